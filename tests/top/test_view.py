"""The screen: its lines, its size, harmless text, colour."""

import json
from unittest import mock

import pytest
from rich.console import Console
from rich.screen import Screen

from tests.top.samples import URL, history, status
from tests.transport.test_rendezvous import make_manifest
from vllm_tide.top import collect
from vllm_tide.top.collect import Sample, read_engines, trainer_figures
from vllm_tide.top.figures import make_picture
from vllm_tide.top.view import body, plain
from vllm_tide.transport import RingStats, WeightsFeedback
from vllm_tide.transport.versions import first_version
from vllm_tide.transport.weights import WeightsPeek

RING = RingStats(1 << 20, 1 << 19, 10, 40, 2, 8, 1, True)
_FIVE, _SIX = map(first_version, (5, 6))
WEIGHTS = WeightsPeek(_SIX, WeightsFeedback(_FIVE, _SIX, "norm", True, 10.9))


def picture(*, servers=True, engines=1, trainers=1, **changed):
    manifests = [(None, make_manifest(f"engine{i}")) for i in range(engines)]
    with (
        mock.patch.object(collect, "inspect_manifests", lambda _: manifests),
        mock.patch.object(collect, "is_live", lambda _: True),
        mock.patch.object(collect, "peek_ring", lambda _: RING),
        mock.patch.object(collect, "peek_weights", lambda _: WEIGHTS),
    ):
        live = read_engines(None)
    beside = [trainer_figures(f"engine{i}", status(), 0.4) for i in range(trainers)]
    samples = [
        Sample(s.t_s, s.unix_s, s.pages if servers else {}, live, beside)
        for s in history(**changed)
    ]
    return make_picture(samples, "/run/tide")


def drawn(shown, columns, rows, colour=None):
    """Return lines of a screen of this size."""
    console = Console(
        width=columns, height=rows, color_system=colour, force_terminal=True
    )
    with console.capture() as capture:
        console.print(Screen(body(shown)), end="")
    return capture.get().split("\n")


def test_every_figure_is_on_the_screen():
    speed = {"plain_step_seconds": 5.0, "step_seconds": 4.0, "faults": {"capture": 3}}
    shown = picture(before={}, after=speed)
    text = plain(shown, 80)
    first = shown["helping"][0]["sentence"]
    assert " ".join(text.splitlines()[1:4]).startswith(first)
    for part in (
        "100.0 out, 200.0 in   4 running, 0 waiting",
        "2.00 tokens per verify step, 2.00 drafted",
        "no draft in 10% of steps, 1.25 times plain decoding",
        "version 5 served, 5 swaps, last pause 10.9 ms",
        "32.0 of 256 MiB, read by a trainer",
        "400.0 rows/s, dropped per second: ring_full 3.0",
        "faults      capture 3",
        "engine0 pid",
        "training, 1 engine, seen 0:00:00 ago",
        "6, 55 steps, loss 1.324",
        "acceptance 1.083 new, 1.058 served (last scored cycle)",
        "gate        gain +0.0251 +- 0.0179",
        "canary      undecided",
        "waiting for the canary of the last publication",
    ):
        assert part in text, part
    assert json.loads(json.dumps(shown, allow_nan=False))["servers"][0]["url"] == URL


def test_without_a_server_the_ring_is_shown():
    text = plain(picture(servers=False, trainers=2), 80)
    assert text.count("Unknown: undecided") == 2
    assert "0.5 of 1 MiB, read by a trainer" in text
    assert "1 records damaged" in text
    assert "5 installed, pause 10.9 ms, 6 published, 6 refused (norm)" in text


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 10), (2, 2)])
def test_the_output_never_exceeds_the_screen(columns, rows):
    lines = drawn(picture(engines=9, trainers=9), columns, rows)
    assert len(lines) == rows
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("evil\033[2J\u202e\nname", "evil?[2J??name"),
        ("[red]x[/red] [/] \\", "[red]x[/red] [/] \\"),
        ("{url:.9} :smile: |", "{url:.9} :smile: |"),
    ],
)
def test_a_name_cannot_inject_terminal_codes_or_markup(name, seen):
    shown = picture()
    shown["servers"][0]["models"] = [name]
    shown["trainers"][0]["waiting_for"] = name
    shown["engines"][0]["policy"] = name
    shown["servers"][0]["faults"] = {name: 3}
    text = plain(shown, 150)
    assert "\033" not in text
    assert text.count(seen) == 4


def test_a_trainer_behind_a_spool_is_not_called_starting():
    shown = picture(trainers=0)
    assert plain(shown, 150).splitlines()[-1] == "TRAINER starting"
    shown["engines"][0]["spool"] = True
    assert "TRAINER at the other end of the spool" in plain(shown, 150)


def test_a_trainer_that_ended_takes_one_line():
    shown = picture()
    assert not plain(shown, 150).splitlines()[-1].startswith("TRAINER")
    shown["trainers"][0]["state"] = "stopped"
    assert plain(shown, 150).splitlines()[-1].startswith("TRAINER engine0 pid")
