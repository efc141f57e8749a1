"""Client that sends a stream to `/v1/completions` and records the responses.

Requests are greedy and streamed. With `ignore_eos` the number of output tokens is
fixed, otherwise the model may end the output. Outputs are compared by token ids
(`return_token_ids`), because equal texts can have different tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.harness.stream import BenchRequest, StreamRequest

# A prompt is text or token ids.
Sendable = StreamRequest | BenchRequest


@dataclass(slots=True)
class RequestResult:
    """Result of one request; times in seconds since the run's start."""

    index: int
    segment: str
    start_s: float
    ttft_s: float | None = None  # from the start of the request
    end_s: float | None = None
    num_prompt_tokens: int | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_chunks: int = 0  # events that carried tokens: one per engine step
    # Arrival (seconds since the run's start) and number of tokens of each chunk.
    chunks: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str | None = None
    max_gap_s: float = 0.0  # longest pause between two chunks after the first
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def e2e_s(self) -> float:
        if self.end_s is None:
            raise ValueError(f"request {self.index} did not end")
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        if self.ttft_s is None or len(self.token_ids) < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (len(self.token_ids) - 1)


def payload(
    model: str, request: Sendable, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the request body, with the keys of `extra` added."""
    prompt = request.prompt
    return {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": request.ignore_eos,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        **(extra or {}),
    }


def take_event(line: bytes, result: RequestResult) -> bool:
    """Add one server-sent line to the result; return whether it carried tokens."""
    if not line.startswith(b"data:"):
        return False
    body = line[5:].strip()
    if not body or body == b"[DONE]":
        return False
    event = json.loads(body)
    if "error" in event:
        result.error = f"server error: {event['error']}"
        return False
    if event.get("usage"):
        result.num_prompt_tokens = event["usage"].get("prompt_tokens")
    has_tokens = False
    for choice in event.get("choices", ()):
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
        if choice.get("prompt_token_ids"):
            result.prompt_token_ids = list(choice["prompt_token_ids"])
        if choice.get("token_ids"):
            result.token_ids.extend(choice["token_ids"])
            result.num_chunks += 1
            has_tokens = True
    return has_tokens


async def _consume(
    response: aiohttp.ClientResponse, result: RequestResult, origin_s: float
) -> None:
    last: float | None = None
    async for line in response.content:
        before = len(result.token_ids)
        if take_event(line, result):
            now = time.perf_counter()
            result.chunks.append((now - origin_s, len(result.token_ids) - before))
            if last is None:
                result.ttft_s = now - origin_s - result.start_s
            else:
                result.max_gap_s = max(result.max_gap_s, now - last)
            last = now


async def send(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    request: Sendable,
    origin_s: float,
    extra: Mapping[str, Any] | None = None,
    on_start: Callable[[RequestResult], None] | None = None,
) -> RequestResult:
    """Send one request and wait for its end; an error is stored in the result."""
    start_s = time.perf_counter() - origin_s
    result = RequestResult(request.index, request.segment, start_s)
    if on_start is not None:
        on_start(result)
    try:
        async with session.post(
            url + "/v1/completions", json=payload(model, request, extra)
        ) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                result.error = f"HTTP {response.status}: {text}"
            else:
                await _consume(response, result, origin_s)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.end_s = time.perf_counter() - origin_s
    num_tokens = len(result.token_ids)
    stopped = result.finish_reason == "stop" and not request.ignore_eos
    if result.error is None and not stopped and num_tokens != request.max_tokens:
        result.error = f"{num_tokens} tokens instead of {request.max_tokens}"
    return result


async def replay(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    requests: Sequence[StreamRequest],
    origin_s: float,
    on_result: Callable[[RequestResult], None],
) -> list[RequestResult]:
    """Send requests in order, wait for all, and return their results in order."""
    results: list[RequestResult] = []
    in_flight: set[asyncio.Task[RequestResult]] = set()

    async def wait_below(limit: int) -> None:
        nonlocal in_flight
        while len(in_flight) >= limit:
            done, in_flight = await asyncio.wait(
                in_flight, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                results.append(task.result())
                on_result(task.result())

    try:
        for request in requests:
            await wait_below(request.concurrency)
            task = asyncio.create_task(send(session, url, model, request, origin_s))
            in_flight.add(task)
        await wait_below(1)
    finally:
        for task in in_flight:
            task.cancel()
    return sorted(results, key=lambda result: result.index)


def make_session(request_timeout_s: float = 600.0) -> aiohttp.ClientSession:
    """Return a session with a timeout of `request_timeout_s` per request."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=request_timeout_s),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=1 << 20,
    )
