"""Which requests may be captured: decided once per request, by the worker."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass
from typing import Any, Literal

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
        sampled: The request's temperature is above zero.
    """

    key: int
    refusal: str | None
    tenant: int = NOBODY
    started: bool = False
    sampled: bool = False


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
