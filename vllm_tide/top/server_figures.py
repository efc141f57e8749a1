"""What a server's `/metrics` says of the last seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_tide.top.rates import Growth, growth
from vllm_tide.top.samples import Sample

_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """One server; None where a figure is not known, or not exported.

    Attributes:
        error: Why there is no page; the rest is empty then.
        seconds: Time the rates are over.
        acceptance_length: vLLM's: 1 + accepted / drafts, the bonus token included;
            `acceptance_length_total` since the server began.
        acceptance_by_position: Share of drafts whose token at a position was accepted.
        draft_length: Mean draft passes per step.
        lengths: Share of steps by number of draft passes.
        off_share: Share of steps without drafting; `off_rounds` by reason.
        dropped_rows_per_s: By reason.
        slo_met: Ended requests that kept their TPOT limit, since the server began.
    """

    url: str
    error: str = ""
    models: list[str] = field(default_factory=list)
    seconds: float = 0.0
    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    acceptance_length: float | None = None
    acceptance_length_total: float | None = None
    acceptance_by_position: list[float] = field(default_factory=list)
    draft_length: float | None = None
    lengths: dict[str, float] = field(default_factory=dict)
    off_share: float | None = None
    off_rounds: dict[str, float] = field(default_factory=dict)
    tide: bool = False
    draft_version: float | None = None
    swaps: float | None = None
    swap_seconds_last: float | None = None
    swap_seconds_max: float | None = None
    refused_drafts: dict[str, float] = field(default_factory=dict)
    ring_used_bytes: float | None = None
    ring_capacity_bytes: float | None = None
    ring_consumer_alive: bool | None = None
    captured_rows_per_s: float | None = None
    dropped_rows_per_s: dict[str, float] = field(default_factory=dict)
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    time_model_error: float | None = None
    throughput_ratio: float | None = None
    slo_met: float = 0.0
    slo_missed: float = 0.0
    slo_rounds_missed: float = 0.0
    faults: dict[str, float] = field(default_factory=dict)


def server_figures(history: Sequence[Sample], url: str) -> ServerFigures:
    """Figures of a server from the samples of the last seconds.

    Args:
        history: Samples, oldest first; not empty.
        url: Of the server.
    """
    grown = growth(history, url)
    if grown is None:
        return ServerFigures(url, error=str(history[-1].pages.get(url, "not seen")))
    page = grown.now
    slo = page.by_label("vllm_tide:slo_requests_total", "outcome")
    alive = page.value("vllm_tide:ring_consumer_alive")
    rounds = grown.of("vllm_tide:control_rounds_total")
    off = grown.by_label("vllm_tide:off_rounds_total", "reason")
    return ServerFigures(
        url=url,
        models=[name for name in page.models() if name],
        seconds=grown.seconds,
        tokens_per_s=grown.per_second("vllm:generation_tokens_total"),
        prompt_tokens_per_s=grown.per_second("vllm:prompt_tokens_total"),
        running=page.value("vllm:num_requests_running"),
        waiting=page.value("vllm:num_requests_waiting"),
        acceptance_length=_length(grown.of(_ACCEPTED), grown.of(_DRAFTS)),
        acceptance_length_total=_length(page.value(_ACCEPTED), page.value(_DRAFTS)),
        acceptance_by_position=_by_position(grown),
        draft_length=_draft_length(grown),
        lengths=_shares(grown.by_label("vllm_tide:rounds_by_length_total", "length")),
        off_share=sum(off.values()) / rounds if rounds else None,
        off_rounds={k: v / rounds for k, v in off.items() if v} if rounds else {},
        tide=page.value("vllm_tide:draft_version") is not None,
        draft_version=page.most("vllm_tide:draft_version"),
        swaps=page.value("vllm_tide:swaps_total"),
        swap_seconds_last=page.most("vllm_tide:swap_seconds_last"),
        swap_seconds_max=page.most("vllm_tide:swap_seconds_max"),
        refused_drafts=page.by_label("vllm_tide:refused_drafts_total", "reason"),
        ring_used_bytes=page.value("vllm_tide:ring_used_bytes"),
        ring_capacity_bytes=page.value("vllm_tide:ring_capacity_bytes"),
        ring_consumer_alive=None if alive is None else alive > 0,
        captured_rows_per_s=grown.per_second("vllm_tide:captured_rows_total"),
        dropped_rows_per_s=_dropped(grown),
        predicted_step_s=_set(page.most("vllm_tide:predicted_step_seconds")),
        measured_step_s=_set(page.most("vllm_tide:measured_step_seconds")),
        time_model_error=page.most("vllm_tide:time_model_error_ratio"),
        throughput_ratio=_set(page.most("vllm_tide:throughput_ratio")),
        slo_met=slo.get("met", 0.0),
        slo_missed=slo.get("missed", 0.0),
        slo_rounds_missed=page.value("vllm_tide:slo_rounds_missed_total") or 0.0,
        faults=page.by_label("vllm_tide:faults_total", "reason"),
    )


def _set(gauge: float | None) -> float | None:
    """A gauge that never was set is exported as 0."""
    return gauge or None


def _length(accepted: float | None, drafts: float | None) -> float | None:
    if not drafts or accepted is None:
        return None
    return 1.0 + accepted / drafts


def _by_position(grown: Growth) -> list[float]:
    drafts = grown.of(_DRAFTS)
    if not drafts:
        return []
    accepted = grown.by_label(_PER_POSITION, "position")
    positions = sorted((name for name in accepted if name.isdigit()), key=int)
    return [accepted[name] / drafts for name in positions]


def _draft_length(grown: Growth) -> float | None:
    """Of control, as a mean over the window; else vLLM's drafted tokens per draft."""
    rounds = grown.of("vllm_tide:control_rounds_total")
    if rounds:
        return (grown.of("vllm_tide:draft_steps_total") or 0.0) / rounds
    drafts, tokens = grown.of(_DRAFTS), grown.of(_DRAFT_TOKENS)
    return tokens / drafts if drafts and tokens is not None else None


def _shares(counts: dict[str, float]) -> dict[str, float]:
    total = sum(counts.values())
    named = sorted((name for name in counts if name.isdigit()), key=int)
    return {name: counts[name] / total for name in named} if total else {}


def _dropped(grown: Growth) -> dict[str, float]:
    if grown.seconds <= 0:
        return {}
    by_reason = grown.by_label("vllm_tide:dropped_rows_total", "reason")
    return {k: v / grown.seconds for k, v in by_reason.items() if v}
