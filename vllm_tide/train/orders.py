"""What an operator may order a trainer to do: status, pause, resume, rollback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vllm_tide.capture.switch import Switch
from vllm_tide.train.deployment import Deployment
from vllm_tide.train.events import EventLog
from vllm_tide.train.status import TrainerStatus, finite
from vllm_tide.transport.admin import Answer
from vllm_tide.transport.header import TransportError

ORDERS = ("status", "pause", "resume", "rollback")


class Orders:
    """Carries orders out, on the trainer's thread between two steps.

    Args:
        status: Gives the current figures.
        pause: Of this run directory.
        deployment: Rolls back.
        events: Told of what was ordered.
        changed: Called after a pause began or ended.
    """

    def __init__(
        self,
        status: Callable[[], TrainerStatus],
        pause: Switch,
        deployment: Deployment,
        events: EventLog,
        changed: Callable[[], None],
    ) -> None:
        self._status, self._pause, self._changed = status, pause, changed
        self._deployment, self._events = deployment, events

    def carry_out(self, request: dict[str, Any]) -> Answer:
        """Carry a request out; its answer."""
        what = request["do"]
        if what == "status":
            return {"ok": True, "status": finite(asdict(self._status()))}
        if what in ("pause", "resume"):
            return self._set_pause(what == "pause")
        if what == "rollback":
            return self._roll_back()
        said = f"{what!r} is no order; give one of {', '.join(ORDERS)}"
        return {"ok": False, "error": said}

    def _set_pause(self, on: bool) -> Answer:
        was = self._pause.on
        volatile = self._pause.set(on)
        if was != on:
            self._events.add("paused" if on else "resumed", reason="ordered")
            self._changed()
        answer: Answer = {"ok": True, "paused": on, "was_paused": was}
        return answer | ({"note": volatile} if volatile else {})

    def _roll_back(self) -> Answer:
        try:
            return {"ok": True, **self._deployment.go_back("ordered")}
        except TransportError as error:
            return {"ok": False, "error": str(error)}
