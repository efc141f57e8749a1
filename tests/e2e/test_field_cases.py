"""Known bugs of speculation over HTTP: streams, ids, tools, pauses, odd requests.

Each was reported against speculative decoding. A server that drafts in each step is
compared with one without speculation.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.harness.server import ServerOptions, VllmServer
from tests.e2e.test_serve import VENV, metrics
from tests.engine.records import drain
from tests.engine.shared_engine import DEMO
from tests.engine.test_field_cases import PROMPTS
from vllm_tide.transport.record import Phase, Record
from vllm_tide.transport.rendezvous import read_manifests
from vllm_tide.transport.ring import RingReader

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.alone]

TEMPLATE = """{% for message in messages %}{{ message.content }}{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,  # else the arguments are any JSON, and blanks without end
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["x"],
        },
    },
}
CALL = {
    "messages": [{"role": "user", "content": "SELECT name FROM users WHERE id = 7"}],
    "tools": [TOOL],
    "tool_choice": "required",
    "max_tokens": 120,
}
LONG = {"prompt": PROMPTS[0], "max_tokens": 600, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Pair:
    """A server that speculates, with its run directory, and one that does not."""

    tide: VllmServer
    plain: VllmServer
    run_dir: Path

    @property
    def both(self) -> tuple[VllmServer, VllmServer]:
        """The two servers."""
        return self.tide, self.plain


class Reply(NamedTuple):
    """Return status and decoded body; of a stream its events."""

    status: int
    body: Any

    @property
    def answer(self) -> dict[str, Any]:
        """Return the first choice, without fields that differ between servers."""
        return {k: v for k, v in self.body["choices"][0].items() if v is not None}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("field")
    (folder / "template.jinja").write_text(TEMPLATE)
    tide = {"preset": "learn", "run_dir": str(folder / "run")}
    tide |= {"train": {"autostart": False}, "capture": {"ring_mib": 64}}
    config = {"method": "eagle3", "model": str(DEMO / "draft")}
    config |= {"num_speculative_tokens": 5, "tide": tide}
    arguments = ["--chat-template", str(folder / "template.jinja")]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]

    def options(name: str, speculative: str | None) -> ServerOptions:
        return ServerOptions(
            venv=VENV,
            model=DEMO / "target",
            log_path=folder / f"{name}.log",
            speculative_config=speculative,
            extra_args=tuple(arguments),
            extra_env={"VLLM_SERVER_DEV_MODE": "1"},
        )

    with contextlib.ExitStack() as stack:
        both = []
        for name, speculative in (("tide", json.dumps(config)), ("plain", None)):
            both.append(stack.enter_context(VllmServer(options(name, speculative))))
            both[-1].wait_ready(lambda _: None)
        yield Pair(*both, folder / "run")


def open_post(
    server: VllmServer, path: str, body: Any, request_id: str | None = None
) -> Any:
    headers = {"Content-Type": "application/json"}
    if request_id is not None:
        headers["X-Request-Id"] = request_id
    if isinstance(body, dict):
        body = {"model": "demo", "temperature": 0} | body
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, headers)
    return urllib.request.urlopen(request, timeout=240)


def post(
    server: VllmServer,
    body: Any,
    path: str = "/v1/completions",
    request_id: str | None = None,
) -> Reply:
    """Send a request; of a refusal return the status without its message."""
    try:
        with open_post(server, path, body, request_id) as reply:
            text = reply.read().decode()
            if not isinstance(body, dict) or not body.get("stream"):
                return Reply(reply.status, json.loads(text))
            lines = [t[6:] for t in text.splitlines() if t.startswith("data: {")]
            return Reply(reply.status, [json.loads(line) for line in lines])
    except urllib.error.HTTPError as error:
        return Reply(error.code, None)


def on_both(servers: Pair, body: Any, path: str = "/v1/completions") -> list[Reply]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda server: post(server, body, path), servers.both))


def drop(server: VllmServer, number: int, request_id: str | None = None) -> None:
    """Begin a stream and disconnect after some chunks."""
    body = LONG | {"prompt": PROMPTS[number % len(PROMPTS)], "stream": True}
    with open_post(server, "/v1/completions", body, request_id) as reply:
        for _ in islice(reply, 2 * (1 + number % 9)):  # a chunk and an empty line
            pass


def same_answers(servers: Pair, **more: Any) -> None:
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 60, "return_token_ids": True, **more}
        got, want = on_both(servers, body)
        assert got.status == want.status == 200
        assert got.answer == want.answer


def assert_one_request_each(records: list[Record]) -> None:
    """Assert that records of a key are of one text, and follow each other."""
    by_key: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if record.num_rows:
            by_key[record.key].append(record)
    assert len(by_key) > 100
    for own in by_key.values():
        assert len({record.num_prompt_tokens for record in own}) == 1
        place, following = 0, None
        for record in own:
            if place == 0:  # rows in the prefix cache are not computed
                place = record.start
            assert record.start == place
            if following is not None and record.phase == Phase.VERIFY:
                assert record.token_ids[0] == following
            place += record.num_accepted + 1
            following = record.next_token


def idle(server: VllmServer) -> bool:
    """Wait until no request runs or waits; return whether that happened."""
    until = time.monotonic() + 60
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while time.monotonic() < until:
        if not any(metrics(server.url)[name] for name in names):
            return True
        time.sleep(0.2)
    return False


@pytest.mark.timeout(900)
def test_dropped_streams_and_reused_ids_affect_no_other_request(servers):
    """64 streams are dropped, 48 more share three ids, eight at once share one."""
    (manifest,) = read_manifests(servers.run_dir)
    ids = [None] * 64 + [f"r{n % 3}" for n in range(48)]
    records: list[Record] = []
    with (
        contextlib.closing(RingReader.attach(manifest.ring)) as reader,
        ThreadPoolExecutor(8) as pool,
    ):
        for server in servers.both:
            for _ in pool.map(drop, [server] * 112, range(112), ids):
                records += drain(reader)
        bodies = [{"prompt": p, "max_tokens": 60} for p in PROMPTS * 2]
        shared, alone = (
            [
                reply.answer
                for reply in pool.map(
                    lambda body, server=server, name=name: post(
                        server, body, request_id=name
                    ),
                    bodies,
                )
            ]
            for server, name in ((servers.tide, "one"), (servers.plain, None))
        )
        assert idle(servers.tide) and idle(servers.plain)
        records += drain(reader)
    assert shared == alone
    same_answers(servers)
    assert_one_request_each(records)
    log = servers.tide.options.log_path.read_text(errors="replace")
    assert "ERROR" not in log and "Traceback" not in log


@pytest.mark.timeout(900)
def test_a_joined_stream_is_the_whole_answer(servers):
    """Text, ids, logprobs and offsets are equal; usage ends at the number of ids."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    most = 0
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 70, "logprobs": 1}
        body |= {"return_token_ids": True, "ignore_eos": True}
        for server in servers.both:
            whole = post(server, body).body
            (one,) = whole["choices"]
            events = post(server, body | {"stream": True, "stream_options": usage}).body
            chunks = [e["choices"][0] for e in events if e["choices"]]
            assert "".join(c["text"] for c in chunks) == one["text"]
            ids = [token for c in chunks for token in c["token_ids"] or ()]
            assert ids == one["token_ids"]
            logprobs = [c["logprobs"] for c in chunks if c["logprobs"]]
            for name in ("tokens", "text_offset"):
                joined = [entry for each in logprobs for entry in each[name]]
                assert joined == one["logprobs"][name]
            joined = [entry for each in logprobs for entry in each["token_logprobs"]]
            assert joined == pytest.approx(one["logprobs"]["token_logprobs"], abs=2e-3)
            counts = [e["usage"]["completion_tokens"] for e in events]
            assert counts == sorted(counts)
            assert counts[-1] == whole["usage"]["completion_tokens"] == len(ids)
            if server is servers.tide:
                most = max(most, *(len(c["token_ids"] or ()) for c in chunks))
    assert most > 1, "no chunk had several tokens"


def test_counters_agree_with_each_other_and_with_usage(servers):
    before = metrics(servers.tide.url)
    made = 0
    for n in range(12):
        body = {"prompt": PROMPTS[n % 4], "max_tokens": 20 + n}
        made += post(servers.tide, body).body["usage"]["completion_tokens"]
    assert idle(servers.tide)
    after = metrics(servers.tide.url)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    accepted = grown("vllm:spec_decode_num_accepted_tokens_total")
    by_place = grown("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert 0 < accepted == by_place
    assert accepted <= grown("vllm:spec_decode_num_draft_tokens_total")
    assert grown("vllm:generation_tokens_total") == made


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "choice", [NAMED, "required", "auto"], ids=["named", "required", "auto"]
)
def test_tool_calls_equal_those_without_speculation(servers, choice):
    path, body = "/v1/chat/completions", CALL | {"tool_choice": choice}
    whole = on_both(servers, body, path)
    streams = on_both(servers, body | {"stream": True}, path)
    assert [reply.status for reply in (*whole, *streams)] == [200] * 4
    messages = [reply.answer["message"] for reply in whole]
    calls = [message.pop("tool_calls", None) or [] for message in messages]
    functions = [[call["function"] for call in some] for some in calls]
    assert messages[0] == messages[1] and functions[0] == functions[1]
    joined = [_joined(stream.body) for stream in streams]
    assert joined[0] == joined[1]
    if choice != "auto":
        (function,) = functions[0]
        assert function["name"] == "f"
        assert joined[0] == ("", function["arguments"])
        assert json.loads(function["arguments"]).keys() == {"x"}


def _joined(events: list[Any]) -> tuple[str, str]:
    """Return content and arguments of a stream's deltas."""
    deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
    calls = [call["function"] for d in deltas for call in d.get("tool_calls") or ()]
    content = "".join(d.get("content") or "" for d in deltas)
    return content, "".join(call.get("arguments") or "" for call in calls)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_during_an_answer(servers, mode):
    """`keep` and `wait` change no token; `abort` ends the answer as usual."""
    outputs = []
    for server in servers.both:
        before = metrics(server.url)["vllm:generation_tokens_total"]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, server, LONG | {"return_token_ids": True})
            until = time.monotonic() + 60
            while metrics(server.url)["vllm:generation_tokens_total"] < before + 20:
                assert time.monotonic() < until and not answer.done()
                time.sleep(0.01)
            paused = post(server, None, f"/pause?mode={mode}").status
            resumed = post(server, None, "/resume").status
            outputs.append((paused, resumed, answer.result()))
    (*statuses, got), (*other, want) = outputs
    assert statuses == other == [200, 200]
    assert got.status == want.status
    if mode != "abort":
        assert got.answer == want.answer and len(got.answer["token_ids"]) == 600
    same_answers(servers)


ODD = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [5000]},
    {"prompt": [-1]},
    {"prompt": ["SELECT ", "def "]},
    {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True},
    {"prompt": PROMPTS[0], "max_tokens": 2000},
]
ELSEWHERE = {
    "/v1/embeddings": {"input": "SELECT"},
    "/pooling": {"input": "SELECT"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/inference/v1/generate": {
        "token_ids": PROMPTS[0],
        "sampling_params": {"max_tokens": 40, "temperature": 0},
    },
}


def test_unusual_requests_are_answered_as_without_speculation(servers):
    asked = [("/v1/completions", {"max_tokens": 20} | body) for body in ODD]
    for path, body in [*asked, *ELSEWHERE.items()]:
        got, want = on_both(servers, body, path)
        assert got.status == want.status, (path, body)
        if got.status == 200:
            assert got.body["choices"] == want.body["choices"], (path, body)
    same_answers(servers)
