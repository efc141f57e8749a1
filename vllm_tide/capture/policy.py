"""Which requests may be captured: decided once per request, by the worker."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import Any

OPT_OUT_KEY = "tide_capture"
_NO = (False, 0, "0", "false", "False", "no", "off")
_YES = (True, 1, "1", "true", "True", "yes", "on")


@dataclass(slots=True)
class Ticket:
    """A request's standing with capture.

    Attributes:
        key: Random 64-bit name under which its rows leave the engine.
        refusal: None when it is captured, else the reason it is not.
        started: Whether a row of it has been captured.
    """

    key: int
    refusal: str | None
    started: bool = False


class CapturePolicy:
    """Decides per request; never sees its text.

    Args:
        sample_rate: Share of requests captured (0 to 1).
        seed: For tests; None draws from the system's entropy.
    """

    def __init__(self, sample_rate: float, seed: int | None = None) -> None:
        self._rate = sample_rate
        self._rng = random.Random(seed)  # noqa: S311 - a sampling coin, no secret

    def admit(self, extra_args: dict[str, Any] | None, supported: bool) -> Ticket:
        """Decide on a new request.

        Args:
            extra_args: `SamplingParams.extra_args` (`vllm_xargs` of the request).
            supported: False for inputs whose rows are not plain tokens (images,
                prompt embeddings).
        """
        key = secrets.randbits(64)
        return Ticket(key=key, refusal=self._refusal(extra_args, supported))

    def _refusal(
        self, extra_args: dict[str, Any] | None, supported: bool
    ) -> str | None:
        wish = (extra_args or {}).get(OPT_OUT_KEY, True)
        if wish in _NO:
            return "opted_out"
        if wish not in _YES:
            # Unreadable consent is no consent.
            return "malformed_opt_out"
        if not supported:
            return "unsupported_input"
        if self._rng.random() >= self._rate:
            return "not_sampled"
        return None
