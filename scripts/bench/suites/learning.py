"""The learning suite: the same stream served without and with a draft that learns.

Five arms: no speculation, the frozen draft, a trainer that always trains, TIDE's gate,
and the gate by groups. Two kinds of traffic: domains one after the other, and the same
requests mixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness.arm import Hooks
from bench.harness.common import (
    BenchError,
    OutOfTimeError,
    columns_text,
    number,
    rounded,
)
from bench.harness.options import SuiteOptions, option
from bench.harness.session import Session, draft_config, run_suite, trained_section
from bench.harness.stream import (
    MIXED,
    SHIFT,
    TRAFFIC,
    StreamRequest,
    mixed_stream,
    shift_stream_of,
)
from bench.harness.trainers import TrainerWatch
from vllm_tide.speculative import merged

TRAINED = ("always", "tide", "gated")


@dataclass(frozen=True, slots=True)
class LearningArm:
    """One arm."""

    name: str  # as on the command line
    drafts: bool  # true if a draft is served
    # `tide.schedule.mode` of its trainer; None: it is never trained.
    mode: str | None = None
    # `tide.deploy.min_requests`, the laziness of synchronisation (Aurora, figure 5);
    # None: as configured.
    spacing: int | None = None


ARMS = (
    LearningArm("none", drafts=False),
    LearningArm("frozen", drafts=True),
    *(LearningArm(mode, drafts=True, mode=mode) for mode in TRAINED),
)
ARM_NAMES = tuple(arm.name for arm in ARMS)


def arms_of(names: Sequence[str]) -> list[LearningArm]:
    """Arms in the order given, each once."""
    if not names:
        raise BenchError("--arms names no arm")
    return [_arm_of(name) for name in dict.fromkeys(names)]


def _arm_of(name: str) -> LearningArm:
    known = {arm.name: arm for arm in ARMS}
    base, at, spacing = name.partition("@")
    if base not in known:
        raise BenchError(f"--arms: there is no arm {name!r}; known: {', '.join(known)}")
    if not at:
        return known[base]
    if known[base].mode is None:
        raise BenchError(f"--arms: {name!r}: only arms that are trained take @REQUESTS")
    if not spacing.isdecimal():
        raise BenchError(
            f"--arms: {name!r}: after @ comes a number of requests between two "
            "publications"
        )
    return replace(known[base], name=name, spacing=int(spacing))


def config_of(
    arm: LearningArm, options: SuiteOptions, run_dir: Path
) -> dict[str, Any] | None:
    """Object for `--speculative-config`; None without speculation."""
    if not arm.drafts:
        return None
    draft = str(options.draft)
    if arm.mode is None:
        return draft_config(options, draft)
    section = trained_section(options, run_dir)
    # After the user's own knobs: the mode is what the arm is.
    section = merged(section, {"schedule": {"mode": arm.mode}})
    if arm.spacing is not None:
        section = merged(section, {"deploy": {"min_requests": arm.spacing}})
    return draft_config(options, draft, section)


@dataclass(frozen=True, kw_only=True)
class LearningOptions(SuiteOptions):
    """Options of the learning suite; outputs are compared with the first arm's."""

    model_sizes: tuple[str, ...] = ("90m",)
    domains: tuple[str, ...] = ("python", "c", "charmaps", "markup")
    requests: tuple[int, ...] = (16, 48, 40, 28)
    traffic: str = option(SHIFT, "shift, mixed or both")
    arms: tuple[str, ...] = ARM_NAMES
    window_s: float = option(10.0, "of curves over time")

    def check(self) -> None:
        super().check()
        arms_of(self.arms)
        if self.traffic not in (*TRAFFIC, "both"):
            raise BenchError(f"--traffic is one of {', '.join(TRAFFIC)}, both")
        if len(self.domains) < 2:
            raise BenchError("--domains: a shift needs two domains, such as python,c")
        if self.window_s <= 0:
            raise BenchError("--window-s is too small")

    def may_differ(self) -> tuple[str, ...]:
        return ("arms", "traffic")

    def kinds(self) -> tuple[str, ...]:
        return TRAFFIC if self.traffic == "both" else (self.traffic,)


def streams_of(options: LearningOptions) -> dict[str, list[StreamRequest]]:
    shifted = shift_stream_of(options)
    every = {
        SHIFT: shifted,
        MIXED: mixed_stream(shifted, options.concurrency, options.seed),
    }
    return {kind: every[kind] for kind in options.kinds()}


def run(options: LearningOptions) -> int:
    options.check()
    streams = streams_of(options)

    def measure(session: Session) -> None:
        for kind, stream in streams.items():
            try:
                for arm in arms_of(options.arms):
                    _one(session, options, kind, stream, arm)
            except OutOfTimeError:
                _close(session, kind)
                raise
            _close(session, kind)

    return run_suite(options, measure)


def _one(
    session: Session,
    options: LearningOptions,
    kind: str,
    stream: Sequence[StreamRequest],
    arm: LearningArm,
) -> None:
    if session.measured(kind, arm.name):
        return
    name, trained = f"{kind}-{arm.name}", arm.mode is not None
    with session.run_dir(name) as run_dir:
        watch = TrainerWatch(run_dir if trained else None)
        run = session.arm(
            name,
            config_of(arm, options, run_dir),
            stream,
            run_dir=run_dir if trained else None,
            trained=trained,
            hooks=Hooks(on_sample=watch.on_sample),
        )
        if run is None:
            return
        figures = session.keep(kind, arm.name, run, stream, watch, options.window_s)
    session.say(
        f"{name}: {figures['output_tokens_per_s']} tokens/s, shifted part "
        f"{figures['shifted']['output_tokens_per_s']}, acceptance length "
        f"{figures['acceptance_length']}, trained {figures['training_s']} s"
    )


def _close(session: Session, kind: str) -> None:
    document = session.document
    # Stable: arms of one kind but another spacing stay as they were given.
    order = sorted(
        document.section(kind), key=lambda name: ARM_NAMES.index(name.partition("@")[0])
    )
    arms = {name: document.section(kind)[name] for name in order}
    document.results[kind] = arms
    comparison = compare_arms(arms)
    document.section("comparison")[kind] = comparison
    document.section("goals")[kind] = verdicts(comparison)
    identity = session.compare(kind, order, f"{kind}-", f"{kind}, ")
    document.section("identity")[kind] = identity
    document.write()
    print(f"{kind}\n{table(arms)}\n{comparison}", flush=True)


def compare_arms(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compares the arms over the shifted part.

    Args:
        arms: `arm_figures` by name, of one kind of traffic.

    Returns:
        `over_frozen` and `over_none`: ratios of output tokens/s; `against_always`, by
        gated arm: `training_s_ratio`; `gain_share`, its gain in tokens/s over the
        frozen draft as a share of always-training's; `tokens_per_s_ratio`;
        `segments`: by segment and arm the ratio to the frozen draft.
    """
    speed = {name: _speed(figures) for name, figures in arms.items()}
    found: dict[str, Any] = {
        f"over_{base}": {
            name: rounded(_ratio(speed[name], speed.get(base)))
            for name in arms
            if name != base
        }
        for base in ("frozen", "none")
        if base in arms
    }
    found["against_always"] = {
        name: _against_always(name, arms, speed)
        for name in ("tide", "gated")
        if name in arms and "always" in arms
    }
    found["segments"] = _segments(arms)
    return found


def verdicts(comparison: Mapping[str, Any]) -> dict[str, bool | None]:
    """The goals, True if met; None where it cannot be said.

    The best trained arm serves at least 1.25 times the frozen draft's tokens/s, and
    the gated one trains at most half as long as always for 97% of its gain.
    """
    over = [
        value
        for name, value in comparison.get("over_frozen", {}).items()
        if name in TRAINED and value is not None
    ]
    gated = comparison.get("against_always", {}).get("gated", {})
    ratio, share = gated.get("training_s_ratio"), gated.get("gain_share")
    return {
        "1.25_times_frozen": max(over) >= 1.25 if over else None,
        "gated_trains_half": None if ratio is None else ratio <= 0.5,
        "gated_has_97_percent_of_gain": None if share is None else share >= 0.97,
    }


def table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    def part(name: str, figures: Mapping[str, Any]) -> Any:
        return next(
            (
                s["acceptance_length"]
                for s in figures.get("segments", ())
                if s["name"] == name
            ),
            None,
        )

    every = list(arms.values())
    names = sorted({s["name"] for f in every for s in f.get("segments", ())})
    rows = {
        "output tokens/s": [f.get("output_tokens_per_s") for f in every],
        "  shifted part": [_speed(f) for f in every],
        "acceptance length": [f.get("acceptance_length") for f in every],
        **{f"  {name}": [part(name, f) for f in every] for name in names},
        "training, s": [f.get("training_s") for f in every],
        "swaps": [f.get("swaps", {}).get("count") for f in every],
        "failed requests": [f.get("failed_requests") for f in every],
    }
    return columns_text(26, list(arms), rows)


def _speed(figures: Mapping[str, Any]) -> float | None:
    return number(figures.get("shifted", {}).get("output_tokens_per_s"))


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _against_always(
    name: str, arms: Mapping[str, Mapping[str, Any]], speed: Mapping[str, float | None]
) -> dict[str, Any]:
    trained = number(arms[name].get("training_s"))
    frozen, always, mine = speed.get("frozen"), speed["always"], speed[name]
    gain: float | None = None
    # A share of no gain says nothing.
    if None not in (frozen, always, mine) and always > frozen:  # type: ignore[operator]
        gain = (mine - frozen) / (always - frozen)  # type: ignore[operator]
    return {
        "training_s_ratio": rounded(
            _ratio(trained, number(arms["always"].get("training_s")))
        ),
        "gain_share": rounded(gain),
        "tokens_per_s_ratio": rounded(_ratio(mine, always)),
    }


def _segments(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    frozen = {
        segment["name"]: number(segment.get("output_tokens_per_s"))
        for segment in arms.get("frozen", {}).get("segments", ())
    }
    out: dict[str, dict[str, Any]] = {}
    for name, figures in arms.items():
        for segment in figures.get("segments", ()) if name != "frozen" else ():
            base = frozen.get(segment["name"])
            ratio = _ratio(number(segment.get("output_tokens_per_s")), base)
            out.setdefault(segment["name"], {})[name] = rounded(ratio)
    return out
