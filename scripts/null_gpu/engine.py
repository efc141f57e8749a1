"""One engine on the null GPU: start, decode, swap of the draft, shutdown.

Argument: JSON case. Prints `RESULT {...}`. Needs the environment of
`scripts/null_gpu.sh`. Computed values have no meaning there, so step results are
patched to one sampled token per request.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import adaptive

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

DEMO = Path(__file__).parents[1] / "demo"
WARM_UP = 12


def main() -> None:
    """Run the case."""
    case = json.loads(sys.argv[1])
    if case["check"]:
        os.environ["VLLM_GPU_SYNC_CHECK"] = "error"
    from counts import Counters
    from vllm import LLM

    speculative = {
        "method": "eagle3",
        "model": str(DEMO / "draft"),
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": case["adaptive"],
    }
    if case["tide"] is not None:
        speculative["tide"] = section(case)
        patch_step_results()
        adaptive.patch_acceptance_model()
    confidence = prices = None
    if case["adaptive"]:
        confidence = adaptive.Confidence()
        if case["tide"] is not None:
            adaptive.patch_measured_times()
            adaptive.patch_observations()
            prices = adaptive.Prices()
    began = time.perf_counter()
    llm = LLM(
        str(DEMO / "target"),
        speculative_config=speculative,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=case["batch"],
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        async_scheduling=case["async"],
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    engine, counters = llm.llm_engine, Counters()
    core = engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    result: dict[str, Any] = {
        "start_s": round(time.perf_counter() - began, 1),
        "runner": type(worker.model_runner).__module__,
        "async": bool(engine.vllm_config.scheduler_config.async_scheduling),
        "at_start": counters.read(),
    }
    bench = Bench(engine, counters, case["batch"])
    bench.begin(WARM_UP + 8)
    bench.finish()
    # Within the model's length, even if all drafts count as accepted.
    bench.begin(900)
    result["prefill"] = bench.window(1)
    bench.step(WARM_UP)
    if prices is not None:
        prices.read()
    result["decode"] = bench.window(case["steps"])
    if prices is not None:
        result["prices"] = prices.read()
    if confidence is not None:
        manager = worker.model_runner.adaptive_verification
        result["cuts"] = adaptive.cuts(manager, confidence, prices, bench)
    if worker.tide is not None:
        result |= with_tide(worker, bench, case)
    bench.abort()
    result["faults"] = {} if worker.tide is None else dict(worker.tide._faults())
    core.shutdown()
    result["shut_down"] = True
    print("RESULT " + json.dumps(result), flush=True)


def section(case: dict[str, Any]) -> dict[str, Any]:
    """Return the `tide` section of a case."""
    return case["tide"] | {"run_dir": case["run_dir"]}


def patch_step_results() -> None:
    """Patch the results of a step to one sampled token: null kernels write none."""
    import numpy as np

    from vllm_tide.capture.step import Step

    read = Step.read

    def landed(step: Step) -> None:
        drafted, padding, bounds = step.drafts, step.padding, step.bounds
        read(step)
        step.bounds = bounds  # no kernel packed those on the device
        step.emitted[:] = 1
        step.start = np.maximum(step.start, 0)
        if step.cut:  # the host's even split is unchanged
            step.logit_ends = step.bounds[1:]
            step.drafts = np.diff(step.bounds) - 1
            step.padding = np.minimum(padding, step.drafts)
            step.trimmed = np.where(padding > 0, 0, drafted - step.drafts)

    Step.read = landed


class Bench:
    """Driver of an engine's steps that counts calls.

    Args:
        engine: vLLM's `LLMEngine`, in this process.
        counters: Counters of the null GPU.
        batch: Number of concurrent requests.
    """

    def __init__(self, engine: Any, counters: Any, batch: int) -> None:
        self._engine = engine
        self._counters = counters
        self._batch = batch
        self._begun = 0

    def begin(self, tokens: int) -> None:
        """Queue a batch of requests with `tokens` output tokens each."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False
        )
        self._names = [f"{self._begun}-{i}" for i in range(self._batch)]
        self._begun += 1
        for i, name in enumerate(self._names):
            prompt = {"prompt_token_ids": list(range(5 + i, 25 + i))}
            self._engine.add_request(name, prompt, sampling)

    def step(self, count: int = 1) -> None:
        """Run steps."""
        for _ in range(count):
            self._engine.step()

    def finish(self) -> None:
        """Run steps until all requests have finished."""
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def abort(self) -> None:
        """Abort the requests."""
        self._engine.abort_request(self._names)
        self.finish()
        self.step(2)

    def window(self, steps: int) -> dict[str, Any]:
        """Return counts and median host milliseconds per step."""
        seconds = []
        before = self._counters.read()
        for _ in range(steps):
            began = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - began)
        after = self._counters.read()
        counts = {name: (after[name] - before[name]) / steps for name in after}
        return {
            **{name: round(count, 2) for name, count in counts.items()},
            "host_ms": round(1e3 * statistics.median(seconds), 3),
        }


def with_tide(worker: Any, bench: Bench, case: dict[str, Any]) -> dict[str, Any]:
    """Return the results of capture, and of a swap while requests decode."""
    tide, result = worker.tide, {}
    if tide.capture is not None:
        result["captured_rows"] = tide.capture.rows
        result["dropped"] = dict(tide.capture.dropped) | dict(tide._ring.dropped_rows)
        result["lost_steps"] = tide._log.lost
        result["read_back"] = read_back(tide._ring.name)
    if tide.swapper is not None:
        result["swap"] = swap(worker, bench)
    if tide.control is not None:
        if case["tide"]["control"]["policy"] == "adaspec":
            result["predicts"] = tide.control.times is not None
        result["lengths"] = lengths(tide.control, bench)
    return result


def read_back(ring: str) -> dict[str, int]:
    """Read the ring like a trainer and count its records and rows."""
    from vllm_tide.transport.ring import RingReader

    reader, rows, records = RingReader.attach(ring), 0, 0
    while (record := reader.read()) is not None:
        rows, records = rows + record.num_rows, records + 1
    result = {"records": records, "rows": rows}
    result["corrupt"] = reader.stats().corrupt_records
    reader.close()
    return result


def lengths(control: Any, bench: Bench) -> dict[str, Any]:
    """Return the counts of a step at each fixed speculative length."""
    control.stop()
    result = {}
    for depth in range(control.num_speculative_tokens, -1, -1):
        control.depth = depth
        bench.step(6)
        result[str(depth)] = bench.window(10)
    return result


def swap(worker: Any, bench: Bench) -> dict[str, Any]:
    """Publish another draft, run steps until it is live; count the swap's step."""
    import torch
    from safetensors.torch import load_file

    from vllm_tide.engine.staging import wire_view
    from vllm_tide.transport.weights import WeightsWriter

    tide, draft = worker.tide, worker.model_runner.get_draft_model()
    tensors = load_file(DEMO / "draft" / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"] * 0.5
    tensors.pop("t2d", None)
    fit = {n: t for n, t in tensors.items() if n not in tide.swapper.shared}
    addresses = {name: p.data_ptr() for name, p in draft.named_parameters()}
    graphs = bench._counters.read()["graphs"]
    writer = WeightsWriter.attach(tide._segment.name)
    writer.publish(
        {
            name: (
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                wire_view(t.contiguous()),
            )
            for name, t in fit.items()
        },
        version=1,
        parent_version=0,
        meta={},
    )
    deadline = time.monotonic() + 60
    while not tide.swapper.ready_version() and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(40):
        step = bench.window(1)
        if tide.swapper.version == 1:
            break
    after = {name: p.data_ptr() for name, p in draft.named_parameters()}
    fc = dict(draft.named_parameters())["model.fc.weight"]
    served = torch.empty(fc.shape, dtype=fc.dtype)
    served.copy_(fc)
    bench.step(5)
    writer.close()
    return {
        "version": tide.swapper.version,
        "refused": dict(tide.swapper.stager.refused),
        "seconds": round(tide.swapper._last_seconds, 6),
        "step": step,
        "same_addresses": after == addresses,
        "same_graphs": bench._counters.read()["graphs"] == graphs,
        # The null GPU executes copies.
        "new_weights_are_served": bool(torch.equal(served, fit["fc.weight"])),
    }


if __name__ == "__main__":
    main()
