"""Eight hours of series, a sample a minute: healthy ones, and one fault per alert.

Faults begin at `FAULT`. A value of None is no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nan

MINUTES = 8 * 60
FAULT = 4 * 60

Value = Callable[[int], float | None]
Series = Mapping[str, Value]

_SERVER = 'job="m", instance="s:8000", model_name="m", engine="0"'
_TRAINER = 'job="m", instance="t:8001", model_name="m"'


def server(name: str, more: str = "") -> str:
    return f"{name}{{{_SERVER}{more and ', ' + more}}}"


def trainer(name: str) -> str:
    return f"vllm_tide:trainer_{name}{{{_TRAINER}}}"


def values(series: Value) -> str:
    """Write series in promtool's notation."""
    samples = (series(minute) for minute in range(MINUTES + 1))
    return " ".join(
        "_" if s is None else "NaN" if s != s else f"{s:.12g}" for s in samples
    )


def gauge(before: float, after: float | None = None) -> Value:
    later = before if after is None else after
    return lambda minute: later if minute >= FAULT else before


def counter(before: float, after: float | None = None) -> Value:
    """Return a counter that grows by so much a minute."""
    later = before if after is None else after
    return lambda minute: min(minute, FAULT) * before + max(minute - FAULT, 0) * later


def hourly(minute: int) -> float:
    return minute // 60


def only_since_fault(minute: int) -> float | None:
    return 1 if minute >= FAULT else None


def times(*minutes: int) -> Value:
    """Return a counter of events at these minutes."""
    return lambda minute: sum(minute >= event for event in minutes)


MISSED = server("vllm_tide:slo_requests_total", 'outcome="missed"')
MET = server("vllm_tide:slo_requests_total", 'outcome="met"')
FIRST = server("vllm:spec_decode_num_accepted_tokens_per_pos_total", 'position="0"')
OFF = server("vllm_tide:steps_without_drafts_total", 'reason="no_gain"')
FULL = server("vllm_tide:dropped_rows_total", 'reason="ring_full"')
CUT = server("vllm_tide:dropped_rows_total", 'reason="cut_short"')
OUTPUT = server("vllm:generation_tokens_total")
DRAFTS = server("vllm:spec_decode_num_drafts_total")
VERIFIED = server("vllm:spec_decode_num_draft_tokens_total")
ACCEPTED = server("vllm:spec_decode_num_accepted_tokens_total")
STEPS = server("vllm_tide:control_steps_total")
UNREACHABLE = server("vllm_tide:slo_unreachable_steps_total")
TIME_ERROR = server("vllm_tide:time_model_error_ratio")
ROWS = server("vllm_tide:captured_rows_total")
ALIVE = server("vllm_tide:ring_consumer_alive")
USED = server("vllm_tide:ring_used_bytes")
CAPACITY = server("vllm_tide:ring_capacity_bytes")
SWAPS = server("vllm_tide:swap_seconds_count")
QUICK_SWAPS = server("vllm_tide:swap_seconds_bucket", 'le="0.25"')

HEALTHY: Series = {
    OUTPUT: counter(6000),
    DRAFTS: counter(2000),
    VERIFIED: counter(6000),
    ACCEPTED: counter(4000),
    FIRST: counter(1600),
    STEPS: counter(600),
    UNREACHABLE: counter(6),
    OFF: counter(60),
    MET: counter(60),
    MISSED: counter(1),
    TIME_ERROR: gauge(0.05),
    server("vllm_tide:draft_version"): hourly,
    SWAPS: hourly,
    QUICK_SWAPS: hourly,
    ROWS: counter(6000),
    FULL: counter(10),
    ALIVE: gauge(1),
    USED: gauge(1e6),
    CAPACITY: gauge(256e6),
    trainer("collecting"): gauge(1),
    trainer("rows_read_total"): counter(6000),
    trainer("steps_total"): counter(20),
    trainer("seconds_total"): counter(20),
    # No number before the first step.
    trainer("loss"): lambda minute: 1.5 if minute else nan,
    trainer("holdout_acceptance_live"): gauge(3.2),
    trainer("publications_total"): hourly,
    trainer("rollbacks_total"): gauge(0),
    trainer("published_version"): hourly,
    trainer("installed_version"): hourly,
}

# name -> (series that replace or join the healthy ones, alerts that fire with it)
PLANTS: dict[str, tuple[Series, tuple[str, ...]]] = {
    "TideLimitMissed": ({MISSED: counter(1, 20)}, ()),
    "TideLimitUnreachable": ({UNREACHABLE: counter(6, 500)}, ()),
    "TideTimeModelWrong": ({TIME_ERROR: gauge(0.05, 0.6)}, ()),
    "TideAcceptanceFell": ({FIRST: counter(1600, 400)}, ()),
    "TideDraftsWasted": (
        {
            ACCEPTED: counter(4000, 600),
            trainer("holdout_acceptance_live"): gauge(3.2, 1.3),
        },
        (),
    ),
    "TideDraftingOff": ({OFF: counter(60, 600)}, ()),
    "TideFaultContained": (
        {server("vllm_tide:faults_total", 'reason="logits"'): only_since_fault},
        (),
    ),
    "TideDraftRefused": (
        {server("vllm_tide:refused_drafts_total", 'reason="norm"'): only_since_fault},
        (),
    ),
    "TideDraftRolledBack": ({trainer("rollbacks_total"): times(FAULT)}, ()),
    "TideTrainerCannotWrite": ({trainer("failed_writes_total"): times(FAULT)}, ()),
    "TideRollbacksRepeat": (
        {trainer("rollbacks_total"): times(FAULT, FAULT + 60, FAULT + 120)},
        ("TideDraftRolledBack",),
    ),
    "TideSwapSlow": (
        {QUICK_SWAPS: lambda minute: hourly(minute) - (minute >= 300)},
        (),
    ),
    "TideDraftNotInstalled": (
        {trainer("installed_version"): lambda minute: hourly(min(minute, FAULT))},
        (),
    ),
    "TideTrainerGone": ({ALIVE: gauge(1, 0)}, ()),
    "TideRingNearlyFull": ({USED: gauge(1e6, 250e6)}, ()),
    # Neither reason alone is a twentieth of the rows.
    "TideRowsDropped": ({FULL: counter(10, 300), CUT: counter(0, 300)}, ()),
    "TideCaptureStopped": ({ROWS: counter(6000, 0), FULL: gauge(0)}, ()),
    "TideTrainerStalled": ({trainer("steps_total"): counter(20, 0)}, ()),
    "TideTrainerDiverged": ({trainer("loss"): gauge(1.5, nan)}, ()),
    "TideHeldOutOptimistic": ({ACCEPTED: counter(4000, 1600)}, ()),
    "TideTrainingWithoutPublication": (
        {trainer("publications_total"): times(30)},
        (),
    ),
}

# Everything stops at FAULT with a full ring and a version not installed: no wait.
_IDLE = {
    OUTPUT: counter(6000, 0),
    DRAFTS: counter(2000, 0),
    VERIFIED: counter(6000, 0),
    ACCEPTED: counter(4000, 0),
    FIRST: counter(1600, 0),
    STEPS: counter(600, 0),
    UNREACHABLE: counter(6, 0),
    OFF: counter(60, 0),
    MET: counter(60, 0),
    MISSED: counter(1, 0),
    TIME_ERROR: gauge(0.05, 0.6),
    ROWS: counter(6000, 0),
    FULL: counter(10, 0),
    USED: gauge(1e6, 250e6),
    trainer("rows_read_total"): counter(6000, 0),
    trainer("steps_total"): counter(20, 0),
    trainer("seconds_total"): counter(20, 0),
    trainer("published_version"): lambda minute: hourly(min(minute, FAULT)),
    trainer("installed_version"): lambda minute: hourly(min(minute, FAULT - 1)),
}
# A static length, no capture, no trainer: figures of control and the ring stay unset.
_PLAIN = {name: series for name, series in HEALTHY.items() if "trainer" not in name} | {
    name: gauge(0)
    for name in (STEPS, UNREACHABLE, TIME_ERROR, ROWS, ALIVE, USED, CAPACITY)
}
for _name in (MET, MISSED, OFF, FULL):
    del _PLAIN[_name]

SILENT: dict[str, Series] = {
    "busy": HEALTHY,
    "idle": {**HEALTHY, **_IDLE},
    "static length without capture": _PLAIN,
    "a trainer before its first step": {
        **HEALTHY,
        trainer("loss"): gauge(nan),
        trainer("steps_total"): gauge(0),
        trainer("rows_read_total"): gauge(0),
    },
    # One shift that the trainer follows within half an hour.
    "shift that is learnt": {
        **HEALTHY,
        FIRST: lambda minute: 1600 * minute - 1200 * min(max(minute - FAULT, 0), 20),
    },
    # Another vLLM on the same Prometheus, with a poor draft that is not TIDE's.
    "vLLM without tide": {
        DRAFTS: counter(2000),
        VERIFIED: counter(6000),
        ACCEPTED: counter(100),
        FIRST: counter(1600, 100),
        OUTPUT: counter(2100),
    },
}
