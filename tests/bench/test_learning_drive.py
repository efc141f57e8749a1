"""An arm is driven against a server that only looks like one."""

import asyncio
import json
import os
import time
from types import SimpleNamespace

import pytest
from aiohttp import web

from bench.harness import arm as arm
from bench.harness import samples as learning_capture
from bench.harness import session as learning_session
from bench.harness.arm import ArmRun, Hooks, LiveView, drive
from bench.harness.common import ServerError
from bench.harness.samples import capture
from bench.harness.session import Session
from bench.suites.loss import LossOptions
from tests.bench.learning_toys import options_for, request
from tests.train.toys import HIDDEN, VOCAB, ToyTarget
from vllm_tide.config import parse_tide
from vllm_tide.train.assemble import VERIFY
from vllm_tide.transport.process import start_time
from vllm_tide.transport.record import Record
from vllm_tide.transport.rendezvous import EngineManifest, write_manifest
from vllm_tide.transport.ring import RingSpec, RingWriter
from vllm_tide.transport.weights import WeightsSegment

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


async def driven(hooks, stream=STREAM):
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
        return await drive(server, stream, LiveView("toy", len(stream)), hooks)
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def no_settling(monkeypatch):
    monkeypatch.setattr(arm, "SETTLE_S", 0.01)
    monkeypatch.setattr(arm, "WARM_UP_TOKENS", 2)


def test_hooks_see_every_result_and_the_end_of_every_segment():
    seen = []
    running = []

    async def beside(_server, scraper):
        running.append(scraper.url)
        await asyncio.sleep(60)

    hooks = Hooks(
        on_result=lambda r: seen.append(r.index),
        beside=beside,
        between=lambda part: seen.append(part.name),
    )
    parts, samples = asyncio.run(driven(hooks))
    assert seen[2] == "0 c" and seen[-1] == "1 c" and len(seen) == 6
    assert [part.num_output_tokens for part in parts] == [6, 6]
    assert len(running) == 1
    generated = [sample.value("vllm:generation_tokens") for sample in samples]
    assert generated == sorted(generated) and generated[-1] - generated[0] == 12


def test_what_runs_beside_may_end_before_the_stream():
    parts, _ = asyncio.run(driven(Hooks()))
    assert len(parts) == 2


def test_a_fault_beside_the_stream_ends_the_arm():
    async def beside(_server, _scraper):
        raise ServerError("the ring is gone")

    with pytest.raises(ServerError, match="the ring is gone"):
        asyncio.run(driven(Hooks(beside=beside)))


class Engine:
    """The engine's side of a ring, in this process."""

    def __init__(self, run_dir):
        spec = RingSpec("toy", HIDDEN, (1, 2, 3), VOCAB, "float32", "hidden", 1)
        self.toy = ToyTarget()
        self.ring = RingWriter.create(spec, 1 << 20)
        self.weights = WeightsSegment.create(1 << 20)
        manifest = EngineManifest(
            engine_id="toy",
            pid=os.getpid(),
            pid_start=start_time(os.getpid()) or 0,
            ring=self.ring.name,
            weights=self.weights.name,
            target_path="target",
            draft_path="draft",
            target_dtype="float32",
            hidden_size=HIDDEN,
            vocab_size=VOCAB,
            draft_vocab_size=VOCAB,
            aux_layer_ids=(1, 2, 3),
            teacher="hidden",
            teacher_topk=1,
            feature_dtype="float32",
            num_speculative_tokens=3,
            tide={},
            created_unix=time.time(),
            shared=["lm_head.weight"],
        )
        write_manifest(run_dir, manifest)

    def serve(self, key, branch=False):
        """Ten rows in two records; the second one ends with a rejected draft."""
        doc = self.toy.document(key, 10, 2, key)
        for lo in (0, 5):
            part = slice(lo, lo + 5)
            accepted = 3 if branch and lo else 4
            record = Record(
                key, VERIFY, lo, 2, accepted, -1, 0, doc.tokens[part].numpy(),
                doc.features[part].numpy(), 0,
                doc.teacher_hidden[part].numpy(), finished=lo == 5,
            )  # fmt: skip
            assert self.ring.try_write(record)

    def close(self):
        self.ring.close()
        self.weights.close()


def test_a_stream_is_captured_by_segment_without_the_warm_up(tmp_path, monkeypatch):
    engines = []

    def fake(options, stream, hooks):
        engine = Engine(options.run_dir)
        engines.append(engine)
        engine.serve(99)  # the warm-up's, before anybody reads
        server = SimpleNamespace()

        async def job():
            reader = asyncio.create_task(hooks.beside(server, None))
            await asyncio.sleep(0.05)
            for name, keys in (("0 c", (1, 2)), ("1 docs", (3,))):
                for key in keys:
                    engine.serve(key, branch=True)
                hooks.between(SimpleNamespace(name=name))
            reader.cancel()

        asyncio.run(job())
        hooks.before_stop(server)
        engine.close()
        return ArmRun(options.name, [], [], 1.0)

    monkeypatch.setattr(learning_session, "run_arm", fake)
    options = options_for(LossOptions, "loss", tmp_path)
    served = []

    def arm(session, name, config, stream, **more):
        served.append((session.options, parse_tide(config["tide"])))
        given = SimpleNamespace(name=name, run_dir=more["run_dir"])
        return fake(given, stream, more["hooks"])

    monkeypatch.setattr(Session, "arm", arm)
    document = SimpleNamespace(problem=pytest.fail)
    session = Session(options, None, document, None, None)
    found = capture(session, STREAM, "capture", "draft")
    assert {name: len(part) for name, part in found.parts.items()} == {
        "0 c": 2,
        "1 docs": 1,
    }
    # A part of its own: whole documents at one length, and nobody else reads the ring.
    ((given, tide),) = served
    assert "--no-enable-prefix-caching" in given.serve_args
    assert tide.control.policy == "static" and not tide.train.autostart
    (sample,) = found.parts["1 docs"]
    assert sample.num_tokens == 9 and len(sample.branches) == 1
    assert found.manifest.shared == ["lm_head.weight"] and found.lost == {}
    assert learning_capture.MAX_BRANCHES >= 1 and len(engines) == 1
