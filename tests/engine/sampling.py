"""Compare samples of speculative engines with Transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tests.patches.test_cpu_sampling import chi_square_p

DEMO = Path(__file__).parents[2] / "scripts" / "demo"
TEXT = '{"id": "queue.Queue", "line": 12, "name": "'


def prompt() -> list[int]:
    """Return a prompt after which the demo's draft is accepted and entropy is high."""
    file = DEMO / "target" / "tokenizer.json"
    return list(Tokenizer.from_file(str(file)).encode(TEXT).ids)


def drawn(
    target: Any, ids: list[int], samples: int, count: int, temperature: float
) -> list[list[int]]:
    """Return samples of Transformers with a fixed seed."""
    torch.manual_seed(0)
    out = target.generate(
        torch.tensor([ids] * samples),
        attention_mask=torch.ones(samples, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )
    return out[:, len(ids) :].tolist()


def check_distribution(
    served: Any,
    target: Any,
    samples: int,
    count: int,
    ids: list[int] | None = None,
    temperature: float = 1.0,
    **work: Any,
) -> dict[str, Any]:
    """Assert that samples have the target's distribution at every position.

    Seeds are fixed: a pass today is a pass tomorrow.
    """
    ids = prompt() if ids is None else ids
    given = {"max_tokens": count, "temperature": temperature}
    report = served([ids] * samples, forget=True, **given, **work)
    plain = drawn(target, ids, samples, count, temperature)
    for position in range(count):
        a, b = ([row[position] for row in side] for side in (plain, report["tokens"]))
        assert chi_square_p(a, b) > 1e-4, position
    joint = [len({tuple(row) for row in side}) for side in (plain, report["tokens"])]
    assert joint[1] > 0.85 * joint[0]
    return report
