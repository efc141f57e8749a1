"""Model Runner V2, synchronous and not, against V1: tokens, records, swaps, lengths.

V2's own kernels run in Triton's interpreter. Each engine captures, is handed another
draft while it serves, and captures again. V2's lengths are steered by a script all the
while: at first to vLLM's static length, at last to anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.offline_engine import OfflineEngine, only_manifest
from tests.engine.records import counted, drain, floats
from tests.engine.test_swap import publish, settled
from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.ring import RingReader
from vllm_tide.transport.weights import WeightsWriter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DEMO = Path(__file__).parents[2] / "scripts" / "demo"
PROMPTS = [
    list(b"hello world"),
    list(b"def main(argv):\n    return 0 " * 2),
    [7],
]
WORK = {"params": {"max_tokens": 12}}
RUNNERS = ("v2", "v2-async")


@dataclass
class Run:
    """What one engine did: before the swap, after it, and (V2) with any lengths."""

    tokens: list[list[list[int]]]
    records: list[list[Record]]
    reports: list[dict[str, Any]]
    finished: int


@pytest.fixture(scope="module")
def other_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's draft with weaker guesses, so that what it drafts differs."""
    path = tmp_path_factory.mktemp("draft") / "other"
    shutil.copytree(DEMO / "draft", path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    fc = tensors["fc.weight"]
    noise = torch.randn(fc.shape, generator=generator) * fc.float().std()
    tensors["fc.weight"] = (fc + noise.to(fc.dtype)).contiguous()
    save_file(tensors, file)
    return path


# [draft steps, most verified (-1: a random prefix), probe] per step, over and over.
STATIC = [[3, 3, 0]]
SCRIPT = [[3, -1, 0], [3, 3, 0], [0, 0, 0], [0, 0, 1], [1, 1, 0], [2, -1, 0], [3, 3, 0]]


def make_case(name: str, run_dir: Path) -> dict[str, Any]:
    runner = name.removesuffix("-topk")
    policy = "threshold" if runner != "v1" else "static"
    teacher = "topk" if name in ("v1-topk", "v2") else "hidden"
    return {
        "target": str(DEMO / "target"),
        "runner": runner,
        "speculative_config": {
            "method": "eagle3",
            "model": str(DEMO / "draft"),
            "num_speculative_tokens": 3,
            "tide": {
                "run_dir": str(run_dir),
                "capture": {"ring_mib": 16, "teacher": teacher, "teacher_topk": 4},
                "train": {"autostart": False},  # the test reads the ring
                "control": {"policy": policy},
            },
        },
        "engine": {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "block_size": 32,
            "enable_prefix_caching": False,
        },
        **({"script": STATIC} if runner != "v1" else {}),
    }


def serve(name: str, run_dir: Path, other: Path) -> Run:
    with OfflineEngine(make_case(name, run_dir)) as engine:
        manifest = only_manifest(run_dir)
        reader = RingReader.attach(manifest.ring)
        writer = WeightsWriter.attach(manifest.weights)
        reports = [engine.work(PROMPTS, **WORK)]
        (file,) = other.glob("*.safetensors")
        parts = [drain(reader)]
        publish(writer, load_file(file), 1)
        settled(engine)
        parts.append(drain(reader))
        reports.append(engine.work(PROMPTS, **WORK))
        parts.append(drain(reader))
        if name in RUNNERS:
            reports.append(engine.work(PROMPTS, script=SCRIPT, **WORK))
            parts.append(drain(reader))
        assert writer.feedback().installed_version == 1
        kept_out = engine.work(PROMPTS[:1], params={"max_tokens": 2}, salts=["pepper"])
        assert kept_out["dropped"]["salted"] == 1
        assert [r for r in drain(reader) if r.num_rows] == []
    ended = [r for part in parts[:2] for r in part if r.finished]
    del parts[1]
    return Run(
        tokens=[report["tokens"] for report in reports],
        records=[[r for r in part if r.num_rows] for part in parts],
        reports=reports,
        finished=len(ended),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory, other_draft) -> dict[str, Run]:
    return {
        name: serve(name, tmp_path_factory.mktemp(name), other_draft)
        for name in ("v1", "v1-topk", *RUNNERS)
    }


def metric(report: dict[str, Any], name: str) -> float:
    return sum(v for k, v in report["metrics"].items() if k.startswith(name + "["))


def by_content(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (r.start, r.token_ids.tolist()))


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_runner_under_test_is_upstreams_own(runs, runner):
    report = runs[runner].reports[0]
    assert report["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert report["async"] == (runner == "v2-async")
    assert runs["v1"].reports[0]["runner"] == "vllm.v1.worker.cpu_model_runner"


@pytest.mark.parametrize("runner", RUNNERS)
def test_tokens_are_those_of_v1(runs, runner):
    assert runs[runner].tokens[:2] == runs["v1"].tokens
    assert runs[runner].reports[1]["faults"] == {}


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("runner", RUNNERS)
def test_records_are_those_of_v1(runs, runner, part):
    same = "v1-topk" if runner == "v2" else "v1"
    got, want = runs[runner].records[part], runs[same].records[part]
    assert counted(got) == counted(want)
    assert any(r.num_accepted > 0 for r in want if r.phase == Phase.VERIFY)
    assert any(r.num_accepted < r.num_rows - 1 for r in want if r.phase == Phase.VERIFY)
    chunked = {r.key for r in want if r.phase == Phase.PREFILL and r.start}
    assert len(chunked) == 1
    for mine, theirs in zip(by_content(got), by_content(want), strict=True):
        assert mine.num_prompt_tokens == theirs.num_prompt_tokens
        assert mine.teacher_start == theirs.teacher_start
        assert mine.draft_version == theirs.draft_version == part
        for name in ("features", "teacher_hidden", "teacher_topk_logprobs"):
            pair = [getattr(side, name) for side in (mine, theirs)]
            assert (pair[0] is None) == (pair[1] is None)
            if pair[0] is not None:
                torch.testing.assert_close(*map(floats, pair), atol=0.02, rtol=0.02)
        np.testing.assert_array_equal(mine.teacher_topk_ids, theirs.teacher_topk_ids)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_swap_changes_what_is_drafted_and_no_address(runs, runner):
    run = runs[runner]
    before, after = run.reports[:2]
    assert (before["version"], after["version"], after["swaps"]) == (0, 1, 1)
    assert after["refused"] == {}
    assert before["addresses"] == after["addresses"]
    assert counted(run.records[0]) != counted(run.records[1])
    assert run.tokens[0] == run.tokens[1]


@pytest.mark.parametrize("runner", RUNNERS)
def test_every_request_says_its_end(runs, runner):
    assert runs[runner].finished == runs["v1"].finished >= len(PROMPTS)


@pytest.mark.parametrize("runner", ("v1", *RUNNERS))
def test_counted_drafts_are_the_verified_ones(runs, runner):
    """vLLM's metric against the records: drafted tokens that the target judged."""
    records = [r for r in runs[runner].records[0] if r.phase == Phase.VERIFY]
    report = runs[runner].reports[0]
    drafted = sum(r.num_rows - 1 for r in records)
    assert metric(report, "vllm:spec_decode_num_draft_tokens") == drafted > 0
    accepted = sum(r.num_accepted for r in records)
    assert metric(report, "vllm:spec_decode_num_accepted_tokens") == accepted > 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_any_lengths_give_the_same_tokens_and_are_counted_right(runs, runner):
    """Depths 0 to 3, prefixes of drafts (where V2 can cut them), probes."""
    run = runs[runner]
    before, report = run.reports[1:]
    assert report["faults"] == report["control_faults"] == {}
    assert run.tokens[2] == run.tokens[1]
    records = [r for r in run.records[2] if r.phase == Phase.VERIFY]
    assert {r.num_rows - 1 for r in records} == {0, 1, 2, 3}

    def grown(count: Callable[[dict[str, Any]], float]) -> float:
        return count(report) - count(before)

    drafted = sum(r.num_rows - 1 for r in records)
    accepted = sum(r.num_accepted for r in records)
    spec = "vllm:spec_decode_num_"
    assert grown(lambda r: metric(r, spec + "draft_tokens")) == drafted
    assert grown(lambda r: metric(r, spec + "accepted_tokens")) == accepted > 0
    seen = [grown(lambda r, k=k: r["outcomes"][k]) for k in ("verified", "accepted")]
    if runner == "v2":
        assert seen == [drafted, accepted]
    else:  # the controller also sees the steps that ran after a request's end
        assert seen[0] >= drafted and seen[1] >= accepted
    assert len(report["probes"]) > len(before["probes"])
