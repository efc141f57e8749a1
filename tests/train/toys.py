"""A tiny deterministic target and its documents, shared by the training tests."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_tide.config import TrainConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.eagle3_config import Eagle3Config
from vllm_tide.draft.target import TargetRows
from vllm_tide.train.evaluate import FORMS, Evaluation
from vllm_tide.train.sample import Branch, Sample
from vllm_tide.train.trainer import Trainer

HIDDEN, VOCAB = 32, 64


LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "max_position_embeddings": 512,
}


def config(**changes: object) -> Eagle3Config:
    """Return the shape of the tiny draft."""
    values: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "aux_layer_ids": (1, 2, 3),
        "target_hidden_size": HIDDEN,
    }
    return Eagle3Config(**{**values, **changes})  # type: ignore[arg-type]


def whole(
    tokens: Tensor,
    features: Tensor,
    hidden: Tensor,
    prompt: int,
    key: int,
    start: int = 0,
) -> Sample:
    """A document with a teacher in every row."""
    return Sample(
        key=key,
        start=start,
        num_prompt_tokens=prompt,
        tokens=tokens.to(torch.int32),
        features=features,
        has_teacher=torch.ones(tokens.numel(), dtype=torch.bool),
        teacher_hidden=hidden,
    )


class ToyTarget:
    """A target with a permutation as next token: x -> (5 x + 3) mod V.

    Hidden state and features are noise-free random embeddings of the current token, so
    a draft can learn the chain exactly.
    """

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=random)
        self.head = torch.linalg.qr(torch.randn(VOCAB, VOCAB, generator=random))[0]
        self.head = self.head[:, :HIDDEN].contiguous() * 8
        self.mix = torch.randn(3, HIDDEN, HIDDEN, generator=random) * HIDDEN**-0.5
        self.rows = TargetRows(self.embed, self.head)

    def next_token(self, token: Tensor) -> Tensor:
        """Return the token that follows."""
        return (5 * token + 3) % VOCAB

    def document(self, first: int, size: int, prompt: int, key: int) -> Sample:
        """Return a greedy document of `size` positions."""
        tokens = [first % VOCAB]
        for _ in range(size - 1):
            tokens.append(int(self.next_token(torch.tensor(tokens[-1]))))
        x = torch.tensor(tokens)
        return whole(x, self.features(x), self.head[self.next_token(x)], prompt, key)

    def draft(self, seed: int = 0, **changes: object) -> Eagle3Draft:
        """Return a fresh draft."""
        return Eagle3Draft.initialise(
            config(**changes), self.embed, self.head, seed=seed
        )

    def features(self, tokens: Tensor) -> Tensor:
        """Return feature rows of tokens, whatever came before them."""
        return torch.cat([self.embed[tokens] @ m for m in self.mix], dim=-1)

    def branch(self, position: int, tokens: Tensor) -> Branch:
        """Return rejected tokens after a position; the target continues from them."""
        return Branch(
            position=position,
            tokens=tokens.int(),
            features=self.features(tokens),
            teacher_hidden=self.head[self.next_token(tokens)],
        )


TOY = ToyTarget()
KNOBS = {
    "batch_tokens": 128,
    "steps_per_cycle": 3,
    "learning_rate": 5e-3,
    "buffer_tokens": 4096,
    "holdout_share": 0.3,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return windows and a held-out side of a size for the documents here."""
    monkeypatch.setattr("vllm_tide.train.reservoir.WINDOW_TOKENS", 64)
    monkeypatch.setattr("vllm_tide.train.reservoir.HOLDOUT_TOKENS", 512)


def documents_of(rng: random.Random, count: int, size: int = 20) -> list[Sample]:
    """Return so many requests with random first token and key."""
    return [
        TOY.document(rng.randrange(VOCAB), size, 3, rng.getrandbits(64))
        for _ in range(count)
    ]


def toy_trainer(count: int = 30, **changes: object) -> Trainer:
    """Return a trainer with so many requests."""
    config = TrainConfig(**{**KNOBS, **changes})  # type: ignore[arg-type]
    trainer, rng = Trainer(TOY.draft(), TOY.rows, config), random.Random(1)
    trainer.add_samples(documents_of(rng, count))
    return trainer


def set_gains(trainer: Trainer, gain: Callable[[Sample], float]) -> None:
    """Let the candidate accept so many more tokens per step than the live draft."""

    def evaluate(draft=None, progress=None, samples=None):  # type: ignore[no-untyped-def]
        evaluation = Evaluation(3)
        for sample in samples:
            more = 0.0 if draft is trainer.live else gain(sample)
            evaluation.requests[sample.key] = [9.0] + [9 * (1.5 + more)] * len(FORMS)
        if progress is not None:
            progress()
        return evaluation

    trainer.evaluate = evaluate  # type: ignore[method-assign]
    trainer._differs = True


def weights_of(draft: Eagle3Draft) -> Tensor:
    """Return all weights in one row."""
    return torch.cat([t.detach().flatten() for t in draft.named_tensors().values()])
