"""Every offered length replays a FULL graph at every batch size, as vLLM dispatches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

LIMIT = 512  # vLLM's largest captured number of tokens


def sizes(most: int, requests: int) -> list[int]:
    """Return what vLLM's configuration captures (`_set_cudagraph_sizes`)."""
    rows = most + 1
    limit = min(requests * rows * 2, LIMIT)

    def counts(largest: int) -> list[int]:
        sizes = [n for n in (1, 2, 4) if n <= largest]
        sizes += [*range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]
        return sorted({*sizes, largest})

    uniform = {n * rows for n in counts(min(requests, limit)) if n * rows <= limit}
    return sorted({*counts(limit), *uniform})


def manager(most: int, requests: int, table: list | None, varlen: bool = False) -> Any:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    made = object.__new__(CudaGraphManager)
    speculative = SimpleNamespace(num_speculative_tokens_per_batch_size=table)
    speculative.uses_dynamic_speculative_decoding = lambda: (
        speculative.num_speculative_tokens_per_batch_size is not None
    )
    made.vllm_config = SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=most,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    captured = sizes(most, requests)
    made.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=captured, max_cudagraph_capture_size=captured[-1]
    )
    made.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    made.decode_query_len, made.varlen_decode = most + 1, varlen
    made.max_num_reqs, made.ubatch_runner = requests, None
    made.lora_capture_cases, made._lora_dispatch_map = [0], {}
    made._candidates, made._capture_descs, made._graphs_captured = {}, {}, True
    made._init_candidates()
    return made


def of_tide(most: int, requests: int) -> Any:
    """The target's dispatcher; the draft's is planned alike."""
    from vllm_tide.engine.adaptive_arguments import offered, replay_each, table_of

    table = table_of(most, requests)
    made, draft = (manager(most, requests, table) for _ in range(2))
    replay_each(made, draft, offered(most, requests))
    assert made._candidates == draft._candidates
    return made


def modes(made: Any, length: int) -> list[str]:
    """Return the modes of batches of up to 128 requests that verify `length` tokens."""
    rows, limit = length + 1, made.compilation_config.max_cudagraph_capture_size
    batches = range(1, min(128, made.max_num_reqs, limit // rows) + 1)
    modes = [made.dispatch(n, n * rows, rows, 0, max_query_len=rows) for n in batches]
    graphs = {d for of_mode in made._capture_descs.values() for d in of_mode}
    assert graphs.issuperset(modes)
    fit = [d.num_reqs is None or d.num_reqs <= made.max_num_reqs for d in modes]
    assert all(fit)
    return [desc.cg_mode.name for desc in modes]


@pytest.mark.parametrize("requests", [1, 3, 50, 256, 1024])
@pytest.mark.parametrize("most", [1, 3, 5, 7])
def test_every_offered_length_replays_a_full_graph_at_every_batch(most, requests):
    from vllm.config.compilation import CUDAGraphMode

    from vllm_tide.engine.adaptive_arguments import offered

    made, lengths = of_tide(most, requests), offered(most, requests)
    assert lengths[0] == 0 and lengths[-1] == most and len(lengths) >= 2
    assert len(lengths) <= (5 if most >= 7 else 4)
    for length in lengths:
        assert set(modes(made, length)) == {"FULL"}, length
    static = manager(most, requests, None)
    count = {mode: len(descs) for mode, descs in made._capture_descs.items()}
    full, captured = CUDAGraphMode.FULL, sizes(most, requests)
    assert count.pop(full) <= len(lengths) * (len(captured) + 1)
    assert count == {mode: len(static._capture_descs[mode]) for mode in count}
    # vLLM captures the largest first and measures memory with these.
    tokens = [desc.num_tokens for desc in made._capture_descs[full]]
    assert tokens == sorted(tokens, reverse=True)
    # Ragged steps run as before.
    for count in range(1, captured[-1] + 1):
        assert made.dispatch(1, count, None, 0) == static.dispatch(1, count, None, 0)


def layout(desc: Any, count: int, rows: int) -> tuple[int, bool]:
    """Inputs of FlashAttention 3's plan of a step: requests; one row each."""
    return -(-(desc.num_reqs or count) // 4), rows == 1


@pytest.mark.parametrize("requests", [1, 3, 8, 64])
@pytest.mark.parametrize("lengths", [[0, 1, 3], []])
def test_each_graph_replays_its_captured_plan_for_mixed_lengths(requests, lengths):
    from vllm_tide.engine.adaptive_arguments import replay_each

    upstream = manager(3, requests, None, varlen=True)
    table = [(1, requests, 3)] if lengths else None
    target, draft = (manager(3, requests, table, varlen=v) for v in (True, False))
    replay_each(target, draft, lengths)
    assert target.varlen_decode
    for count in range(1, requests + 1):
        plain = target.dispatch(count, count, 1, 0, max_query_len=1)
        assert (plain.cg_mode.name, plain.uniform_token_count) == ("FULL", 1)
        assert plain in target._capture_descs[plain.cg_mode]
        for rows in range(1, 5):
            for tokens in range(count, rows * count + 1):  # cut on the device, or all
                uniform = rows if tokens == rows * count else None
                ran = target.dispatch(count, tokens, uniform, 0, max_query_len=rows)
                if rows > 1:
                    assert ran == upstream.dispatch(count, tokens, None, 0, rows)
                    assert ran.max_query_len == 4  # captured for more rows than one
                # As vLLM's speculator does it.
                first = draft.dispatch(count, ran.num_tokens, uniform, 0)
                if first.cg_mode.name == "FULL":
                    captured = first.num_reqs, first.uniform_token_count
                    assert layout(first, *captured) == layout(ran, count, rows)


@pytest.mark.parametrize(
    ("depth", "up", "down"), [(0, 0, 0), (2, 3, 1), (4, 7, 3), (7, 7, 7)]
)
def test_a_depth_becomes_an_offered_one_downwards_under_a_limit(depth, up, down):
    """A longer step than control allowed would miss a TPOT limit."""
    from vllm_tide.engine.adaptive_arguments import rounded

    assert rounded(depth, [0, 1, 3, 7], up=True) == up
    assert rounded(depth, [0, 1, 3, 7], up=False) == down
