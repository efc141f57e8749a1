"""What an operator knows: the cluster file, a run directory, profiles, simulations.

A number may be a range `[low, high]`. Each is kept with its source: `given` in the
file, `measured` by a trainer or a profile, `extrapolated` from less than 63% of what
there is to learn, `simulated`, or `assumed`.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from vllm_tide.config import ConfigError, TrainConfig, Whole, explained
from vllm_tide.plan.throughput import Accelerators, Case, Learning, SpeedUp

_HOUR = 3600.0
_LONGEST = 32.0  # acceptance length


def _between(what: str, least: float, most: float) -> BeforeValidator:
    """Check of a number or a range of them; `what` is its unit."""
    said = f"{what}: a number from {least:,g} to {most:,g}, or a range [low, high]"

    def check(value: Any) -> tuple[float, float]:
        ends = value if isinstance(value, list | tuple) else (value, value)
        real = [isinstance(x, int | float) and not isinstance(x, bool) for x in ends]
        if len(ends) != 2 or not all(real):
            raise ValueError(said)
        low, high = ends
        if not least <= low <= high <= most:  # nor NaN
            raise ValueError(said)
        return float(low), float(high)

    return BeforeValidator(check)


Range = tuple[float, float]
Rate = Annotated[Range, _between("tokens per second of one", 0, 1e9)]
Dollars = Annotated[Range, _between("US dollars", 0, 1e4)]
Length = Annotated[Range, _between("tokens per verify step", 1, _LONGEST)]
Cost = Annotated[Range, _between("a verify step's time over a plain one's", 1, 100)]
Tokens = Annotated[Range, _between("trained tokens", 1e2, 1e12)]
Hours = Annotated[Range, _between("hours", 1e-3, 1e5)]
Seconds = Annotated[Range, _between("seconds", 0, 1e6)]
Part = Annotated[Range, _between("a share", 0, 0.99)]
Passes = Annotated[Range, _between("passes over a captured row", 1, 1e3)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ClassFile(_Strict):
    """One class of accelerator; rates are of one of them."""

    name: Annotated[str, Field(min_length=1)]
    count: Annotated[Whole, Field(ge=0, le=100_000)]
    serve_tokens_per_s: Rate
    train_tokens_per_s: Rate | None = None
    usd_per_hour: Dollars = (0.0, 0.0)
    gpus_per_instance: Annotated[Whole, Field(ge=1, le=1024)] = 1
    step_cost: Cost | None = None

    @model_validator(mode="after")
    def _can_be(self) -> ClassFile:
        if not self.name.isprintable():
            raise ValueError("name has a character that cannot be printed")
        if self.count % self.gpus_per_instance:
            raise ValueError(
                f"count is {self.count}, no multiple of gpus_per_instance, "
                f"{self.gpus_per_instance}: leave out what serves and trains nothing"
            )
        return self


class DraftFile(_Strict):
    """How well the draft does, how fast it learns, and what a verify step costs."""

    length_before: Length | None = None
    length_after: Length | None = None
    tokens_to_63_percent: Tokens | None = None
    step_cost: Cost | None = None
    passes: Passes = (1.0, float(TrainConfig.model_fields["max_passes"].default))
    batch_tokens: Annotated[Whole, Field(ge=1, le=1e8)] = 2048


class WorkloadFile(_Strict):
    """How often requests change, how many are captured, how many are asked for."""

    shift_every_hours: Hours
    prefill_share: Part = (0.0, 0.0)
    captured_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    demand_tokens_per_s: Annotated[float, Field(gt=0, le=1e12)] | None = None
    concurrency_per_instance: Annotated[Whole, Field(ge=1, le=1e5)] = 64


class ClusterFile(_Strict):
    """The file of `vllm-tide plan --cluster`."""

    classes: Annotated[list[ClassFile], Field(min_length=1)]
    draft: DraftFile = DraftFile()
    workload: WorkloadFile
    deploy_seconds: Seconds = (60.0, 60.0)
    switch_seconds: Seconds = (300.0, 300.0)


EXAMPLE = {
    "classes": [
        {
            "name": "H100",
            "count": 8,
            "usd_per_hour": 2.5,
            "serve_tokens_per_s": 1650,
            "train_tokens_per_s": [4000, 50000],
            "gpus_per_instance": 4,
        },
        {
            "name": "MI250",
            "count": 4,
            "usd_per_hour": 0.9,
            "serve_tokens_per_s": 244,
            "train_tokens_per_s": [1600, 20500],
            "gpus_per_instance": 4,
        },
    ],
    "draft": {
        "length_before": 1.9,
        "length_after": [2.2, 2.8],
        "tokens_to_63_percent": [1e7, 5e7],
        "step_cost": [1.5, 1.8],
        "passes": [1, 8],
    },
    "workload": {
        "shift_every_hours": [6, 48],
        "prefill_share": [0.05, 0.15],
        "captured_share": 1.0,
    },
    "deploy_seconds": 60,
    "switch_seconds": 300,
}


@dataclass(frozen=True)
class Input:
    """A number that the plan is made of.

    Attributes:
        low, high: The same if it is known.
    """

    low: float
    high: float
    source: str

    def at(self, share: float) -> float:
        """A value of the range, 0: low, 1: high; even steps are even factors."""
        if self.low <= 0:
            return self.low + share * (self.high - self.low)
        return self.low * math.exp(share * math.log(self.high / self.low))


@dataclass
class Cluster:
    """The file, checked and completed.

    Attributes:
        inputs: By dotted name, `CLASS.serve_tokens_per_s` for those of a class.
        speeds: By class, speed-ups that a simulation gave instead of a step cost.
    """

    file: ClusterFile
    inputs: dict[str, Input]
    speeds: dict[str, SpeedUp] = field(default_factory=dict)

    def case(self, values: Mapping[str, float], control: bool = True) -> Case:
        """The cluster with one value for each input.

        Args:
            control: False: requests are drafted for even where it does not pay.
        """
        made = []
        for group in self.file.classes:
            speed = self.speeds.get(group.name)
            if speed is None:
                cost = max(1.0, values[f"{group.name}.step_cost"])
                prefill = values["workload.prefill_share"]
                speed = SpeedUp.of_step_cost(cost, control, prefill)
            serves, trains, usd = (
                values[f"{group.name}.{name}"]
                for name in ("serve_tokens_per_s", "train_tokens_per_s", "usd_per_hour")
            )
            step = group.gpus_per_instance
            made.append(
                Accelerators(group.name, group.count, serves, trains, usd, step, speed)
            )
        workload = self.file.workload
        return Case(
            classes=tuple(made),
            learning=Learning(
                before=max(1.0, values["draft.length_before"]),
                after=max(1.0, values["draft.length_after"]),
                tokens=max(1.0, values["draft.tokens_to_63_percent"]),
                delay=values["deploy_seconds"],
            ),
            every=max(1.0, _HOUR * values["workload.shift_every_hours"]),
            captured=workload.captured_share * values["draft.passes"],
            switch=values["switch_seconds"],
            demand=workload.demand_tokens_per_s or math.inf,
        )


def read_cluster(
    path: Path,
    run_dir: Path | None = None,
    profiles: Mapping[str, Path] | None = None,
    speedup: Path | None = None,
) -> Cluster:
    """Read a cluster file, and what was measured where the file has nothing.

    Args:
        run_dir: Of a trainer: how the draft learns, and how fast it is trained.
        profiles: By class, what `vllm-tide profile` wrote.
        speedup: What `scripts/sim/run.py --speedup` wrote.

    Raises:
        ConfigError: A line for each mistake.
    """
    file = _checked(path)
    names = [group.name for group in file.classes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path}: classes: {twice[0]!r} is there twice.")
    if all(g.count * g.serve_tokens_per_s[1] < 1e-6 for g in file.classes):
        said = "none serves; one needs a count and serve_tokens_per_s above 0."
        raise ConfigError(f"{path}: classes: {said}")
    found: dict[str, Input] = {}
    if run_dir is not None:
        found |= learnt(run_dir, file.draft.batch_tokens)
    for name, profile in (profiles or {}).items():
        if name not in names:
            raise ConfigError(f"--profile {name}: no such class in {path}.")
        cost = step_cost(profile, file.workload.concurrency_per_instance)
        found[f"{name}.step_cost"] = Input(cost, cost, "measured")
    speeds = {} if speedup is None else _speeds(speedup, names)
    try:
        return Cluster(file, dict(_inputs(file, found, speeds)), speeds)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read as JSON ({said}).") from None


def _checked(path: Path) -> ClusterFile:
    try:
        return ClusterFile.model_validate(_json(path))
    except ValidationError as error:
        said = (sentence for _, sentence in explained(error, ClusterFile))
        lines = (f"{path}: {sentence.removeprefix(': ')}" for sentence in said)
        raise ConfigError("\n".join(lines)) from None


_MEASURES = defaultdict(
    lambda: "draft.step_cost, --profile or --speedup",
    dict.fromkeys(
        ("draft.length_before", "draft.length_after", "draft.tokens_to_63_percent"),
        "--run-dir of a trainer that has learnt",
    ),
)


def _inputs(
    file: ClusterFile, found: Mapping[str, Input], speeds: Mapping[str, SpeedUp]
) -> Iterator[tuple[str, Input]]:
    def take(
        name: str, given: tuple[float, float] | None, *otherwise: Input
    ) -> tuple[str, Input]:
        known = found.get(name)
        if known and (given is None or known.source.startswith("measured")):
            return name, known
        if given is not None:
            return name, Input(*given, "given")
        if not otherwise:
            raise ConfigError(f"{name}: is missing; give it, or {_MEASURES[name]}.")
        return name, otherwise[0]

    draft = file.draft
    for field_name in ("length_before", "length_after", "tokens_to_63_percent"):
        yield take(f"draft.{field_name}", getattr(draft, field_name))
    yield take("workload.shift_every_hours", file.workload.shift_every_hours)
    defaulted: list[tuple[str, BaseModel]] = [
        ("workload.prefill_share", file.workload),
        ("draft.passes", draft),
        ("deploy_seconds", file),
        ("switch_seconds", file),
        *((f"{group.name}.usd_per_hour", group) for group in file.classes),
    ]
    for name, part in defaulted:
        field_name = name.rpartition(".")[2]
        known = field_name in part.model_fields_set
        low, high = getattr(part, field_name)
        yield name, Input(low, high, "given" if known else "assumed")
    for group in file.classes:
        yield take(f"{group.name}.serve_tokens_per_s", group.serve_tokens_per_s)
        trains = f"{group.name}.train_tokens_per_s"
        if len(file.classes) == 1 and "train_tokens_per_s" in found:
            yield trains, found["train_tokens_per_s"]
        else:
            nothing = Input(0.0, 0.0, "assumed")
            yield take(trains, group.train_tokens_per_s, nothing)
        if group.name not in speeds:
            yield take(f"{group.name}.step_cost", group.step_cost or draft.step_cost)


def step_cost(path: Path, requests: int) -> float:
    """Time of a verify step over a plain one, of a stored profile.

    Args:
        requests: Decoded at the same time, with 256 tokens of context each.
    """
    from vllm_tide.control.profile_store import ProfileError, load

    try:
        stored = load(path)
    except (OSError, ProfileError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"--profile: {path}: {said}") from None
    steps = int(stored.facts.get("num_speculative_tokens") or 3)
    shape = {"requests": requests, "context": 256 * requests, "prefill": 0}
    plain = stored.model.round_seconds(**shape, verified=0, steps=0, first_rows=0)
    drafted = requests * steps
    rows = requests + drafted
    round_s = stored.model.round_seconds(
        **shape, verified=drafted, steps=steps, first_rows=rows
    )
    return round_s / plain


def _speeds(path: Path, names: list[str]) -> dict[str, SpeedUp]:
    content = _json(path)
    try:
        table = {
            name: SpeedUp(
                tuple(map(float, rows["length"])), tuple(map(float, rows["speedup"]))
            )
            for name, rows in content["classes"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigError(
            f"--speedup: {path} is not what scripts/sim/run.py --speedup writes."
        ) from None
    for name, speed in table.items():
        lengths = speed.lengths
        ascends = all(a < b for a, b in zip(lengths, lengths[1:], strict=False))
        if name not in names:
            raise ConfigError(f"--speedup: {name!r} of {path} is no class of the file.")
        if len(lengths) < 2 or len(speed.values) != len(lengths) or not ascends:
            raise ConfigError(
                f"--speedup: {name!r} needs two or more ascending lengths."
            )
        if not all(0 < x < 1e4 for x in (*lengths, *speed.values, speed(1.0))):
            said = "lengths and speed-ups, at length 1 too, are between 0 and 10,000."
            raise ConfigError(f"--speedup: {name!r} of {path}: {said}")
    return table


def learnt(run_dir: Path, batch_tokens: int) -> dict[str, Input]:
    """How the draft learns, of a trainer's events since the last shift.

    Of several trainers' files the one with the newest event counts.

    Args:
        batch_tokens: Rows of one optimizer step (`tide.train.batch_tokens`); events
            have steps only.

    Returns:
        Lengths before and after, tokens to 63% and tokens per second. The length after
        is at most K + 1; a range from the largest seen if less than 63% was learnt.

    Raises:
        ConfigError: Fewer than three cycles were evaluated, or nothing can be read.
    """
    from vllm_tide.transport.rendezvous import inspect_manifests

    if not run_dir.is_dir():
        raise ConfigError(f"--run-dir {run_dir}: there is no such folder.")
    files: dict[Path, list[dict[str, Any] | None]] = {}
    for path in sorted(run_dir.glob("events-*.jsonl")):
        try:
            files[path] = [*map(_event, path.read_bytes().splitlines())]
        except OSError as error:
            raise ConfigError(f"--run-dir: {path}: {error.strerror}.") from None
    newest = max(
        files, key=lambda p: max(map(_unix, files[p]), default=0.0), default=run_dir
    )
    events = files.get(newest, [])
    shifts = [i for i, e in enumerate(events) if e and e.get("event") == "shift"]
    since = events[shifts[-1] + 1 if shifts else 0 :]
    cycles = [e for e in since if e and e.get("event") == "cycle" and e["holdout_new"]]
    unusable = since.count(None)
    left_out = f", {unusable} unusable left out" if unusable else ""
    told = f" by {newest.name}{left_out}"
    counted = f" by {newest.name} and draft.batch_tokens {batch_tokens}{left_out}"
    if len(cycles) < 3:
        raise ConfigError(
            f"--run-dir {newest}: a trainer there has evaluated {len(cycles)} cycles "
            f"since the last shift{left_out}; three or more are needed."
        )
    tokens, at, lengths = 0.0, [0.0], [float(cycles[0]["holdout_live"])]
    for cycle in cycles:
        tokens += cycle["steps"] * batch_tokens
        at.append(tokens)
        lengths.append(float(cycle["holdout_new"]))
    after, tau = fit_curve(at, lengths)
    depths = [m.num_speculative_tokens for _, m in inspect_manifests(run_dir) if m]
    after = min(after, max(*lengths, min(1.0 + max(depths, default=31), _LONGEST)))
    least, source = after, "measured"
    if tau > tokens:
        least, source = min(after, max(lengths)), "extrapolated"
    rate = tokens / math.fsum(cycle["seconds"] for cycle in cycles)
    return {
        "draft.length_before": Input(lengths[0], lengths[0], "measured" + told),
        "draft.length_after": Input(least, after, source + told),
        "draft.tokens_to_63_percent": Input(tau, tau, source + counted),
        "train_tokens_per_s": Input(rate, rate, "measured" + counted),
    }


def _unix(event: dict[str, Any] | None) -> float:
    at = (event or {}).get("unix")
    return at if isinstance(at, int | float) else 0.0


def _event(line: bytes) -> dict[str, Any] | None:
    """An event of a trainer; None: it is none, or its numbers are none."""
    try:
        event: dict[str, Any] = json.loads(line)
        if event.get("event") != "cycle" or event.setdefault("holdout_new") is None:
            return event
        fits = all(1 <= event[f"holdout_{n}"] <= _LONGEST for n in ("live", "new"))
        fits = fits and all(0 < event[n] < 1e9 for n in ("steps", "seconds"))
        return event if fits else None
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return None


def fit_curve(tokens: list[float], lengths: list[float]) -> tuple[float, float]:
    """Least squares of A0 + gap (1 - exp(-tokens / tau)) with A0 the first length.

    Returns:
        A0 + gap, and tau, between a tenth and ten times the tokens that were trained.
    """
    first, last = lengths[0], tokens[-1]

    def fitted(tau: float) -> tuple[float, float]:
        rise = [1.0 - math.exp(-t / tau) for t in tokens]
        square = math.fsum(r * r for r in rise)
        gained = math.fsum(r * (x - first) for r, x in zip(rise, lengths, strict=True))
        gap = max(0.0, gained / square)
        wrong = zip(rise, lengths, strict=True)
        return math.fsum((first + gap * r - x) ** 2 for r, x in wrong), gap

    taus = [last * 10 ** (i / 50) for i in range(-50, 51)]
    tau = min(taus, key=lambda t: fitted(t)[0])
    return first + fitted(tau)[1], tau
