#!/usr/bin/env python
"""Cost of control, as it is served, while its draft is of no use.

Two servers are up at once on the same core: one without a speculative configuration
(`none`), one with `eagle3`, adaspec and their defaults whose draft proposes nonsense
(`off`: the rows of its `fc` are shuffled). A block is a visit of none, one of off and
one of none again on the same requests: a closed loop of new prompts, so prefills come
between the decode steps; prefix caching is on and emptied before each visit, and the
server that waits is stopped (SIGSTOP). Visits are short: how fast a shared host is
changes by about as much within a second as within a minute, so many short visits say
more than few long ones. The first block of a batch size is not counted: control learns
there that nothing pays.

`ratio` is output tokens per second over none's (1: off is free), `cpu_ratio` the same
per CPU second of the engine, which a busy neighbour disturbs far less: geometric means
over blocks with 95% intervals (Student's t of the logarithms). `none_ratio` compares
the two visits of none: what this machine calls equal.

    scripts/bench/off_cost.py [--batches 1,4,16,48] [--minutes 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.blocks import ratio_of
from bench.harness.client import RequestResult, make_session, send
from bench.harness.common import clock_text, environment
from bench.harness.measure import first_wave_tokens
from bench.harness.models import kv_cache_bytes, read_config, targets_of
from bench.harness.scrape import Scrape, Scraper, tide_values
from bench.harness.server import (
    SERVED_NAME,
    ServerOptions,
    VllmServer,
    end_on_signals,
    leave_if_ended,
)
from bench.harness.stream import BenchRequest, load_pool

DEMO = Path(__file__).resolve().parents[1] / "demo"
DOMAIN = "python"
NONE, OFF = "none", "off"
BESIDE_S = 0.6  # of a visit, for its metrics and for stopping the server
START_S = 90.0  # both servers, and a first visit of each batch size


@dataclass(frozen=True, slots=True)
class Visit:
    """Outcome of the requests of a visit."""

    rate: float  # output tokens per second
    cpu_rate: float  # output tokens per CPU second of the engine
    tide: dict[str, Any]
    tokens: list[list[int]]


def useless_draft(draft: Path, folder: Path) -> Path:
    """A copy of a draft whose `fc` reads the target's features in a wrong order."""
    import torch
    from safetensors.torch import load_file, save_file

    made = folder / "useless"
    made.mkdir()
    (made / "config.json").write_bytes((draft / "config.json").read_bytes())
    tensors = load_file(draft / "model.safetensors")
    order = torch.Generator().manual_seed(0)
    weight = tensors["fc.weight"]
    shuffled = weight.flatten()[torch.randperm(weight.numel(), generator=order)]
    tensors["fc.weight"] = shuffled.reshape(weight.shape)
    save_file(tensors, made / "model.safetensors")
    return made


def speculative_config(draft: Path, run_dir: Path) -> str:
    """Control with the defaults that users get, and nothing beside it."""
    return json.dumps(
        {
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": 7,
            "tide": {
                "run_dir": str(run_dir),
                "preset": "control",
                "control": {"policy": "adaspec"},
            },
        }
    )


def engine_cpu_s(server: VllmServer) -> float:
    times = [p.cpu_times() for p in server.processes()["engine"]]
    return float(sum(t.user + t.system for t in times))


async def visit(
    server: VllmServer, requests: Sequence[BenchRequest], batch: int
) -> Visit:
    """Serve requests, `batch` at a time, from an empty prefix cache.

    Raises:
        RuntimeError: A request failed.
    """
    async with make_session() as session:
        async with session.post(server.url + "/reset_prefix_cache") as reply:
            reply.raise_for_status()
        scraper = Scraper(server.url, time.perf_counter())
        queue = iter(requests)

        async def worker() -> list[RequestResult]:
            return [
                await send(session, server.url, SERVED_NAME, r, scraper.origin_s)
                for r in queue
            ]

        before: Scrape = await scraper.read(session)
        cpu_s, began = engine_cpu_s(server), time.perf_counter()
        served = await asyncio.gather(*(worker() for _ in range(batch)))
        seconds = time.perf_counter() - began
        cpu_s = engine_cpu_s(server) - cpu_s
        after = await scraper.read(session)
    results = sorted(itertools.chain(*served), key=lambda result: result.index)
    if failed := [r.error for r in results if r.error is not None]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    tokens = [list(result.token_ids) for result in results]
    total = sum(map(len, tokens))
    tide = tide_values(before, after)
    return Visit(total / seconds, total / cpu_s, tide, tokens)


def requests_of(
    prompts: Sequence[tuple[int, ...]], first: int, batch: int, count: int, tokens: int
) -> list[BenchRequest]:
    """Requests of a block; the lengths of the first ones are spread."""
    made = []
    for place in range(count):
        length = tokens
        if place < batch:
            length = first_wave_tokens(place, batch, tokens)
        prompt = prompts[(first + place) % len(prompts)][:128]
        made.append(BenchRequest(place, DOMAIN, prompt, length))
    return made


def summary(batch: int, blocks: Sequence[Sequence[Visit]]) -> dict[str, Any]:
    """A row: ratios of each block's visit of off to its two of none."""

    def ratios(of: str) -> list[list[float]]:
        return [[math.log(getattr(visit, of)) for visit in block] for block in blocks]

    def against_none(of: str) -> list[float]:
        return [off - (one + two) / 2 for one, off, two in ratios(of)]

    row: dict[str, Any] = {"batch": batch, "blocks": len(blocks)}
    for name, logs in (
        ("", against_none("rate")),
        ("cpu_", against_none("cpu_rate")),
        ("none_", [two - one for one, _, two in ratios("rate")]),
    ):
        mean, low, high = ratio_of(logs)
        row |= {f"{name}ratio": mean, f"{name}low": low, f"{name}high": high}
    row["outputs_equal"] = all(
        visit.tokens == block[0].tokens for block in blocks for visit in block
    )
    row["tide"] = [block[1].tide for block in blocks]
    return row


def told(row: dict[str, Any]) -> str:
    """A row in words."""

    def ratio(name: str) -> str:
        low, high = row[f"{name}low"], row[f"{name}high"]
        text = f"{row[f'{name}ratio']:.4f}"
        return text if low is None else f"{text} [{low:.4f}, {high:.4f}]"

    return (
        f"batch {row['batch']:3d}: tokens/s over none's {ratio('')}, per CPU second "
        f"{ratio('cpu_')}, none over itself {ratio('none_')}; {row['blocks']} blocks"
    )


class Run:
    """Both servers, and the blocks so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.batches = [int(b) for b in options.batches.split(",")]
        self.blocks: dict[int, list[list[Visit]]] = {b: [] for b in self.batches}
        self._counts: dict[int, int] = {}
        self._turns = 0

    def serve(self, target: Path, stack: ExitStack, folder: Path) -> None:
        """Start the servers; they end with `stack`."""
        o, most = self.options, max(self.batches)
        run_dir = folder / "run"
        run_dir.mkdir(mode=0o700)
        off = speculative_config(useless_draft(o.draft, folder), run_dir)
        memory = kv_cache_bytes(read_config(target), most, 512, 4)
        self._prompts = load_pool(o.prompts, target, [DOMAIN]).prompts[DOMAIN]
        self._servers = {}
        for name, config in ((NONE, None), (OFF, off)):
            options = ServerOptions(
                venv=Path(sys.prefix),
                model=target,
                log_path=folder / f"{name}.log",
                speculative_config=config,
                max_model_len=512,
                max_num_seqs=most,
                kv_cache_bytes=memory,
                # For /reset_prefix_cache.
                extra_env={"VLLM_SERVER_DEV_MODE": "1"},
            )
            server = stack.enter_context(VllmServer(options))
            server.wait_ready(lambda _: None)
            server.pause()
            self._servers[name] = server

    def block(self, batch: int) -> None:
        """A block; the first of a batch size settles how many requests they have."""
        o, first = self.options, batch not in self._counts
        count = self._counts.get(batch, 2 * batch)
        prompts = (self._prompts, self._turns, batch, count, o.output_tokens)
        requests = requests_of(*prompts)
        self._turns += count
        visits = []
        for name in (NONE, OFF, NONE):
            server = self._servers[name]
            server.resume()
            visits.append(asyncio.run(visit(server, requests, batch)))
            server.pause()
        if first:
            wanted = visits[-1].rate * o.seconds / o.output_tokens
            self._counts[batch] = max(3 * batch // 2, round(wanted))
        else:
            self.blocks[batch].append(visits)

    def rows(self) -> list[dict[str, Any]]:
        return [summary(b, blocks) for b, blocks in self.blocks.items() if blocks]


def main() -> int:
    """Run blocks until the time is over and print; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--model-size", default="90m", help="inflate the target to it")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft")
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts")
    parser.add_argument("--batches", default="1,4,16,48", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a visit, about")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--work", type=Path, help="where inflated targets are kept")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    run = Run(options)
    each = 3 * (options.seconds + BESIDE_S)
    left = 60 * options.minutes - START_S - each * len(run.batches)
    print(
        f"plan: blocks of none, off, none at batch {options.batches} in turn, about "
        f"{max(1, int(left / each / len(run.batches)))} of each, until "
        f"{clock_text(60 * options.minutes)} have passed",
        flush=True,
    )
    began, turns = time.monotonic(), 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sizes = [options.model_size] if options.model_size else []
        [target] = targets_of(options.target, sizes, options.work or folder, print)
        run.serve(target.path, stack, folder)
        # A block of each that is not counted, and one at least that is.
        while turns < 2 or time.monotonic() - began < 60 * options.minutes:
            for batch in run.batches:
                leave_if_ended()
                run.block(batch)
            turns += 1
            for row in run.rows():
                print(told(row), flush=True)
    if options.json:
        from json_text import json_text

        facts = {"target": target.facts, "seconds": options.seconds}
        document = {"rows": run.rows(), "environment": environment(facts)}
        options.json.write_text(json_text(document))
    return 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
