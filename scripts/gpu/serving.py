"""Stages that serve: what vllm_tide/bench and scripts/bench measure, at a GPU's sizes.

Waiting servers keep their memory, so each is given a small share of the GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from place import DEMO, ROOT, Place, TimeIsOver

from vllm_tide.bench.identity import Difference, first_difference, rescore_all

BENCH = ROOT / "scripts" / "bench"
ARMS = ("none", "static1", "static3", "static5", "static7", "vllm_dynamic",
        "vllm_adaptive", "threshold", "adaspec_adaptive")  # fmt: skip
BATCHES = {"1 to 8": (1, 2, 4, 8), "16 to 64": (16, 32, 64), "128 and 256": (128, 256)}
# A target whose steps cost something: the demo's function at that many parameters.
SIZE = "1b"


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


def capture(place: Place) -> None:
    """`capture_cost.py` at each batch size."""
    for batch in (1,) if place.cpu else (1, 8, 64, 256):
        place.part(f"batch {batch}", lambda b=batch: _capture(place, b))


def _capture(place: Place, batch: int) -> Any:
    result = place.work / f"capture-{batch}.json"
    command = [str(BENCH / "capture_cost.py"), "--venv", sys.prefix]
    command += ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft")]
    command += ["--prompts", str(DEMO / "prompts"), "--work", str(place.work / "cost")]
    command += ["--json", str(result), "--concurrency", str(batch)]
    command += ["--requests-per-block", str(batch), "--repeat-prompts"]
    if place.cpu:
        command += ["--pairs", "2", "--max-tokens", "16"]
    else:
        command += ["--pairs", "6", "--max-tokens", "96", "--dtype", "bfloat16"]
        command += ["--serve-args", "--gpu-memory-utilization 0.3"]
    place.command(command, f"capture-{batch}")
    whole = _read(result)
    kept = ("median_ratio", "quartiles", "cost_percent", "rates", "captured_rows",
            "dropped", "outputs_equal")  # fmt: skip
    return {name: whole[name] for name in kept}


def sweep(place: Place) -> None:
    """The control suite over batch sizes; the arms of a part in one interleaved run."""
    parts = {"1": (1,)} if place.cpu else BATCHES
    for name, batches in parts.items():
        place.part(f"batch {name}", lambda b=batches: _sweep(place, b))


def _sweep(place: Place, batches: tuple[int, ...]) -> Any:
    label = f"sweep-{batches[0]}"
    # V1, which is what runs on a CPU, has no adaptive verification.
    arms = ("none", "static3", "adaspec") if place.cpu else ARMS
    command = ["--suite", "control", "--arms", ",".join(arms)]
    command += ["--batches", ",".join(map(str, batches)), "--repeats", "1"]
    command += ["--domains", "matched"]
    if place.cpu:
        command += ["--seconds", "2", "--calibration-seconds", "1"]
        command += ["--output-tokens", "32"]
    else:
        command += ["--seconds", "3", "--dtype", "bfloat16", "--compile"]
        command += ["--model-sizes", SIZE, "--resident", str(len(arms))]
        command += ["--serve-args", "--gpu-memory-utilization 0.08"]
        command += ["--max-minutes", f"{place.minutes_left():.1f}"]
    whole = _bench(place, command, label)
    kept = ("cells", "summary", "identity", "problems", "complete", "stopped")
    return {name: whole[name] for name in kept if name in whole}


def shift(place: Place) -> None:
    """The learning suite: frozen and trained drafts on a stream that shifts."""
    command = ["--suite", "learning", "--traffic", "shift", "--resume"]
    if place.cpu:
        command += ["--arms", "frozen,tide", "--domains", "python,docs_en"]
        command += ["--requests", "4", "--output-tokens", "16", "--concurrency", "2"]
    else:
        command += ["--domains", "python,docs_en", "--requests", "240,480"]
        command += ["--dtype", "bfloat16", "--concurrency", "16"]
        command += ["--tide", json.dumps({"train": {"device": "cuda"}})]
        command += ["--serve-args", "--gpu-memory-utilization 0.3"]
        command += ["--max-minutes", f"{place.minutes_left():.1f}"]

    def measure() -> Any:
        whole = _bench(place, command, "shift")
        if "max-minutes" in str(whole.get("stopped")):
            raise TimeIsOver  # what is measured is in the work folder
        kept = ("results", "identity", "problems", "complete")
        found = {name: whole[name] for name in kept if name in whole}
        return {"trainer_device": "cpu" if place.cpu else "cuda", **found}

    place.part("shift", measure)


def profile(place: Place) -> None:
    """`time_model.py`: the error of predicted times, held out and while serving."""
    for size in ("demo",) if place.cpu else ("demo", "350m"):
        place.part(size, lambda s=size: _profile(place, s))


def _profile(place: Place, size: str) -> Any:
    result = place.work / f"profile-{size}.json"
    command = [str(BENCH / "time_model.py"), "--models", size, "--json", str(result)]
    command += ["--keep", str(place.work / "models")]
    if place.cpu:
        command += ["--quick", "--seconds", "5", "--serve-seconds", "5"]
        command += ["--max-num-seqs", "2"]
    else:
        command += ["--seconds", "90", "--serve-seconds", "30"]
        command += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.3"]
    place.command(command, f"profile-{size}")
    whole = _read(result)[size]
    return {name: whole[name] for name in ("facts", "samples", "fit", "serving")}


def _bench(place: Place, command: list[str], label: str) -> Any:
    result = place.work / f"{label}.json"
    whole = [
        "-m",
        "vllm_tide",
        "bench",
        "run",
        *command,
        "--yes",
        "--json",
        str(result),
    ]
    try:
        place.command([*whole, "--work", str(place.work / label)], label)
    except RuntimeError:
        # A run that stops at its last minute has still measured something.
        if not result.exists() or "max-minutes" not in str(_read(result)["stopped"]):
            raise
    return _read(result)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
