"""A real `vllm serve` with TIDE: HTTP in, capture, a real trainer, swaps, HTTP out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.harness.server import ServerOptions, VllmServer
from tests import toys
from vllm_tide.transport.rendezvous import read_manifests

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone]

VENV = Path(sys.executable).parent.parent
PROMPTS = [list(f"request number {i} says".encode()) for i in range(40)]
NUM_TOKENS = 48


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


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
    return post(url, body)["choices"][0]["token_ids"]


def metrics(url: str) -> dict[str, float]:
    """Every sample of the server's own /metrics, labels dropped but `reason`."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"([a-z_:A-Z0-9]+)(\{.*\})? ([-+.e0-9]+)$", line)
        if match:
            reason = re.search(r'reason="([a-z_]+)"', match[2] or "")
            name = match[1] + (f"/{reason[1]}" if reason else "")
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


def ours_in_shm() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("vllm_tide_")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("serve")
    target = toys.make_target(folder / "target")
    draft = toys.make_draft(folder / "draft", target)
    config = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": 3,
        "tide": {
            "run_dir": str(folder / "run"),
            "capture": {"ring_mib": 32},
            "train": {
                "min_new_tokens": 600,
                "steps_per_cycle": 10,
                "batch_tokens": 512,
                "min_gain": 0.0,
                "holdout_share": 0.3,
            },
        },
    }
    (folder / "tide.json").write_text("// served by a test\n" + json.dumps(config))
    options = ServerOptions(
        venv=VENV,
        model=target,
        log_path=folder / "server.log",
        speculative_config=str(folder / "tide.json"),
        max_model_len=256,
        extra_env={"VLLM_PLUGINS": "vllm_tide"},
    )
    started = VllmServer(options)
    with started:
        started.wait_ready(lambda _: None)
        yield started


def greedy(target: Path, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    # As `ignore_eos`: the token may be sampled and ends nothing. `min_new_tokens` would
    # forbid it.
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def trainers(server: VllmServer) -> list[psutil.Process]:
    (manifest,) = read_manifests(server.options.model.parent / "run")
    found = []
    for child in psutil.Process(manifest.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended: a zombie
            found += [child] if "train" in " ".join(child.cmdline()) else []
    return found


def what_the_trainer_does(server: VllmServer) -> str:
    """For the report of a failure: its times, cores and stacks, and its log's end."""
    said = []
    for process in trainers(server):
        figures = process.cpu_times(), process.cpu_affinity(), process.nice()
        said.append(f"{process}: {figures}")
        process.send_signal(signal.SIGUSR1)
    time.sleep(2)  # the stacks are written meanwhile; only after a failure
    for log in (server.options.model.parent / "run").glob("trainer-*.log"):
        said.append(log.read_text(errors="replace")[-6000:])
    return "\n".join(said)


@pytest.mark.timeout(600)
def test_the_loop_closes_over_http(server):
    folder = server.options.model.parent
    began = time.time()
    first = {i: complete(server.url, PROMPTS[i]) for i in (0, 1)}
    deadline = time.monotonic() + 400
    swaps = 0.0
    while swaps < 2 and time.monotonic() < deadline:
        for prompt in PROMPTS:
            assert len(complete(server.url, prompt)) == NUM_TOKENS
        swaps = metrics(server.url)["vllm_tide:swaps_total"]
    seen = metrics(server.url)
    assert swaps >= 2, f"{server.log_tail()}\n{what_the_trainer_does(server)}"
    assert seen["vllm_tide:captured_rows_total"] > 1000
    assert seen["vllm_tide:draft_version"] >= 2
    installed = seen["vllm_tide:draft_installed_timestamp_seconds"]
    assert began < installed < time.time()
    assert seen["vllm_tide:swap_seconds_count"] == seen["vllm_tide:swaps_total"]
    assert seen["vllm_tide:ring_consumer_alive"] == 1
    assert seen["vllm_tide:ring_capacity_bytes"] > 0
    assert not [name for name in seen if name.startswith("vllm:tide")]
    assert not [name for name in seen if name.startswith("vllm_tide:faults")]
    # Outputs never change: before swaps, after swaps, and against Transformers.
    for i, tokens in first.items():
        assert complete(server.url, PROMPTS[i]) == tokens
    assert first[0] == greedy(folder / "target", PROMPTS[0])
    status = json.loads(next((folder / "run").glob("trainer-*.json")).read_text())
    assert status["published_version"] >= 2
    assert status["model_name"] == "demo"  # as the server's own metrics say


def test_opt_out_travels_over_http(server):
    complete(server.url, PROMPTS[0], vllm_xargs={"tide_capture": False})
    time.sleep(0.6)
    complete(server.url, PROMPTS[1], cache_salt="pepper")
    time.sleep(0.6)
    complete(server.url, PROMPTS[2])
    figures = metrics(server.url)
    assert figures["vllm_tide:dropped_rows_total/opted_out"] == 1
    assert figures["vllm_tide:dropped_rows_total/salted"] == 1


def ask_admin(server: VllmServer, name: str, token: str | None) -> tuple[int, Any]:
    """Status and answer of an admin route."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    method = "GET" if name == "status" else "POST"
    url = f"{server.url}/plugins/vllm_tide/{name}"
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_admin_routes_reach_the_trainer_with_their_token_only(server):
    run_dir = server.options.model.parent / "run"
    token = (run_dir / "admin.token").read_text().strip()
    for name in ("status", "pause", "resume", "rollback"):
        assert ask_admin(server, name, None)[0] == 401
        assert ask_admin(server, name, token[:-1])[0] == 401
    code, said = ask_admin(server, "status", token)
    (answer,) = said["trainers"].values()
    assert code == 200 and answer["status"]["published_version"] >= 2
    assert ask_admin(server, "pause", token)[0] == 200
    assert (run_dir / "paused.json").exists()
    before = complete(server.url, PROMPTS[3])
    assert complete(server.url, PROMPTS[3]) == before
    assert ask_admin(server, "resume", token)[0] == 200
    assert not (run_dir / "paused.json").exists()


def test_a_killed_trainer_never_affects_serving(server):
    (trainer,) = trainers(server)
    trainer.send_signal(signal.SIGKILL)
    before = complete(server.url, PROMPTS[3])
    assert complete(server.url, PROMPTS[3]) == before
    trainer.wait(60)


def test_stopping_the_server_leaves_nothing_behind(server):
    run_dir = server.options.model.parent / "run"
    deadline = time.monotonic() + 120  # the test before may have killed the trainer
    while not (running := trainers(server)) and time.monotonic() < deadline:
        time.sleep(0.2)
    (trainer,) = running
    (manifest,) = read_manifests(run_dir)
    mine = {manifest.ring, manifest.weights}
    assert mine <= ours_in_shm()
    server.stop()
    assert not mine & ours_in_shm()
    assert not read_manifests(run_dir)
    assert not trainer.is_running()
