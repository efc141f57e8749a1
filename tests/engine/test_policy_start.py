"""Initial state of control."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm

DEMO = Path(__file__).parents[2] / "scripts" / "demo"


def parameters(folder):
    """Return the number of values a forward reads, from a checkpoint's header."""
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(
        math.prod(entry["shape"])
        for name, entry in header.items()
        if "embed_tokens" not in name and entry.get("dtype") in ("BF16", "F32")
    )


def test_the_initial_guess_counts_what_a_forward_reads():
    from vllm.engine.arg_utils import EngineArgs

    from vllm_tide.engine.policy_start import first_guess

    draft = DEMO / "draft"
    config = EngineArgs(
        model=str(DEMO / "target"),
        dtype="float32",
        speculative_config={
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": 3,
        },
    ).create_engine_config()
    guess = first_guess(SimpleNamespace(vllm_config=config))
    step = guess.target(1, 0)
    of_target = parameters(DEMO / "target")
    expected = parameters(draft) / of_target
    assert 0.5 < guess.draft_first(1, 0) / step / expected < 2.0
    # A token of context: keys and values of each layer, over the weights.
    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_kv_heads(parallel) * model.get_num_layers(parallel)
    token = 2 * heads * model.get_head_size()
    assert 0.5 < (guess.target(1, 1) / step - 1.0) / (token / of_target) < 2.0
