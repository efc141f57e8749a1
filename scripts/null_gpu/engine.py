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
import threading
import time
from pathlib import Path
from typing import Any

import adaptive

from depths import Depths

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

DEMO = Path(__file__).parents[1] / "demo"
WARM_UP, DRAFTED = 12, 3
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 1 << 28,
    "enable_prefix_caching": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
"""Default options of `vllm.LLM`."""


def main() -> None:
    """Run the case."""
    case = json.loads(sys.argv[1])
    if case["check"]:
        os.environ["VLLM_GPU_SYNC_CHECK"] = "error"
    from counts import Counters
    from vllm import LLM

    speculative = {
        "method": case.get("method", "eagle3"),
        "model": str(draft_folder(case)),
        "num_speculative_tokens": DRAFTED,
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
    options = {
        "max_num_seqs": case["batch"],
        "async_scheduling": case["async"],
        **ENGINE,
        **case.get("engine", {}),
    }
    publisher = Publisher(case["run_dir"]) if case.get("publish_at_start") else None
    llm = LLM(str(DEMO / "target"), speculative_config=speculative, **options)
    if publisher is not None:
        publisher.end()
    engine, counters = llm.llm_engine, Counters()
    core = engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    result: dict[str, Any] = {
        "start_s": round(time.perf_counter() - began, 1),
        "runner": type(worker.model_runner).__module__,
        "async": bool(engine.vllm_config.scheduler_config.async_scheduling),
        "at_start": counters.read(),
    }
    if publisher is not None:
        result["published_at_start"] = publisher.published
    bench = Bench(engine, counters, case["batch"])
    depths = None if worker.tide is None else Depths(worker.tide)
    alias = Alias(worker, counters) if case.get("alias") else None
    bench.begin(WARM_UP + 8)
    bench.finish()
    # Within the model's length, even if all drafts count as accepted.
    bench.begin(900)
    result["prefill"] = bench.window(1)
    if depths is not None:
        depths.freeze(DRAFTED)  # as upstream
    bench.step(WARM_UP)
    if prices is not None:
        prices.read()
    if depths is not None:
        depths.clear()
    result["decode"] = bench.window(case["steps"])
    if depths is not None:
        depths.check()
    if prices is not None:
        result["prices"] = prices.read()
    if confidence is not None:
        manager = worker.model_runner.adaptive_verification
        result["cuts"] = adaptive.cuts(manager, confidence, prices, bench)
    if worker.tide is not None:
        result |= with_tide(worker, bench, case, depths)
    if alias is not None:
        result["late_rows"] = alias.late
    result["forbidden_calls"] = counters.read()["forbidden_calls"]
    bench.abort()
    result["faults"] = {} if worker.tide is None else dict(worker.tide._faults())
    core.shutdown()
    result["shut_down"] = True
    print("RESULT " + json.dumps(result), flush=True)


def draft_folder(case: dict[str, Any]) -> Path:
    """Return the demo draft, or a fresh one of another kind."""
    if "method" not in case:
        return DEMO / "draft"
    import torch

    from vllm_tide.config import FreshConfig
    from vllm_tide.draft.fresh import fresh_directory

    return fresh_directory(
        DEMO / "target",
        FreshConfig(),
        torch.bfloat16,
        Path(case["run_dir"]) / "fresh",
        case["method"],
        DRAFTED,
    )


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


def with_tide(
    worker: Any, bench: Bench, case: dict[str, Any], depths: Depths
) -> dict[str, Any]:
    """Return the results of capture, and of swaps while requests decode."""
    tide, result = worker.tide, {}
    if tide.capture is not None:
        result["captured_rows"] = tide.capture.rows
        result["dropped"] = dict(tide.capture.dropped) | dict(tide._ring.dropped_rows)
        result["lost_steps"] = tide._log.lost
        result["read_back"] = read_back(tide._ring.name)
    if tide.swapper is not None:
        folder = draft_folder(case)
        result["swap"] = swap(worker, bench, 0.5, folder)
        result["rollback"] = swap(worker, bench, 1.0, folder)
    if tide.control is not None:
        policy = case["tide"].get("control", {}).get("policy")
        if case["adaptive"] or policy == "adaspec":
            result["predicts"] = tide.control.times is not None
        result["lengths"] = lengths(depths, bench)
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


def lengths(depths: Depths, bench: Bench) -> dict[str, Any]:
    """Return the counts of a step at each speculative length."""
    result = {}
    for depth in reversed(depths.choices):
        depths.freeze(depth)
        bench.step(6)
        depths.clear()
        result[str(depth)] = bench.window(10)
        depths.check()
    return result


def served_tensors(draft: Any) -> dict[str, Any]:
    """Return the tensors of a draft that graphs read; of DFlash not only parameters."""
    tensors = dict(draft.named_parameters())
    for name in ("_fused_kv_weight", "_k_norm_weights", "_hidden_norm_weight"):
        if hasattr(draft.model, name):
            tensors[name] = getattr(draft.model, name)
    return tensors


def swap(worker: Any, bench: Bench, scale: float, folder: Path) -> dict[str, Any]:
    """Publish another draft, run steps until it is live; count the swap's step."""
    import torch

    from vllm_tide.transport.versions import first_version

    tide, draft = worker.tide, worker.model_runner.get_draft_model()
    version = first_version(tide.swapper.number + 1)
    fit = draft_tensors(scale, tide.swapper.shared, folder)
    addresses = {name: t.data_ptr() for name, t in served_tensors(draft).items()}
    graphs = bench._counters.read()["graphs"]
    publish(tide._segment.name, fit, version)
    deadline = time.monotonic() + 60
    while tide.swapper.ready_version() != version and time.monotonic() < deadline:
        time.sleep(0.05)
    for _ in range(40):
        step = bench.window(1)
        if tide.swapper.version == version:
            break
    tensors = served_tensors(draft)
    after = {name: t.data_ptr() for name, t in tensors.items()}
    same = torch.equal(tensors["model.fc.weight"].cpu(), fit["fc.weight"])
    if "_fused_kv_weight" in tensors:
        key = "layers.0.self_attn.k_proj.weight"
        rows = tensors["_fused_kv_weight"].cpu()[: len(fit[key])]
        same = same and torch.equal(rows, fit[key])
    bench.step(5)
    return {
        "version": tide.swapper.number,
        "refused": dict(tide.swapper.stager.refused),
        "seconds": round(tide.swapper._last_seconds, 6),
        "step": step,
        "same_addresses": after == addresses,
        "same_graphs": bench._counters.read()["graphs"] == graphs,
        # The null GPU executes copies.
        "new_weights_are_served": bool(same),
    }


def draft_tensors(
    scale: float, shared: set[str], folder: Path = DEMO / "draft"
) -> dict[str, Any]:
    """Return a draft's tensors, some of them scaled."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    for name in ("fc.weight", "layers.0.self_attn.k_proj.weight"):
        if name in tensors:
            tensors[name] = tensors[name] * scale
    tensors.pop("t2d", None)
    return {name: t for name, t in tensors.items() if name not in shared}


def publish(segment: str, tensors: dict[str, Any], version: int) -> None:
    """Publish a draft in a weights segment."""
    from vllm_tide.draft.tensor_bytes import to_bytes
    from vllm_tide.transport.draft_weights import DraftWeights
    from vllm_tide.transport.weights import WeightsWriter

    writer = WeightsWriter.attach(segment)
    writer.publish(DraftWeights.encode(to_bytes(tensors), version))
    writer.close()


class Alias:
    """Counts steps with rows packed after the launch of a draft's graph.

    Graphs share memory: the draft's may overwrite the target's outputs.

    Attributes:
        late: Number of such steps.
    """

    def __init__(self, worker: Any, counters: Any) -> None:
        runner, stage = worker.model_runner, worker.tide.capture._stage
        self.late, launched = 0, [0]
        sample, fill = runner.sample, stage.fill

        def sampled(*args: Any, **named: Any) -> Any:
            launched[0] = counters.read()["graph_launches"]  # the target has run
            return sample(*args, **named)

        def filled(*args: Any) -> Any:
            self.late += counters.read()["graph_launches"] != launched[0]
            return fill(*args)

        runner.sample, stage.fill = sampled, filled


class Publisher:
    """Publishes drafts from the first captured graph to the end of the start.

    A trainer that finds a stored draft does so while the engine captures its graphs. An
    engine takes one draft at a time, so one before the first capture proves nothing.
    """

    def __init__(self, run_dir: str) -> None:
        self.published = 0
        self._run_dir, self._ended = Path(run_dir), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from counts import Counters

        from vllm_tide.transport.rendezvous import read_manifests

        counters = Counters()
        while not self._ended.wait(0.01):
            if not counters.read()["graphs"]:
                continue
            for engine in read_manifests(self._run_dir):
                self.published += 1
                tensors = draft_tensors(1.0, set(engine.shared))
                publish(engine.weights, tensors, self.published)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


if __name__ == "__main__":
    main()
