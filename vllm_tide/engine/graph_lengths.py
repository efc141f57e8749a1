"""Speculative lengths where there are CUDA graphs: few, each replays a FULL graph."""

from __future__ import annotations

from typing import Any


def offered(most: int, requests: int) -> list[int]:
    """At most four lengths, ascending: each costs graphs, start-up time and memory.

    Args:
        most: num_speculative_tokens.
        requests: max_num_seqs. For one request vLLM captures one length's drafts.
    """
    return sorted({0, 1, min(3, most - 1) if requests > 1 else most, most})


def rounded(depth: int, lengths: list[int], *, up: bool) -> int:
    """The next offered length from `depth` on, up or down."""
    if up:
        return next((n for n in lengths if n >= depth), lengths[-1])
    return next((n for n in reversed(lengths) if n <= depth), 0)


def table_of(most: int, requests: int) -> list[tuple[int, int, int]]:
    """The same as vLLM's `num_speculative_tokens_per_batch_size`.

    vLLM captures the draft's graphs from it; `SchedulerTide.draft_depth` goes over it.
    """
    middle = [(requests, requests, offered(most, requests)[-2])]
    return [(1, max(requests - 1, 1), most)] + (middle if requests > 1 else [])


def replay_each(manager: Any, lengths: list[int]) -> None:
    """Let a manager of graphs replay a FULL one at each length, at any batch size.

    vLLM 0.32.0 gives a number of tokens the graphs of the next captured number over
    all lengths: where that is another length's, the step falls to PIECEWISE. So vLLM
    plans one length at a time here, and the plans are put together.

    Args:
        manager: vLLM's `CudaGraphManager`, before it captures; changed.
        lengths: What `offered` gives.
    """
    speculative = manager.vllm_config.speculative_config
    compilation, requests = manager.compilation_config, manager.max_num_reqs
    sizes = compilation.cudagraph_capture_sizes
    if not (manager.cudagraph_mode and sizes):
        return
    table = speculative.num_speculative_tokens_per_batch_size
    mixed = manager._capture_descs, manager._candidates
    plans = []
    try:
        for rows in (length + 1 for length in lengths):
            # The largest batch has a graph too.
            largest = min(compilation.max_cudagraph_capture_size // rows, requests)
            one = [(1, requests, rows - 1)]
            speculative.num_speculative_tokens_per_batch_size = one
            compilation.cudagraph_capture_sizes = sorted({*sizes, largest * rows})
            manager._capture_descs, manager._candidates = {}, {}
            manager._init_candidates()
            plans.append((manager._capture_descs, manager._candidates))
    finally:
        speculative.num_speculative_tokens_per_batch_size = table
        compilation.cudagraph_capture_sizes = sizes
    graphs, candidates = (
        {
            key: [d for plan in own for d in plan.get(key, ()) if d.uniform_token_count]
            + [d for d in found if not d.uniform_token_count]
            for key, found in upstream.items()
        }
        for upstream, *own in zip(mixed, *plans, strict=True)
    )
    for found in graphs.values():
        found.sort(key=lambda desc: desc.num_tokens, reverse=True)
    manager._capture_descs, manager._candidates = graphs, candidates
