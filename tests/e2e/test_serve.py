"""One real `vllm serve` with everything enabled and the trainer that it starts.

The tests share it and run in this order: the last one stops it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.harness.server import ServerOptions, VllmServer
from tests import toys
from vllm_tide.cli.main import main
from vllm_tide.config import parse_tide
from vllm_tide.transport.rendezvous import read_manifests

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone]

VENV = Path(sys.executable).parent.parent
PROMPTS = [list(f"request number {i} says".encode()) for i in range(10, 50)]
NUM_TOKENS = 48
TIDE = {
    "capture": {"ring_mib": 32},
    "train": {
        "nice": 1,  # at 10 it needs cores that are idle
        "min_new_tokens": 600,
        "steps_per_cycle": 10,
        "batch_tokens": 512,
        "min_gain": 0.0,
        "holdout_share": 0.3,
    },
    "control": {"client_slo_tpot_ms": 0.0001},
    "test_time": {"memory": "ngram", "adapt": "shared"},
}


def complete(url: str, prompt: list[int], **more: Any) -> list[int]:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    request = urllib.request.Request(
        url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


def metrics(url: str) -> dict[str, float]:
    """Return every sample of the server's own /metrics, without labels but `reason`."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as reply:
        text = reply.read().decode()
    values: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"([a-z_:A-Z0-9]+)(\{.*\})? ([-+.e0-9]+)$", line)
        if match:
            reason = re.search(r'reason="([a-z_]+)"', match[2] or "")
            name = match[1] + (f"/{reason[1]}" if reason else "")
            values[name] = values.get(name, 0.0) + float(match[3])
    return values


def until(
    server: VllmServer, what: str, holds: Callable[[dict[str, float]], object]
) -> dict[str, float]:
    """Send requests until the metrics match: the engine reports in its steps."""
    deadline = time.monotonic() + 300
    while True:
        complete(server.url, PROMPTS[0], max_tokens=4)
        if holds(seen := metrics(server.url)):
            return seen
        assert time.monotonic() < deadline, f"never: {what}\n{server.log_tail(40)}"
        time.sleep(0.1)


def ours_in_shm(server: VllmServer) -> set[str]:
    (manifest,) = read_manifests(run_dir_of(server))
    return {manifest.ring, manifest.weights} & set(os.listdir("/dev/shm"))


def run_dir_of(server: VllmServer) -> Path:
    return server.options.model.parent / "run"


def greedy(target: Path, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return the target's greedy tokens after a prompt, by Transformers."""
    return greedy_batch(target, [prompt], num_tokens)[0]


def greedy_batch(
    target: Path, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """Return the same for prompts of one length."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    # As `ignore_eos`: the token may be sampled and does not end the request.
    # `min_new_tokens` would forbid it.
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[:, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("serve")
    target = toys.make_target(folder / "target")
    config = {
        "method": "eagle3",
        "model": str(toys.make_draft(folder / "draft", target)),
        "num_speculative_tokens": 3,
        "tide": TIDE | {"run_dir": str(folder / "run")},
    }
    (folder / "tide.json").write_text("// served by a test\n" + json.dumps(config))
    options = ServerOptions(
        venv=VENV,
        model=target,
        log_path=folder / "server.log",
        speculative_config=str(folder / "tide.json"),
        max_model_len=256,
        # A separate cache: it must measure, and leave nothing in the user's.
        extra_env={"XDG_CACHE_HOME": str(folder / "cache")},
    )
    with VllmServer(options) as started:
        started.wait_ready(lambda _: None)
        yield started


@pytest.fixture(scope="module")
def right(server: VllmServer) -> list[list[int]]:
    return greedy_batch(server.options.model, PROMPTS, NUM_TOKENS)


def trainers(server: VllmServer) -> list[psutil.Process]:
    (manifest,) = read_manifests(run_dir_of(server))
    children = []
    for child in psutil.Process(manifest.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended: a zombie
            children += [child] if "train" in " ".join(child.cmdline()) else []
    return children


def what_the_trainer_does(server: VllmServer) -> str:
    """Return, for a failure's report, times, cores and stacks, and the log's end."""
    lines = []
    for process in trainers(server):
        figures = process.cpu_times(), process.cpu_affinity(), process.nice()
        lines.append(f"{process}: {figures}")
        process.send_signal(signal.SIGUSR1)
    time.sleep(2)  # the stacks are written meanwhile; only after a failure
    for log in run_dir_of(server).glob("trainer-*.log"):
        lines.append(log.read_text(errors="replace")[-6000:])
    return "\n".join(lines)


@pytest.mark.timeout(1800)
def test_outputs_are_the_targets_while_drafts_are_trained_and_swapped(server, right):
    run_dir, began = run_dir_of(server), time.time()
    (manifest,) = read_manifests(run_dir)
    assert parse_tide(manifest.tide).control.policy == "adaspec"
    deadline = time.monotonic() + 1200
    swaps = 0.0
    with ThreadPoolExecutor(4) as pool:
        while swaps < 2 and time.monotonic() < deadline:
            answers = list(pool.map(lambda p: complete(server.url, p), PROMPTS))
            assert answers == right  # whichever draft was live
            swaps = metrics(server.url)["vllm_tide:swaps_total"]
            time.sleep(1.0)  # cores for the trainer
        seen = metrics(server.url)
        assert swaps >= 2, f"{server.log_tail()}\n{what_the_trainer_does(server)}"
        assert list(pool.map(lambda p: complete(server.url, p), PROMPTS)) == right
    (trainer,) = trainers(server)
    assert os.sched_getaffinity(trainer.pid) <= set(server.options.other_cpus)
    assert trainer.nice() == min(19, os.nice(0) + 1)
    status = json.loads(next(run_dir.glob("trainer-*.json")).read_text())
    assert status["published_version"] >= 2
    assert status["model_name"] == "demo"  # as in the server's own metrics

    assert seen["vllm_tide:captured_rows_total"] > 1000
    assert seen["vllm_tide:draft_version"] >= 2
    installed = seen["vllm_tide:draft_installed_timestamp_seconds"]
    assert began < installed < time.time()
    assert seen["vllm_tide:swap_seconds_count"] == seen["vllm_tide:swaps_total"]
    assert seen["vllm_tide:ring_consumer_alive"] == 1
    assert seen["vllm_tide:ring_capacity_bytes"] > 0
    assert seen["vllm_tide:control_steps_total"] >= NUM_TOKENS
    verified = seen["vllm_tide:verified_tokens_total"]
    assert 0 < verified <= seen["vllm_tide:drafted_tokens_total"]
    assert seen["vllm_tide:step_seconds_total"] > 0
    assert seen["vllm_tide:plain_step_seconds_total"] > 0
    assert not [name for name in seen if name.startswith("vllm:tide")]
    assert not [name for name in seen if name.startswith("vllm_tide:faults")]
    assert not [name for name in seen if name.startswith("vllm_tide:refused")]


def test_request_arguments_are_read_over_http(server, right):
    def say(**more: Any) -> None:
        assert complete(server.url, PROMPTS[1], **more) == right[1]

    names = {
        "vllm_tide:dropped_rows_total/opted_out": 1,
        "vllm_tide:dropped_rows_total/salted": 1,
        "vllm_tide:slo_requests_total": 2,
        "vllm_tide:malformed_limits_total": 1,
    }
    before = metrics(server.url)
    say(vllm_xargs={"tide_capture": False})
    say(cache_salt="pepper")
    for limit in (0.0001, 100000, "soon"):
        say(vllm_xargs={"tide_slo_tpot_ms": limit})
    seen = until(
        server,
        f"counts of {sorted(names)}",
        lambda now: all(now.get(n, 0) > before.get(n, 0) for n in names),
    )
    assert {n: seen[n] - before.get(n, 0) for n in names} == names


def test_orders_reach_the_trainer(server, right, capsys):
    run_dir = run_dir_of(server)

    def order(*command: str) -> str:
        assert main([*command, "--run-dir", str(run_dir)]) == 0
        return capsys.readouterr().out

    order("pause")
    assert (run_dir / "paused.json").exists()
    rows = until(server, "a pause", lambda now: not now["vllm_tide:capture_on"])
    newest = rows["vllm_tide:draft_version"]
    served_as = int(re.search(r"served as version (\d+)", order("rollback"))[1])
    assert served_as > newest
    seen = until(
        server,
        "the draft before",
        lambda now: now["vllm_tide:draft_version"] == served_as,
    )
    assert complete(server.url, PROMPTS[2]) == right[2]
    name = "vllm_tide:captured_rows_total"
    assert seen[name] == rows[name]
    order("resume")
    assert not (run_dir / "paused.json").exists()
    until(server, "captured rows", lambda now: now[name] > rows[name])

    assert "published" in order("status")
    acme = {"vllm_xargs": {"tide_tenant": "acme"}}
    assert complete(server.url, PROMPTS[3], **acme) == right[3]
    deadline = time.monotonic() + 120  # until the trainer has read it
    while "removed nothing" in (output := order("purge", "--tenant", "acme")):
        assert time.monotonic() < deadline, output
        complete(server.url, PROMPTS[3], **acme)
    assert "removed nothing" not in order("purge", "--all")


def test_a_killed_trainer_is_restarted_and_never_affects_serving(server, right):
    (trainer,) = trainers(server)
    trainer.send_signal(signal.SIGKILL)
    assert complete(server.url, PROMPTS[4]) == right[4]
    trainer.wait(60)
    name = "vllm_tide:ring_consumer_alive"
    until(server, "another trainer", lambda now: trainers(server) and now[name])


def test_stopping_the_server_leaves_nothing_behind(server):
    run_dir = run_dir_of(server)
    assert len(mine := ours_in_shm(server)) == 2
    processes = [p for some in server.processes().values() for p in some]
    (trainer,) = trainers(server)
    assert trainer in processes
    assert server.stop(grace_s=120)
    assert not mine & set(os.listdir("/dev/shm"))
    assert not read_manifests(run_dir)
    assert not list(run_dir.glob(f"trainer-{trainer.pid}-*.sock"))
    assert not [p for p in processes if p.is_running()]
