"""When to train: TIDE's algorithm 1 against the gate per group, on synthetic streams.

    python scripts/bench/schedule_sim.py [--seeds 40] [--json FILE]

*Detection*: streams whose acceptance changes at a known request, training paused.
Delay is counted in requests of the whole stream; a change not seen in the rest of the
stream is missed; what switches collection on before the change is a false alarm. While
collection is on, a cycle without improvement ends after every 32 requests. The second
row of each stream gives TIDE the epsilon at which it is as quiet as the gate per group:
delays can be compared only at equal false alarms.

*Loop*: a model of training (a cycle closes a share of the gap of the domains it was fed
with, the others forget a little) on a stream whose domains shift, and on a mixed one.

Everything is simulated: this compares decisions, it measures no server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from vllm_tide.config import ScheduleConfig
from vllm_tide.deploy import schedule as rules
from vllm_tide.deploy.schedule import Schedule
from vllm_tide.deploy.served import Cell, ServedRequest, bucket_of

K = 3
CYCLE_REQUESTS = 32
WARM_REQUESTS = 400
BETWEEN_REQUESTS = 0.07  # standard deviation of acceptance between requests
MIN_GAIN = 0.006
"""Gain in acceptance that is published: about 0.01 tokens."""


_BEGAN = itertools.count(1)


def make_request(
    rng: np.random.Generator,
    level: float,
    *,
    group: int = 0,
    rounds: tuple[int, int] = (15, 45),
    version: int = 0,
    key: int = 0,
    drafts: int = K,
    engine: str = "",
) -> ServedRequest:
    """One served request.

    Args:
        rng: Source of chance.
        level: Mean chance that a drafted token is accepted after the ones before it.
        group: Group it belongs to.
        rounds: Fewest and most rounds.
        version: Draft version it was served with.
        key: Request key.
        drafts: Drafted tokens per round.
        engine: Engine that served it.
    """
    chance = float(np.clip(rng.normal(level, BETWEEN_REQUESTS), 0.01, 0.99))
    count = int(rng.integers(rounds[0], rounds[1] + 1))
    passed = rng.random((count, drafts)) < chance
    accepted = np.cumprod(passed, axis=1).sum(axis=1)
    cells: dict[Cell, list[float]] = {}
    generated = 0
    for taken in accepted.tolist():
        sums = cells.setdefault((bucket_of(generated), 1, 0), [0.0, 0.0])
        sums[0] += taken + 1
        sums[1] += 1.0
        generated += taken + 1
    return ServedRequest(
        key=key,
        engine=engine,
        group=group,
        versions=(version,),
        began=next(_BEGAN),
        cells=cells,
        tries=float(count),
        hits=float((accepted > 0).sum()),
        squares=float(count),
    )


@dataclass(frozen=True)
class Scenario:
    """A stream.

    Attributes:
        name: What it shows.
        requests: Its length.
        change: Request from which it is another one; `requests` if it stays.
        shares: Of the domains in the traffic, before and from the change on.
        level: Acceptance of a domain at a request.
        rounds: Fewest and most rounds of a request.
    """

    name: str
    requests: int
    change: int
    shares: tuple[tuple[float, ...], tuple[float, ...]]
    level: Callable[[int, int], float]
    rounds: tuple[int, int] = (15, 45)


_MIXED = (0.65, 0.5, 0.4, 0.55)
_ONE, _FOUR, _FIVE = (1.0,), (0.25,) * 4, (0.2,) * 5
_AT = 800

SCENARIOS = (
    Scenario("noise, one domain", 2400, 2400, (_ONE, _ONE), lambda d, i: 0.55),
    Scenario(
        "noise, short requests", 2400, 2400, (_ONE, _ONE), lambda d, i: 0.55, (3, 9)
    ),
    Scenario("noise, four domains", 2400, 2400, (_FOUR, _FOUR), lambda d, i: _MIXED[d]),
    Scenario(
        "step -0.20, one domain",
        1400,
        _AT,
        (_ONE, _ONE),
        lambda d, i: 0.55 if i < _AT else 0.35,
    ),
    Scenario(
        "step -0.10, one domain",
        1400,
        _AT,
        (_ONE, _ONE),
        lambda d, i: 0.55 if i < _AT else 0.45,
    ),
    Scenario(
        "drift -0.20 over 1000",
        2400,
        _AT,
        (_ONE, _ONE),
        lambda d, i: 0.55 - 0.2 * min(max(i - _AT, 0) / 1000, 1.0),
    ),
    Scenario(
        "step -0.20 in one of four",
        1600,
        _AT,
        (_FOUR, _FOUR),
        lambda d, i: _MIXED[d] - (0.2 if d == 3 and i >= _AT else 0.0),
    ),
    Scenario(
        "a fifth domain appears",
        1600,
        _AT,
        ((*_FOUR, 0.0), _FIVE),
        lambda d, i: (*_MIXED, 0.3)[d],
    ),
)


def _schedule(mode: str) -> Schedule:
    return Schedule(ScheduleConfig.model_validate({"mode": mode}), 1)


@dataclass
class Detection:
    """What one gate did on one stream."""

    false_alarms: int
    watched: int
    delay: int | None
    collected: int


def detect(
    scenario: Scenario, mode: str, seed: int, epsilon: float | None = None
) -> Detection:
    """Run one gate over one stream, paused at its beginning and at its change."""
    rng = np.random.default_rng(seed)
    with patch.object(rules, "EPSILON", rules.EPSILON if epsilon is None else epsilon):
        return _detect(scenario, mode, rng)


def _detect(scenario: Scenario, mode: str, rng: np.random.Generator) -> Detection:
    schedule = _schedule(mode)
    found = Detection(0, 0, None, 0)
    was, on_for = False, 0
    for index in range(scenario.requests):
        late = index >= scenario.change
        if index == scenario.change:
            _pause(schedule)
            was, on_for = False, 0
        domain = int(rng.choice(len(scenario.shares[late]), p=scenario.shares[late]))
        level = scenario.level(domain, index)
        shifts = schedule.shifts
        schedule.observe(make_request(rng, level, group=domain, rounds=scenario.rounds))
        if index < WARM_REQUESTS:
            _pause(schedule)
            continue
        found.watched += not late
        on = schedule.collecting
        if schedule.shifts > shifts and not was:
            if late:
                found.delay = index - scenario.change
                break
            found.false_alarms += 1
        found.collected += on
        on_for = on_for + 1 if on else 0
        if on_for and on_for % CYCLE_REQUESTS == 0:
            schedule.cycle_done(False)
        was = schedule.collecting
    return found


def _pause(schedule: Schedule) -> None:
    while schedule.collecting:
        schedule.cycle_done(False)


def _alarms(scenario: Scenario, mode: str, seeds: int, epsilon: float | None) -> float:
    """False alarms per 1000 requests."""
    runs = [detect(scenario, mode, seed, epsilon) for seed in range(seeds)]
    return 1e3 * sum(r.false_alarms for r in runs) / sum(r.watched for r in runs)


def matched_epsilon(scenario: Scenario, seeds: int) -> float:
    """Smallest epsilon (step 0.005) at which `tide` is as quiet as `gated`."""
    change = scenario.change
    # The stream before its change, and long enough to count.
    calm = replace(
        scenario,
        requests=2400,
        change=2400,
        level=lambda d, i: scenario.level(d, min(i, change - 1)),
    )
    wanted = _alarms(calm, "gated", seeds, None)
    for thousandths in range(50, 400, 5):
        if _alarms(calm, "tide", seeds, thousandths / 1000) <= wanted:
            return thousandths / 1000
    return 0.4


def detection_table(seeds: int) -> list[dict[str, object]]:
    """Rows: scenario, mode, epsilon, false alarms per 1000, delay, missed."""
    rows: list[dict[str, object]] = []
    for scenario in SCENARIOS:
        quiet = matched_epsilon(scenario, seeds)
        for mode, epsilon in (("tide", None), ("tide", quiet), ("gated", None)):
            runs = [detect(scenario, mode, seed, epsilon) for seed in range(seeds)]
            delays = [r.delay for r in runs if r.delay is not None]
            changes = scenario.change < scenario.requests
            watched = sum(r.watched for r in runs)
            rows.append(
                {
                    "scenario": scenario.name,
                    "mode": mode,
                    "epsilon": 0.05 if epsilon is None else epsilon,
                    "false_alarms_per_1000": 1e3
                    * sum(r.false_alarms for r in runs)
                    / watched,
                    "collecting_before_change": sum(r.collected for r in runs)
                    / watched,
                    "median_delay_requests": statistics.median(delays)
                    if delays
                    else None,
                    "missed": 1 - len(delays) / len(runs) if changes else None,
                }
            )
    return rows


@dataclass
class LoopModel:
    """Domains' acceptance under training.

    Attributes:
        live: Acceptance of the draft served.
        candidate: Acceptance of the draft in training; it goes on from cycle to cycle.
        best: What training can reach.
        step: Share of the gap that a cycle on one domain alone closes.
        forget: Share of its gain that a domain loses in a cycle without it.
        floor: Acceptance where nothing was learnt.
    """

    live: list[float]
    candidate: list[float]
    best: tuple[float, ...]
    step: float = 0.35
    forget: float = 0.02
    floor: float = 0.3

    def train(self, shares: list[float]) -> list[float]:
        """One cycle on data of the given shares; gains of the candidate over live."""
        for d, share in enumerate(shares):
            level = self.candidate[d]
            if share > 0:
                part = 1 - (1 - self.step) ** min(1.0, 2 * share)
                self.candidate[d] += part * (self.best[d] - level)
            else:
                self.candidate[d] -= self.forget * (level - self.floor)
        return [a - b for a, b in zip(self.candidate, self.live, strict=True)]


def loop(
    stream: str, mode: str, seed: int, *, rehearsal: float = 0.5, requests: int = 4000
) -> dict[str, float]:
    """Close the loop: collect, train, publish what improves, pause.

    Args:
        stream: "shifting" (one domain after another) or "mixed" (all at once; halfway
            one changes its nature).
        mode: `tide.schedule.mode`.
        seed: Of chance.
        rehearsal: Share of training drawn from all that was collected; the rest is
            drawn from the wanted groups alone.
        requests: Length of the stream.

    Returns:
        Mean acceptance over the stream, and the number of training cycles.
    """
    rng = np.random.default_rng(seed)
    schedule = _schedule(mode)
    start = [0.6, 0.3, 0.3, 0.3]
    model = LoopModel(list(start), list(start), (0.62, 0.6, 0.55, 0.5))
    total, cycles, version = 0.0, 0, 0
    data = [0] * 4
    for index in range(requests):
        if stream == "shifting":
            domain = min(index // (requests // 5), 4) % 4
        else:
            domain = int(rng.integers(4))
            if index == requests // 2:
                model.live[3] = model.candidate[3] = model.floor
        level = model.live[domain]
        total += level
        schedule.observe(make_request(rng, level, group=domain, version=version))
        data[domain] += schedule.collecting
        if not schedule.should_train(sum(data) // CYCLE_REQUESTS):
            continue
        cycles += 1
        stored = [n / sum(data) for n in data]
        drawn = stored
        wanted = schedule.wanted_groups()
        if wanted is not None:
            wanted = frozenset(d for d in wanted if data[d]) or frozenset(range(4))
            alone = [(d in wanted) / len(wanted) for d in range(4)]
            drawn = [
                rehearsal * s + (1 - rehearsal) * a
                for s, a in zip(stored, alone, strict=True)
            ]
        noisy = [g + float(rng.normal(0.0, 0.004)) for g in model.train(drawn)]
        improved = sum(s * g for s, g in zip(stored, noisy, strict=True)) > MIN_GAIN
        if improved:
            version += 1
            model.live = list(model.candidate)
        schedule.cycle_done(
            improved, {d: noisy[d] > MIN_GAIN for d in range(4) if data[d]}
        )
        data = [0] * 4
    return {"mean_acceptance": total / requests, "cycles": cycles}


def loop_table(seeds: int) -> list[dict[str, object]]:
    """Rows: stream, mode, mean acceptance, cycles, share of always's gain and cost."""
    rows: list[dict[str, object]] = []
    for stream in ("shifting", "mixed"):
        frozen = loop_frozen(stream)
        always: dict[str, float] = {}
        for mode, rehearsal in (
            ("always", 1.0),
            ("tide", 1.0),
            ("gated", 0.5),
            ("gated", 0.0),
        ):
            runs = [loop(stream, mode, s, rehearsal=rehearsal) for s in range(seeds)]
            mean = {k: statistics.fmean(r[k] for r in runs) for k in runs[0]}
            always = always or mean
            gain = always["mean_acceptance"] - frozen
            rows.append(
                {
                    "stream": stream,
                    "mode": mode,
                    "rehearsal": rehearsal,
                    **mean,
                    "gain_of_always": (mean["mean_acceptance"] - frozen) / gain,
                    "cycles_of_always": mean["cycles"] / always["cycles"],
                }
            )
    return rows


def loop_frozen(stream: str) -> float:
    """Mean acceptance of the draft at the beginning, never trained."""
    if stream == "shifting":
        return (0.6 + 0.3 * 3 + 0.6) / 5
    return (0.6 + 0.3 * 3) / 4


def print_table(rows: list[dict[str, object]]) -> None:
    """Columns aligned."""
    names = list(rows[0])
    cells = [
        [f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in (names, *cells):
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)))
    print()


def main() -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    tables: dict[str, list] = {
        "detection": detection_table(args.seeds),
        "loop": loop_table(max(1, args.seeds // 4)),
    }
    for rows in tables.values():
        print_table(rows)
    if args.json:
        record = {
            "what": "decisions of the training schedule on synthetic streams",
            "seeds": args.seeds,
            "config": ScheduleConfig.model_validate({}).model_dump(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            **tables,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
