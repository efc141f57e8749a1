"""Requests that are malformed, aborted, or too many for the KV cache."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp

from bench.harness.client import payload
from bench.harness.server import SERVED_NAME

from .counters import total
from .fault import Fault
from .scene import MAX_SEQS, NotRecovered, Scene

QUEUES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_SOON_S = 0.1
PREEMPTED = "vllm:num_preemptions_total"
UNREADABLE = "vllm_tide:dropped_rows_total{malformed_opt_out}"

# Valid for vLLM but not for us: the request is served, nothing is captured.
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
    """Send unusual and invalid values in `vllm_xargs`."""
    before = total(await scene.reading(), UNREADABLE)
    scene.struck()
    sent = [rng.choice(_ODD[:4]), rng.choice(_ODD), *rng.sample(_WILD, 3)]
    replies = await asyncio.gather(*(_send(scene, value) for value in sent))
    for value, wrong in zip(sent, replies, strict=True):
        if wrong:
            raise NotRecovered(f"vllm_xargs {json.dumps(value)[:60]}: {wrong}")
    await scene.until("a count", lambda r: total(r, UNREADABLE) > before)


async def _send(scene: Scene, value: Any) -> str:
    """Return the error of an answer that is neither right nor refused with a reason."""
    ask = scene.load.ask()
    wrong = await scene.load.request(ask, {"vllm_xargs": value})
    refused = wrong.startswith("HTTP 4") and '"message"' in wrong
    if value in _UNSENDABLE and wrong.startswith("server error"):
        refused = True
    return "" if refused else wrong


async def abort_requests(scene: Scene, rng: random.Random) -> None:
    """Abort requests: before the first token, or after some."""
    scene.struck()
    waits = [_SOON_S, *(rng.uniform(0.0, 0.3) for _ in range(rng.randint(0, 4)))]
    await asyncio.gather(*(_hang_up(scene, wait) for wait in waits))
    await scene.until(
        "the end of what was given up",
        lambda r: sum(r.get(name, 99) for name in QUEUES) <= scene.load.clients,
    )


async def _hang_up(scene: Scene, after_s: float) -> None:
    """Send a long request and disconnect: soon, or a while after its first token."""
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
    """Send more long requests than the KV cache holds: some are preempted."""
    before = total(await scene.reading(), PREEMPTED)
    scene.struck()
    for _ in range(4):
        asks = [scene.load.ask((120, 170)) for _ in range(MAX_SEQS + 4)]
        replies = await asyncio.gather(*(scene.load.request(ask) for ask in asks))
        for wrong in filter(None, replies):
            raise NotRecovered(wrong)
        if total(await scene.reading(), PREEMPTED) > before:
            return
    raise NotRecovered("nothing was preempted")


FAULTS = (
    Fault("malformed_xargs", malformed_xargs, UNREADABLE),
    Fault(
        "abort_requests",
        abort_requests,
        None,
        uncounted="vLLM counts none; the suite reads that the queues are empty again",
    ),
    Fault("exhaust_kv", exhaust_kv, PREEMPTED),
)
