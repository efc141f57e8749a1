"""Greedy text with and without us, on a GPU."""

from __future__ import annotations

from typing import Any

from place import DEMO, Place

from bench.harness.identity import Difference, first_difference, rescore_all


def smoke(place: Place) -> None:
    """The demo models: greedy text with speculation is the text without it.

    As it is served: in bfloat16 and with graphs. Batches differ, so a near tie may fall
    either way; the target judges the first difference of each request.
    """
    batch, tokens = (2, 16) if place.cpu else (8, 96)
    case = {"batch": batch, "tokens": tokens}
    eagle = {"method": "eagle3", "model": str(DEMO / "draft")}
    eagle |= {"num_speculative_tokens": 3}
    tide = {"run_dir": str(place.work / "run"), "train": {"autostart": False}}
    ours = {**eagle, "tide": {**tide, "control": {"policy": place.policy}}}
    arms: dict[str, Any] = {"none": None, "upstream": eagle, "tide": ours}
    if place.cpu:
        del arms["upstream"]
    else:  # it needs graphs
        adaptive = {**tide, "control": {"policy": "adaspec"}}
        arms["adaptive"] = {**eagle, "tide": adaptive}
        arms["adaptive"]["enable_adaptive_verification"] = True

    def serve(name: str) -> Any:
        return place.child({**case, "speculative": arms[name]}, name)

    found = {name: place.part(name, lambda n=name: serve(n)) for name in arms}
    if None in found.values():
        return
    dtype = "float32" if place.cpu else "bfloat16"
    if not place.dry:  # the null GPU's text is none
        place.part("greedy text is equal", lambda: judge(found, dtype))


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
