"""TIDE in the engine core: swap directives for all ranks, and metrics.

The scheduler's output carries each directive, so all ranks swap drafts at the same
step. A request's `cache_salt` stays in the engine core: the directive lists only the
new requests that have one.

The draft's KV is stored in the blocks of the target's KV, and block hashes do not
depend on the draft. A request with a cached prefix therefore drafts on KV of the draft
that was live when the prefix was computed. A fast draft counts as its base.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NotRequired, TypedDict

from vllm_tide.config import TideConfig, parse_tide, starts_trainer
from vllm_tide.engine.requests import argument, length_cap
from vllm_tide.metrics import increments
from vllm_tide.transport.versions import step_of

logger = logging.getLogger("vllm.tide")


CONTEXTS = ("0-1k", "1k-4k", "4k-16k", "16k-64k", "64k-")
"""Labels of a request's length so far (tokens)."""
_CONTEXT_ENDS = (1 << 10, 4 << 10, 16 << 10, 64 << 10)
_WAITING = 16  # most steps in flight, for which the source of drafts is unknown


class StepDirective(TypedDict):
    """Directive for the workers of a step (`SchedulerOutput.tide`).

    Attributes:
        install: Version of the draft to install before the step.
        salted: New requests of the step that have a `cache_salt`.
        step_costs: Costs of verification (`ControlV2.step_costs`).
    """

    install: NotRequired[int]
    salted: NotRequired[list[str]]
    step_costs: NotRequired[Any]


def make_scheduler(speculative_config: Any, scheduler: Any) -> SchedulerTide | None:
    """Create TIDE's part of the scheduler; return None if `tide` is not configured.

    Args:
        scheduler: vLLM's `Scheduler`; its KV cache manager may not exist yet.
    """
    if speculative_config is None or speculative_config.tide is None:
        return None
    config = parse_tide(speculative_config.tide)
    if starts_trainer(config) and config.spool.url is None:
        leave_the_core()
    return SchedulerTide(speculative_config.num_speculative_tokens, scheduler, config)


def leave_the_core() -> None:
    """Make the engine core sleep instead of poll while a CPU worker computes.

    vLLM reserves one core for everything but the model; polling leaves the trainer a
    tenth of it. The queue is checked every ms, because it may lose a notification that
    closely follows another.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        shm_broadcast.busy_loop_limit_s = 0.0
        shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 1
        logger.info(
            "vllm_tide: vLLM waits without spinning, to leave the core to a trainer"
        )


class SchedulerTide:
    """TIDE's part of the scheduler.

    Args:
        scheduler: vLLM's `Scheduler`; gives requests and the block pool.
    """

    def __init__(self, longest: int, scheduler: Any, config: TideConfig) -> None:
        self._longest = longest
        self._scheduler = scheduler
        self._keep_out = not config.capture.salted
        self._staged = 0
        self._ordered = 0
        self._depth: int | None = None
        self._step_costs: Any = None
        self._stats: dict[str, Any] | None = None
        self._drafts: Any = None
        self._memory: set[str] = set()  # requests with verified drafts of the memory
        # On V2 `_memory` arrives some steps later: counts that wait for it, by step.
        self._step: int | None = None
        self._waiting: dict[int, list[tuple[str, str, int, int, int]]] = {}
        self._malformed_caps = 0
        self._swap_seconds: list[float] = []
        self._counted: dict[Any, float] = {}
        # Hashes of cached blocks by id, as of the directive that installed the draft.
        self._old: dict[int, Any] = {}
        self._verified: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        # Verify steps by accepted tokens, for each context, since the last report.
        self._steps: list[Counter[int]] = [Counter() for _ in CONTEXTS]

    def control(self, new_requests: Iterable[Any] = ()) -> StepDirective | None:
        """Return the directive for the workers of the next step, or None."""
        directive = StepDirective()
        if self._staged not in (0, self._ordered):
            self._ordered = directive["install"] = self._staged
            if not step_of(self._staged):
                self._leave_old_kv()
        salted = []
        for new in new_requests:
            if (request := self._scheduler.requests.get(new.req_id)) is None:
                continue
            request.tide_prefix = self._prefix(new, request.num_prompt_tokens)
            self._cap(request, new.sampling_params)
            if self._keep_out and request.cache_salt:
                salted.append(new.req_id)
        if salted:
            directive["salted"] = salted
        if self._step_costs is not None:
            directive["step_costs"] = self._step_costs
        return directive or None

    def _cap(self, request: Any, params: Any) -> None:
        """Limit the drafts of a new request to its `tide_k_max`."""
        if argument(params, "tide_k_max") is None or hasattr(request, "tide_k_max"):
            return
        request.tide_k_max = cap = length_cap(params, self._longest)
        if cap is None and not self._malformed_caps:
            logger.warning(
                "vllm_tide: ignored tide_k_max in vllm_xargs: it is not a non-negative "
                "integer (malformed_limits; logged once)."
            )
        self._malformed_caps += cap is None
        if cap is not None:
            kind: Any = type(request)
            request.__class__, request.spec_token_ids = _capped(kind), []

    def _leave_old_kv(self) -> None:
        """Store the cached blocks that the previous draft has written."""
        self._old = {
            block.block_id: block.block_hash
            for block in self._scheduler.kv_cache_manager.block_pool.blocks
            if block.block_hash is not None
        }

    def _prefix(self, new: Any, num_prompt_tokens: int) -> str:
        """Return the cached share of a prompt, with `_old` if of an earlier draft."""
        cached = new.num_computed_tokens
        if not cached:
            return "none"
        share = "most" if 2 * cached >= num_prompt_tokens else "part"
        first = self._scheduler.kv_cache_manager.block_pool.blocks[new.block_ids[0][0]]
        old = self._old.get(first.block_id)
        return share if old is None or old != first.block_hash else share + "_old"

    def verified(self, request: Any, drafts: int, accepted: int) -> None:
        """Count the verified and accepted draft tokens of a request in a step."""
        if self._memory and request.request_id in self._memory:
            return
        prefix = getattr(request, "tide_prefix", "none")
        length = bisect_right(_CONTEXT_ENDS, request.num_tokens)
        if self._step is None:
            self._count(prefix, length, drafts, accepted)
            return
        self._waiting.setdefault(self._step, []).append(
            (request.request_id, prefix, length, drafts, accepted)
        )

    def _count(self, prefix: str, length: int, drafts: int, accepted: int) -> None:
        self._verified[prefix] += drafts
        self._accepted[prefix] += accepted
        self._steps[length][accepted] += 1

    def _settle(self, step: int, memory: Sequence[str]) -> None:
        """Count a landed step; the drafts of `memory` requests are not the draft's."""
        for name, prefix, length, drafts, accepted in self._waiting.pop(step, ()):
            if name not in memory:
                self._count(prefix, length, drafts, accepted)

    def draft_depth(self, most: int) -> int:
        """Return the draft depth of the step that is being scheduled.

        The worker of Model Runner V2 predicts it (`ControlV2.depth`); V1 decides during
        the step. The prediction replaces vLLM's table of lengths, which may exist only
        to capture graphs (`arguments.py`).
        """
        return most if self._depth is None else min(self._depth, self._longest)

    def observe(self, report: dict[str, Any] | None) -> None:
        """Process a worker's report (`ModelRunnerOutput.tide`).

        A version that is still staged after its directive is sent again, because a rank
        had not staged it yet.
        """
        self._drafts, self._memory = None, set()
        if report is None:
            return
        self._drafts = report.pop("drafts", None)
        self._memory = set(report.pop("memory", ()))
        self._step = report.pop("step", None)
        for step, memory in report.pop("settled", ()):
            if step == self._step:  # on a CPU a step lands before it is counted
                self._memory, self._step = set(memory), None
            else:
                self._settle(step, memory)
        if len(self._waiting) > _WAITING:  # a lost step never lands
            del self._waiting[min(self._waiting)]
        self._depth, self._step_costs = report.get("depth"), report.get("step_costs")
        if "staged" not in report:
            return  # a report without metrics
        if report["staged"] == self._ordered:
            self._ordered = 0
        self._staged = report["staged"]
        self._swap_seconds += report.get("swap_seconds", ())
        self._stats = report

    def take_drafts(self) -> Any:
        """Return the last step's `DraftTokenIds` and clear them; None if not sent."""
        drafts, self._drafts = self._drafts, None
        return drafts

    def stats(self) -> dict[str, Any] | None:
        """Return the values for the API server's metrics, once per report."""
        stats, self._stats = self._stats, None
        if stats is not None:
            stats = stats | {
                "malformed_limits": self._malformed_caps
                + stats.get("malformed_limits", 0),
                "swap_seconds": self._swap_seconds,
                "prefix_verified": dict(self._verified),
                "prefix_accepted": dict(self._accepted),
                "step_accepted": {
                    name: dict(steps)
                    for name, steps in zip(CONTEXTS, self._steps, strict=True)
                    if steps
                },
            }
            self._swap_seconds = []
            for steps in self._steps:
                steps.clear()
            stats = increments(stats, self._counted)
        return stats


@cache
def _capped(kind: Any) -> Any:
    """Return a subclass of vLLM's request with at most `tide_k_max` drafts."""

    def cut(request: Any, drafts: list[int]) -> None:
        request.tide_drafts = drafts[: request.tide_k_max]

    drafts = property(lambda request: request.tide_drafts, cut)
    return type(kind.__name__, (kind,), {"spec_token_ids": drafts})
