"""The memory on Model Runner V2: outputs, whose drafts were whose, and who hears of it.

Upstream's runner and our kernels run in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.offline_engine import OfflineEngine, only_manifest
from tests.engine.records import drain
from tests.engine.test_adaptive_v2 import ADASPEC, DRAFT, FLAT
from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.ring import RingReader

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DEMO = Path(__file__).parents[2] / "scripts" / "demo"
# One that repeats itself at once, one that the target soon repeats, a short one.
PROMPTS = [
    list(b"one two three. " * 5),
    list(b"def main(argv):\n    return 0 " * 2),
    [7],
]
WORK = {"params": {"max_tokens": 32}}
SPEC = "vllm:spec_decode_num_"


def serve(
    runner: str,
    run_dir: Path,
    control: dict[str, Any] | None = None,
    turns: int = 1,
    **case: Any,
) -> tuple[list[dict[str, Any]], list[Record]]:
    """Reports of serving the prompts so many times, and the records."""
    case = {
        "target": str(DEMO / "target"),
        "runner": runner,
        "speculative_config": None,
        "stats": control is not None,
        "engine": {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "block_size": 32,
            "enable_prefix_caching": False,
        },
    } | case
    if control is not None:
        case["speculative_config"] = {
            "method": "eagle3",
            "model": str(DEMO / "draft"),
            "num_speculative_tokens": 3,
            "enable_adaptive_verification": "curves" in case,
            "tide": {
                "run_dir": str(run_dir),
                "train": {"autostart": False},
                "capture": {"ring_mib": 16},
                "control": control,
                "test_time": {"memory": "ngram"},
            },
        }
    with OfflineEngine(case) as engine:
        records, reader = [], None
        if control is not None:
            reader = RingReader.attach(only_manifest(run_dir).ring)
        reports = []
        for _ in range(turns):
            reports.append(engine.work(PROMPTS, **WORK))
            if reader is not None:
                records += drain(reader)
        return reports, [r for r in records if r.num_rows]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    reports, _ = serve("v1", tmp_path_factory.mktemp("plain"))
    return reports[0]["tokens"]


def drafts_of(records: list[Record]) -> dict[bool, tuple[int, int, int]]:
    """Rounds, drafted and accepted tokens of the draft (False) and the memory."""
    found = {}
    for memory in (False, True):
        own = [
            r
            for r in records
            if r.phase == Phase.VERIFY and r.num_rows > 1 and r.memory == memory
        ]
        drafted = sum(r.num_rows - 1 for r in own)
        found[memory] = (len(own), drafted, sum(r.num_accepted for r in own))
    return found


def metric(report: dict[str, Any], name: str) -> float:
    return sum(v for k, v in report["metrics"].items() if k.startswith(name + "["))


@pytest.mark.parametrize("garbage", [False, True], ids=["found", "garbage"])
@pytest.mark.parametrize("runner", ["v2", "v2-async"])
def test_outputs_are_the_targets_own_and_each_source_is_counted_alone(
    plain, tmp_path, runner, garbage
):
    """Greedy; a second request of a slot finds nothing there of the first."""
    static = {"policy": "static"}
    reports, records = serve(runner, tmp_path, static, 2, garbage=garbage)
    for report in reports:
        assert report["tokens"] == plain
        assert report["faults"] == report["control_faults"] == {}
    last = reports[-1]
    by = drafts_of(records)
    rounds, drafted, accepted = by[True]
    if garbage:
        assert rounds > 50 and accepted < 0.1 * drafted
        assert by[False][0] == 0
    else:
        assert rounds > 10 and accepted > 1.5 * rounds
        assert by[False][0] > 10
    counts = last["control"]
    if runner == "v2":
        assert counts["memory_proposals"] == rounds
        assert counts["memory_accepted_tokens"] == accepted
        assert counts["verified_tokens"] == by[False][1]
        assert counts["accepted_tokens"] == by[False][2]
    else:  # control also sees the steps that ran after a request's end
        assert counts["memory_proposals"] >= rounds
        assert counts["verified_tokens"] >= by[False][1]
    # vLLM counts both.
    both = [by[False][i] + by[True][i] for i in (1, 2)]
    assert metric(last, SPEC + "draft_tokens") == both[0]
    assert metric(last, SPEC + "accepted_tokens") == both[1]
    assert sum(last["prefixes"].values()) <= by[False][1]
    assert sum(last["contexts_accepted"].values()) <= by[False][2]
    if not garbage:
        assert sum(last["prefixes"].values()) > 0


def test_adaptive_verification_prices_the_memory_s_and_learns_of_the_draft_s(
    plain, tmp_path
):
    for garbage in (False, True):
        reports, records = serve(
            "v2-async", tmp_path, ADASPEC, curves=[DRAFT, FLAT], garbage=garbage
        )
        (report,) = reports
        assert report["tokens"] == plain
        assert report["faults"] == report["control_faults"] == {}
        assert drafts_of(records)[True][0] > 5
