"""Panels of what engines report on the server's `/metrics`."""

from __future__ import annotations

from vllm_tide.dashboards.panel import Panel, Query, Row
from vllm_tide.dashboards.promql import (
    EACH,
    by_batch,
    happened,
    of_engine,
    of_trainer,
    per_engine,
    quantile,
)

DRAFTS = per_engine("vllm:spec_decode_num_drafts_total")
VERIFIED = per_engine("vllm:spec_decode_num_draft_tokens_total")
ACCEPTED = per_engine("vllm:spec_decode_num_accepted_tokens_total")
OUTPUT = per_engine("vllm:generation_tokens_total")
ROUNDS = per_engine("vllm_tide:control_rounds_total")
VERSION = of_engine("vllm_tide:draft_version")
CAPACITY = of_engine("vllm_tide:ring_capacity_bytes")
SLO_MISSED = per_engine("vllm_tide:slo_requests_total", where='outcome="missed"')
SLO_ALL = per_engine("vllm_tide:slo_requests_total")

ACCEPTANCE_LENGTH = f"1 + {ACCEPTED} / {DRAFTS}"
# Where nothing was drafted nothing was wasted: 0 of 0 is shown as 0.
SLO_SHARE = f"{SLO_MISSED} / clamp_min({SLO_ALL}, 1e-9)"
LIVE_SINCE = of_engine("vllm_tide:draft_installed_timestamp_seconds") + " > 0"
PLAIN_SECONDS = per_engine("vllm_tide:plain_seconds_total")
ROUND_SECONDS = per_engine("vllm_tide:round_seconds_total")

OVERVIEW = Row(
    "Overview",
    (
        Panel(
            "Tokens per draft",
            "Acceptance length, the target's own token included. 1 means that "
            "drafting gives nothing.",
            "none",
            (Query(ACCEPTANCE_LENGTH, EACH),),
            kind="stat",
            width=4,
            decimals=2,
        ),
        Panel(
            "Output rate",
            "Tokens per second that users get.",
            "none",
            (Query(OUTPUT, EACH),),
            kind="stat",
            width=4,
            decimals=0,
        ),
        Panel(
            "Requests over their limit",
            "Share of ended requests with a TPOT limit that missed it; 0 where none "
            "had one.",
            "percentunit",
            (Query(SLO_SHARE, EACH),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Live draft",
            "Version of the draft that serves; 0 is the checkpoint's.",
            "none",
            (Query(VERSION, EACH),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Age of the live draft",
            "Time since the live draft was installed; the checkpoint's, since the "
            "server's start.",
            "s",
            (Query(f"time() - ({LIVE_SINCE})", EACH),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Trainer reads",
            "1 while a trainer (or relay) reads this engine's ring.",
            "none",
            (Query(of_engine("vllm_tide:ring_consumer_alive"), EACH),),
            kind="stat",
            width=4,
        ),
    ),
)

ACCEPTANCE = Row(
    "Acceptance",
    (
        Panel(
            "Acceptance length",
            "Tokens per draft, the target's own included. It also falls when control "
            "chooses shorter drafts: look at the first position to judge the draft.",
            "none",
            (Query(ACCEPTANCE_LENGTH, EACH),),
        ),
        Panel(
            "Acceptance per position",
            "Share of drafts whose token at a position was accepted; position 0 does "
            "not depend on the chosen length.",
            "percentunit",
            (
                Query(
                    per_engine(
                        "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"
                    )
                    + f" / on (model_name, engine) group_left () {DRAFTS}",
                    f"{EACH} position {{{{position}}}}",
                ),
            ),
        ),
        Panel(
            "Acceptance by cached prefix",
            "Share of verified tokens accepted, by how much of the prompt was in the "
            "prefix cache; _old: with the KV of an earlier draft (tide.swap.draft_kv).",
            "percentunit",
            (
                Query(
                    per_engine("vllm_tide:prefix_accepted_tokens_total", "prefix")
                    + " / "
                    + per_engine("vllm_tide:prefix_verified_tokens_total", "prefix"),
                    f"{EACH} {{{{prefix}}}}",
                ),
            ),
        ),
        Panel(
            "Wasted drafts",
            "Share of drafted tokens that gave nothing: verified and rejected, or "
            "drafted and not worth verifying.",
            "percentunit",
            (
                Query(f"1 - {ACCEPTED} / {VERIFIED}", f"{EACH} rejected of verified"),
                Query(
                    per_engine("vllm_tide:trimmed_tokens_total")
                    + " / clamp_min("
                    + per_engine("vllm_tide:drafted_tokens_total")
                    + ", 1e-9)",
                    f"{EACH} left out of drafted",
                ),
            ),
        ),
    ),
)

CONTROL = Row(
    "Control",
    (
        Panel(
            "Chosen length and batch size",
            "Mean draft passes per step, and running requests on the right axis. "
            "Lengths fall as batches grow.",
            "none",
            (
                Query(of_engine("vllm_tide:draft_length"), f"{EACH} length"),
                Query(
                    of_engine("vllm:num_requests_running"),
                    f"{EACH} requests",
                    unit="none",
                ),
            ),
        ),
        Panel(
            "Chosen length by batch size",
            "Mean draft passes per step over the shown range, by running requests.",
            "none",
            (
                Query(
                    by_batch("vllm_tide:draft_length"), f"{EACH} {{{{batch}}}} requests"
                ),
            ),
            kind="bargauge",
            decimals=2,
        ),
        Panel(
            "Steps by length",
            "Steps per second by number of draft passes; 0 is off.",
            "none",
            (
                Query(
                    per_engine("vllm_tide:rounds_by_length_total", "length"),
                    f"{EACH} length {{{{length}}}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Goodput",
            "Output tokens per second, and what the same steps would have given "
            "without accepted drafts. The latter is a floor of what no speculation "
            "gives: plain steps are shorter.",
            "none",
            (
                Query(OUTPUT, f"{EACH} output"),
                Query(
                    f"clamp_min({OUTPUT} - {ACCEPTED}, 0)",
                    f"{EACH} same steps, no drafts",
                ),
            ),
        ),
        Panel(
            "Output rate against no speculation",
            "Tokens per second that users get, and that plain decoding would give by "
            "control's time model (adaspec only); on the right the measured share.",
            "none",
            (
                Query(OUTPUT, f"{EACH} output"),
                Query(
                    f"{OUTPUT} * {ROUND_SECONDS} / ({PLAIN_SECONDS} > 0)",
                    f"{EACH} estimate without speculation",
                ),
                Query(
                    f"{PLAIN_SECONDS} / ({ROUND_SECONDS} > 0)",
                    f"{EACH} speed-up",
                    unit="percentunit",
                ),
            ),
        ),
        Panel(
            "Realised over predicted throughput",
            "Tokens per second over what control predicted. Far below 1 for long: "
            "control's models are wrong, and it draws back.",
            "percentunit",
            (Query(of_engine("vllm_tide:throughput_ratio"), EACH),),
        ),
        Panel(
            "Steps without drafting",
            "Share of steps by why nothing was drafted: no_gain, slo (a limit forbids "
            "what would pay), override (measured not to pay), check (to measure an "
            "undrafted step), no_room.",
            "percentunit",
            (
                Query(
                    per_engine("vllm_tide:off_rounds_total", "reason")
                    + f" / on (model_name, engine) group_left () clamp_min({ROUNDS}, "
                    "1e-9)",
                    f"{EACH} {{{{reason}}}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Predicted and measured step time",
            "Decayed means of the same steps.",
            "s",
            (
                Query(
                    of_engine("vllm_tide:predicted_step_seconds"), f"{EACH} predicted"
                ),
                Query(of_engine("vllm_tide:measured_step_seconds"), f"{EACH} measured"),
            ),
        ),
        Panel(
            "Errors of control's models",
            "Relative error of predicted step times, and calibration error of "
            "acceptance probabilities.",
            "percentunit",
            (
                Query(of_engine("vllm_tide:time_model_error_ratio"), f"{EACH} time"),
                Query(of_engine("vllm_tide:calibration_error"), f"{EACH} calibration"),
            ),
        ),
        Panel(
            "Probes and holes",
            "Shadow probes per second while off, and tokens per second that the draft "
            "will never have seen (tide.control.catchup_mib).",
            "none",
            (
                Query(per_engine("vllm_tide:probes_total"), f"{EACH} probes"),
                Query(per_engine("vllm_tide:hole_tokens_total"), f"{EACH} holes"),
            ),
        ),
    ),
)

LIMITS = Row(
    "Limits on time per output token",
    (
        Panel(
            "Requests with a limit",
            "Ended requests per second that met or missed their TPOT limit, as the "
            "engine saw it.",
            "none",
            (
                Query(
                    per_engine("vllm_tide:slo_requests_total", "outcome"),
                    f"{EACH} {{{{outcome}}}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Steps over a limit",
            "Share of steps in which no speculative length could keep a limit, or that "
            "left clients' out; requests per second whose limit was no number.",
            "percentunit",
            (
                Query(
                    per_engine("vllm_tide:slo_rounds_missed_total")
                    + f" / clamp_min({ROUNDS}, 1e-9)",
                    f"{EACH} steps",
                ),
                Query(
                    per_engine("vllm_tide:client_limits_left_out_total")
                    + f" / clamp_min({ROUNDS}, 1e-9)",
                    f"{EACH} left out",
                ),
                Query(
                    per_engine("vllm_tide:malformed_slo_total"),
                    f"{EACH} malformed",
                    unit="none",
                ),
            ),
        ),
        Panel(
            "Time per output token",
            "vLLM's own figure over ended requests.",
            "s",
            (
                Query(
                    quantile(0.5, "vllm:request_time_per_output_token_seconds"),
                    f"{EACH} median",
                ),
                Query(
                    quantile(0.95, "vllm:request_time_per_output_token_seconds"),
                    f"{EACH} 95%",
                ),
            ),
        ),
    ),
)

DRAFT = Row(
    "Draft",
    (
        Panel(
            "Draft version",
            "Version that serves, with swaps and rollbacks as bars on the right axis. "
            "A rollback publishes the old weights under a new version.",
            "none",
            (
                Query(VERSION, f"{EACH} version"),
                Query(
                    happened(of_engine("vllm_tide:swaps_total")),
                    f"{EACH} swaps",
                    unit="none",
                    bars=True,
                ),
                Query(
                    happened(of_trainer("vllm_tide:trainer_rollbacks_total")),
                    "{{instance}} rollbacks",
                    unit="none",
                    bars=True,
                ),
            ),
            width=12,
            steps=True,
        ),
        Panel(
            "Pause of a swap",
            "How long swaps held up the engine: the newest, the longest.",
            "s",
            (
                Query(of_engine("vllm_tide:swap_seconds_last"), f"{EACH} newest"),
                Query(of_engine("vllm_tide:swap_seconds_max"), f"{EACH} longest"),
            ),
            width=6,
            steps=True,
        ),
        Panel(
            "Refused drafts",
            "Publications that an engine refused, by reason; empty while there was "
            "none.",
            "none",
            (
                Query(
                    of_engine("vllm_tide:refused_drafts_total"),
                    f"{EACH} {{{{reason}}}}",
                ),
            ),
            width=6,
            steps=True,
        ),
    ),
)

CAPTURE = Row(
    "Capture",
    (
        Panel(
            "Captured rows",
            "Rows per second written to the ring, and requests per second with at "
            "least one of them.",
            "none",
            (
                Query(per_engine("vllm_tide:captured_rows_total"), f"{EACH} rows"),
                Query(
                    per_engine("vllm_tide:captured_requests_total"),
                    f"{EACH} requests",
                    unit="none",
                ),
            ),
            width=6,
        ),
        Panel(
            "Rows not captured",
            "Per second, by reason. over_budget: the trainer takes less; cut_short and "
            "ring_full: it fell behind; ids_only: it asked for no more; paused: "
            "nothing left the engine; consent_off, unknown_key, opted_out, "
            "malformed_*, not_opted_in, salted, unsupported_input and not_sampled "
            "count requests.",
            "none",
            (
                Query(
                    per_engine("vllm_tide:dropped_rows_total", "reason"),
                    f"{EACH} {{{{reason}}}}",
                ),
            ),
            width=6,
            stacked=True,
        ),
        Panel(
            "Ring fill",
            "Share of the ring that no trainer has read yet.",
            "percentunit",
            (
                Query(
                    of_engine("vllm_tide:ring_used_bytes") + f" / ({CAPACITY} > 0)",
                    EACH,
                ),
            ),
            width=6,
        ),
        Panel(
            "Contained faults",
            "Faults of ours that were kept out of serving, by where; empty while "
            "there was none.",
            "none",
            (Query(of_engine("vllm_tide:faults_total"), f"{EACH} {{{{reason}}}}"),),
            width=6,
            steps=True,
        ),
        Panel(
            "Left out after faults",
            "Time until control or capture, left out after faults, is tried again; and "
            "whether capture is on (1), or paused or off (0).",
            "s",
            (
                Query(
                    of_engine("vllm_tide:control_suspended_seconds"), f"{EACH} control"
                ),
                Query(
                    of_engine("vllm_tide:capture_suspended_seconds"), f"{EACH} capture"
                ),
                Query(of_engine("vllm_tide:capture_on"), f"{EACH} on", unit="none"),
            ),
            width=6,
        ),
    ),
)

ROWS = (OVERVIEW, ACCEPTANCE, CONTROL, LIMITS, DRAFT, CAPTURE)
