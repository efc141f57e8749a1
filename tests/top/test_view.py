"""What is drawn: within the screen, harmless, without colour where none is wanted."""

import re
from importlib.resources import files

import pytest

from tests.top.samples import URL, history, status
from tests.transport.test_rendezvous import make_manifest
from vllm_tide.dashboards import ALERTS
from vllm_tide.top.layout import TWO_COLUMNS, body, screen
from vllm_tide.top.live import plain, presses
from vllm_tide.top.picture import make_picture
from vllm_tide.top.run_files import EngineLook, TrainerLook
from vllm_tide.top.samples import Sample
from vllm_tide.top.text import Style, ago, bar, clipped, line, percent, rendered, width
from vllm_tide.transport import RingStats, WeightsFeedback
from vllm_tide.transport.peek import WeightsPeek

RING = RingStats(1 << 20, 1 << 19, 10, 40, 2, 8, 1, True)
WEIGHTS = WeightsPeek(6, WeightsFeedback(5, 6, "norm", True, 10.9))


def picture(*, servers=True, engines=1, trainers=1, **changed):
    first, last = history(**changed)
    looks = [
        EngineLook(make_manifest(f"engine{i}"), True, RING, WEIGHTS)
        for i in range(engines)
    ]
    told = [TrainerLook(f"engine{i}", status(), 0.4) for i in range(trainers)]
    samples = [
        Sample(s.t_s, s.unix_s, s.pages if servers else {}, looks, told)
        for s in (first, last)
    ]
    return make_picture(samples, "/run/tide")


def text_of(shown, columns=80):
    return plain(shown, columns)


def test_everything_asked_for_is_on_the_screen():
    shown = text_of(picture())
    for part in (
        "100.0 out, 200.0 in   4 running, 0 waiting",
        "2.00 tokens/draft (2.10 since start), by position 75% 20% 5%",
        "2.00 tokens drafted per step; by length 0:10% 2:60% 3:30%",
        "no draft in 10% of steps: no_gain 10%",
        "27.9 ms, predicted 27.1 ms; tokens/s 1.01 times predicted",
        "version 5 served, 5 swaps, last pause 10.9 ms (max 15.3)",
        "[#.........] 12% of 256 MiB, read by a trainer",
        "400.0 rows/s, dropped 3.0/s (ring_full 3.0)",
        "112 of 114 requests kept their limit (98%)",
        "engine0 pid",
        "training, 1 engine, seen 0 s ago",
        "6, 55 steps, loss 1.324",
        "acceptance 1.083 new, 1.058 served: gain +0.0251 +- 0.0179",
        "collecting, accepted 0.413 lately, 0.522 usually, 2 shifts",
        "because   accepted share of group 3 fell",
        "undecided: speed over plain 1.91 -> 2.07, 4 requests (+8% +- 4%)",
        "waiting for the canary of the last publication",
    ):
        assert part in shown, part


def test_a_usual_picture_fits_80_by_24():
    shown = picture()
    assert len(body(shown, 80)) <= 22
    lines = screen(shown, 80, 24, 0)
    assert len(lines) == 24
    assert max(map(width, lines)) <= 80
    assert "more lines" not in rendered(lines[-1], colour=False)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 10), (200, 50), (1, 1)])
def test_never_more_than_the_screen_has(columns, rows):
    for offset in (0, 7, 1000):
        lines = screen(picture(engines=9, trainers=9), columns, rows, offset)
        assert len(lines) == rows
        assert max(map(width, lines)) <= columns


def test_scrolling_reaches_the_last_line():
    shown = picture(engines=9, trainers=9)
    last = rendered(body(shown, 80)[-1], colour=False)
    first = [rendered(found, colour=False) for found in screen(shown, 80, 24, 0)]
    end = [rendered(found, colour=False) for found in screen(shown, 80, 24, 10**6)]
    assert re.search(r"\d+ more lines below", first[-1])
    assert last not in first
    assert last in end


def test_a_wide_screen_puts_trainers_beside_engines():
    wide = text_of(picture(), TWO_COLUMNS)
    assert len(wide.splitlines()) < len(text_of(picture(), 80).splitlines())
    head = next(found for found in wide.splitlines() if "SERVER" in found)
    assert "TRAINER" in head


def test_without_a_server_the_ring_speaks():
    shown = text_of(picture(servers=False))
    assert "[#####.....] 50% of 1 MiB, read by a trainer" in shown
    assert "1 records damaged" in shown
    assert "5 installed, 6 published, 6 refused (norm); pause 10.9 ms" in shown


def test_nobody_there():
    shown = picture(servers=False, engines=0, trainers=0)
    assert shown.empty
    assert "none announced" in text_of(shown)


def test_faults_and_a_missing_trainer_are_shown():
    shown = text_of(picture(after={"faults": {"capture": 3}, "alive": 0}))
    assert "faults      capture 3" in shown
    assert "no trainer" in shown


def test_requests_left_out_on_purpose_are_no_warning():
    shown = body(picture(after={"dropped": {"over_budget": 50}}), 80)
    (style,) = (style for line in shown for text, style in line if "over_bud" in text)
    assert style is Style.PLAIN


@pytest.mark.parametrize("reason", ["ring_full", "cut_short"])
def test_rows_lost_to_a_slow_trainer_are_a_warning_as_in_the_alert(reason):
    shown = body(picture(after={"dropped": {reason: 50}}), 80)
    (style,) = (style for line in shown for text, style in line if reason in text)
    assert style is Style.WARN
    text = files("vllm_tide.dashboards").joinpath(ALERTS).read_text(encoding="utf-8")
    named = re.findall(r'dropped_rows_total\{reason=~"(.*?)"', text)
    assert named
    for reasons in named:
        assert reason in reasons.split("|")


def test_a_name_cannot_command_the_terminal():
    shown = picture()
    shown.servers[0].models[:] = ["evil\033[2J\u202e\nname"]
    shown = text_of(shown)
    assert "\033" not in shown
    assert "evil?[2J??name" in shown


def test_colour_changes_no_character():
    for found in body(picture(), 80):
        coloured = rendered(found, colour=True)
        assert re.sub(r"\033\[\d*m", "", coloured) == rendered(found, colour=False)


def test_a_clipped_line_says_so():
    assert rendered(clipped(line("abcdef"), 4), colour=False) == "abc>"
    assert rendered(clipped(line("abcd"), 4), colour=False) == "abcd"


def test_keys_are_told_apart():
    assert presses(b"j\033[Aq\033[6~\033OB") == [
        b"j",
        b"\033[A",
        b"q",
        b"\033[6~",
        b"\033OB",
    ]


def test_words():
    assert bar(0.5, 4) == "[##..]"
    assert bar(7.0, 4) == "[####]"
    assert (percent(0.001), percent(0.0), percent(0.5)) == ("<1%", "0%", "50%")
    assert (ago(3), ago(300), ago(7300), ago(10**6)) == (
        "3 s",
        "5 min",
        "2 h",
        "12 days",
    )


def test_json_holds_what_the_screen_shows():
    told = picture().to_json()
    assert told["servers"][0]["url"] == URL
    assert told["engines"][0]["installed_version"] == 5
    assert told["trainers"][0]["holdout_acceptance_new"] == 1.083
