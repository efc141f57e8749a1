"""Requests that are malformed, given up, or too many for the KV cache."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import aiohttp

from bench.harness.client import payload
from bench.harness.server import SERVED_NAME
from vllm_tide.cli.main import main
from vllm_tide.cli.trainer import EXIT_ERROR
from vllm_tide.transport.tenant import tenant_id, tenant_key

from .counters import GIVEN_UP, total
from .fault import Fault
from .scene import MAX_SEQS, START_S, NotRecovered, Scene
from .trainer import LOOK, LOOK_FILE, order

QUEUES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
TRIES, COUNT_S = 5, 3.0
"""A request may be complete before a busy server notices that its client hung up: then
nothing is counted in this time (s), and others are given up, so many times."""
FLOOD, HELD_ROWS = 8, 120  # rounds of 8 requests; rows scored of others
_SOON_S = 0.1
PREEMPTED = "vllm:num_preemptions_total"
ROWS = "vllm_tide:captured_rows_total"
STEP, TOKENS = "vllm_tide:measured_step_seconds", "vllm:generation_tokens_total"
UNREADABLE = "vllm_tide:dropped_rows_total{malformed_opt_out}"

# Accepted by vLLM and not readable for us: the request is served, nothing captured.
_ODD: tuple[Any, ...] = (
    {"tide_capture": "perhaps"},
    {"tide_capture": 2},
    {"tide_capture": ""},
    {"tide_capture": [True]},
    {"tide_capture": "maybe", "tide_tenant": [], "tide_slo_tpot_ms": "soon"},
)
# vLLM cannot pass these on to its engine, and answers 500 with an empty message.
_UNSENDABLE: tuple[Any, ...] = ({"tide_tenant": "\ud800"}, {"tide_tenant": 2**80})
# May be refused as well, with a reason.
_WILD: tuple[Any, ...] = (
    {"tide_tenant": ""},
    {"tide_tenant": 1.5},
    {"tide_tenant": "x" * 5000},
    *_UNSENDABLE,
    {"tide_slo_tpot_ms": -1},
    {"tide_slo_tpot_ms": float("nan")},
    {"tide_slo_tpot_ms": [1, 2]},
    {"tide_capture": {"deep": {"er": 1}}},
    {"tide_capture": None},
    {"": 0},
    [],
    "tide_capture",
    7,
)


async def malformed_xargs(scene: Scene, rng: random.Random) -> None:
    """Odd and impossible values in `vllm_xargs`."""
    before = total(await scene.reading(), UNREADABLE)
    scene.struck()
    sent = [rng.choice(_ODD[:4]), rng.choice(_ODD), *rng.sample(_WILD, 3)]
    said = await asyncio.gather(*(_send(scene, value) for value in sent))
    for value, wrong in zip(sent, said, strict=True):
        if wrong:
            raise NotRecovered(f"vllm_xargs {json.dumps(value)[:60]}: {wrong}")
    await scene.until("a count", lambda r: total(r, UNREADABLE) > before)


async def _send(scene: Scene, value: Any) -> str:
    """What was wrong with the answer: neither right nor a refusal with a reason."""
    ask = scene.load.ask()
    wrong = await scene.load.request(ask, {"vllm_xargs": value})
    refused = wrong.startswith("HTTP 4") and '"message"' in wrong
    if value in _UNSENDABLE and wrong.startswith("server error"):
        refused = True
    return "" if refused else wrong


async def abort_requests(scene: Scene, rng: random.Random) -> None:
    """Clients that hang up: before the first token, or after some."""
    before = (await scene.reading()).get(GIVEN_UP, 0)
    scene.struck()
    clients = scene.load.clients
    for again in reversed(range(TRIES)):
        # Only one that had its first token can be counted.
        waits = [_SOON_S, *(rng.uniform(0.0, 0.3) for _ in range(rng.randint(0, 4)))]
        await asyncio.gather(*(_hang_up(scene, wait) for wait in waits))
        await scene.until(
            "the end of what was given up",
            lambda r: sum(r.get(name, 99) for name in QUEUES) <= clients,
        )
        try:
            await scene.until(
                "a count of it", lambda r: r.get(GIVEN_UP, 0) > before, COUNT_S
            )
            return
        except NotRecovered:
            if not again:
                raise


async def _hang_up(scene: Scene, after_s: float) -> None:
    """Send a long request and hang up: soon, or a while after its first token."""
    ask = scene.load.ask((96, 160))
    url = f"{scene.load.url}/v1/completions"
    soon = after_s < _SOON_S
    async with aiohttp.ClientSession() as session:
        try:
            async with (
                asyncio.timeout(after_s if soon else 30),
                session.post(url, json=payload(SERVED_NAME, ask)) as reply,
            ):
                if not soon:
                    await reply.content.readline()
                    await asyncio.sleep(after_s - _SOON_S)
                    return
                await reply.read()
        except TimeoutError:
            return


async def exhaust_kv(scene: Scene, rng: random.Random) -> None:
    """More long requests than the KV cache holds: some are preempted, all end right."""
    before = total(await scene.reading(), PREEMPTED)
    scene.struck()
    for _ in range(4):
        asks = [scene.load.ask((120, 170)) for _ in range(MAX_SEQS + 4)]
        said = await asyncio.gather(*(scene.load.request(ask) for ask in asks))
        for wrong in filter(None, said):
            raise NotRecovered(wrong)
        if total(await scene.reading(), PREEMPTED) > before:
            return
    raise NotRecovered("nothing was preempted")


async def lost_key(scene: Scene, rng: random.Random) -> None:
    """The tenants' key is gone, or another: a purge by name fails, capture goes on."""
    path = scene.run_dir / "state" / "vllm_tide" / "tenants.key"  # see command.py
    key, rows = path.read_text(), (await scene.reading()).get(ROWS, 0)
    scene.struck()
    path.unlink()
    command = ["purge", "--tenant", "acme", "--run-dir", str(scene.run_dir)]
    try:
        for _ in range(2):
            if await asyncio.to_thread(main, command) != EXIT_ERROR:
                raise NotRecovered("a purge with another key did not fail")
            path.write_text(f"{rng.getrandbits(256):064x}")
        await scene.until("captured rows", lambda r: r.get(ROWS, 0) > rows)
    finally:
        path.write_text(key)


async def client_limit(scene: Scene, rng: random.Random) -> None:
    """One client asks for little more than a step per token: the others keep theirs."""
    step_ms = 1e3 * (await scene.reading()).get(STEP, 0.01) * rng.uniform(0.5, 1.3)
    scene.struck()
    for _ in range(TRIES):
        rates = []
        for said in ({}, {"tide_slo_tpot_ms": step_ms}):
            ask, extra = scene.load.ask, dict[str, object](vllm_xargs=said)
            began, before = time.monotonic(), (await scene.reading()).get(TOKENS, 0)
            wrong = [await scene.load.request(ask(), extra) for _ in range(12)]
            if any(wrong):
                raise NotRecovered(max(wrong))
            tokens = (await scene.reading()).get(TOKENS, 0) - before
            rates.append(tokens / (time.monotonic() - began))
        if rates[1] > 0.8 * rates[0]:
            return
    raise NotRecovered(f"{rates[1]:.0f} of {rates[0]:.0f} tokens per second are left")


async def flood(scene: Scene, rng: random.Random) -> None:
    """More than the gate holds, without a name or each by a new one."""
    load, file = scene.load, scene.run_dir / LOOK_FILE
    honest = tenant_id("honest", tenant_key(scene.run_dir, None))

    async def look() -> list[float]:
        path = order(scene.run_dir, LOOK, honest)
        await scene.until("a look at the gate", lambda _: not path.exists(), START_S)
        return list(json.loads(file.read_text("utf-8")))

    load.extra = {"vllm_xargs": {"tide_tenant": "honest"}}
    try:
        while (before := await look())[0] < HELD_ROWS:
            await asyncio.sleep(1.0)
        scene.struck()
        for _ in range(FLOOD):
            new = {"vllm_xargs": {"tide_tenant": str(rng.random())}}
            sent = [load.request(load.ask((96, 160)), e) for e in (new, {}) * 4]
            load.problems += filter(None, await asyncio.gather(*sent))
        rows, accepted, error = await look()
    finally:
        load.extra = None
        file.unlink(missing_ok=True)
    if rows < 0.75 * HELD_ROWS or accepted < before[1] - 2 * (before[2] + error):
        raise NotRecovered(f"the gate on others: {before}, now {rows, accepted, error}")


FAULTS = (
    Fault("lost_key", lost_key, None, uncounted="the purge fails in a sentence"),
    Fault("client_limit", client_limit, None, uncounted="throughput is compared"),
    Fault("malformed_xargs", malformed_xargs, UNREADABLE),
    Fault("abort_requests", abort_requests, GIVEN_UP),
    Fault("exhaust_kv", exhaust_kv, PREEMPTED),
    Fault("flood", flood, None, uncounted="what is held is read"),
)
