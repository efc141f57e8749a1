"""Panels of what the trainer reports on its own `/metrics`."""

from __future__ import annotations

from vllm_tide.dashboards.panel import Panel, Query, Row
from vllm_tide.dashboards.promql import EACH, happened, of_trainer, per_trainer
from vllm_tide.dashboards.serving import ACCEPTANCE_LENGTH

WHO = "{{model_name}} {{instance}}"

TRAINING = Row(
    "Training",
    (
        Panel(
            "Loss",
            "Loss of the last optimizer step. It jumps when traffic shifts; it must "
            "come down again.",
            "none",
            (Query(of_trainer("vllm_tide:trainer_loss"), WHO),),
        ),
        Panel(
            "Held-out and served acceptance length",
            "What held-out requests promise for the live draft and the candidate, "
            "and what serving gives. Held-out is optimistic (teacher-forced) and "
            "drafts at full length.",
            "none",
            (
                Query(
                    of_trainer("vllm_tide:trainer_holdout_acceptance_live"),
                    f"{WHO} held out, live",
                ),
                Query(
                    of_trainer("vllm_tide:trainer_holdout_acceptance_new"),
                    f"{WHO} held out, candidate",
                ),
                Query(ACCEPTANCE_LENGTH, f"{EACH} served"),
            ),
        ),
        Panel(
            "Publications",
            "Drafts published, refused by every engine, and taken back by the canary.",
            "none",
            (
                Query(
                    happened(of_trainer("vllm_tide:trainer_publications_total")),
                    f"{WHO} published",
                    bars=True,
                ),
                Query(
                    happened(of_trainer("vllm_tide:trainer_refused_total")),
                    f"{WHO} refused",
                    bars=True,
                ),
                Query(
                    happened(of_trainer("vllm_tide:trainer_rollbacks_total")),
                    f"{WHO} rolled back",
                    bars=True,
                ),
            ),
        ),
        Panel(
            "Versions",
            "Newest draft published, and the one each engine serves. A gap that stays "
            "means that an engine does not install.",
            "none",
            (
                Query(
                    of_trainer("vllm_tide:trainer_published_version"),
                    f"{WHO} published",
                ),
                Query(
                    of_trainer("vllm_tide:trainer_installed_version"),
                    f"{WHO} installed",
                ),
                Query(of_trainer("vllm_tide:trainer_engine_version"), "{{engine_id}}"),
            ),
            steps=True,
        ),
        Panel(
            "Since the last publication",
            "Time since the trainer last published a draft; empty before the first. "
            "Long is fine while held-out acceptance does not rise.",
            "s",
            (
                Query(
                    "time() - "
                    + of_trainer(
                        "vllm_tide:trainer_last_publication_timestamp_seconds"
                    ),
                    WHO,
                ),
            ),
        ),
        Panel(
            "Work",
            "Rows read and tokens trained on per second; optimizer steps per second "
            "on the right axis.",
            "none",
            (
                Query(
                    per_trainer("vllm_tide:trainer_rows_read_total"), f"{WHO} rows read"
                ),
                Query(
                    per_trainer("vllm_tide:trainer_tokens_total"),
                    f"{WHO} tokens trained",
                ),
                Query(
                    per_trainer("vllm_tide:trainer_steps_total"),
                    f"{WHO} steps",
                    unit="none",
                ),
            ),
        ),
        Panel(
            "Time training",
            "Share of time in training cycles, evaluations included, and share of "
            "batch rows that stayed empty.",
            "percentunit",
            (
                Query(
                    per_trainer("vllm_tide:trainer_seconds_total"), f"{WHO} training"
                ),
                Query(
                    of_trainer("vllm_tide:trainer_packing_waste"), f"{WHO} empty rows"
                ),
            ),
        ),
        Panel(
            "Requests, cycles and lost writes",
            "Served requests followed per second; on the right axis training cycles, "
            "those that the device had no memory for, and status files and events that "
            "could not be written.",
            "none",
            (
                Query(
                    per_trainer("vllm_tide:trainer_requests_total"), f"{WHO} requests"
                ),
                Query(
                    happened(of_trainer("vllm_tide:trainer_cycles_total")),
                    f"{WHO} cycles",
                    unit="none",
                    bars=True,
                ),
                Query(
                    happened(of_trainer("vllm_tide:trainer_out_of_memory_total")),
                    f"{WHO} out of memory",
                    unit="none",
                    bars=True,
                ),
                Query(
                    happened(of_trainer("vllm_tide:trainer_failed_writes_total")),
                    f"{WHO} lost writes",
                    unit="none",
                    bars=True,
                ),
            ),
        ),
        Panel(
            "Served acceptance as the schedule sees it",
            "Short and long average of the accepted share of drafted tokens. The "
            "short one below the long one is a shift.",
            "percentunit",
            (
                Query(of_trainer("vllm_tide:trainer_short_average"), f"{WHO} short"),
                Query(of_trainer("vllm_tide:trainer_long_average"), f"{WHO} long"),
            ),
        ),
        Panel(
            "Collecting",
            "1 while engines send full rows, with shifts seen and pauses as bars.",
            "none",
            (
                Query(of_trainer("vllm_tide:trainer_collecting"), f"{WHO} collecting"),
                Query(
                    happened(of_trainer("vllm_tide:trainer_shifts_total")),
                    f"{WHO} shifts",
                    bars=True,
                ),
                Query(
                    happened(of_trainer("vllm_tide:trainer_pauses_total")),
                    f"{WHO} pauses",
                    bars=True,
                ),
            ),
            steps=True,
        ),
    ),
)

ROWS = (TRAINING,)
