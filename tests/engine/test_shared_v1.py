"""Model Runner V1 in a real engine: capture, consent, caps and swaps."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch

from tests.engine.oracle import Oracle
from tests.engine.records import counted, drafted, longest_drafts, metric
from vllm_tide.cli.main import main
from vllm_tide.transport.record import Phase
from vllm_tide.transport.ring import Collect
from vllm_tide.transport.versions import first_version

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ENGINE = "v1"
PROMPTS = [
    list(b"hello world"),
    list(b"def main(argv):\n    return 0 " * 4),
    list(b"abc abc abc"),
    list(b"the quick brown fox jumps over the lazy dog " * 3),
    [7],
]
TEXTS = (b"one two three. ", b"def main(argv):\n", b"the quick brown fox ", b"abc 123 ")
LONG = [list(text * 20)[:130] for text in TEXTS]  # together more than fits


@pytest.fixture(scope="module")
def oracle(target):
    return Oracle(target)


def sequences(prompts: list[list[int]], report: dict[str, Any]) -> list[list[int]]:
    return [p + t for p, t in zip(prompts, report["tokens"], strict=True)]


def test_captured_rows_equal_transformers(served, oracle, greedy):
    report = served(PROMPTS, forget=True, max_tokens=24)
    assert report["tokens"] == greedy(PROMPTS, 24)
    assert report["faults"] == {}
    records = report["records"]
    oracle.check_whole(records, sequences(PROMPTS, report))
    verify = [r for r in records if r.phase == Phase.VERIFY]
    assert any(r.num_accepted < r.num_rows - 1 for r in verify), "no rejected row"
    assert any(r.num_accepted > 0 for r in verify)
    assert any(r.phase == Phase.PREFILL and r.start > 0 for r in records)
    # vLLM's metrics count what the records hold.
    rows = sum(r.num_rows - 1 for r in verify)
    assert metric(report, "draft_tokens") == rows + report["dropped"]["placeholder"]
    assert metric(report, "accepted_tokens") == sum(r.num_accepted for r in verify)


def test_prefix_cache_hits_are_marked_and_refusals_are_honoured(served, oracle):
    shared = list(b"a shared preamble that is longer than any block size" * 3)
    first = served([shared + [1]], forget=True, max_tokens=4)
    assert "prefix_cached" not in first["dropped"]
    second = served([shared + [2]], max_tokens=4)
    missing = second["records"][0].start
    # All whole blocks: without `disable_eagle_block_drop` the last one is left out.
    assert missing == 32 * (len(shared) // 32)
    assert second["dropped"]["prefix_cached"] == missing
    oracle.check(second["records"], sequences([shared + [2]], second))
    out = served(
        PROMPTS[:3],
        max_tokens=4,
        extra=[{"tide_capture": False}, {"tide_capture": "maybe"}, None],
        salts=[None, None, "pepper"],
    )
    assert out["rows"] == 0 and out["records"] == []
    refused = ("opted_out", "malformed_opt_out", "salted")
    assert [out["dropped"][reason] for reason in refused] == [1, 1, 1]


def test_rows_become_metadata_only_while_the_trainer_pauses(served, oracle):
    prompts = PROMPTS[:3]
    tenants = [{"tide_tenant": name} for name in ("a", "b", "a")]
    work = {"max_tokens": 20, "extra": tenants, "forget": True}
    full = served(prompts, **work)
    served.reader.set_collect(Collect.METADATA)
    light = served(prompts, **work)
    served.reader.set_collect(Collect.FULL)
    last = served(prompts, **work)
    assert light["faults"] == {}
    assert light["tokens"] == full["tokens"] == last["tokens"]
    assert not any(r.metadata_only for r in full["records"] + last["records"])
    assert light["rows"] == 0 and "ids_only" not in last["dropped"]
    assert light["dropped"]["ids_only"] == sum(r.num_rows for r in light["records"])
    for r in light["records"]:
        assert r.metadata_only and r.features.shape == (r.num_rows, 0)
        assert r.teacher_hidden is r.teacher_topk_ids is None
    # The same steps were served, so the same ids and outcomes come.
    counts = [counted(report["records"]) for report in (full, light, last)]
    assert counts[0] == counts[1] == counts[2]
    oracle.check_whole(last["records"], sequences(prompts, last))
    # Two tenants; all records of a request have its tenant.
    of_key: dict[int, int] = {}
    for r in full["records"] + light["records"] + last["records"]:
        assert of_key.setdefault(r.key, r.tenant) == r.tenant != 0
    assert sorted(Counter(of_key.values()).values()) == [3, 6]


def test_preempted_requests_are_recomputed_and_captured_correctly(
    served, oracle, greedy
):
    report = served(LONG, forget=True, max_tokens=96)
    preempted = [v for k, v in report["metrics"].items() if "num_preemptions" in k]
    assert sum(preempted) > 0
    assert report["faults"] == {}
    assert report["tokens"] == greedy(LONG, 96)
    oracle.check_whole(report["records"], sequences(LONG, report))


def test_stop_strings_and_ended_requests(served, oracle):
    free = served(PROMPTS[:2], forget=True, max_tokens=30)
    # A byte that the first request emits somewhere in the middle ends it there.
    stop = [bytes([t]).decode() for t in free["tokens"][0][3:] if 32 < t < 127]
    report = served(PROMPTS[:2], max_tokens=30, stop=stop[:1] or ["zz"], forget=True)
    # The end of a request is reported with the next step.
    after = served(PROMPTS[2:3], max_tokens=2)
    assert report["faults"] == {}
    oracle.check(report["records"], sequences(PROMPTS[:2], report))
    assert len(report["ended"] | after["ended"]) >= 2


def test_no_request_gets_more_drafts_than_it_asked_for(served):
    prompts = [[*b"hello world", i] for i in range(4)]
    caps = [0, 1, None, 4]  # the last is above the maximum
    extra = [None if cap is None else {"tide_k_max": cap} for cap in caps]
    free = served(prompts, max_tokens=10, forget=True)
    capped = served(prompts, max_tokens=10, extra=extra, forget=True)
    assert capped["tokens"] == free["tokens"] and capped["faults"] == {}
    assert longest_drafts(capped["records"], prompts) == [0, 1, 3, 3]


def test_capture_is_switched_for_the_run_directory(served):
    where = ["--run-dir", str(served.run_dir)]
    assert main(["capture", "off", *where]) == 0
    until = time.monotonic() + 60
    while served(PROMPTS[:2], max_tokens=8)["rows"]:
        assert time.monotonic() < until
    off = served(PROMPTS[:2], max_tokens=8, forget=True)
    assert off["records"] == [] and off["rows"] == 0 and off["faults"] == {}
    assert off["dropped"]["paused"] >= 2 * 7
    assert main(["capture", "on", *where]) == 0
    while not (on := served(PROMPTS[:2], max_tokens=8, forget=True))["rows"]:
        assert time.monotonic() < until
    assert on["tokens"] == off["tokens"] and on["records"]
    served.reader.set_collect(Collect.NOTHING)
    assert served(PROMPTS[:2], max_tokens=8)["records"] == []


def test_a_swapped_draft_drafts_as_from_disk_at_the_same_addresses(
    served, own_draft, other_draft
):
    """Return to the draft that was loaded from disk: the very same drafts."""
    disk = served(PROMPTS, forget=True, max_tokens=16)
    number = disk["version"]
    assert served.publish(other_draft) == ""
    swapped = served(PROMPTS, forget=True, max_tokens=16)
    assert {r.draft_version for r in swapped["records"]} == {first_version(number + 1)}
    assert served.publish(own_draft) == ""
    back = served(PROMPTS, forget=True, max_tokens=16)
    assert disk["tokens"] == swapped["tokens"] == back["tokens"]
    assert disk["addresses"] == swapped["addresses"] == back["addresses"]
    assert drafted(disk["records"]) != drafted(swapped["records"])
    assert drafted(disk["records"]) == drafted(back["records"])
    assert back["version"] == number + 2 and back["faults"] == {}


def test_bad_publications_are_refused_and_the_old_draft_keeps_serving(
    served, own_draft, other_draft
):
    fc, vocab = other_draft["fc.weight"], 4096
    nan = fc.clone()
    nan[3, 5] = float("nan")
    bad = [
        ("not_finite", {"fc.weight": nan}),
        ("shape", {"fc.weight": fc[:, :-1].clone()}),
        ("norm", {"fc.weight": fc * 1e4}),
        ("names", {"extra.weight": torch.zeros(2)}),
        ("shared", {"embed_tokens.weight": torch.zeros(vocab, fc.shape[0])}),
    ]
    before = served(PROMPTS, forget=True, max_tokens=12)
    for reason, change in bad:
        assert served.publish(other_draft | change) == reason
    fewer = {name: t for name, t in other_draft.items() if name != "norm.weight"}
    assert served.publish(fewer) == "names"
    after = served(PROMPTS, forget=True, max_tokens=12)
    assert after["tokens"] == before["tokens"]
    assert after["version"] == before["version"]
    assert drafted(after["records"]) == drafted(before["records"])
    # A good one is still accepted after all that.
    assert served.publish(other_draft) == ""


def test_prefixes_cached_before_a_swap_are_counted_separately(
    served, other_draft, greedy
):
    prefix = list(b"in a hole in the ground there lived one who " * 3)[:128]
    first, after, again = (prefix + list(end) for end in (b"first", b"later", b"again"))
    part = prefix[:64] + list(b"the road goes ever on and on down from the door " * 2)

    def settle() -> None:
        time.sleep(0.6)  # until the workers' next report
        served([first], max_tokens=4)

    served([first], forget=True, max_tokens=4)
    settle()
    before = served.prefixes.copy()
    served([first, part], max_tokens=40)
    assert served.publish(other_draft) == ""
    report = served([after], max_tokens=24)
    assert report["tokens"] == greedy([after], 24)
    served([again], max_tokens=24)
    settle()
    # The requests that publish have no prefix.
    assert {"none", "most", "part", "most_old"} <= (served.prefixes - before).keys()
    alone = served([after], max_tokens=24, forget=True)
    # Its prefix had the KV of the previous draft.
    assert drafted(alone["records"]) != drafted(report["records"])
