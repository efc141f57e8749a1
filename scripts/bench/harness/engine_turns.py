"""vLLM engines that take turns on the same cores, some steps at a time.

How fast a shared host is changes by several percent from one second to the next, and as
much over longer times: two servers that are measured one after the other differ by
that. Here each arm's engine is a process of its own, scheduler and all, without HTTP;
one at a time has a turn of a fraction of a second, the others are stopped (SIGSTOP).
Turns end between two steps, and the clocks of a process that waits stand, so that no
step and no round of control is longer for it.

Scheduler and worker send each other their messages serialised, as two processes do.

Run as a script this file is such a process.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MODULE = "bench.harness.engine_turns"


@dataclass(frozen=True, slots=True)
class Turn:
    """What an engine did in a turn.

    Attributes:
        seconds: By the wall clock.
        cpu_s: CPU seconds of its process.
        finished: Number and checksum of the output of each request that ended.
        decode_steps: Of each step without a prompt in it: CPU time of the stepping
            thread (ms), requests, drafts it verified, drafts it made.
        error: Why there is no such thing; empty: all is well.
    """

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    finished: tuple[tuple[int, int], ...] = ()
    decode_steps: tuple[tuple[float, int, int, int], ...] = ()
    error: str = ""


class Engine:
    """An arm's process; stopped outside of its turns.

    Args:
        speculative_config: As `vllm serve` takes it; None: no speculation.
        arguments: More of `vllm serve`'s.
        env: Of the process.
        log: File for what it prints.

    Raises:
        RuntimeError: Of every method, where the engine failed.
    """

    def __init__(
        self,
        model: Path,
        speculative_config: str | None,
        arguments: Sequence[str],
        env: dict[str, str],
        log: Path,
    ) -> None:
        self._log = log
        self._pipe, theirs = Pipe()
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        try:
            self._pipe.send((str(model), speculative_config, list(arguments)))
            self._answer()
        except BaseException:
            self.close()
            raise

    def begin(
        self, prompts: Sequence[Sequence[int]], batch: int, tokens: int, salt: str
    ) -> None:
        """Drop what is under way; keep `batch` of these requests in flight."""
        self._ask("begin", prompts, batch, tokens, salt)

    def turn(self, seconds: float) -> Turn:
        """Run steps for so many seconds."""
        return self._ask("turn", seconds)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, *command: Any) -> Turn:
        self._process.send_signal(signal.SIGCONT)
        self._pipe.send(command)
        return self._answer()

    def _answer(self) -> Turn:
        try:
            turn: Turn = self._pipe.recv()
        except EOFError:
            turn = Turn(error="it has ended")
        if turn.error:
            end = self._log.read_text(errors="replace")[-2000:]  # it may not outlive us
            where = f"an engine failed: {turn.error}; see {self._log}, which ends"
            raise RuntimeError(f"{where}\n{end}")
        self._process.send_signal(signal.SIGSTOP)
        return turn


class Served:
    """The engine inside of the process, and its requests."""

    def __init__(
        self, model: str, speculative_config: str | None, arguments: list[str]
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        words = ["--model", model, *arguments]
        if speculative_config is not None:
            words += ["--speculative-config", speculative_config]
        given = EngineArgs.from_cli_args(parser.parse_args(words))
        self._engine = LLMEngine.from_vllm_config(given.create_engine_config())
        core: Any = self._engine.engine_core
        self._scheduler = core.engine_core.scheduler
        _send_messages(core.engine_core.model_executor)
        self._live: dict[str, list[int]] = {}  # outputs of requests that run

        def sampling(tokens: int) -> SamplingParams:
            return SamplingParams(
                max_tokens=tokens,
                ignore_eos=True,
                temperature=0.0,
                output_kind=RequestOutputKind.DELTA,
            )

        self._sampling = sampling

    def begin(
        self, prompts: list[list[int]], batch: int, tokens: int, salt: str
    ) -> Turn:
        self._engine.abort_request(list(self._live))
        self._live.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._salt, self._next = salt, 0
        self._prompts, self._tokens = prompts, tokens
        for place in range(batch):  # their ends are spread
            self._another(max(1, -(-tokens * (place + 1) // batch)))
        return Turn()

    def turn(self, seconds: float) -> Turn:
        began, cpu_s = time.perf_counter(), time.process_time()
        tokens, steps, finished, decode_steps = 0, 0, [], []
        while time.perf_counter() < began + seconds:
            steps += 1
            verified, running = self._drafts(), self._scheduler.running
            decodes = not self._scheduler.waiting and all(
                r.num_computed_tokens >= r.num_prompt_tokens for r in running
            )
            num, thread_s = len(running), time.thread_time()
            outputs = self._engine.step()
            if decodes:
                spent = 1e3 * (time.thread_time() - thread_s)
                decode_steps.append((spent, num, verified, self._drafts()))
            for output in outputs:
                new = output.outputs[0].token_ids
                known = self._live[output.request_id]
                known += new
                tokens += len(new)
                if output.finished:
                    del self._live[output.request_id]
                    number = int(output.request_id.rpartition(" ")[2])
                    finished.append((number, zlib.crc32(repr(known).encode())))
                    self._another(self._tokens)
        spent, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        return Turn(tokens, steps, spent, cpu_s, tuple(finished), tuple(decode_steps))

    def _drafts(self) -> int:
        """Tokens that wait to be verified."""
        return sum(len(r.spec_token_ids) for r in self._scheduler.running)

    def _another(self, tokens: int) -> None:
        name = f"{self._salt} {self._next}"
        prompt = self._prompts[self._next % len(self._prompts)]
        given = {"prompt_token_ids": list(prompt), "cache_salt": name}
        self._engine.add_request(name, given, self._sampling(tokens))
        self._live[name] = []
        self._next += 1


def _send_messages(executor: Any) -> None:
    """Serialise what scheduler and worker give each other, as between processes."""
    call = executor.collective_rpc

    def sent(value: Any) -> Any:
        return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def send(method: str, *, args: tuple[Any, ...] = (), **more: Any) -> Any:
        answer = call(*sent((method,)), args=sent(args), **more)
        if not isinstance(answer, Future):
            return sent(answer)
        received: Future[Any] = Future()
        received.set_result(sent(answer.result()))
        return received

    executor.collective_rpc = send


def _die_with_parent() -> None:
    """A stopped process would stay for ever if who started it is killed (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _serve(pipe: Connection) -> None:
    """Answer until the other end is closed."""
    real, waited = time.perf_counter, [0.0]
    # Before anything else has taken hold of them.
    for name in ("perf_counter", "monotonic"):
        clock = getattr(time, name)
        setattr(time, name, lambda clock=clock: clock() - waited[0])
    served, answer = Served(*pipe.recv()), Turn()
    while True:
        began = real()  # it may be stopped as soon as the answer is out
        pipe.send(answer)
        try:
            name, *given = pipe.recv()
        except EOFError:
            return
        waited[0] += real() - began
        answer = getattr(served, name)(*given)


if __name__ == "__main__":
    _die_with_parent()
    # As a module, so that what goes through the pipe has the same type at both ends.
    from bench.harness import engine_turns

    connection = Connection(int(sys.argv[1]))
    try:
        engine_turns._serve(connection)
    except Exception as error:  # noqa: BLE001 (told to who started it)
        connection.send(engine_turns.Turn(error=f"{type(error).__name__}: {error}"))
        raise
