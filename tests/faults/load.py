"""Clients in a loop, and checks of every answer.

An accepted request must end with the right tokens; a refused one must have a reason.
Anything else is a problem.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from bench.harness.client import RequestResult, send
from bench.harness.server import SERVED_NAME

from .reference import Known

HANG_S = 120.0
"""A request that takes longer than this (s) hangs."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, in the form of `bench.client.send`."""

    index: int
    prompt: tuple[int, ...]
    right: tuple[int, ...]
    segment: str = "faults"
    ignore_eos: bool = True

    @property
    def max_tokens(self) -> int:
        """Requested output tokens."""
        return len(self.right)


class Load:
    """Steady requests, a few at a time.

    Args:
        session: For all requests.
        known: Prompts and their outputs.
        seed: Of lengths and order.
        clients: Requests at a time.
        tokens: Fewest and most output tokens of a request.

    Attributes:
        url: Of the server; None while there is none.
        right: Answers that were complete and right.
        excused: Requests that a killed server did not answer, by their error.
        clients: Requests at a time.
        extra: Further keys of the clients' requests.
        problems: Messages about wrong answers since they were last taken.
        latencies: End (seconds, monotonic clock) and duration (s) of right answers.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        known: Sequence[Known],
        seed: int,
        clients: int = 3,
        tokens: tuple[int, int] = (8, 32),
    ) -> None:
        self._session, self._known = session, known
        self._rng = random.Random(seed)  # noqa: S311 - not cryptographic
        self.clients, self._number, self._tokens = clients, 0, tokens
        self._open: dict[int, float] = {}
        self._origin_s = time.perf_counter()
        self.url: str | None = None
        self.extra: dict[str, object] | None = None
        self.excused: Counter[str] = Counter()
        self.right = 0
        self.problems: list[str] = []
        self.latencies: list[tuple[float, float]] = []

    def ask(self, tokens: tuple[int, int] | None = None) -> Ask:
        """Return a request with a known answer.

        Args:
            tokens: Fewest and most output tokens; prompts without a clear answer of
                that many are passed over where there are others.
        """
        low, high = tokens or self._tokens
        long = [k for k in self._known if len(k.output) >= low] or self._known
        known = self._rng.choice(long)
        count = min(self._rng.randint(low, high), len(known.output))
        self._number += 1
        return Ask(self._number, known.prompt, known.output[:count])

    async def request(self, ask: Ask, extra: dict[str, object] | None = None) -> str:
        """Send one request and check the answer.

        Returns:
            Its error; empty if it was complete and right.
        """
        url = self.url
        if url is None:
            return "no server"
        self._open[ask.index] = began = time.monotonic()
        try:
            async with asyncio.timeout(HANG_S):
                result = await send(
                    self._session, url, SERVED_NAME, ask, self._origin_s, extra
                )
        except TimeoutError:
            return f"no end after {HANG_S:.0f} s"
        finally:
            del self._open[ask.index]
        wrong = judged(ask, result)
        if not wrong:
            self.right += 1
            now = time.monotonic()
            self.latencies.append((now, now - began))
        elif self.url != url:  # the server was killed on purpose meanwhile
            self.excused[wrong.split(":")[0]] += 1
            return ""
        return wrong

    async def run(self) -> None:
        """Run the clients until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.clients):
                group.create_task(self._client())

    async def settle(self) -> str:
        """Wait for the requests in flight, then for a later right answer.

        Returns:
            The missing event; empty if none.
        """
        began, right, number = time.monotonic(), self.right, self._number
        while time.monotonic() - began < HANG_S + 5:
            if self.right > right and not any(n <= number for n in self._open):
                return ""
            if self.problems:
                return ""
            await asyncio.sleep(0.02)
        return f"no request was right in {HANG_S:.0f} s"

    def take_problems(self) -> list[str]:
        """Return the problems since the last call."""
        problems, self.problems = self.problems, []
        return problems

    async def _client(self) -> None:
        while True:
            if self.url is None:
                await asyncio.sleep(0.05)
                continue
            wrong = await self.request(self.ask(), self.extra)
            if wrong:
                self.problems.append(wrong)
                await asyncio.sleep(0.2)


def judged(ask: Ask, result: RequestResult) -> str:
    """Return the error of an answer; empty if none."""
    if result.error is not None:
        return result.error
    got = tuple(result.token_ids)
    if got == ask.right:
        return ""
    pairs = enumerate(zip(got, ask.right, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), None)
    if place is None:
        return f"wrong length: {len(got)} tokens of {len(ask.right)}"
    return f"wrong token: number {place} of {len(got)} is {got[place]}"
