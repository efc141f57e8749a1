"""Our DFlash draft equals vLLM's on the same rows, also after an installation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.forked import run_forked
from tests.toys import make_target
from vllm_tide.draft import DFlashConfig, DFlashDraft, TargetRows, VocabMap
from vllm_tide.draft.checkpoint import load_draft, save_draft
from vllm_tide.draft.config import Rope
from vllm_tide.draft.rows import RowLayout, Rows, StepRows

pytestmark = pytest.mark.vllm
ROWS, DEPTH, FIRST = 24, 4, 7


@pytest.mark.parametrize(
    "changes",
    [{}, {"draft_vocab_size": 100, "rope": Rope(5e4, "llama3", 8.0, 1.0, 4.0, 32)}],
    ids=["plain", "pruned-llama3-rope"],
)
def test_logits_equal_vllm_before_and_after_an_installation(
    tmp_path: Path, changes: dict
) -> None:
    pytest.importorskip("vllm")
    target = TargetRows.load(make_target(tmp_path / "target"))
    size = target.vocab_size
    shape = replace(
        DFlashConfig(
            hidden_size=target.hidden_size,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=size,
            draft_vocab_size=size,
            aux_layer_ids=(1, 2, 3),
            target_hidden_size=target.hidden_size,
            num_layers=2,
            block_size=DEPTH + 1,
            mask_token_id=size - 2,
        ),
        **changes,
    )
    torch.manual_seed(1)
    ids = torch.randperm(size)[: shape.draft_vocab_size].sort().values
    vocab = VocabMap.from_target_ids(ids, size)
    drafts = []
    for name in ("draft", "other"):
        draft = DFlashDraft.initialise(
            shape, target.embed_tokens, target.lm_head, vocab
        )
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        save_draft(draft, tmp_path / name, torch.float32)
        drafts.append(load_draft(tmp_path / name, target))
    tokens = torch.randint(0, size - 2, (ROWS + 1,))
    features = torch.randn(ROWS + 1, shape.feature_size)
    inputs = {
        "features": features[:ROWS].contiguous(),
        "positions": torch.arange(FIRST, FIRST + ROWS),
        "slots": torch.tensor([int(tokens[ROWS]), *[shape.mask_token_id] * DEPTH]),
        "places": torch.arange(FIRST + ROWS, FIRST + ROWS + DEPTH + 1),
        "embed": target.embed_tokens.float().clone(),
    }
    save_file(inputs, tmp_path / "in.safetensors")
    script = Path(__file__).with_name("vllm_dflash_oracle.py")
    names = ["target", "draft", "other", "in.safetensors", "out.safetensors"]
    done = run_forked([str(script), *(str(tmp_path / n) for n in names)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "accepted" not in done.stdout
    theirs = load_file(tmp_path / "out.safetensors")
    assert torch.equal(theirs["installed"], theirs["other"])
    at = torch.tensor([ROWS - 1])
    plan = [StepRows(at, torch.tensor([0]))] * DEPTH
    for draft, name in zip(drafts, ("first", "other"), strict=True):
        with torch.no_grad():
            weights = draft.compute_weights(torch.float32)
            rows = Rows(
                tokens,
                torch.arange(FIRST, FIRST + ROWS + 1),
                features,
                RowLayout([0, ROWS + 1], [ROWS + 1], [], []),
                plan,
            )
            normed = draft.forward_steps(rows, weights)
            ours = draft.logits(torch.cat(normed), weights)
        expected = theirs[name][1:, ids]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
