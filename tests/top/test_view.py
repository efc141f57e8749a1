"""What is drawn: within the screen, harmless, without colour where none is wanted."""

import json
import re
from importlib.resources import files
from unittest import mock

import pytest
from rich.console import Console
from rich.screen import Screen

from tests.top.samples import URL, history, status
from tests.transport.test_rendezvous import make_manifest
from vllm_tide.dashboards import ALERTS
from vllm_tide.top import collect
from vllm_tide.top.collect import Sample, look_at_engines, trainer_figures
from vllm_tide.top.figures import is_empty, make_picture
from vllm_tide.top.view import body, percent, plain
from vllm_tide.transport import RingStats, WeightsFeedback
from vllm_tide.transport.weights import WeightsPeek

RING = RingStats(1 << 20, 1 << 19, 10, 40, 2, 8, 1, True)
WEIGHTS = WeightsPeek(6, WeightsFeedback(5, 6, "norm", True, 10.9))


def picture(*, servers=True, engines=1, trainers=1, **changed):
    first, last = history(**changed)
    looks = announced(engines)
    told = [trainer_figures(f"engine{i}", status(), 0.4) for i in range(trainers)]
    samples = [
        Sample(s.t_s, s.unix_s, s.pages if servers else {}, looks, told)
        for s in (first, last)
    ]
    return make_picture(samples, "/run/tide")


def announced(count):
    manifests = [(None, make_manifest(f"engine{i}")) for i in range(count)]
    with (
        mock.patch.object(collect, "inspect_manifests", lambda _: manifests),
        mock.patch.object(collect, "peek_ring", lambda _: RING),
        mock.patch.object(collect, "peek_weights", lambda _: WEIGHTS),
    ):
        return look_at_engines(None)


def text_of(shown, columns=80):
    return plain(shown, columns)


def drawn(shown, columns, rows, colour=None):
    """Lines that a screen of this size shows, with the end of each."""
    console = Console(
        width=columns, height=rows, color_system=colour, force_terminal=True
    )
    with console.capture() as capture:
        console.print(Screen(body(shown)), end="")
    return capture.get().split("\n")


def test_everything_asked_for_is_on_the_screen():
    shown = text_of(picture())
    for part in (
        "100.0 out, 200.0 in   4 running, 0 waiting",
        "2.00 tokens/draft (2.10 since start), by position 75% 20% 5%",
        "2.00 tokens drafted per step; by length 0 10%, 2 60%, 3 30%",
        "no draft in 10% of steps: no_gain 10%",
        "27.9 ms, predicted 27.1 ms; tokens/s 1.01 times predicted",
        "version 5 served, 5 swaps, last pause 10.9 ms (max 15.3)",
        "32.0 of 256 MiB, read by a trainer",
        "400.0 rows/s, dropped per second: ring_full 3.0",
        "limits of requests: kept 112, missed 2",
        "engine0 pid",
        "training, 1 engine, seen 0:00:00 ago",
        "6, 55 steps, loss 1.324",
        "acceptance 1.083 new, 1.058 served: gain +0.0251 +- 0.0179",
        "tide, collecting, accepted 0.413 lately, 0.522 usually, 2 shifts",
        "because   acceptance fell from 0.522 to 0.413",
        "canary      undecided",
        "speed     1.91 -> 2.07 times plain, 4 requests (+8% +- 4%)",
        "waiting for the canary of the last publication",
    ):
        assert part in shown, part


def test_the_first_line_says_if_it_helps():
    shown = text_of(picture()).splitlines()
    assert shown[1].startswith("Not known: undecided, 1.91x -> 2.07x of plain")
    told = picture()["helping"][0]["sentence"]
    assert " ".join(shown[1:3]).startswith(told)
    alone = picture(servers=False, engines=0, trainers=0)
    assert "Not known: no server was asked (--url), no trainer runs." in text_of(alone)


def test_several_verdicts_are_told_apart_by_name():
    shown = text_of(picture(servers=False, trainers=2))
    assert shown.count("Not known: undecided") == 2
    assert "engine0\n" in shown
    assert "engine1\n" in shown


def test_a_usual_picture_fits_80_by_24():
    lines = drawn(picture(), 80, 24)
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert {line.strip() for line in text_of(picture()).splitlines()} <= {
        line.strip() for line in lines
    }


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 10), (200, 50), (2, 2)])
def test_never_more_than_the_screen_has(columns, rows):
    shown = picture(engines=9, trainers=9)
    lines = drawn(shown, columns, rows)
    assert len(lines) == rows
    assert max(map(len, lines)) <= columns


def test_without_a_server_the_ring_speaks():
    shown = text_of(picture(servers=False))
    assert "0.5 of 1 MiB, read by a trainer" in shown
    assert "1 records damaged" in shown
    assert "5 installed, 6 published, 6 refused (norm); pause 10.9 ms" in shown


def test_nobody_there():
    shown = picture(servers=False, engines=0, trainers=0)
    assert is_empty(shown)
    assert "none announced" in text_of(shown)


def test_faults_and_a_missing_trainer_are_shown():
    shown = text_of(picture(after={"faults": {"capture": 3}, "alive": 0}))
    assert "faults      capture 3" in shown
    assert "no trainer" in shown


def style_of(shown, part):
    """Colour that a part has on a screen."""
    (line,) = (line for line in drawn(shown, 80, 40, colour="standard") if part in line)
    return re.findall(r"\033\[([\d;]*)m", line[: line.index(part)])[-1]


def test_requests_left_out_on_purpose_are_no_warning():
    shown = picture(after={"dropped": {"over_budget": 50}})
    assert style_of(shown, "over_budget") != "33"


@pytest.mark.parametrize("reason", ["ring_full", "cut_short"])
def test_rows_lost_to_a_slow_trainer_are_a_warning_as_in_the_alert(reason):
    shown = picture(after={"dropped": {reason: 50}})
    assert style_of(shown, f"{reason}") == "33"
    text = files("vllm_tide.dashboards").joinpath(ALERTS).read_text(encoding="utf-8")
    named = re.findall(r'dropped_rows_total\{reason=~"(.*?)"', text)
    assert named
    for reasons in named:
        assert reason in reasons.split("|")


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("evil\033[2J\u202e\nname", "evil?[2J??name"),
        ("[red]x[/red] [/] \\", "[red]x[/red] [/] \\"),
        ("{url:.9} :smile: |", "{url:.9} :smile: |"),
    ],
)
def test_a_name_cannot_command_the_terminal_or_the_markup(name, seen):
    shown = picture()
    shown["servers"][0]["models"] = [name]
    shown["trainers"][0]["waiting_for"] = name
    shown["engines"][0]["policy"] = name
    shown["servers"][0]["faults"] = {name: 3}
    text = text_of(shown, 150)
    assert "\033" not in text
    assert text.count(seen) == 4


def test_colour_changes_no_character():
    coloured = drawn(picture(), 80, 24, colour="standard")
    assert "\033[33m" in "".join(coloured)
    assert [re.sub(r"\033\[[\d;]*m", "", line) for line in coloured] == drawn(
        picture(), 80, 24
    )


def test_a_long_line_goes_on_in_the_next():
    narrow = text_of(picture(), 40)
    assert max(map(len, narrow.splitlines())) <= 40
    words = re.sub(r"\s+", " ", narrow)
    assert "limits of requests: kept 112, missed 2; 7 steps" not in words
    assert "limits of requests: kept 112, missed 2" in words


def test_a_share_that_is_not_quite_none_is_told():
    assert (percent(0.001), percent(0.0), percent(0.5)) == ("<1%", "0%", "50%")


def test_json_holds_what_the_screen_shows():
    told = json.loads(json.dumps(picture(), allow_nan=False))
    assert told["servers"][0]["url"] == URL
    assert told["engines"][0]["installed_version"] == 5
    assert told["trainers"][0]["holdout_acceptance_new"] == 1.083
    assert told["helping"][0]["helps"] is None


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"canary": {}}, None),
        (
            {"canary": {"requests": 4, "speed_before": 1.0, "speed_after": 2.0}},
            "  speed     1.00 -> 2.00 times plain, 4 requests",
        ),
        (
            {"canary": {"requests": 4, "backoff_cycles": 3}},
            "canary      backing off 3 cycles after a rollback",
        ),
        ({"schedule": {}}, None),
        ({"rollbacks": 2, "refused_versions": 1}, "; 1 refused; 2 rolled back"),
        ({"state": "waiting", "engines": {}}, "waiting, 0 engines, seen 0:00:00 ago"),
    ],
)
def test_a_trainer_s_lines(fields, part):
    shown = picture()
    shown["trainers"] = [trainer_figures("e", status(**fields), 0.0)]
    text = text_of(shown, 120)
    if part is None:
        (row,) = fields
        assert f"\n  {row} " not in text
    else:
        assert part in text


def test_a_silent_trainer_and_old_files_are_told():
    shown = picture()
    shown["trainers"] = [trainer_figures("e", status(), 600.0)]
    shown["old_trainers"] = 2
    text = text_of(shown)
    assert "1 engine, silent for 0:10:00" in text
    assert "2 status files of ended trainers not shown" in text


@pytest.mark.parametrize(
    ("alive", "word"), [(True, "alive"), (False, "dead"), (None, "pid not to be seen")]
)
def test_an_engine_s_state_is_told(alive, word):
    shown = picture()
    shown["engines"][0]["alive"] = alive
    assert f" {word}  t + " in text_of(shown)


def test_without_capture_or_tide_that_is_said():
    shown = picture()
    shown["servers"][0] |= {"ring_capacity_bytes": 0.0}
    assert "ring        no capture" in text_of(shown)
    shown["servers"][0] |= {"tide": False, "acceptance_length_total": None}
    text = text_of(shown)
    assert "tide        not configured on this server" in text
    assert "acceptance  nothing drafted yet" in text
    shown["servers"][0] |= {"error": "does not answer (too slow)"}
    assert f"SERVER {URL}  does not answer (too slow)" in text_of(shown)
