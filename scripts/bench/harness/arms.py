"""The arms of the control benchmark: which server each one needs.

`none` and `static1/3/5/7` are plain vLLM; `vllm_dynamic` is plain vLLM with its
batch-size schedule, `vllm_adaptive` with its adaptive verification; the others run a
policy of `tide.control` with at most `TIDE_MAX_TOKENS` draft tokens. The last four are
the ablation of the AdaSpec paper's Table 2, each adding one part to the one before.
`adaspec_adaptive` is `adaspec` whose drafts vLLM's adaptive verification cuts on the
device. Both arms with it have to be asked for: few engines can (`why_not`).

`memory` is a static length of `MEMORY_TOKENS` with drafts from each request's own text
beside the draft's (`tide.test_time.memory`), `adaspec_memory` the same under AdaSpec.
`shared` and `exact` train a fast draft while requests run (`tide.test_time.adapt`),
`memory_shared` has both; in none of them the ordinary loop trains. `everything` is all
of tide: it, AdaSpec, the memory, a shared fast draft.

An arm may be followed by `@SCALE`: its requests then carry a TPOT limit of SCALE x the
P90 TPOT of arm `none` (`adaspec_slo` is `adaspec@1.0`). Arms that differ in nothing but
the limit share one server, since the limit travels with the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.harness.common import BenchError

_REFUSAL = "arm {arm!r} needs vLLM's adaptive verification, which {why}"


def why_not(
    arm: str, venv: Path, model_runner: str | None, *, compiled: bool
) -> str | None:
    """One sentence if an arm with adaptive verification cannot be served."""
    if model_runner == "0":
        why = "Model Runner V1 has not; unset VLLM_USE_V2_MODEL_RUNNER"
    elif _is_for_cpu(venv):
        why = "needs CUDA graphs, and so a GPU; --venv holds vLLM for CPU"
    elif not compiled:
        why = "needs CUDA graphs; add --compile"
    else:
        return None
    return _REFUSAL.format(arm=arm, why=why)


def _is_for_cpu(venv: Path) -> bool:
    places = [str(path) for path in venv.glob("lib/python*/site-packages")]
    found = metadata.distributions(path=places)
    names = [f"{dist.metadata['Name']} {dist.version}" for dist in found]
    return any(name.startswith("vllm") and "cpu" in name for name in names)


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
MEMORY_TOKENS = 3
# Policy, most draft tokens, `tide.test_time`.
_TEST_TIME_ARMS: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "memory": ("static", MEMORY_TOKENS, {"memory": "ngram"}),
    "adaspec_memory": ("adaspec", TIDE_MAX_TOKENS, {"memory": "ngram"}),
    "shared": ("static", MEMORY_TOKENS, {"adapt": "shared"}),
    "memory_shared": ("static", MEMORY_TOKENS, {"memory": "ngram", "adapt": "shared"}),
    "exact": ("static", MEMORY_TOKENS, {"adapt": "exact", "stride": 10}),
    "everything": ("adaspec", TIDE_MAX_TOKENS, {"memory": "ngram", "adapt": "shared"}),
}
# Of new tokens, before the ordinary loop trains.
_NEVER = 1 << 40
_POLICIES: Mapping[str, Mapping[str, Any]] = {
    "threshold": {"policy": "threshold"},
    "tide_gate": {"policy": "tide_gate"},
    "adaspec": {"policy": "adaspec"},
    "adaspec_adaptive": {"policy": "adaspec"},
    "adaspec_drafter": {"policy": "adaspec", "verify": False},
    "adaspec_calibration": {"policy": "adaspec"},
    "adaspec_slo": {"policy": "adaspec"},
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm."""

    name: str  # as given on the command line and written to the JSON
    num_tokens: int  # most draft tokens per round; 0 without speculation
    # The `tide.control` section; None for plain vLLM.
    control: Mapping[str, Any] | None = field(default=None, hash=False)
    # Its requests' TPOT limit, as a factor of arm `none`'s P90 TPOT.
    slo_scale: float | None = None
    # The `tide.test_time` section.
    test_time: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def is_dynamic(self) -> bool:
        return self.name == "vllm_dynamic"

    @property
    def is_adaptive(self) -> bool:
        return self.name.partition("@")[0] in ADAPTIVE_ARMS

    @property
    def is_static(self) -> bool:
        return self.name == "none" or STATIC.match(self.name) is not None

    @property
    def adapts(self) -> bool:
        """True if its server has a trainer, for a fast draft."""
        return "adapt" in (self.test_time or {})

    @property
    def server_key(self) -> str:
        kind = [self.is_dynamic, self.is_adaptive]
        return json.dumps([*kind, self.num_tokens, self.control, self.test_time])


def make_arm(text: str, control: Mapping[str, Any] | None = None) -> Arm:
    """Arm of a name such as `static3` or `adaspec@0.9`."""
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
    if name in _TEST_TIME_ARMS:
        policy, most, test_time = _TEST_TIME_ARMS[name]
        merged = {**(control or {}), "policy": policy}
        return Arm(text, most, merged, test_time=test_time)
    if name in _POLICIES:
        merged = {"client_slo_tpot_ms": 1e-3, **(control or {}), **_POLICIES[name]}
        return Arm(text, TIDE_MAX_TOKENS, merged, scale)
    known = ", ".join((*CONTROL_ARMS, *ADAPTIVE_ARMS, *ABLATION_ARMS, *_TEST_TIME_ARMS))
    raise BenchError(f"there is no arm {text!r}; known: {known}, static<k>")


def make_arms(
    names: Sequence[str], control: Mapping[str, Any] | None = None
) -> list[Arm]:
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
    if arm.test_time is not None:
        config["tide"]["test_time"] = dict(arm.test_time)
    if arm.adapts:  # the suite's visits are salted
        config["tide"] |= {"preset": "full", "capture": {"salted": True}}
        if arm.name != "everything":
            config["tide"]["train"] = {"min_new_tokens": _NEVER}
    return json.dumps(config)
