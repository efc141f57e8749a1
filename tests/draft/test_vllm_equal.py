"""Our draft equals vLLM's Eagle3LlamaForCausalLM on the same rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.forked import run_forked
from tests.toys import make_target
from vllm_tide.draft import Eagle3Config, Eagle3Draft, TargetRows, VocabMap
from vllm_tide.draft.checkpoint import load_draft, save_draft
from vllm_tide.draft.config import Rope
from vllm_tide.draft.rows import RowLayout, Rows, StepRows

pytestmark = pytest.mark.vllm
ROWS = 24


def _shape(target: TargetRows) -> Eagle3Config:
    return Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        aux_layer_ids=(1, 2, 3),
        target_hidden_size=target.hidden_size,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        {
            "norm_before_fc": True,
            "draft_vocab_size": 100,
            "rope": Rope(5e4, "llama3", 8.0, 1.0, 4.0, 32),
        },
    ],
    ids=["plain", "eagle3.1", "pruned-llama3-rope"],
)
def test_logits_equal_vllm(tmp_path: Path, changes: dict) -> None:
    pytest.importorskip("vllm")
    target_dir = make_target(tmp_path / "target")
    target = TargetRows.load(target_dir)
    torch.manual_seed(1)
    shape = replace(_shape(target), **changes)
    size = target.vocab_size
    target_ids = torch.randperm(size)[: shape.draft_vocab_size].sort().values
    draft = Eagle3Draft.initialise(
        shape,
        target.embed_tokens,
        target.lm_head,
        VocabMap.from_target_ids(target_ids, size),
    )
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_draft(draft, tmp_path / "draft", torch.float32)
    draft = load_draft(tmp_path / "draft", target)
    tokens = torch.randint(0, size, (ROWS + 1,))
    features = torch.randn(ROWS + 1, shape.feature_size)
    inputs = {
        "tokens": tokens[1:].contiguous(),
        "positions": torch.arange(7, 7 + ROWS),
        "features": features[:ROWS].contiguous(),
        "embed": target.embed_tokens.float().clone(),
    }
    save_file(inputs, tmp_path / "in.safetensors")
    script = Path(__file__).with_name("vllm_oracle.py")
    names = ["target", "draft", "in.safetensors", "out.safetensors"]
    done = run_forked([str(script), *(str(tmp_path / n) for n in names)])
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(tmp_path / "out.safetensors")
    rows = StepRows(torch.arange(ROWS), torch.arange(ROWS))
    with torch.no_grad():
        weights = draft.compute_weights(torch.float32)
        layout = RowLayout([0, ROWS + 1], [ROWS + 1], [], [])
        positions = torch.arange(7, 8 + ROWS)
        (normed,) = draft.forward_steps(
            Rows(tokens, positions, features, layout, [rows]), weights
        )
        ours = draft.logits(normed, weights)
    expected = theirs["logits"][:, draft.vocab.target_ids]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    others = torch.ones(size, dtype=torch.bool)
    others[draft.vocab.target_ids] = False
    assert bool(torch.isneginf(theirs["logits"][:, others]).all())
    if shape.norm_output:
        torch.testing.assert_close(normed, theirs["hidden"], rtol=1e-4, atol=1e-4)
