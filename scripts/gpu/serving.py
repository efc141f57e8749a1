"""Greedy text with and without us, on a GPU."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from place import DEMO, Place

from bench.harness.identity import Difference, first_difference, rescore_all


def smoke(place: Place) -> None:
    """The demo models: greedy text with speculation is the text without it.

    As it is served: in bfloat16 and with graphs. Batches differ, so a near tie may fall
    either way; the target judges the first difference of each request.
    """
    case = {"batch": 2, "tokens": 16} if place.dry else {"batch": 8, "tokens": 96}
    eagle = {"method": "eagle3", "model": str(DEMO / "draft")}
    eagle |= {"num_speculative_tokens": 3}
    tide = {"run_dir": str(place.work / "run"), "train": {"autostart": False}}
    # A start on a GPU measures no times, which adaspec alone needs.
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

    def served() -> dict[str, Any]:
        workers = 1 if place.dry else len(arms)  # nothing is timed
        with ThreadPoolExecutor(workers) as pool:
            return dict(zip(arms, pool.map(serve, arms), strict=True))

    found = place.part("arms", served)
    if not place.dry:  # the null GPU's text is none
        place.part("greedy text is equal", lambda: judge(found, "bfloat16"))


def lengths(place: Place) -> None:
    """Each step drafts by hand another length, where graphs are for any mix of them.

    A step without drafts among them once gave garbage: see `replay_each`.
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
        control, found = engine.tide.control, {}
        control.stop()
        for depth in itertools.cycle((3, 0, 1, 0, 0, 3, 3)):
            if not engine.engine.has_unfinished_requests():
                break
            control.depth = depth
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
        texts = [found[name] for name in names]
        return {"tokens": texts, "modes": dict(engine.modes)}

    found = {"none": plain, "steered": place.part("steered", steered)}
    if not place.dry:
        place.part("greedy text is equal", lambda: judge(found, "bfloat16"))


def judge(found: dict[str, Any], dtype: str) -> list[dict[str, Any]]:
    """The near ties at which an arm's text leaves that of none.

    Raises:
        AssertionError: A difference is none.
    """
    plain, differences = found["none"], []
    for name, report in found.items():
        for i, theirs in enumerate(report["tokens"]):
            ours, prompt = plain["tokens"][i], plain["prompts"][i]
            if (at := first_difference(ours, theirs)) is None:
                continue
            tokens, prefix = (ours[at], theirs[at]), (*prompt, *ours[:at])
            differences.append(Difference(("none", name), i, at, tokens, prefix))
    judged = [d.summary() for d in rescore_all(differences, DEMO / "target", dtype)]
    wrong = [d for d in judged if not d["near_tie"]]
    assert not wrong, f"another text than none, and no near tie: {wrong[:3]}"
    return judged
