"""vLLM engines that run alternately on the same cores, in slices of some steps.

The speed of a shared host changes by several percent from one second to the next, and
as much over longer times, so two servers measured one after the other differ by that.
Here each arm's engine runs in a separate process with its scheduler and without HTTP.
One engine at a time runs for a slice of a fraction of a second; the others are stopped
(SIGSTOP). Slices end between two steps, and the clocks of a stopped process do not
advance, so neither a step nor the controller measures the pause.

Messages between scheduler and worker are serialised, as between two processes.

Run as a script, this file is the engine process.
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

MODULE = "bench.harness.time_slices"


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """Measurements of one engine in one slice.

    Attributes:
        seconds: Wall-clock time.
        cpu_s: CPU seconds of the process.
        finished: Number and output checksum of each finished request.
        decode_steps: For each step without prefill: CPU time of the stepping thread
            (ms), requests, verified draft tokens, proposed draft tokens.
        error: Error message; empty on success.
    """

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    finished: tuple[tuple[int, int], ...] = ()
    decode_steps: tuple[tuple[float, int, int, int], ...] = ()
    error: str = ""


class Engine:
    """Process of an arm's engine; stopped outside of its slices.

    Args:
        speculative_config: As for `vllm serve`; None: no speculation.
        arguments: Further arguments of `vllm serve`.
        env: Environment of the process.
        log: File for its output.

    Raises:
        RuntimeError: The engine failed (from every method).
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
        self._pipe, child_end = Pipe()
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(child_end.fileno())],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                pass_fds=[child_end.fileno()],
            )
        child_end.close()
        try:
            self._pipe.send((str(model), speculative_config, list(arguments)))
            self._receive()
        except BaseException:
            self.close()
            raise

    def begin(
        self, prompts: Sequence[Sequence[int]], batch: int, tokens: int, salt: str
    ) -> None:
        """Abort running requests; keep `batch` of these requests in flight."""
        self._call("begin", prompts, batch, tokens, salt)

    def run_slice(self, seconds: float) -> TimeSlice:
        """Run steps for so many seconds."""
        return self._call("run_slice", seconds)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _call(self, *command: Any) -> TimeSlice:
        self._process.send_signal(signal.SIGCONT)
        self._pipe.send(command)
        return self._receive()

    def _receive(self) -> TimeSlice:
        try:
            result: TimeSlice = self._pipe.recv()
        except EOFError:
            result = TimeSlice(error="the process has ended")
        if result.error:
            # The log may be in a temporary folder, so the message has its end.
            end = self._log.read_text(errors="replace")[-2000:]
            where = f"an engine failed: {result.error}; {self._log} ends with"
            raise RuntimeError(f"{where}\n{end}")
        self._process.send_signal(signal.SIGSTOP)
        return result


class EngineLoop:
    """The engine in its process, and its requests."""

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
        command = ["--model", model, *arguments]
        if speculative_config is not None:
            command += ["--speculative-config", speculative_config]
        engine_args = EngineArgs.from_cli_args(parser.parse_args(command))
        self._engine = LLMEngine.from_vllm_config(engine_args.create_engine_config())
        core: Any = self._engine.engine_core
        self._scheduler = core.engine_core.scheduler
        _serialise_calls(core.engine_core.model_executor)
        self._live: dict[str, list[int]] = {}  # outputs of running requests

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
    ) -> TimeSlice:
        self._engine.abort_request(list(self._live))
        self._live.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._salt, self._next = salt, 0
        self._prompts, self._tokens = prompts, tokens
        for place in range(batch):  # stagger the ends of the first requests
            self._add_request(max(1, -(-tokens * (place + 1) // batch)))
        return TimeSlice()

    def run_slice(self, seconds: float) -> TimeSlice:
        began, cpu_s = time.perf_counter(), time.process_time()
        tokens, steps, finished, decode_steps = 0, 0, [], []
        while time.perf_counter() < began + seconds:
            steps += 1
            verified, running = self._num_drafts(), self._scheduler.running
            decodes = not self._scheduler.waiting and all(
                r.num_computed_tokens >= r.num_prompt_tokens for r in running
            )
            num, thread_s = len(running), time.thread_time()
            outputs = self._engine.step()
            if decodes:
                spent = 1e3 * (time.thread_time() - thread_s)
                decode_steps.append((spent, num, verified, self._num_drafts()))
            for output in outputs:
                new = output.outputs[0].token_ids
                token_ids = self._live[output.request_id]
                token_ids += new
                tokens += len(new)
                if output.finished:
                    del self._live[output.request_id]
                    number = int(output.request_id.rpartition(" ")[2])
                    finished.append((number, zlib.crc32(repr(token_ids).encode())))
                    self._add_request(self._tokens)
        spent, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        done, timed = tuple(finished), tuple(decode_steps)
        return TimeSlice(tokens, steps, spent, cpu_s, done, timed)

    def _num_drafts(self) -> int:
        """Return the number of draft tokens of the next verify step."""
        return sum(len(r.spec_token_ids) for r in self._scheduler.running)

    def _add_request(self, tokens: int) -> None:
        name = f"{self._salt} {self._next}"
        prompt = self._prompts[self._next % len(self._prompts)]
        inputs = {"prompt_token_ids": list(prompt), "cache_salt": name}
        self._engine.add_request(name, inputs, self._sampling(tokens))
        self._live[name] = []
        self._next += 1


def _serialise_calls(executor: Any) -> None:
    """Serialise the messages of scheduler and worker, as between processes."""
    call = executor.collective_rpc

    def copy(value: Any) -> Any:
        return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def send(method: str, *, args: tuple[Any, ...] = (), **more: Any) -> Any:
        answer = call(*copy((method,)), args=copy(args), **more)
        if not isinstance(answer, Future):
            return copy(answer)
        received: Future[Any] = Future()
        received.set_result(copy(answer.result()))
        return received

    executor.collective_rpc = send


def _die_with_parent() -> None:
    """Exit with the parent: a stopped process would stay for ever (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _serve(pipe: Connection) -> None:
    """Answer commands until the other end is closed."""
    real, waited = time.perf_counter, [0.0]
    # Replace the clocks before other modules import them.
    for name in ("perf_counter", "monotonic"):
        clock = getattr(time, name)
        setattr(time, name, lambda clock=clock: clock() - waited[0])
    loop, answer = EngineLoop(*pipe.recv()), TimeSlice()
    while True:
        began = real()  # the process may be stopped once the answer is sent
        pipe.send(answer)
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        waited[0] += real() - began
        answer = getattr(loop, name)(*arguments)


if __name__ == "__main__":
    _die_with_parent()
    # Imported as a module, so both ends of the pipe have the same `TimeSlice` type.
    from bench.harness import time_slices

    connection = Connection(int(sys.argv[1]))
    try:
        time_slices._serve(connection)
    except Exception as error:  # noqa: BLE001 (reported to the parent)
        message = f"{type(error).__name__}: {error}"
        connection.send(time_slices.TimeSlice(error=message))
        raise
