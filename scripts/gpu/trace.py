"""Ten steps under torch's profiler: how often the host waits, ours and upstream's."""

from __future__ import annotations

from typing import Any

from place import DEMO, Place


def trace(place: Place) -> None:
    """Upstream's EAGLE-3, then ours with capture and with control."""
    run_dir = place.work / "run"
    arms = {"upstream": None, "capture": {"control": {"policy": "static"}},
            "capture and control": {"control": {"policy": place.policy}}}  # fmt: skip
    batch = 2 if place.cpu else 32

    def measure(name: str, tide: dict[str, Any] | None) -> dict[str, Any]:
        speculative: dict[str, Any] = {
            "method": "eagle3",
            "model": str(DEMO / "draft"),
            "num_speculative_tokens": 3,
        }
        if tide is not None:
            quiet = {"run_dir": str(run_dir), "train": {"autostart": False}}
            speculative["tide"] = {**quiet, **tide}
        case = {"speculative": speculative, "batch": batch, "tokens": 48, "trace": True}
        found = place.child(case, f"trace-{name.replace(' ', '-')}")
        return {"runner": found["runner"], "calls_per_step": found["trace"]}

    for name, tide in arms.items():
        place.part(name, lambda name=name, tide=tide: measure(name, tide))
