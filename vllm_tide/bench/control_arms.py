"""The arms of the control benchmark: which server each one needs.

``none`` and ``static1/3/5/7`` are plain vLLM; ``vllm_dynamic`` is plain vLLM with its
batch-size schedule, ``vllm_adaptive`` with its adaptive verification; the others run a
policy of ``tide.control`` with at most ``TIDE_MAX_TOKENS`` draft tokens.  The last four
are the ablation of the AdaSpec paper's Table 2, each adding one part to the one before.

``adaspec_adaptive`` is ``adaspec`` with vLLM's adaptive verification cutting its drafts
on the device.  Both arms with it have to be asked for: few engines can
(``adaptive.py``).

An arm may be followed by ``@SCALE``: its requests then carry a TPOT limit of SCALE x
the P90 TPOT of arm ``none`` (``adaspec_slo`` is ``adaspec@1.0``).  Arms that differ
in nothing but the limit share one server, since the limit travels with the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTROL_ARMS = (
    "none",
    "static1",
    "static3",
    "static5",
    "static7",
    "threshold",
    "tide_gate",
    "vllm_dynamic",
    "adaspec",
)
ABLATION_ARMS = (
    "adaspec_drafter",
    "adaspec_verifier",
    "adaspec_calibration",
    "adaspec_slo",
)
# Baselines the ablation is read against, as in the paper's table.
ABLATION_SUITE = ("none", "static3", "threshold", *ABLATION_ARMS)
# With vLLM's adaptive verification.
ADAPTIVE_ARMS = ("vllm_adaptive", "adaspec_adaptive")
# (first batch size, last batch size, number of draft tokens), as vLLM takes it.
Schedule = Sequence[tuple[int, int, int]]
STATIC = re.compile(r"^static([1-9]\d?)$")
TIDE_MAX_TOKENS = 7
SLO_KEY = "tide_slo_tpot_ms"
_POLICIES: Mapping[str, Mapping[str, Any]] = {
    "threshold": {"policy": "threshold"},
    "tide_gate": {"policy": "tide_gate"},
    "adaspec": {"policy": "adaspec"},
    "adaspec_adaptive": {"policy": "adaspec"},
    "adaspec_drafter": {"policy": "adaspec", "verify": False, "calibrate": False},
    "adaspec_verifier": {"policy": "adaspec", "calibrate": False},
    "adaspec_calibration": {"policy": "adaspec"},
    "adaspec_slo": {"policy": "adaspec"},
}


class BenchError(ValueError):
    """The benchmark cannot run as asked; one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm.

    Attributes:
        name: As given on the command line and written to the JSON.
        num_tokens: Most draft tokens per round; 0 without speculation.
        control: The ``tide.control`` section; None for plain vLLM.
        slo_scale: Its requests' TPOT limit, as a factor of arm ``none``'s P90 TPOT.
    """

    name: str
    num_tokens: int
    control: Mapping[str, Any] | None = field(default=None, hash=False)
    slo_scale: float | None = None

    @property
    def is_dynamic(self) -> bool:
        """Return whether the arm needs a tuned schedule before its server starts."""
        return self.name == "vllm_dynamic"

    @property
    def is_adaptive(self) -> bool:
        """Return whether drafts are cut by vLLM's adaptive verification."""
        return self.name.partition("@")[0] in ADAPTIVE_ARMS

    @property
    def is_static(self) -> bool:
        """Return whether the arm always drafts the same number of tokens, or none."""
        return self.name == "none" or STATIC.match(self.name) is not None

    @property
    def server_key(self) -> str:
        """Arms of one key are served by one server."""
        kind = [self.is_dynamic, self.is_adaptive]
        return json.dumps([*kind, self.num_tokens, self.control])


def make_arm(text: str, control: Mapping[str, Any] | None = None) -> Arm:
    """Return the arm of a name such as ``static3`` or ``adaspec@0.9``.

    Args:
        text: Name, with ``@SCALE`` if its requests carry a TPOT limit.
        control: Knobs put into the ``tide.control`` section of every tide arm.

    Raises:
        BenchError: There is no such arm.
    """
    name, _, scale_text = text.partition("@")
    scale: float | None = 1.0 if name == "adaspec_slo" else None
    if scale_text:
        try:
            scale = float(scale_text)
        except ValueError:
            scale = None
        if scale is None or not 0 < scale < 100:
            raise BenchError(f"arm {text!r}: after @ comes a factor such as 0.9")
        if name not in _POLICIES:
            raise BenchError(f"arm {text!r}: only tide's policies take a TPOT limit")
    if name == "none":
        return Arm(text, 0)
    if match := STATIC.match(name):
        return Arm(text, int(match[1]))
    if name in ("vllm_dynamic", "vllm_adaptive"):
        return Arm(text, TIDE_MAX_TOKENS)
    if name in _POLICIES:
        merged = {"client_slo_tpot_ms": 1e-3, **(control or {}), **_POLICIES[name]}
        return Arm(text, TIDE_MAX_TOKENS, merged, scale)
    known = ", ".join((*CONTROL_ARMS, *ADAPTIVE_ARMS, *ABLATION_ARMS))
    raise BenchError(f"there is no arm {text!r}; known: {known}, static<k>")


def make_arms(
    names: Sequence[str], control: Mapping[str, Any] | None = None
) -> list[Arm]:
    """Return the arms in order, each once.

    Raises:
        BenchError: An arm is unknown, or needs another one that is not there.
    """
    arms = [make_arm(name, control) for name in dict.fromkeys(names)]
    if not arms:
        raise BenchError("no arm was given")
    has_none = any(arm.name == "none" for arm in arms)
    for arm in arms:
        if arm.slo_scale is not None and not has_none:
            raise BenchError(f"arm {arm.name!r} needs arm 'none' for its TPOT limit")
    static = [arm for arm in arms if arm.is_static]
    if any(arm.is_dynamic for arm in arms) and len(static) < 2:
        raise BenchError(
            "arm 'vllm_dynamic' is tuned from the static arms; add at least two of "
            "none, static1, static3, static5, static7"
        )
    return arms


def speculative_config(
    arm: Arm, draft: Path, run_dir: Path, schedule: Schedule | None = None
) -> str | None:
    """Return the JSON for ``--speculative-config``; None without speculation.

    Args:
        arm: The arm served.
        draft: EAGLE-3 checkpoint folder.
        run_dir: Where a tide engine may write its manifest (mode 0700 folder).
        schedule: The tuned schedule; needed by ``vllm_dynamic`` only.
    """
    if arm.num_tokens == 0:
        return None
    config: dict[str, Any] = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": arm.num_tokens,
    }
    if arm.is_dynamic:
        if schedule is None:
            raise ValueError("vllm_dynamic has no schedule yet")
        # vLLM reserves slots for the longest entry: ask for no more than is used.
        config["num_speculative_tokens"] = max(1, *(k for _, _, k in schedule))
        config["num_speculative_tokens_per_batch_size"] = [list(r) for r in schedule]
    if arm.is_adaptive or arm.control is not None:  # tide's default is on
        config["enable_adaptive_verification"] = arm.is_adaptive
    if arm.control is not None:
        config["tide"] = {
            "run_dir": str(run_dir),
            "preset": "control",
            "control": dict(arm.control),
        }
    return json.dumps(config)
