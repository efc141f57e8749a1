"""Comparison of greedy outputs with and without vllm_tide on a GPU."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from place import DEMO, Place

from bench.harness.identity import Difference, first_difference, rescore_all


def smoke(place: Place) -> None:
    """Check that greedy outputs of the demo models are the same with speculation.

    Serving is in bfloat16 with CUDA graphs. Batches differ, so near ties may differ;
    the first difference of each request is re-scored with the target.
    """
    case = {"batch": 2, "tokens": 16} if place.dry else {"batch": 8, "tokens": 96}
    eagle = {"method": "eagle3", "model": str(DEMO / "draft")}
    eagle |= {"num_speculative_tokens": 3}
    tide = {"run_dir": str(place.work / "run"), "train": {"autostart": False}}
    # adaspec needs times, which a GPU start measures for adaptive verification only.
    ours = {**eagle, "tide": {**tide, "control": {"policy": "threshold"}}}
    adaptive = {**tide, "control": {"policy": "adaspec"}}
    cut = {**eagle, "enable_adaptive_verification": True}
    memory = {**adaptive, "test_time": {"memory": "ngram"}}
    arms: dict[str, Any] = {
        "none": None,
        "upstream": eagle,
        "tide": ours,
        "adaptive": {**cut, "tide": adaptive},
        "memory": {**cut, "tide": memory},
    }

    def serve(name: str) -> Any:
        return place.child({**case, "speculative": arms[name]}, name)

    def serve_all() -> dict[str, Any]:
        workers = 1 if place.dry else len(arms)  # nothing is timed
        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(arms, pool.map(serve, arms), strict=True))

    reports = place.part("arms", serve_all)
    if not place.dry:  # the null GPU computes no text
        place.part("greedy text is equal", lambda: compare(reports, "bfloat16"))


def lengths(place: Place) -> None:
    """Check the outputs if each step has another draft depth, with mixed graphs.

    A step without drafts needs `replay_each` for correct outputs.
    """
    from inprocess import Engine

    batch, tokens = (2, 16) if place.dry else (8, 96)
    case = {"batch": batch, "tokens": tokens, "speculative": None}
    plain = place.part("none", lambda: place.child(case, "none"))

    def steered() -> dict[str, Any]:
        limits = {"max_num_seqs": 8, "gpu_memory_utilization": 0.3}
        limits |= {"kv_cache_memory_bytes": 2 << 30, "max_model_len": 512}
        engine = Engine(
            place, (DEMO / "target", DEMO / "draft"), 3,
            {"control": {"policy": "adaspec"}},
            adaptive={"enable_adaptive_verification": True}, **limits,
        )  # fmt: skip
        names = [engine.add(prompt, tokens) for prompt in plain["prompts"]]
        outputs: dict[str, list[int]] = {}
        engine.depths.clear()
        for depth in itertools.cycle((3, 0, 1, 0, 0, 3, 3)):
            if not engine.engine.has_unfinished_requests():
                break
            engine.depths.freeze(depth)
            for output in engine.step():
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        tokens_of, counts = [outputs[name] for name in names], engine.depths.counts
        assert counts.keys() >= {0, 1, 3}, f"depths of the steps: {dict(counts)}"
        return {"tokens": tokens_of, "modes": dict(engine.modes), "depths": counts}

    reports = {"none": plain, "steered": place.part("steered", steered)}
    if not place.dry:
        place.part("greedy text is equal", lambda: compare(reports, "bfloat16"))


def compare(reports: dict[str, Any], dtype: str) -> list[dict[str, Any]]:
    """Return the near ties where an arm's output differs from that of `none`.

    Raises:
        AssertionError: A difference is not a near tie.
    """
    plain, differences = reports["none"], []
    for name, report in reports.items():
        for i, output in enumerate(report["tokens"]):
            expected, prompt = plain["tokens"][i], plain["prompts"][i]
            if (at := first_difference(expected, output)) is None:
                continue
            tokens, prefix = (expected[at], output[at]), (*prompt, *expected[:at])
            differences.append(Difference(("none", name), i, at, tokens, prefix))
    rescored = [d.summary() for d in rescore_all(differences, DEMO / "target", dtype)]
    wrong = [d for d in rescored if not d["near_tie"]]
    assert not wrong, f"differs from none without a near tie: {wrong[:3]}"
    return rescored
