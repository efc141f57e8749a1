"""DFlash: a block equals a plain module, sees no future, and has EAGLE-3's rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

from tests.toys import make_target
from tests.train.toys import HIDDEN, KNOBS, LLAMA, TOY, VOCAB, documents_of, whole
from vllm_tide.config import FreshConfig, TrainConfig
from vllm_tide.draft import (
    DFlashConfig,
    DFlashDraft,
    DraftError,
    load_draft,
    save_draft,
)
from vllm_tide.draft.config import Rope, UnsupportedDraft, read_config
from vllm_tide.draft.fresh import fresh_directory, mask_token
from vllm_tide.draft.kind import KINDS, canonical, draft_config, method_of
from vllm_tide.draft.probe import probe_rows
from vllm_tide.draft.prune import reprune
from vllm_tide.draft.rows import StepRows
from vllm_tide.draft.speculators import Verifier, save_speculators
from vllm_tide.draft.vocab import VocabMap
from vllm_tide.speculative import METHODS
from vllm_tide.train.evaluate import evaluate
from vllm_tide.train.packing import Batch, pack, plan_rows
from vllm_tide.train.sample import Sample
from vllm_tide.train.step import TrainStep

DEPTH = 4
MASK = VOCAB - 1


def shape(**changes: object) -> DFlashConfig:
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "aux_layer_ids": (1, 2, 3),
        "target_hidden_size": HIDDEN,
        "num_layers": 2,
        "block_size": DEPTH + 1,
        "mask_token_id": MASK,
    }
    return DFlashConfig(**{**values, **changes})


def make_draft(**changes: object) -> DFlashDraft:
    torch.manual_seed(3)
    config = shape(**changes)
    ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
    draft = DFlashDraft.initialise(
        config,
        torch.randn(VOCAB, HIDDEN),
        torch.randn(VOCAB, HIDDEN) * 0.3,
        VocabMap.from_target_ids(ids, VOCAB),
    )
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return draft


def make_sample(size: int, prompt: int, start: int, key: int) -> Sample:
    tokens, features = torch.randint(0, MASK, (size,)), torch.randn(size, 3 * HIDDEN)
    return whole(tokens, features, torch.randn(size, HIDDEN), prompt, key, start)


def plain_block(
    draft: DFlashDraft, sample: Sample, row: int, depth: int = DEPTH
) -> Tensor:
    """The block after `row`, by slot and attention head; [depth, H], normed."""
    config, w = draft.config, draft.named_tensors()

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return x * scale * w[f"{name}.weight"]

    def rotated(x: Tensor, position: int) -> Tensor:
        angles = torch.tensor(config.rope.inverse_frequencies(config.head_dim))
        turned = torch.complex(*x.chunk(2)) * torch.polar(
            torch.ones_like(angles), angles * position
        )
        return torch.cat([turned.real, turned.imag])

    context = norm(sample.features[: row + 1] @ w["fc.weight"].T, "hidden_norm")
    tokens = [int(sample.tokens[row + 1]), *[config.mask_token_id] * depth]
    x = draft.embed[tokens]
    first, heads, dim = sample.start, config.num_attention_heads, config.head_dim
    group = heads // config.num_key_value_heads
    for i in range(config.num_layers):
        name = f"layers.{i}.self_attn"

        def projected(
            x: Tensor, part: str, head: int, name: str = name, dim: int = dim
        ) -> Tensor:
            weight = w[f"{name}.{part}_proj.weight"][head * dim : (head + 1) * dim]
            return weight @ x

        z = norm(x, f"layers.{i}.input_layernorm")
        mixed = torch.empty(depth + 1, heads * dim)
        for head in range(heads):
            keys, values = [], []
            for at, c in [*enumerate(context), *enumerate(z, start=row + 1)]:
                key = norm(projected(c, "k", head // group), f"{name}.k_norm")
                keys.append(rotated(key, first + at))
                values.append(projected(c, "v", head // group))
            for j in range(depth + 1):
                query = norm(projected(z[j], "q", head), f"{name}.q_norm")
                query = rotated(query, first + row + 1 + j)
                p = (torch.stack(keys) @ query * dim**-0.5).softmax(0)
                mixed[j, head * dim : (head + 1) * dim] = p @ torch.stack(values)
        x = x + mixed @ w[f"{name}.o_proj.weight"].T
        post = norm(x, f"layers.{i}.post_attention_layernorm")
        gate, up, down = (
            w[f"layers.{i}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        x = x + (F.silu(post @ gate.T) * (post @ up.T)) @ down.T
    return norm(x, "norm")[1:]


def blocks(
    draft: DFlashDraft, samples: list[Sample], dtype: torch.dtype = torch.float32
) -> dict[tuple[int, int, int], Tensor]:
    """Return (document key, row, step) to the normed output."""
    batch = pack(samples, branches=False)
    plan = plan_rows(batch, DEPTH)
    weights = draft.compute_weights(dtype)
    outputs = draft.forward_steps(batch.rows(plan), weights, depth=DEPTH)
    out = {}
    for i, (step, normed) in enumerate(zip(plan, outputs, strict=True)):
        for at, value in zip(step.active[step.loss].tolist(), normed, strict=True):
            doc = int(batch.segments[at])
            out[batch.keys[doc], at - batch.layout.doc_starts[doc], i] = value.detach()
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 1, "rope": Rope(5e5, "llama3", 8.0, 1.0, 4.0, 64)},
        {"num_key_value_heads": 4, "draft_vocab_size": 40},
    ],
    ids=["two-layers", "llama3-rope", "as-many-key-heads"],
)
@torch.no_grad()
def test_packed_blocks_equal_a_plain_module(changes: dict[str, Any]) -> None:
    draft = make_draft(**changes)
    samples = [make_sample(9, 3, 0, 1), make_sample(12, 10, 30, 2)]
    out = blocks(draft, samples)
    assert (1, 2, 0) in out and (1, 2, DEPTH - 1) in out  # row P - 1 is the first
    for (key, row, step), normed in out.items():
        expected = plain_block(draft, samples[key - 1], row)[step]
        torch.testing.assert_close(normed, expected, rtol=0, atol=2e-5)


@torch.no_grad()
def test_a_block_sees_nothing_from_its_anchor_on_but_the_anchors_token() -> None:
    draft, sample = make_draft(), make_sample(12, 3, 0, 1)
    before = blocks(draft, [sample])
    row = 5
    changed = make_sample(12, 3, 0, 1)
    changed.tokens[:] = sample.tokens
    changed.features[:] = sample.features
    changed.tokens[row + 2 :] = 1
    changed.features[row + 1 :] = 9.0
    after = blocks(draft, [changed])
    for step in range(DEPTH):
        assert torch.equal(before[1, row, step], after[1, row, step])
        assert not torch.equal(before[1, row + 1, step], after[1, row + 1, step])
    changed.tokens[row + 1] = (int(sample.tokens[row + 1]) + 1) % MASK
    assert not torch.equal(before[1, row, 0], blocks(draft, [changed])[1, row, 0])


def test_slot_j_of_an_anchor_has_the_teacher_of_the_token_before_it() -> None:
    """A target with teacher t at position t: slot j of anchor a gets a + j - 1."""
    size = 14
    sample = whole(
        torch.arange(size),
        torch.zeros(size, 3 * HIDDEN),
        torch.arange(size)[:, None].float().expand(size, HIDDEN),
        4,
        1,
    )
    packed = pack([sample], branches=False)
    plan = plan_rows(packed, DEPTH)
    batch = Batch.from_plan(packed, plan, torch.arange(size))
    row = torch.cat([step.active[step.loss] for step in plan])
    anchor, slot = row + 1, batch.loss.step + 1
    assert isinstance(batch.teacher, Tensor)
    teacher = batch.teacher[batch.loss.teacher][:, 0].long()
    assert torch.equal(teacher, anchor + slot - 1)
    labelled = batch.loss.label >= 0
    assert torch.equal(batch.loss.label[labelled], (anchor + slot)[labelled])


def test_a_draft_learns_the_target_and_its_evaluation_shows_it() -> None:
    draft = DFlashDraft.initialise(shape(num_layers=1), TOY.embed, TOY.head)
    config = TrainConfig(**{**KNOBS, "ttt_steps": DEPTH})  # type: ignore[arg-type]
    step, rng = TrainStep(draft, TOY.rows, config), random.Random(0)
    holdout = documents_of(rng, 8, 24)
    before = evaluate(draft, TOY.rows, holdout, DEPTH).acceptance("greedy")
    losses = []
    for _ in range(120):
        result = step.run(pack(documents_of(rng, 6, 24), branches=False))
        assert result is not None
        losses.append(result.loss)
    after = evaluate(draft, TOY.rows, holdout, DEPTH).acceptance("greedy")
    assert losses[-1] < 0.5 * losses[0]
    assert before < 1.5 < 3.0 < after


def test_a_large_batch_trains_on_some_blocks_with_right_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = make_draft()
    batch = pack([make_sample(40, 3, 0, 1), make_sample(30, 9, 5, 2)], branches=False)
    plan = plan_rows(batch, DEPTH)
    assert draft.choose_rows(plan) is plan
    monkeypatch.setattr("vllm_tide.draft.dflash.MAX_BLOCKS", 11)
    torch.manual_seed(0)
    chosen = draft.choose_rows(plan)
    assert chosen[0].active.numel() == 11
    rows_left = set(chosen[0].active.tolist())
    for before, after in zip(plan, chosen, strict=True):
        want = [r for r in before.active[before.loss].tolist() if r in rows_left]
        assert after.active[after.loss].tolist() == want

    def taught(steps: list[StepRows]) -> set[tuple[float, int]]:
        planned = Batch.from_plan(batch, steps, torch.arange(VOCAB))
        assert isinstance(planned.teacher, Tensor)
        teacher = planned.teacher[planned.loss.teacher][:, 0]
        return set(zip(teacher.tolist(), planned.loss.step.tolist(), strict=True))

    assert taught(plan) >= taught(chosen)


@pytest.mark.parametrize("size", [VOCAB, 40])
def test_both_forms_of_a_checkpoint_keep_everything(tmp_path: Path, size: int) -> None:
    draft = make_draft(draft_vocab_size=size, rope=Rope(5e5, "linear", 2.0))
    target = TOY.rows
    save_draft(draft, tmp_path / "own", torch.float32)
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    save_speculators(
        tmp_path / "spec", draft.config, tensors, Verifier("org/model", ("Llama",), 4)
    )
    for name in ("own", "spec"):
        raw = read_config(tmp_path / name)
        assert method_of(raw) == "dflash" and draft_config(raw) == draft.config
        again = load_draft(tmp_path / name, target)
        assert isinstance(again, DFlashDraft) and again.config == draft.config
        for parameter, value in draft.named_tensors().items():
            assert torch.equal(again.tensor(parameter), value), parameter
    assert canonical(tensors).keys() == tensors.keys()


def test_vllm_reads_the_configuration_that_we_write(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.transformers_utils.configs.speculators.algos import update_dflash

    top, layer = shape().to_speculators()
    read: dict[str, Any] = dict(layer)
    update_dflash(top, read)
    assert read["architectures"] == ["DFlashDraftModel"]
    assert read["dflash_config"]["causal"] is False
    own = shape().to_json()
    assert read["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    assert own["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    assert DFlashConfig.from_json(read | {"block_size": DEPTH + 1}) == shape()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"causal": True}}, "causal"),
        ({"dflash_config": {"use_swa": True}}, "use_swa"),
        ({"dflash_config": {"sample_from_anchor": True}}, "sample_from_anchor"),
        ({"dflash_config": {"attention_value_scale": 0.5}}, "attention_value_scale"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
    ],
)
def test_an_option_that_is_not_computed_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    raw = shape().to_json()
    nested = {**raw["dflash_config"], **changes.pop("dflash_config", {})}
    with pytest.raises(UnsupportedDraft, match=message):
        draft_config({**raw, **changes, "dflash_config": nested})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": VOCAB}, "mask_token_id"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [-3, 1, 2]}, "must be a list of integers from 0"),
        ({"target_layer_ids": ["1", 2]}, "must be a list of integers from 0"),
        ({"target_layer_ids": [True, 2]}, "must be a list of integers from 0"),
        ({"architectures": "DFlash2DraftModel"}, "'DFlash2DraftModel' is not"),
        ({"target_layer_ids": [1, 1]}, "repeats a layer"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], message: str) -> None:
    raw = shape().to_json()
    for key, value in changes.items():
        part = raw if key in raw else raw["dflash_config"]
        part[key] = value
    with pytest.raises(DraftError, match=message):
        draft_config(raw)


def test_a_fresh_draft_is_built_per_kind_and_depth(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    cache = tmp_path / "cache"

    def built(method: str, depth: int) -> Path:
        return fresh_directory(
            target, FreshConfig(), torch.float32, cache, method, depth
        )

    folders = {built("eagle3", 3), built("eagle3", 5), built("dflash", 7)}
    folders.add(built("dflash", 4))
    assert len(folders) == 3  # EAGLE-3 has no length
    draft = load_draft(built("dflash", 7), target)
    assert isinstance(draft, DFlashDraft)
    assert draft.config.block_size == 8 and draft.owns_lm_head
    assert draft.config.mask_token_id == mask_token(target, draft.config.vocab_size)
    with pytest.raises(DraftError, match="at least 4"):
        fresh_config_of({**LLAMA, "num_hidden_layers": 3})


def fresh_config_of(raw: dict[str, Any]) -> Any:
    from vllm_tide.draft.fresh import fresh_config

    return fresh_config(raw, FreshConfig(), "dflash", 3)


def test_the_probe_of_published_tensors_finds_an_overflow() -> None:
    draft = make_draft()
    tensors = {name: t.detach().clone() for name, t in draft.named_tensors().items()}
    rows = probe_rows(draft.config, tensors, torch.float32)
    assert rows.shape[1] == VOCAB and bool(rows.isfinite().all())
    tensors["layers.1.mlp.down_proj.weight"] += 3e38
    assert not bool(probe_rows(draft.config, tensors, torch.float32).isfinite().all())


def test_a_new_vocabulary_keeps_the_kind() -> None:
    draft = make_draft(draft_vocab_size=40)
    ids = torch.arange(VOCAB - 40, VOCAB)
    again = reprune(draft, VocabMap.from_target_ids(ids, VOCAB), TOY.rows)
    assert isinstance(again, DFlashDraft) and again.config == draft.config


def test_every_kind_has_a_method_that_the_configuration_accepts() -> None:
    assert tuple(KINDS) == METHODS
    assert all(kind.config.method == name for name, kind in KINDS.items())
