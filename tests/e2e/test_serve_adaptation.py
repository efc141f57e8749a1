"""A real `vllm serve` serves fast drafts during requests, then the base again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bench.harness.server import ServerOptions, VllmServer
from inflate_model import inflate
from tests import toys
from tests.e2e.test_serve import PROMPTS, VENV, complete, metrics, until
from vllm_tide.draft.tensor_bytes import from_bytes
from vllm_tide.transport.rendezvous import read_manifests
from vllm_tide.transport.versions import is_fast, number_of
from vllm_tide.transport.weights import WeightsSegment, peek_weights

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.alone]

# They end at different times: with a slow trainer too, one is always open.
LENGTHS, MIN_TOKENS = (1500, 1100, 800), 32
VERSION, ENDED = "vllm_tide:draft_version", "the long requests have ended"
ADAPT = {"memory": "ngram", "adapt": "shared", "stride": 16, "min_tokens": MIN_TOKENS}
# Ordinary training would change the base.
TRAIN = {"min_new_tokens": 10**9, "batch_tokens": 512}
TIDE = {"preset": "full", "control": {"policy": "adaspec"}}
TIDE |= {"train": TRAIN, "test_time": ADAPT}


def make_target(folder: Path) -> Path:
    """Make a slower toy for long texts with confident predictions."""
    inflate(toys.make_target(folder / "toy"), folder / "target", 8192, 0)
    config, weights = (
        folder / "target" / name for name in ("config.json", "model.safetensors")
    )
    changed = json.loads(config.read_text()) | {"max_position_embeddings": 2048}
    config.write_text(json.dumps(changed))
    tensors = load_file(weights)
    tensors["lm_head.weight"] *= 8  # the same greedy text, learned in a few steps
    save_file(tensors, weights, {"format": "pt"})
    return folder / "target"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[VllmServer]:
    target = make_target(tmp_path)
    draft = toys.make_draft(tmp_path / "draft", target, intermediate_size=128)
    config = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    options = ServerOptions(
        venv=VENV,
        model=target,
        log_path=tmp_path / "server.log",
        speculative_config=json.dumps(
            config | {"tide": TIDE | {"run_dir": str(tmp_path / "run")}}
        ),
        max_model_len=2048,
        extra_env={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    with VllmServer(options) as started:
        started.wait_ready(lambda _: None)
        yield started


@torch.no_grad()
def behind_the_best(target: Path, prompt: list[int], text: list[int]) -> float:
    """Return the gap of tokens to the best logit, as a share of the largest."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    return float((logits.amax(1) - chosen).max() / logits.abs().max())


@pytest.mark.timeout(900)
def test_a_fast_draft_is_served_during_requests_and_the_base_after(server, tmp_path):
    run_dir, enough = tmp_path / "run", threading.Event()
    until(server, "a trainer", lambda _: list(run_dir.glob("trainer-*.json")))
    (manifest,) = read_manifests(run_dir)

    def fast_is_served(_seen: dict[str, float]) -> bool:
        state = peek_weights(manifest.weights)
        return bool(state.feedback and is_fast(state.feedback.installed_version))

    def client(i: int) -> list[int]:
        while True:
            text = complete(server.url, PROMPTS[i], max_tokens=LENGTHS[i])
            assert len(text) == LENGTHS[i]
            if enough.is_set():
                return text

    with ThreadPoolExecutor() as pool:
        clients = [pool.submit(client, i) for i in range(len(LENGTHS))]
        try:
            until(server, "a fast draft in service", fast_is_served)
            assert not any(each.done() for each in clients)
        finally:
            enough.set()
    # Each was open when it was installed, and is the target's (near ties apart).
    for i, each in enumerate(clients):
        gaps = behind_the_best(server.options.model, PROMPTS[i], each.result())
        assert gaps < 1e-4

    (log,) = run_dir.glob("events-*.jsonl")
    until(server, "the end", lambda _: ENDED in log.read_text())
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert "adapted" in events and "cycle" not in events
    segment = WeightsSegment.attach(manifest.weights)

    def base_is_served(seen: dict[str, float]) -> bool:
        sent = segment.read()
        installed = peek_weights(manifest.weights).feedback.installed_version
        return not is_fast(sent.version) and installed == sent.version

    until(server, "the base in service", base_is_served)
    sent, stored = segment.read(), load_file(tmp_path / "draft" / "model.safetensors")
    back = from_bytes(sent.tensors)
    assert number_of(sent.version) == 0 == metrics(server.url)[VERSION]
    assert back and all(torch.equal(back[name], stored[name]) for name in back)
    segment.close()

    seen = metrics(server.url)
    assert seen["vllm_tide:swaps_total"] >= 2
    assert seen["vllm_tide:memory_proposals_total"] > 0
    assert not [name for name in seen if "_tide:faults" in name or "refused" in name]
