"""What each cell of a run sends: the same to every arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .prompt_pool import BenchRequest, PromptPool, closed_loop_request
from .run_options import RunOptions
from .traces import clip, keep_for_load, load_traces, requests_of, thin
from .visits import Cell

MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace ready to be sent, with what was done to it."""

    requests: Sequence[BenchRequest]
    keep: float
    offered_tokens_per_s: float
    unthinned: int


def closed_requests(
    options: RunOptions, pool: PromptPool, domain: str, repeat: int
) -> Callable[[int, int | None], BenchRequest]:
    """Return the endless sequence of a closed-loop cell.

    The order of the prompts depends on seed, repeat and domain, not on the arm or
    the batch size.  ``mixed`` takes the domains in turn.
    """
    domains = options.domains if domain == MIXED else (domain,)
    order = [pool.sequence(name, f"{options.seed}:{repeat}") for name in domains]

    def request_at(index: int, max_tokens: int | None) -> BenchRequest:
        place, which = divmod(index, len(domains))
        request = closed_loop_request(
            order[which],
            domains[which],
            place,
            options.output_tokens if max_tokens is None else max_tokens,
            options.limits.max_input,
        )
        return BenchRequest(index, request.segment, request.prompt, request.max_tokens)

    return request_at


def closed_cells(options: RunOptions) -> list[Cell]:
    """Return the cells of a batch sweep."""
    return [
        Cell(domain, batch=batch)
        for domain in options.domains
        for batch in options.batches
    ]


def replays(
    options: RunOptions, pool: PromptPool, capacity_tokens_per_s: float
) -> dict[Cell, Replay]:
    """Return the traces of a run by cell.

    Args:
        options: Of the run.
        pool: Prompts.
        capacity_tokens_per_s: What plain decoding reaches; used where ``keep`` is
            left to the load wanted.
    """
    domain = MIXED if len(options.domains) > 1 else options.domains[0]
    traces = load_traces(
        options.trace_dir, options.traces, options.trace_seconds, options.seed
    )
    found = {}
    for name, unclipped in traces.items():
        trace = clip(unclipped, options.limits)
        keep = options.keep
        if keep is None:
            keep = keep_for_load(
                trace, options.trace_seconds, capacity_tokens_per_s, options.load
            )
        kept = thin(trace, keep, options.seed)
        found[Cell(domain, trace=name)] = Replay(
            requests_of(kept, pool, options.domains, options.seed),
            round(keep, 5),
            round(float(kept.output.sum()) / options.trace_seconds, 2),
            len(trace),
        )
    return found
