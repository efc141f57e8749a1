"""Which requests may be captured: decided once per request, by the worker."""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vllm_tide.transport.ring import RingWriter
from vllm_tide.transport.tenant import KEY_BYTES, NOBODY, tenant_id

Consent = Literal["opt_out", "opt_in", "off"]

CONSENT_KEY = "tide_capture"
TENANT_KEY = "tide_tenant"
ARGUMENTS = (CONSENT_KEY, TENANT_KEY, "tide_slo_tpot_ms", "tide_k_max")
"""What a request may say to us."""
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
"""Every reason that counts a request instead of rows, in the order of the questions."""
OVERLOAD = ("over_budget", "cut_short")
"""Reasons of `RowBudget`: they count rows."""
_NO = (False, 0, "0", "false", "False", "no", "off")
_YES = (True, 1, "1", "true", "True", "yes", "on")


@dataclass(slots=True)
class Ticket:
    """A request's standing with capture.

    Attributes:
        key: Random 64-bit name under which its rows leave the engine.
        refusal: None when it is captured, else the reason it is not.
        tenant: Id of who sent it; 0 when the request names nobody.
        started: Whether a row of it has been captured.
        capped: It limits its drafts: its speed says nothing of the draft.
        rows: Full rows that were taken of it.
        prompt: Tokens of its prompt, once it was admitted by `RowBudget`; else -1.
    """

    key: int
    refusal: str | None
    tenant: int = NOBODY
    started: bool = False
    sampled: bool = False
    capped: bool = False
    rows: int = 0
    prompt: int = -1


class CapturePolicy:
    """Decides per request; never sees its text.

    Args:
        sample_rate: Share of requests captured (0 to 1).
        seed: For tests; None draws from the system's entropy.
        consent: What a request without a word about capture has said.
        tenant_key: Secret that hides the tenants' names (`tenant.tenant_key`); None
            makes one of its own, and no name can be looked up later.
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
            supported: False for inputs whose rows are not plain tokens (images,
                prompt embeddings).
            salted: It has a `cache_salt` that keeps it out.
        """
        args = extra_args or {}
        tenant = self._tenant(args.get(TENANT_KEY))
        return Ticket(
            key=secrets.randbits(64),
            refusal=self._refusal(args, supported, salted, tenant),
            tenant=NOBODY if tenant is None else tenant,
            capped="tide_k_max" in args,
        )

    def _tenant(self, name: Any) -> int | None:
        """The id of a name; None if it is no name."""
        if name is None:
            return NOBODY
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
            # What cannot be told apart could neither be capped nor purged.
            return "malformed_tenant"
        if self._rng.random() >= self._rate:
            return "not_sampled"
        return None

    def _without_consent(self, args: dict[str, Any]) -> str:
        """Why there is no consent; empty if there is."""
        if self._consent == "off":
            return "consent_off"
        if any(str(k).lower().startswith("tide") and k not in ARGUMENTS for k in args):
            return "unknown_key"  # it may be a misspelt refusal
        if CONSENT_KEY not in args:
            return "not_opted_in" if self._consent == "opt_in" else ""
        wish = args[CONSENT_KEY]
        if wish in _NO:
            return "opted_out"
        # Unreadable consent is no consent.
        return "" if wish in _YES else "malformed_opt_out"


class RowBudget:
    """Shares what the trainer takes among whole requests.

    A request is admitted at its first full rows, for good: if what is in the ring and
    what the admitted requests still owe leaves room for it, or if the consumer takes
    rows at such a rate that it can take those of one request more. The rate is what it
    took while the ring was not empty, or all that came while it was; it is tried out
    upwards in small steps, as admitted requests cannot be taken back.
    """

    FILL, SAFE, GROWTH, SECONDS = 0.75, 0.4, 1.1, 2.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.staged = 0
        self._admitted: dict[int, Ticket] = {}
        self._output_rows = 128.0  # of a request, on average
        self._row_bytes = self._capacity = self._used = 0
        self._owed = self._owed_prompt = 0.0
        self._counted = False  # whether these are of now
        self._seen = (0.0, 0, 0)
        # Bytes per second: what the consumer takes, what is written; requests.
        self._rate = self._flow = self._crowd = 0.0

    def look(self, ring: RingWriter) -> None:
        """See how far the consumer is; once a step."""
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
            self._crowd += weight * (len(self._admitted) - self._crowd)
            if tail < old_head:
                self._rate += weight * ((tail - old_tail) / seconds - self._rate)
            else:
                self._rate = max(self._rate, self._flow)

    def take(self, ticket: Ticket, count: int, prompt: int) -> str | None:
        """Decide about full rows of a request; why they are not taken, else None."""
        if ticket.prompt < 0:
            if not self._has_room(prompt):
                return "over_budget"
            ticket.prompt = prompt
            self._admitted[ticket.key] = ticket
            self._owed += prompt + self._output_rows
            self._owed_prompt += prompt
        size = self.size(count)
        # The end of the ring may be left empty by a record that does not fit there.
        if self._used + size > self._capacity * 15 // 16:
            self.end(ticket)
            return "cut_short"
        ticket.rows += count
        self._used += size
        return None

    def size(self, count: int) -> int:
        """Most bytes of a request's rows in the ring."""
        return count * self._row_bytes + 256

    def end(self, ticket: Ticket) -> None:
        """The request ended. Idempotent."""
        if self._admitted.pop(ticket.key, None) is not None:
            output = max(ticket.rows - ticket.prompt, 0)
            self._output_rows += (output - self._output_rows) / 16

    def _count(self) -> None:
        """Count what the admitted requests owe."""
        rows, prompts = 0.0, 0
        for ticket in self._admitted.values():
            left = max(ticket.prompt - ticket.rows, 0)
            output = ticket.prompt + self._output_rows - ticket.rows - left
            rows += left + max(output, self._output_rows / 4)
            prompts += left
        self._owed, self._owed_prompt, self._counted = rows, prompts, True

    def _has_room(self, prompt: int) -> bool:
        if not self._counted:
            self._count()
        rows = self._owed + prompt + self._output_rows
        if self._used + rows * self._row_bytes <= self.FILL * self._capacity:
            return True
        if self._used > self.SAFE * self._capacity:
            return False
        if not self._admitted:  # however long they are: the rate is learnt from one
            return True
        # A prompt beyond half the ring would otherwise never come in.
        rows = self._owed_prompt + min(prompt, self._capacity / 2 / self._row_bytes)
        each = self._flow / self._crowd if self._crowd > 1e-3 else math.inf
        return (
            self._used + rows * self._row_bytes <= self.FILL * self._capacity
            and (len(self._admitted) + 1) * each <= self.GROWTH * self._rate
        )
