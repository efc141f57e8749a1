"""Choice of the requests that are captured, made once per request by the worker."""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from vllm_tide.transport.ring import RingWriter
from vllm_tide.transport.tenant import KEY_BYTES, NO_TENANT, tenant_id

Consent = Literal["opt_out", "opt_in", "off"]

CONSENT_KEY = "tide_capture"
TENANT_KEY = "tide_tenant"
ARGUMENTS = (CONSENT_KEY, TENANT_KEY, "tide_slo_tpot_ms", "tide_k_max")
"""Keys of `vllm_xargs` for TIDE."""
MAX_TENANT_CHARS = 256
REFUSALS = (
    "consent_off",
    "unknown_key",
    "opted_out",
    "malformed_opt_out",
    "not_opted_in",
    "salted",
    "unsupported_input",
    "malformed_tenant",
    "not_sampled",
)
"""Reasons that count requests instead of rows, in the order of the checks."""
OVERLOAD = ("over_budget", "cut_short")
"""Reasons of `RowBudget`: they count rows."""
NEW, NOT_CAPTURED, OVER_BUDGET, CUT_SHORT, FIRST_SLOT = range(5)
"""Numbers of `Ticket.slot`: `FIRST_SLOT` and above are places in `RowBudget`."""
_NO = (False, 0, "0", "false", "False", "no", "off")
_YES = (True, 1, "1", "true", "True", "yes", "on")


@dataclass(slots=True)
class Ticket:
    """State of a request in capture.

    Attributes:
        key: Random 64-bit id of the request in its records.
        refusal: None if it is captured, else the reason why it is not.
        tenant: Id of its tenant; 0 if the request has none.
        started: Whether a row of it has been captured.
        capped: Whether it limits its drafts, so its speed is no measure of the draft.
        slot: Its place in `RowBudget`, or one of the numbers below `FIRST_SLOT`.
    """

    key: int
    refusal: str | None
    tenant: int = NO_TENANT
    started: bool = False
    sampled: bool = False
    capped: bool = False
    slot: int = NEW


NO_TICKET = Ticket(0, "unknown", slot=NOT_CAPTURED)
"""Ticket of requests without one."""


class CapturePolicy:
    """Decision per request, made without its text.

    Args:
        sample_rate: Share of requests captured (0 to 1).
        seed: For tests; None uses the system's entropy.
        consent: `tide.capture.consent`.
        tenant_key: Key for hashing tenant names (`tenant.tenant_key`); None creates a
            random one, so ids cannot be computed from names later.
    """

    def __init__(
        self,
        sample_rate: float,
        seed: int | None = None,
        *,
        consent: Consent = "opt_out",
        tenant_key: bytes | None = None,
    ) -> None:
        self._rate = sample_rate
        self._consent = consent
        self._tenant_key = tenant_key or secrets.token_bytes(KEY_BYTES)
        self._rng = random.Random(seed)  # noqa: S311 - a sampling coin, no secret

    def admit(
        self, extra_args: dict[str, Any] | None, supported: bool, salted: bool = False
    ) -> Ticket:
        """Decide on a new request.

        Args:
            extra_args: `SamplingParams.extra_args` (`vllm_xargs` of the request).
            supported: False for inputs other than plain tokens (images, prompt
                embeddings).
            salted: Whether it is excluded because of its `cache_salt`.
        """
        args = extra_args or {}
        tenant = self._tenant(args.get(TENANT_KEY))
        return Ticket(
            key=secrets.randbits(64),
            refusal=self._refusal(args, supported, salted, tenant),
            tenant=NO_TENANT if tenant is None else tenant,
            capped="tide_k_max" in args,
        )

    def _tenant(self, name: Any) -> int | None:
        """Return the id of a tenant name; None if it is not a valid name."""
        if name is None:
            return NO_TENANT
        if isinstance(name, int) and not isinstance(name, bool) and abs(name) < 2**64:
            name = str(name)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_TENANT_CHARS:
            return None
        return tenant_id(name, self._tenant_key)

    def _refusal(
        self, args: dict[str, Any], supported: bool, salted: bool, tenant: int | None
    ) -> str | None:
        if refusal := self._without_consent(args):
            return refusal
        if salted:
            return "salted"
        if not supported:
            return "unsupported_input"
        if tenant is None:
            # Without a tenant id the rows could be neither limited nor purged.
            return "malformed_tenant"
        if self._rng.random() >= self._rate:
            return "not_sampled"
        return None

    def _without_consent(self, args: dict[str, Any]) -> str:
        """Return the reason why consent is missing; empty if it is given."""
        if self._consent == "off":
            return "consent_off"
        if any(str(k).lower().startswith("tide") and k not in ARGUMENTS for k in args):
            return "unknown_key"  # may be a misspelt tide_capture
        if CONSENT_KEY not in args:
            return "not_opted_in" if self._consent == "opt_in" else ""
        consent = args[CONSENT_KEY]
        if consent in _NO:
            return "opted_out"
        # An invalid value counts as refusal.
        return "" if consent in _YES else "malformed_opt_out"


class RowBudget:
    """Admission of whole requests within the capacity of ring and trainer.

    A request is admitted at its first full rows and stays admitted. It needs space in
    the ring after the present rows and the expected rows of admitted requests, or a
    consumer that reads fast enough for one more request. The rate is that of reading
    while the ring is not empty, and that of writing while it is empty. It grows in
    small steps, because an admission cannot be revoked.
    """

    FILL, SAFE, GROWTH, SECONDS = 0.75, 0.4, 1.1, 2.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.staged = 0
        # By slot: rows staged so far and prompt tokens of the admitted requests.
        self._rows, self._prompts = np.zeros((2, 64), np.int64)
        self._admitted = np.zeros(64, bool)
        self._output_rows = 128.0  # average of a request
        self._row_bytes = self._capacity = self._used = 0
        # Expected further rows of admitted requests; whether they are up to date.
        self._owed = self._owed_prompt = 0.0
        self._counted = False
        self._seen = (0.0, 0, 0)
        # Bytes read and written per second, and admitted requests (averages).
        self._rate = self._flow = self._crowd = 0.0

    def update(self, ring: RingWriter) -> None:
        """Update the fill level and the rates of the ring, once per step."""
        head, tail = ring.level()
        self._row_bytes, self._capacity = ring.spec.row_bytes + 64, ring.capacity
        self._used, self._counted = head - tail + self.staged, False
        now, (since, old_head, old_tail) = self._clock(), self._seen
        seconds = now - since
        if not old_tail <= tail or not old_head <= head:  # another ring
            self._seen = (now, head, tail)
        elif seconds >= self.SECONDS / 8:
            self._seen = (now, head, tail)
            weight = -math.expm1(-seconds / self.SECONDS)
            self._flow += weight * ((head - old_head) / seconds - self._flow)
            self._crowd += weight * (int(self._admitted.sum()) - self._crowd)
            if tail < old_head:
                self._rate += weight * ((tail - old_tail) / seconds - self._rate)
            else:
                self._rate = max(self._rate, self._flow)

    def take(
        self, tickets: Sequence[Ticket], counts: np.ndarray, prompts: np.ndarray
    ) -> np.ndarray:
        """Admit full rows of a step's requests, those that run already first.

        Args:
            counts: int64 [n], their rows in this step.
            prompts: int64 [n], tokens of their prompts.

        Returns:
            int64 [n], `Ticket.slot` after this; full rows are those of admitted ones.
        """
        slots = _slots_of(tickets)
        running = np.flatnonzero(slots >= FIRST_SLOT)
        rows = counts[running]
        size = int(self.size(rows).sum())
        pending: list[int] = []
        if self._has_space(size):
            self._used += size
            self._rows[slots[running]] += rows
        else:
            pending = running.tolist()
        if len(running) < len(slots):
            pending += np.flatnonzero(slots == NEW).tolist()
        for i in pending:
            self._take(tickets[i], int(counts[i]), int(prompts[i]))
        return _slots_of(tickets) if pending else slots

    def size(self, count: Any) -> Any:
        """Return an upper bound of the bytes of a request's rows in the ring."""
        return count * self._row_bytes + 256

    def skip(self, ticket: Ticket, rows: int) -> None:
        """Expect fewer rows of a prompt, which are cached."""
        if ticket.slot >= FIRST_SLOT:
            left = int(self._prompts[ticket.slot]) - rows
            self._prompts[ticket.slot] = max(left, 0)

    def refuse(self, ticket: Ticket, reason: str) -> None:
        """Refuse further rows of a request, for one of `OVERLOAD`."""
        self.end(ticket)
        ticket.refusal = reason
        ticket.slot = OVER_BUDGET if reason == "over_budget" else CUT_SHORT

    def end(self, ticket: Ticket) -> None:
        """Remove a request that has ended. Idempotent."""
        slot = ticket.slot
        if slot >= FIRST_SLOT:
            output = max(int(self._rows[slot] - self._prompts[slot]), 0)
            self._output_rows += (output - self._output_rows) / 16
            self._admitted[slot] = False
        ticket.slot = NOT_CAPTURED

    def _take(self, ticket: Ticket, count: int, prompt: int) -> None:
        if ticket.refusal is not None:
            ticket.slot = NOT_CAPTURED
            return
        if ticket.slot == NEW:
            if not self._fits(prompt):
                self.refuse(ticket, "over_budget")
                return
            self._open(ticket, prompt)
        size = self.size(count)
        if not self._has_space(size):
            self.refuse(ticket, "cut_short")
            return
        self._rows[ticket.slot] += count
        self._used += size

    def _has_space(self, size: int) -> bool:
        # A record that does not fit at the end of the ring leaves that space empty.
        return self._used + size <= self._capacity * 15 // 16

    def _open(self, ticket: Ticket, prompt: int) -> None:
        slot = FIRST_SLOT + int(self._admitted[FIRST_SLOT:].argmin())
        if self._admitted[slot]:  # all are
            slot = len(self._admitted)
            self._rows, self._prompts, self._admitted = (
                np.concatenate([array, np.zeros_like(array)])
                for array in (self._rows, self._prompts, self._admitted)
            )
        ticket.slot = slot
        self._rows[slot], self._prompts[slot] = 0, prompt
        self._admitted[slot] = True
        self._owed += prompt + self._output_rows
        self._owed_prompt += prompt

    def _count(self) -> None:
        """Estimate the further rows of all admitted requests."""
        rows, prompts = self._rows[self._admitted], self._prompts[self._admitted]
        left = np.maximum(prompts - rows, 0)
        output = prompts + self._output_rows - rows - left
        output = np.maximum(output, self._output_rows / 4)
        self._owed = float(left.sum() + output.sum())
        self._owed_prompt, self._counted = float(left.sum()), True

    def _fits(self, prompt: int) -> bool:
        if not self._counted:
            self._count()
        rows = self._owed + prompt + self._output_rows
        if self._used + rows * self._row_bytes <= self.FILL * self._capacity:
            return True
        if self._used > self.SAFE * self._capacity:
            return False
        count = int(self._admitted.sum())
        if not count:  # of any length: one request is needed for the rate
            return True
        # Without the limit a prompt of more than half the ring is never admitted.
        rows = self._owed_prompt + min(prompt, self._capacity / 2 / self._row_bytes)
        each = self._flow / self._crowd if self._crowd > 1e-3 else math.inf
        return (
            self._used + rows * self._row_bytes <= self.FILL * self._capacity
            and (count + 1) * each <= self.GROWTH * self._rate
        )


def _slots_of(tickets: Sequence[Ticket]) -> np.ndarray:
    return np.fromiter(map(attrgetter("slot"), tickets), np.int64, len(tickets))
