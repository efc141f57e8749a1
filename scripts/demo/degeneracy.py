"""How repetitive the target's own continuations are, per domain."""

from itertools import islice
from pathlib import Path

from . import corpus
from .generate import Generator
from .prompts import candidates, distinct_4grams


def measure(
    work: Path,
    folder: Path,
    *,
    num_prompts: int,
    num_tokens: int,
    temperature: float,
) -> dict[str, dict[str, float]]:
    """Return repetition figures on unfiltered held-out prompts.

    ``loops`` is the share of continuations with fewer than 35 percent distinct
    4-grams; ``ended_early`` the share that stop before ``num_tokens``.
    """
    generator = Generator(folder)
    report = {}
    for domain in corpus.DOMAINS:
        texts = [
            t for _, t in islice(candidates(work, domain, "held_out"), num_prompts)
        ]
        rows = generator.continue_texts(texts, num_tokens, temperature=temperature)
        shares = [distinct_4grams(row) for row in rows]
        report[domain] = {
            "prompts": len(rows),
            "distinct_4grams": round(sum(shares) / len(shares), 3),
            "loops": round(sum(s < 0.35 for s in shares) / len(shares), 3),
            "ended_early": round(sum(len(r) < num_tokens for r in rows) / len(rows), 3),
        }
    return report
