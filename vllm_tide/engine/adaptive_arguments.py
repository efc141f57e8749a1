"""vLLM's adaptive verification, and the speculative lengths with CUDA graphs.

These are few, and each replays a FULL graph.
"""

from __future__ import annotations

from typing import Any

from vllm_tide.config import parse_tide


def offered(most: int, requests: int) -> list[int]:
    """At most five lengths, ascending: each costs graphs, start-up time and memory.

    Between 3 and 7 lies what is best at many batches: without it one depth for the
    batch yields up to 1.5% less than a table of all lengths.

    Args:
        requests: max_num_seqs. For one request vLLM captures one length's drafts, for
            two those of two.
    """
    wide = most >= 7 and requests > 2
    middle = {min(3, most - 1), (most + 3) // 2 if wide else most}
    return sorted({0, 1, most} | (middle if requests > 1 else set()))


def rounded(depth: int, lengths: list[int], *, up: bool) -> int:
    if up:
        return next((n for n in lengths if n >= depth), lengths[-1])
    return next((n for n in reversed(lengths) if n <= depth), 0)


def table_of(most: int, requests: int) -> list[tuple[int, int, int]]:
    """The same as vLLM's `num_speculative_tokens_per_batch_size`.

    vLLM captures the draft's graphs from it; `SchedulerTide.draft_depth` goes over it.
    """
    lengths = offered(most, requests)
    middle = lengths[-3:-1] if len(lengths) == 5 else lengths[-2:-1]
    middle = middle if requests > 1 else []
    first = requests - len(middle)
    last = enumerate(reversed(middle), first + 1)
    return [(1, first, most), *((batch, batch, length) for batch, length in last)]


def replay_each(target: Any, draft: Any, lengths: list[int]) -> None:
    """Let the target and the draft's first pass replay FULL graphs at each length.

    Both read what attention planned for the target's step. FlashAttention 3 lays its
    plan out by the number of requests, padding included, and, with heads of up to 64 or
    over 128 numbers, in another way where each has one row: a graph that was captured
    for another layout makes garbage of it (seen on an H100). So with graphs for any mix
    of lengths (adaptive verification) steps without drafts have graphs of their own,
    and in the others the draft's pass has none.

    Args:
        target, draft: vLLM's `CudaGraphManager`s, before they capture; changed.
        lengths: Those that are offered; empty: all steps draft as far.
    """
    if target.varlen_decode:
        lengths = [0]
    for manager in (target, draft) if lengths else ():
        _plan_each(manager, lengths)


def _plan_each(manager: Any, lengths: list[int]) -> None:
    """Plan a FULL graph at each length, at any batch size.

    vLLM 0.32.0 gives a number of tokens the graphs of the next captured number over
    all lengths: where that is another length's, the step falls to PIECEWISE. So vLLM
    plans one length at a time here, and the plans are put together.
    """
    speculative = manager.vllm_config.speculative_config
    compilation, requests = manager.compilation_config, manager.max_num_reqs
    sizes = compilation.cudagraph_capture_sizes
    if not (manager.cudagraph_mode and sizes):
        return
    table = speculative.num_speculative_tokens_per_batch_size
    mixed = manager._capture_descs, manager._candidates
    varlen, manager.varlen_decode = manager.varlen_decode, False
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
        manager.varlen_decode = varlen
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


KNOB = "enable_adaptive_verification"


def settle_adaptive(section: dict[str, Any], asked: bool | None) -> dict[str, Any]:
    """Note in a `tide` section whether adaptive verification may be switched on.

    It may where `tide.control.verify` is not given (`switch_adaptive_on`), as only the
    dictionary that a configuration is made from shows what an operator left out.
    """
    control = dict(section.get("control", {}))
    if asked is None and control.get("verify"):
        del control["verify"]  # which is the default
    elif asked is not None:
        control.setdefault("verify", _is_cpu())
    return {**section, "control": control}


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def switch_adaptive_on(vllm_config: Any, log: Any) -> None:
    """Switch adaptive verification on, unless the operator or vLLM is against it.

    Only on Model Runner V2 and a GPU. An attention backend that cannot do it shows
    later: `WorkerTideV2.make_verification`.
    """
    speculative = vllm_config.speculative_config
    control = parse_tide(speculative.tide).control
    given = "verify" in speculative.tide.get("control", {})
    if control.policy in ("static", "threshold") or given:
        return
    if speculative.enable_adaptive_verification:
        return
    speculative.enable_adaptive_verification = True
    try:
        # What vLLM asked of it when the configuration was made.
        vllm_config._verify_aux_output_compatibility()
        vllm_config._verify_sampling_replay_config()
        vllm_config._validate_adaptive_verification()
        attention = vllm_config.attention_config
        for backend in (attention.backend, *attention.backend_per_kind.values()):
            if backend and not (
                backend.get_class().supports_device_cpu_query_lens_mismatch()
            ):
                raise ValueError(f"--attention-backend {backend.name} cannot do it.")
    except ValueError as error:
        speculative.enable_adaptive_verification = False
        log.warning(
            "tide: %s stays off, which cuts each request's drafts: %s", KNOB, error
        )
