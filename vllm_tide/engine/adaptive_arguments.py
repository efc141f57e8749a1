"""vLLM's adaptive verification, and the speculative lengths that have CUDA graphs.

There are at most five such lengths, and each replays a FULL graph.
"""

from __future__ import annotations

from typing import Any

from vllm_tide.config import parse_tide


def offered(most: int, requests: int) -> list[int]:
    """Return the speculative lengths that get CUDA graphs, ascending, at most five.

    Each length costs graphs, start-up time and memory. A length between 3 and 7 is best
    at many batch sizes: without one, a single depth for the whole batch yields up to
    1.5% less than a table of all lengths.

    Args:
        requests: max_num_seqs. vLLM captures one draft length if it is 1, two if 2.
    """
    wide = most >= 7 and requests > 2
    middle = {min(3, most - 1), (most + 3) // 2 if wide else most}
    return sorted({0, 1, most} | (middle if requests > 1 else set()))


def rounded(depth: int, lengths: list[int], *, up: bool) -> int:
    """Return the nearest of `lengths` that is at least, or at most, `depth`."""
    if up:
        return next((n for n in lengths if n >= depth), lengths[-1])
    return next((n for n in reversed(lengths) if n <= depth), 0)


def table_of(most: int, requests: int) -> list[tuple[int, int, int]]:
    """Return `offered` as vLLM's `num_speculative_tokens_per_batch_size`.

    vLLM captures the draft's graphs from this table. The scheduler does not use it:
    `SchedulerTide.draft_depth` replaces its values.
    """
    lengths = offered(most, requests)
    middle = lengths[-3:-1] if len(lengths) == 5 else lengths[-2:-1]
    middle = middle if requests > 1 else []
    first = requests - len(middle)
    last = enumerate(reversed(middle), first + 1)
    return [(1, first, most), *((batch, batch, length) for batch, length in last)]


def replay_each(target: Any, draft: Any, lengths: list[int]) -> None:
    """Make the target and the draft's first pass replay FULL graphs at each length.

    Both use the attention metadata of the target's step. The layout of
    FlashAttention 3's metadata depends on the number of requests, padding included,
    and, for a `head_size` up to 64 or over 128, on whether each request has one row. A
    graph that was captured with another layout returns wrong outputs (seen on an H100).
    With adaptive verification, graphs cover any mix of lengths. Then steps without
    drafts get separate graphs, and in all other steps the draft's pass has no graph.

    Args:
        target, draft: vLLM's `CudaGraphManager`s before capture; modified in place. The
            draft's is None if it has a length that does not depend on the target's.
        lengths: Result of `offered`; empty if all steps use the same depth.
    """
    if target.varlen_decode:
        lengths = [0]
    for manager in (target, draft) if lengths else ():
        if manager is not None:
            _plan_each(manager, lengths)


def _plan_each(manager: Any, lengths: list[int]) -> None:
    """Plan a FULL graph at each length, at any batch size.

    vLLM 0.32.0 pads a step to the next captured number of tokens of any length, and
    falls back to PIECEWISE if that number belongs to another length. Therefore vLLM
    plans one length at a time here, and the plans are merged.
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
            # Also capture the largest batch.
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
            + [d for d in descs if not d.uniform_token_count]
            for key, descs in upstream.items()
        }
        for upstream, *own in zip(mixed, *plans, strict=True)
    )
    for descs in graphs.values():
        descs.sort(key=lambda desc: desc.num_tokens, reverse=True)
    manager._capture_descs, manager._candidates = graphs, candidates


KNOB = "enable_adaptive_verification"


def settle_adaptive(section: dict[str, Any], asked: bool | None) -> dict[str, Any]:
    """Record in a `tide` section whether adaptive verification may be switched on.

    It may if `tide.control.verify` is absent; `switch_adaptive_on` checks that. Only
    the dictionary of a configuration shows which keys the operator omitted.
    """
    control = dict(section.get("control", {}))
    if asked is None and control.get("verify"):
        del control["verify"]  # true is the default
    elif asked is not None:
        control.setdefault("verify", _is_cpu())
    return {**section, "control": control}


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def switch_adaptive_on(vllm_config: Any, log: Any) -> None:
    """Switch adaptive verification on, unless the operator or vLLM rules it out.

    Only for Model Runner V2 on a GPU. `WorkerTideV2.make_verification` handles an
    attention backend without support, which is not known yet.
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
        # The checks that vLLM ran on the original configuration.
        vllm_config._verify_aux_output_compatibility()
        vllm_config._verify_sampling_replay_config()
        vllm_config._validate_adaptive_verification()
        attention = vllm_config.attention_config
        for backend in (attention.backend, *attention.backend_per_kind.values()):
            if backend and not (
                backend.get_class().supports_device_cpu_query_lens_mismatch()
            ):
                raise ValueError(f"--attention-backend {backend.name} lacks support.")
    except ValueError as error:
        speculative.enable_adaptive_verification = False
        log.warning(
            "vllm_tide: %s stays off, so drafts are not cut per request: %s",
            KNOB,
            error,
        )
