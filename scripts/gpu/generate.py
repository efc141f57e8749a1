"""One engine in this process: text, speed, swaps, or a profile of ten steps.

    python generate.py '{"report": FILE, "batch": 8, ...}'

Keys of the case: speculative (the configuration, or null), batch, tokens, dtype, eager,
heads (how many swaps to time), trace (whether to profile), target, cpu.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[1] / "demo"
TRACED_STEPS = 10
SWAP_WAIT_S = 60.0


def prompts(count: int) -> list[str]:
    """Prompts of the demo, again from the start where there are too few."""
    with gzip.open(DEMO / "prompts" / "python.jsonl.gz", "rt") as lines:
        found = [json.loads(line)["prompt"] for line in lines]
    return [found[i % len(found)] for i in range(count)]


def main() -> int:
    """Serve the case and write its report."""
    case = json.loads(sys.argv[1])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker is in reach
    if case["cpu"]:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=case.get("target", str(DEMO / "target")),
        dtype=case.get("dtype", "float32" if case["cpu"] else "bfloat16"),
        max_model_len=512,
        max_num_seqs=case["batch"],
        enforce_eager=case.get("eager", case["cpu"]),
        speculative_config=case.get("speculative"),
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=0, max_tokens=case["tokens"], ignore_eos=True)
    texts = prompts(case["batch"])
    llm.generate(texts, params, use_tqdm=False)  # warms up
    began = time.perf_counter()
    outputs = llm.generate(texts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    report: dict[str, Any] = {
        "runner": type(worker.model_runner).__module__,
        "tokens_per_s": case["batch"] * case["tokens"] / seconds,
        "prompts": [list(output.prompt_token_ids) for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }
    if case.get("heads"):
        report["swaps"] = swaps(llm, worker, case, texts[:1], params)
    if case.get("trace"):
        report["trace"] = trace(llm, texts, params)
    Path(case["report"]).write_text(json.dumps(report), encoding="utf-8")
    return 0


def swaps(llm: Any, worker: Any, case: dict[str, Any], texts: Any, params: Any) -> Any:
    """Publish the draft's own weights again and again; how long each part took."""
    from safetensors.torch import load_file

    from vllm_tide.transport import WeightsWriter

    swapper = worker.tide.swapper
    draft = Path(case["speculative"]["model"])
    tensors: dict[str, Any] = {}
    for path in draft.glob("*.safetensors"):
        tensors |= load_file(path)
    given = {
        name: (
            str(t.dtype).removeprefix("torch."),
            t.shape,
            t.view(-1).view(_u8()).numpy(),
        )
        for name, t in tensors.items()
        if name not in swapper.shared
    }
    writer = WeightsWriter.attach(swapper._segment.name)
    found = []
    for version in range(1, case["heads"] + 1):
        began = time.perf_counter()
        writer.publish(given, version=version, parent_version=version - 1, meta={})
        published = time.perf_counter()
        while swapper.ready_version() != version:
            if time.perf_counter() - published > SWAP_WAIT_S:
                raise SystemExit(f"version {version}: {dict(swapper.stager.refused)}")
            time.sleep(0.001)
        staged = time.perf_counter()
        llm.generate(texts, params, use_tqdm=False)
        if swapper.version != version:
            raise SystemExit(f"version {version}: {dict(swapper.stager.refused)}")
        found.append(
            {
                "publish_s": published - began,
                "stage_s": staged - published,
                "install_s": swapper._last_seconds,
            }
        )
    writer.close()
    return found


def _u8() -> Any:
    import torch

    return torch.uint8


def trace(llm: Any, texts: list[str], params: Any) -> dict[str, float]:
    """Calls per step that wait for the device, or move to the host."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    engine = llm.llm_engine
    for number, text in enumerate(texts):
        engine.add_request(f"trace-{number}", text, params)
    for _ in range(3):  # the prompts, and what is made once
        engine.step()
    kinds = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as profiled:
        for _ in range(TRACED_STEPS):
            engine.step()
    waits = ("Synchronize", "aten::item", "aten::_local_scalar_dense", "Memcpy DtoH")
    counts = {
        event.key: event.count / TRACED_STEPS
        for event in profiled.key_averages()
        if any(name in event.key for name in waits)
    }
    while engine.has_unfinished_requests():
        engine.step()
    return dict(sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
