"""Control of Model Runner V2 with asynchronous scheduling: one depth for the batch.

The engine's `ControlV2` receives the steps of the simulated engine, without adaptive
verification: no draft is cut, and every step runs at least one draft pass. A step is
launched while the previous one runs, with the results of the one before that, and its
depth reaches the scheduler with its output. A depth is therefore used `LAG` steps after
the step that determined it.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from sim import state as col
from sim.acceptance import Process
from sim.adapter import Adapter
from sim.state import Server, Step
from sim.truth import Truth
from vllm_tide.capture import step as engine_step
from vllm_tide.config import ControlConfig
from vllm_tide.control.time_model import TimeModel
from vllm_tide.engine import control_v2
from vllm_tide.engine.adaptive_arguments import offered, rounded
from vllm_tide.engine.policy_start import start_policy

LAG = 4
"""Steps from an observed step to the step that uses its depth."""

_LONGEST = 1 << 20


class OneDepth:
    """A `ControlV2` as a policy.

    Args:
        times: Initial time model.
        top: num_speculative_tokens.
        server: Limits of the engine.

    Attributes:
        control: The engine's control.
        depth: Draft steps of the next step, one of `offered`.
        coming: Depths of the steps after it, in order of decision.
    """

    def __init__(self, times: TimeModel, top: int, server: Server) -> None:
        limit = server.slo_seconds
        config = ControlConfig(slo_tpot_ms=None if limit is None else limit * 1e3)
        requests = server.max_num_seqs
        self.control = control_v2.ControlV2(requests, _LONGEST, config, top, False)
        self.control.lengths = self._lengths = offered(top, requests)
        start_policy(None, self.control, config, times)
        self.coming = deque([top] * (LAG - 1))
        self.depth = top

    @property
    def adapter(self) -> type[Adapter]:
        """Type of the adapter to the simulated engine."""
        return OneDepthAdapter

    def learn(self, step: engine_step.Step, now: float) -> None:
        """Process a step that landed at `now` (simulated seconds); advance `depth`.

        Raises:
            RuntimeError: Control failed; an engine would disable it and continue.
        """
        clock = SimpleNamespace(monotonic=lambda: now)
        with patch.object(control_v2, "time", clock):
            self.control.learn(step)
        if self.control.faults:
            raise RuntimeError(f"control failed: {self.control.faults}")
        up = not self.control.limited
        self.coming.append(rounded(self.control.depth, self._lengths, up=up))
        self.depth = self.coming.popleft()

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the engine's control."""
        return self.control.stats()


class OneDepthAdapter(Adapter):
    """Adapter that passes steps to `ControlV2` like Model Runner V2."""

    def __init__(
        self, policy: OneDepth, process: Process, truth: Truth, server: Server
    ) -> None:
        super().__init__(policy, process, truth, server)
        self._slo = None  # `ControlV2` has a separate `SloBook`
        self._one = policy
        self._names: dict[int, str] = {}  # by slot
        self._right = np.zeros(server.max_num_seqs, np.int64)

    def add(self, slot: int, now: float) -> None:
        """Ignore it: the first step of a request admits it."""

    def drop(self, slot: int) -> None:
        """End a request."""
        self._one.control.end([self._names.pop(slot)])

    def after_target(self, state: np.ndarray, step: Step, now: float) -> float:
        """Run `Adapter.after_target` with the same depth for all requests."""
        truth, requests, depth = self._truth, step.requests, self._one.depth
        slots, at = state[col.SLOT], state[col.AT]
        self._admit(state, step)
        cached = int(state[col.CACHED].sum())
        first_s = truth.draft_first(cached, step.rows)  # runs in any case
        next_s = truth.draft_next(requests, cached, max(depth - 1, 0))
        host_s = truth.model.host
        seconds = first_s + next_s + host_s
        sample = self._measure(step, max(depth, 1), first_s, next_s, host_s)
        self.drafted += depth * requests
        drafts = state[col.SENT].copy()
        ends = np.cumsum(step.committed - step.accepted + drafts)
        sampled = np.zeros((requests, self._process.top + 1), np.int64)
        # The first draft token is always 1, and the target samples 1 if it accepts it.
        sampled[:, 0] = self._right[slots]
        self._right[slots] = self._process.run[at] > 0
        state[col.SENT] = np.minimum(self._caps(state, step), depth)
        landed = engine_step.Step(
            req_ids=[self._names[slot] for slot in slots.tolist()],
            bounds=np.append(0, ends),
            drafts=drafts,
            padding=np.zeros(requests, np.int32),
            logit_ends=ends,
            num_prompt_tokens=np.zeros(requests, np.int64),
            version=0,
            buffer=None,
            steps=depth,
            reading=(lambda: sample) if step.continues else None,
            start=state[col.CACHED] - step.committed,
            emitted=step.emitted,
            sampled=sampled,
            confidence=self._process.confidence[at],
            drafted=np.ones(requests, np.int64),
        )
        self._one.learn(landed, now + seconds)
        return seconds

    def _admit(self, state: np.ndarray, step: Step) -> None:
        """Admit the requests that are new in this step."""
        new = []
        for place, slot in enumerate(state[col.SLOT].tolist()):
            if slot in self._names:
                continue
            self._names[slot] = name = str(int(state[col.REQUEST, place]))
            parameters = SimpleNamespace(
                max_tokens=int(state[col.LEFT, place] + step.emitted[place]),
                temperature=0.0,
                extra_args=None,
                structured_outputs=None,
            )
            prompt = int(state[col.CACHED, place] + state[col.TODO, place])
            new.append(
                SimpleNamespace(
                    req_id=name, prompt_len=prompt, sampling_params=parameters
                )
            )
        if new:
            self._one.control.admit(
                SimpleNamespace(
                    scheduled_new_reqs=new,
                    num_scheduled_tokens=dict.fromkeys(self._names.values(), 1),
                    preempted_req_ids=None,
                )
            )
