"""Real engines that tests share: one of each kind, started when first asked for.

A test file names its kind, `ENGINE = "v1"`, and its tests take `served`. So that a kind
is started in one test process only, the whole file goes to one (`tests/conftest.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.offline_engine import OfflineEngine
from tests.engine.shared_engine import DEMO, KINDS, Served, draft_tensors, engine_case
from vllm_tide.capture.switch import OFF, Switch
from vllm_tide.transport.ring import Collect


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return `engines(kind)`, which starts the engine of a kind once."""
    with ExitStack() as stack:

        @cache
        def get(kind: str) -> Served:
            run_dir = tmp_path_factory.mktemp(kind)
            case = engine_case(run_dir, KINDS[kind])
            started = stack.enter_context(OfflineEngine(case))
            served = Served(started, run_dir)
            stack.callback(served.close)
            return served

        yield get


@pytest.fixture
def served(request: pytest.FixtureRequest, engines: Any) -> Iterator[Served]:
    """The engine of the file's kind in its state after the start."""
    one = engines(request.module.ENGINE)
    before = one.writer.feedback().installed_version if one._writer else 0
    yield one
    assert Switch(one.run_dir, OFF).set(False) == ""
    if one.reader is not None:
        one.reader.set_collect(Collect.FULL)
    if one._writer and one.writer.feedback().installed_version != before:
        assert one.publish(draft_tensors(Path(one.manifest.draft_path))) == ""


@pytest.fixture(scope="session")
def own_draft() -> dict[str, torch.Tensor]:
    """The demo's draft, which every kind starts with."""
    return draft_tensors(DEMO / "draft")


@pytest.fixture(scope="session")
def other_draft(own_draft: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The demo's draft with weaker guesses, so that its tokens differ."""
    generator = torch.Generator().manual_seed(0)
    fc = own_draft["fc.weight"]
    noise = torch.randn(fc.shape, generator=generator) * fc.float().std()
    return own_draft | {"fc.weight": (fc + noise.to(fc.dtype)).contiguous()}


@pytest.fixture(scope="session")
def target() -> Any:
    """Transformers' model of the demo target in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    # As `ignore_eos`: the token may be sampled and does not end the request.
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def greedy(target: Any) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Return `greedy(prompts, count)`: the target's outputs without a draft."""

    @cache
    def one(prompt: tuple[int, ...], count: int) -> list[int]:
        out = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    def texts(prompts: list[list[int]], count: int) -> list[list[int]]:
        return [one(tuple(prompt), count) for prompt in prompts]

    return texts
