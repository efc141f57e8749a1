import asyncio
import json
import time

from aiohttp import web

from bench.harness.client import make_session, replay
from bench.harness.stream import StreamRequest

CYCLE = (1, 1, 3, 3, 3, 3, 2, 2)


class FakeServer:
    """Streams `max_tokens` tokens, two at a time, and watches the concurrency."""

    def __init__(self):
        self.now = 0
        self.most = {}
        self.order = []

    async def completions(self, request):
        body = await request.json()
        index = int(body["prompt"])
        self.order.append(index)
        self.now += 1
        self.most[index] = self.now
        try:
            if index == 5:
                return web.Response(status=500, text="broken")
            reply = web.StreamResponse()
            await reply.prepare(request)
            wanted = body["max_tokens"] - (2 if index == 6 else 0)
            for start in range(0, wanted, 2):
                await asyncio.sleep(0.005)
                choice = {"token_ids": [start, start + 1], "text": "x"}
                if start == 0:
                    choice["prompt_token_ids"] = [index]
                event = json.dumps({"choices": [choice]})
                await reply.write(f"data: {event}\n\n".encode())
            await reply.write(b"data: [DONE]\n\n")
            return reply
        finally:
            self.now -= 1


async def _replay():
    fake = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    stream = [
        StreamRequest(i, "before_shift", False, "", str(i), 8, limit)
        for i, limit in enumerate(CYCLE)
    ]
    seen = []
    async with make_session() as session:
        results = await replay(
            session,
            f"http://127.0.0.1:{port}",
            "demo",
            stream,
            time.perf_counter(),
            seen.append,
        )
    await runner.cleanup()
    return fake, results, seen


def test_a_stream_is_replayed_in_order_within_its_concurrency():
    fake, results, seen = asyncio.run(_replay())
    assert fake.order == list(range(8))
    assert [r.index for r in results] == list(range(8))
    assert len(seen) == 8
    assert all(fake.most[i] <= limit for i, limit in enumerate(CYCLE))
    assert fake.most[0] == fake.most[1] == 1
    good = results[0]
    assert good.ok and good.token_ids == list(range(8))
    assert good.num_chunks == 4 and good.prompt_token_ids == [0]
    assert 0 < good.ttft_s < good.e2e_s


def test_failed_and_cut_requests_are_errors_that_say_why():
    _, results, _ = asyncio.run(_replay())
    assert results[5].error == "HTTP 500: broken"
    assert results[6].error == "6 tokens instead of 8"
    assert [r.ok for r in results].count(False) == 2
