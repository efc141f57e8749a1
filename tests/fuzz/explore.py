"""One parser for some seconds: rounds of fresh examples, findings told by place."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.attempt import Parser, TooSlow, attempt

ROUND = 400
_SHOWN = 400


@dataclass
class Explored:
    """What came of it.

    Attributes:
        examples: Inputs given.
        outcomes: How often each outcome was seen.
        findings: By kind and place: the seed of its round, the first input.
    """

    examples: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)


def explore(parser: Parser, seconds: float, seed: int) -> Explored:
    """Give a parser inputs for so long.

    Args:
        parser: The parser.
        seconds: How long.
        seed: Of the first round; every round has the next.
    """
    found = Explored()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        # Were the process to die, the last line says in which round.
        print(f"round {seed}", flush=True)
        _round(parser, seed, until, found)
        seed += 1
    return found


def _round(parser: Parser, seed: int, until: float, found: Explored) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=ROUND,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(parser.inputs)
    def one(value: Any) -> None:
        if time.monotonic() > until:
            return
        found.examples += 1
        try:
            found.outcomes[attempt(parser, value)] += 1
        except (Exception, TooSlow) as error:  # noqa: BLE001 - whatever it is
            _keep(found, error, seed, value)

    one()


def _keep(found: Explored, error: BaseException, seed: int, value: Any) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "vllm_tide/" in frame.filename] or frames
    name = ours[-1].filename.rpartition("vllm_tide/")[2]
    place = f"{type(error).__name__} in {name}, {ours[-1].name}"
    first = {
        "finding": place,
        "sentence": str(error)[:_SHOWN],
        "seed": seed,
        "input": repr(value)[:_SHOWN],
    }
    found.findings.setdefault(place, first)
