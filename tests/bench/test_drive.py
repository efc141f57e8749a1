"""An arm is driven against a server that only looks like one."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from aiohttp import web

from bench.harness import arm
from bench.harness.arm import Hooks, LiveView, drive
from tests.bench.toys import request

STREAM = [request(i, f"{i // 2} c", "c", 3) for i in range(4)]


class FakeServer:
    """Streams tokens; counts what it generated."""

    def __init__(self):
        self.generated = 0

    async def completions(self, http):
        body = await http.json()
        reply = web.StreamResponse()
        await reply.prepare(http)
        for token in range(body["max_tokens"]):
            self.generated += 1
            event = json.dumps({"choices": [{"token_ids": [token]}]})
            await reply.write(f"data: {event}\n\n".encode())
        return reply

    async def metrics(self, _):
        return web.Response(text=f"vllm:generation_tokens_total {self.generated}\n")


async def driven(hooks):
    fake = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.completions)
    app.router.add_get("/metrics", fake.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server = SimpleNamespace(
        url=f"http://127.0.0.1:{runner.addresses[0][1]}", memory_mib=dict
    )
    try:
        return await drive(server, STREAM, LiveView("toy", len(STREAM)), hooks)
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def no_settling(monkeypatch):
    monkeypatch.setattr(arm, "SETTLE_S", 0.01)
    monkeypatch.setattr(arm, "WARM_UP_TOKENS", 2)


def test_hooks_see_every_result_and_the_end_of_every_segment():
    seen = []
    hooks = Hooks(
        on_result=lambda r: seen.append(r.index),
        between=lambda part: seen.append(part.name),
    )
    parts, samples = asyncio.run(driven(hooks))
    assert seen[2] == "0 c" and seen[-1] == "1 c" and len(seen) == 6
    assert [part.num_output_tokens for part in parts] == [6, 6]
    generated = [sample.value("vllm:generation_tokens") for sample in samples]
    assert generated == sorted(generated) and generated[-1] - generated[0] == 12


def test_a_fault_in_a_hook_ends_the_arm():
    def broken(_):
        raise RuntimeError("no such status")

    with pytest.raises(RuntimeError, match="no such status"):
        asyncio.run(driven(Hooks(on_sample=broken)))
