"""Output tokens and speed of one case on an engine in this process.

Argument: JSON with report (a file), batch, tokens, speculative.
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


def prompts(count: int) -> list[str]:
    """Return prompts of the demo, repeated if there are too few."""
    with gzip.open(DEMO / "prompts" / "python.jsonl.gz", "rt") as lines:
        texts = [json.loads(line)["prompt"] for line in lines]
    return [texts[i % len(texts)] for i in range(count)]


def main() -> int:
    """Serve the case and write its report."""
    case = json.loads(sys.argv[1])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker is in this process
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(DEMO / "target"),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=case["batch"],
        speculative_config=case["speculative"],
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=0, max_tokens=case["tokens"], ignore_eos=True)
    texts = prompts(case["batch"])
    llm.generate(texts, params, use_tqdm=False)  # warm-up
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
    Path(case["report"]).write_text(json.dumps(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
