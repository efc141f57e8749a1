"""Do the arms of a learning suite give the same tokens?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .client import RequestResult
from .identity import Difference, Rescored, compare, rescore_all

MAX_SHOWN = 50
Rescore = Callable[[Sequence[Difference], Path, str], list[Rescored]]


def identity_of(
    arms: Mapping[str, Sequence[RequestResult]],
    target: Path,
    dtype: str,
    rescore: Rescore = rescore_all,
) -> dict[str, Any]:
    """Compare every arm with the first one, on the requests that both ran.

    Args:
        arms: Results by name; an arm without any is left out.
        target: The served model, for re-scoring differences.
        dtype: The served type.
        rescore: Decides which differences are near ties.

    Returns:
        `compared_with`; by arm `compared` requests, `identical`, `near_ties`, `wrong`;
        and the first differences.

    Raises:
        ValueError: A request was tokenised differently, or is shorter in one arm.
    """
    given = {name: results for name, results in arms.items() if results}
    if len(given) < 2:
        return {"compared_with": None, "arms": {}, "differences": []}
    first, *others = given
    found: list[Difference] = []
    compared: dict[str, int] = {}
    for name in others:
        left, right = _common(given[first], given[name])
        compared[name] = sum(a.ok and b.ok for a, b in zip(left, right, strict=True))
        found += compare((first, name), left, right)
    rescored = rescore(found, target, dtype)
    verdicts = {}
    for name in others:
        mine = [item for item in rescored if item.difference.arms[1] == name]
        wrong = sum(not item.near_tie for item in mine)
        verdicts[name] = {
            "compared": compared[name],
            "identical": not wrong and compared[name] > 0,
            "near_ties": len(mine) - wrong,
            "wrong": wrong,
        }
    shown = [item.summary() for item in rescored][:MAX_SHOWN]
    return {"compared_with": first, "arms": verdicts, "differences": shown}


def identity_problems(identity: Mapping[str, Any], where: str = "") -> list[str]:
    """Return a sentence for each arm whose outputs differ."""
    return [
        f"{where}{name}: outputs differ from {identity['compared_with']} "
        f"({verdict['wrong']} not near ties)"
        for name, verdict in identity["arms"].items()
        if not verdict["identical"]
    ]


def _common(
    left: Sequence[RequestResult], right: Sequence[RequestResult]
) -> tuple[list[RequestResult], list[RequestResult]]:
    both = {r.index for r in left} & {r.index for r in right}
    return tuple(  # type: ignore[return-value]
        sorted((r for r in side if r.index in both), key=lambda r: r.index)
        for side in (left, right)
    )
