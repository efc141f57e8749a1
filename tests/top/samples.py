"""Pages, status files and samples, as servers and trainers write them."""

import json
import time

from vllm_tide.sidecar.report import TrainerStatus
from vllm_tide.top.collect import Sample, parse_page

LABELS = 'engine="0",model_name="demo"'
URL = "http://localhost:8000"


def page_text(tide=True, **changed):
    """A page of `/metrics`; counters are totals, `positions` a list of them."""
    totals = {
        "generated": 1000,
        "prompt": 5000,
        "drafts": 400,
        "draft_tokens": 1200,
        "accepted": 480,
        "positions": [300, 150, 30],
        "running": 4,
        "waiting": 0,
        "rounds": 500,
        "steps": 900,
        "lengths": {0: 100, 2: 300, 3: 100},
        "off": {"no_gain": 90, "slo": 10},
        "rows": 8000,
        "dropped": {"ring_full": 20, "paused": 0},
        "version": 5,
        "swaps": 5,
        "swap_last": 0.0109,
        "used": 32 << 20,
        "alive": 1,
        "slo": {"met": 112, "missed": 2},
        "measured": 0.0279,
        "plain_seconds": 0.0,
        "round_seconds": 0.0,
        "faults": {},
        "memory": (0, 0),
    } | changed
    lines = []

    def add(name, kind, value, **labels):
        more = "".join(f',{key}="{text}"' for key, text in labels.items())
        head = f"# TYPE {name} {kind}"
        if head not in lines:
            lines.append(head)
        suffix = "_total" if kind == "counter" else ""
        lines.append(f"{name}{suffix}{{{LABELS}{more}}} {float(value)}")

    add("vllm:num_requests_running", "gauge", totals["running"])
    add("vllm:num_requests_waiting", "gauge", totals["waiting"])
    add("vllm:generation_tokens", "counter", totals["generated"])
    add("vllm:prompt_tokens", "counter", totals["prompt"])
    add("vllm:spec_decode_num_drafts", "counter", totals["drafts"])
    add("vllm:spec_decode_num_draft_tokens", "counter", totals["draft_tokens"])
    add("vllm:spec_decode_num_accepted_tokens", "counter", totals["accepted"])
    for position, count in enumerate(totals["positions"]):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        add(name, "counter", count, position=position)
    if tide:
        add("vllm_tide:captured_rows", "counter", totals["rows"])
        add("vllm_tide:swaps", "counter", totals["swaps"])
        add("vllm_tide:control_rounds", "counter", totals["rounds"])
        add("vllm_tide:draft_steps", "counter", totals["steps"])
        add("vllm_tide:plain_seconds", "counter", totals["plain_seconds"])
        add("vllm_tide:round_seconds", "counter", totals["round_seconds"])
        proposals, from_memory = totals["memory"]
        add("vllm_tide:memory_proposals", "counter", proposals)
        add("vllm_tide:memory_accepted_tokens", "counter", from_memory)
        for reason, count in totals["dropped"].items():
            add("vllm_tide:dropped_rows", "counter", count, reason=reason)
        for reason, count in totals["off"].items():
            add("vllm_tide:off_rounds", "counter", count, reason=reason)
        for length, count in totals["lengths"].items():
            add("vllm_tide:rounds_by_length", "counter", count, length=length)
        for outcome, count in totals["slo"].items():
            add("vllm_tide:slo_requests", "counter", count, outcome=outcome)
        for reason, count in totals["faults"].items():
            add("vllm_tide:faults", "counter", count, reason=reason)
        add("vllm_tide:draft_version", "gauge", totals["version"])
        add("vllm_tide:ring_used_bytes", "gauge", totals["used"])
        add("vllm_tide:ring_capacity_bytes", "gauge", 256 << 20)
        add("vllm_tide:ring_consumer_alive", "gauge", totals["alive"])
        add("vllm_tide:predicted_step_seconds", "gauge", 0.0271)
        add("vllm_tide:measured_step_seconds", "gauge", totals["measured"])
        add("vllm_tide:throughput_ratio", "gauge", 1.01)
        add("vllm_tide:swap_seconds_last", "gauge", totals["swap_last"])
        add("vllm_tide:swap_seconds_max", "gauge", 0.0153)
    return "\n".join(lines) + "\n"


def page(t_s=0.0, **changed):
    return parse_page(page_text(**changed), t_s)


def sample(t_s, found, engines=(), trainers=()):
    """A sample with one server: a page, or why there is none."""
    return Sample(t_s, 1.7e9 + t_s, {URL: found}, list(engines), list(trainers))


def history(before=None, after=None):
    """Two samples ten seconds apart, a thousand tokens later."""
    grown = {
        "generated": 2000,
        "prompt": 7000,
        "drafts": 800,
        "draft_tokens": 2400,
        "accepted": 880,
        "positions": [600, 230, 50],
        "rounds": 1000,
        "steps": 1900,
        "lengths": {0: 150, 2: 600, 3: 250},
        "off": {"no_gain": 140, "slo": 10},
        "rows": 12000,
        "dropped": {"ring_full": 50, "paused": 0},
    }
    return [
        sample(0.0, page(0.0, **(before or {}))),
        sample(10.0, page(10.0, **(grown | (after or {})))),
    ]


def status(**changed):
    """Fields of a trainer's status file."""
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
            publications=4,
            waiting_for="the canary of the last publication",
            schedule={
                "mode": "tide",
                "collecting": True,
                "reason": "acceptance fell from 0.522 to 0.413",
                "shifts": 2,
                "short": 0.413,
                "long": 0.522,
            },
            canary={
                "undecided": True,
                "rollbacks": 0,
                "backoff_cycles": 0,
                "requests": 4,
                "speed_before": 1.908,
                "speed_after": 2.07,
                "change": 0.08,
                "error": 0.04,
            },
            engines={"e1": {"published": 4, "installed": 3, "refused": 0}},
            last_publish_unix=time.time() - 32,
            updated_unix=time.time(),
        )
    )
    return dict(fields) | changed


def write_status(run_dir, name="e1", **changed):
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / f"trainer-{name}.json"
    path.write_text(json.dumps(status(**changed)))
    return path
