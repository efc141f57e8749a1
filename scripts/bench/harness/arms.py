"""Arms of the suites `control` and `long`, and the server options of each.

`none` and `static1/3/5/7` are plain vLLM; `vllm_dynamic` is plain vLLM with its
batch-size schedule; the others run a policy of `tide.control` with at most
`TIDE_MAX_TOKENS` draft tokens. `adaspec_drafter` verifies all drafted tokens, as in the
ablation of the AdaSpec paper's Table 2.

`memory` is a static length of `MEMORY_TOKENS` with n-gram drafts from the request's
text in addition to the draft model's (`tide.test_time.memory`); `adaspec_memory` is the
same with AdaSpec. `shared` and `exact` train a fast draft while requests run
(`tide.test_time.adapt`); `memory_shared` has memory and `shared`. The ordinary training
loop is off in all of them. `everything` has AdaSpec, memory, a shared fast draft and
the ordinary training loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.common import BenchError, draft_method

# (first batch size, last batch size, number of draft tokens), in vLLM's format.
Schedule = Sequence[tuple[int, int, int]]
STATIC = re.compile(r"^static([1-9]\d?)$")
TIDE_MAX_TOKENS = 7
MEMORY_TOKENS = 3
# Policy, maximum draft tokens, `tide.test_time`.
_TEST_TIME_ARMS: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "memory": ("static", MEMORY_TOKENS, {"memory": "ngram"}),
    "adaspec_memory": ("adaspec", TIDE_MAX_TOKENS, {"memory": "ngram"}),
    "shared": ("static", MEMORY_TOKENS, {"adapt": "shared"}),
    "memory_shared": ("static", MEMORY_TOKENS, {"memory": "ngram", "adapt": "shared"}),
    "exact": ("static", MEMORY_TOKENS, {"adapt": "exact", "stride": 10}),
    "everything": ("adaspec", TIDE_MAX_TOKENS, {"memory": "ngram", "adapt": "shared"}),
}
# New tokens needed before the ordinary loop trains.
_NEVER = 1 << 40
_POLICIES: Mapping[str, Mapping[str, Any]] = {
    "threshold": {"policy": "threshold"},
    "adaspec": {"policy": "adaspec"},
    "adaspec_drafter": {"policy": "adaspec", "verify": False},
}


@dataclass(frozen=True, slots=True)
class Arm:
    """Arm of a suite."""

    name: str  # as given on the command line and written to the JSON
    num_tokens: int  # maximum draft tokens per step; 0 without speculation
    # The `tide.control` section; None for plain vLLM.
    control: Mapping[str, Any] | None = field(default=None, hash=False)
    # The `tide.test_time` section.
    test_time: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def is_dynamic(self) -> bool:
        return self.name == "vllm_dynamic"

    @property
    def is_static(self) -> bool:
        return self.name == "none" or STATIC.match(self.name) is not None

    @property
    def adapts(self) -> bool:
        """True if the server has a trainer for a fast draft."""
        return "adapt" in (self.test_time or {})


def make_arm(name: str, control: Mapping[str, Any] | None = None) -> Arm:
    """Return the arm of a name such as `static3`."""
    if name == "none":
        return Arm(name, 0)
    if match := STATIC.match(name):
        return Arm(name, int(match[1]))
    if name == "vllm_dynamic":
        return Arm(name, TIDE_MAX_TOKENS)
    if name in _TEST_TIME_ARMS:
        policy, most, test_time = _TEST_TIME_ARMS[name]
        merged = {**(control or {}), "policy": policy}
        return Arm(name, most, merged, test_time=test_time)
    if name in _POLICIES:
        return Arm(name, TIDE_MAX_TOKENS, {**(control or {}), **_POLICIES[name]})
    known = ", ".join(("vllm_dynamic", *_POLICIES, *_TEST_TIME_ARMS))
    raise BenchError(f"unknown arm {name!r}; known: none, static<k>, {known}")


def make_arms(
    names: Sequence[str], control: Mapping[str, Any] | None = None
) -> list[Arm]:
    arms = [make_arm(name, control) for name in dict.fromkeys(names)]
    if not arms:
        raise BenchError("no arm given")
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
        "method": draft_method(draft),
        "model": str(draft),
        "num_speculative_tokens": arm.num_tokens,
    }
    if arm.is_dynamic:
        if schedule is None:
            raise ValueError("vllm_dynamic has no schedule yet")
        # vLLM reserves slots for the longest entry, so use the schedule's maximum.
        config["num_speculative_tokens"] = max(1, *(k for _, _, k in schedule))
        config["num_speculative_tokens_per_batch_size"] = [list(r) for r in schedule]
    if arm.control is not None:  # tide's default is on
        config["enable_adaptive_verification"] = False
        config["tide"] = {
            "run_dir": str(run_dir),
            "preset": "control",
            "control": dict(arm.control),
        }
        config["tide"]["test_time"] = {"memory": "off", **(arm.test_time or {})}
    if arm.adapts:  # the suite's requests have a cache salt
        config["tide"] |= {"preset": "full", "capture": {"salted": True}}
        if arm.name != "everything":
            config["tide"]["train"] = {"min_new_tokens": _NEVER}
    return json.dumps(config)
