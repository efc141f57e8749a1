"""Compares every arm's outputs with arm ``none``'s while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .client import RequestResult
from .identity import Difference, compare, rescore_all

BASELINE = "none"
# Re-scoring runs the target in two types; so many differences of one arm are plenty.
MOST_RESCORED = 40


@dataclass
class ArmVerdict:
    """What was compared of an arm."""

    requests: int = 0
    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    near_ties: int = 0
    wrong: int = 0
    rescored: list[dict[str, object]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; ``identical`` is None until all is re-scored."""
        pending = len(self.differences)
        identical: bool | None = not (self.wrong or self.errors)
        if self.requests == 0 or (pending and identical):
            identical = None
        return {
            "identical": identical,
            "requests": self.requests,
            "tokens": self.tokens,
            "near_ties": self.near_ties,
            "wrong": self.wrong,
            "not_rescored": pending,
            "errors": self.errors,
            "differences": self.rescored,
        }


@dataclass
class OutputBook:
    """Outputs of one target, compared as soon as both sides are there."""

    verdicts: dict[str, ArmVerdict] = field(default_factory=dict)
    # (cell, repeat) -> arm -> results, until arm `none` has been there.
    _waiting: dict[object, dict[str, list[RequestResult]]] = field(default_factory=dict)
    _baseline: dict[object, list[RequestResult]] = field(default_factory=dict)

    def add(self, place: object, arm: str, results: Sequence[RequestResult]) -> None:
        """Take the outputs of a visit.

        Args:
            place: Cell and repeat: what was run there is the same in every arm.
            arm: Name of the arm.
            results: Finished requests; prompt and index agree between arms.
        """
        kept = [result for result in results if result.ok]
        if arm == BASELINE:
            self._baseline[place] = kept
            for other, waiting in self._waiting.pop(place, {}).items():
                self._compare(place, other, waiting)
        elif place in self._baseline:
            self._compare(place, arm, kept)
        else:
            self._waiting.setdefault(place, {})[arm] = kept

    def _compare(self, place: object, arm: str, results: list[RequestResult]) -> None:
        verdict = self.verdicts.setdefault(arm, ArmVerdict())
        base = {result.index: result for result in self._baseline[place]}
        other = {result.index: result for result in results}
        both = sorted(base.keys() & other.keys())
        verdict.requests += len(both)
        verdict.tokens += sum(len(base[index].token_ids) for index in both)
        try:
            verdict.differences += compare(
                (BASELINE, arm), [base[i] for i in both], [other[i] for i in both]
            )
        except ValueError as error:
            verdict.errors.append(f"{place}: {error}")

    def rescore(self, target: Path, dtype: str) -> None:
        """Decide of every difference whether it is a near tie; loads the target."""
        for verdict in self.verdicts.values():
            chosen = verdict.differences[:MOST_RESCORED]
            for item in rescore_all(chosen, target, dtype):
                verdict.near_ties += item.near_tie
                verdict.wrong += not item.near_tie
                verdict.rescored.append(item.summary())
            del verdict.differences[:MOST_RESCORED]

    def to_json(self) -> dict[str, Any]:
        """Return the verdict by arm."""
        return {arm: verdict.to_json() for arm, verdict in self.verdicts.items()}
