"""Pages, status files and samples, as servers and trainers write them."""

import json
import time

from vllm_tide.sidecar.report import TrainerStatus
from vllm_tide.top.collect import Sample, parse_page

LABELS = 'engine="0",model_name="demo"'
URL = "http://localhost:8000"
COUNTERS = {
    "vllm:generation_tokens": 1000,
    "vllm:prompt_tokens": 5000,
    "vllm:spec_decode_num_drafts": 400,
    "vllm:spec_decode_num_draft_tokens": 1200,
    "vllm:spec_decode_num_accepted_tokens": 480,
    "vllm_tide:captured_rows": 8000,
    "vllm_tide:swaps": 5,
    "vllm_tide:control_steps": 500,
    "vllm_tide:draft_passes": 900,
    "vllm_tide:plain_step_seconds": 0.0,
    "vllm_tide:step_seconds": 0.0,
    "vllm_tide:memory_proposals": 0,
    "vllm_tide:memory_accepted_tokens": 0,
    "vllm_tide:dropped_rows": {"ring_full": 20, "paused": 0},
    "vllm_tide:steps_without_drafts": {"no_gain": 90, "slo": 10},
    "vllm_tide:faults": {},
}
GAUGES = {
    "vllm:num_requests_running": 4,
    "vllm:num_requests_waiting": 0,
    "vllm_tide:draft_version": 5,
    "vllm_tide:ring_used_bytes": 32 << 20,
    "vllm_tide:ring_capacity_bytes": 256 << 20,
    "vllm_tide:ring_consumer_alive": 1,
    "vllm_tide:last_swap_seconds": 0.0109,
}
# Totals ten seconds later.
LATER = {
    "generation_tokens": 2000,
    "prompt_tokens": 7000,
    "drafts": 800,
    "draft_tokens": 2400,
    "accepted_tokens": 880,
    "captured_rows": 12000,
    "control_steps": 1000,
    "draft_passes": 1900,
    "dropped_rows": {"ring_full": 50, "paused": 0},
    "steps_without_drafts": {"no_gain": 140, "slo": 10},
}


def page_text(tide=True, **changed):
    """Return a page of `/metrics`; values are changed by the end of a metric's name."""
    lines = []
    for kind, metrics in (("counter", COUNTERS), ("gauge", GAUGES)):
        for name, value in metrics.items():
            short = name.partition(":")[2].removeprefix("spec_decode_num_")
            value = changed.get(short, value)
            if not tide and name.startswith("vllm_tide:"):
                continue
            lines.append(f"# TYPE {name} {kind}")
            sample = name + "_total" * (kind == "counter")
            if not isinstance(value, dict):
                lines.append(f"{sample}{{{LABELS}}} {float(value)}")
                continue
            for reason, count in value.items():
                lines.append(f'{sample}{{{LABELS},reason="{reason}"}} {float(count)}')
    return "\n".join(lines) + "\n"


def page(t_s=0.0, **changed):
    return parse_page(page_text(**changed), t_s)


def sample(t_s, page_or_reason, engines=(), trainers=()):
    """Return a sample with one server."""
    pages = {URL: page_or_reason}
    return Sample(t_s, 1.7e9 + t_s, pages, list(engines), list(trainers))


def history(before=None, after=None):
    """Return two samples ten seconds apart, a thousand tokens later."""
    return [
        sample(0.0, page(0.0, **(before or {}))),
        sample(10.0, page(10.0, **(LATER | (after or {})))),
    ]


def status(**changed):
    """Return the fields of a trainer's status file."""
    fields = vars(
        TrainerStatus(
            pid=4242,
            model_name="demo",
            state="training",
            cycles=6,
            steps=55,
            loss=1.3243,
            rows_read=17537,
            train_tokens=24273,
            holdout_acceptance_new=1.083,
            holdout_acceptance_live=1.058,
            last_decision="gain +0.0251 +- 0.0179",
            published_version=4,
            installed_version=3,
            waiting_for="the canary of the last publication",
            canary={
                "undecided": True,
                "backoff_cycles": 0,
                "speed_before": 1.908,
                "speed_after": 2.07,
                "change": 0.08,
                "error": 0.04,
                "requests": 12,
            },
            engines={"e1": {"published": 4, "installed": 3, "refused": 0}},
            last_publish_unix=time.time() - 32,
            updated_unix=time.time(),
        )
    )
    return dict(fields) | changed


def write_status(run_dir, name="e1", **changed):
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = run_dir / f"trainer-{name}.json"
    path.write_text(json.dumps(status(**changed)))
    return path
