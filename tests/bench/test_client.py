"""Streams are replayed against a fake server."""

import asyncio
import contextlib
import json
import time

from aiohttp import web

from bench.harness.client import make_session, replay, send
from bench.harness.stream import StreamRequest

CYCLE = (1, 1, 3, 3, 3, 3, 2, 2)


class FakeServer:
    """Streams `max_tokens` tokens, two at a time, and records the concurrency."""

    def __init__(self):
        self.now = 0
        self.most, self.order = {}, []

    async def completions(self, http):
        body = await http.json()
        prompt = body["prompt"]
        self.order.append(prompt)
        self.now += 1
        self.most[prompt] = self.now
        try:
            if prompt == "prompt 5":
                return web.Response(status=500, text="broken")
            reply = web.StreamResponse()
            await reply.prepare(http)
            num_tokens = body["max_tokens"] - (2 if prompt == "prompt 6" else 0)
            for start in range(0, num_tokens, 2):
                await asyncio.sleep(0.005)
                choice = {"token_ids": [start, start + 1], "text": "x"}
                if start + 2 >= num_tokens:
                    choice["finish_reason"] = "stop"
                if start == 0:
                    choice["prompt_token_ids"] = [7]
                event = json.dumps({"choices": [choice]})
                await reply.write(f"data: {event}\n\n".encode())
            await reply.write(b"data: [DONE]\n\n")
            return reply
        finally:
            self.now -= 1


@contextlib.asynccontextmanager
async def served():
    fake = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield fake, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_a_stream_is_replayed_in_order_within_its_concurrency():
    stream = [
        StreamRequest(i, "0 math", "", f"prompt {i}", 8, limit)
        for i, limit in enumerate(CYCLE)
    ]
    seen = []
    may_end = StreamRequest(8, "0 math", "", "prompt 6", 8, 1, ignore_eos=False)

    async def run():
        async with served() as (fake, url), make_session() as session:
            begin = time.perf_counter()
            done = await replay(session, url, "demo", stream, begin, seen.append)
            order = list(fake.order)
            return fake, order, done, await send(session, url, "demo", may_end, begin)

    fake, order, results, ended = asyncio.run(run())
    assert ended.ok and ended.token_ids == list(range(6))  # the model's own end
    assert order == [f"prompt {i}" for i in range(8)]
    assert [r.index for r in results] == list(range(8)) and len(seen) == 8
    assert all(fake.most[f"prompt {i}"] <= limit for i, limit in enumerate(CYCLE))
    assert fake.most["prompt 0"] == fake.most["prompt 1"] == 1
    good = results[0]
    assert good.ok and good.token_ids == list(range(8))
    assert good.num_chunks == 4 and good.prompt_token_ids == [7]
    assert 0 < good.ttft_s < good.e2e_s
    assert results[5].error == "HTTP 500: broken"
    assert results[6].error == "6 tokens instead of 8"
    assert [r.ok for r in results].count(False) == 2
