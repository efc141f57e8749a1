"""Run vLLM offline with an EAGLE-3 draft and report its outputs as JSON.

Argument: JSON with target, draft, and optionally "runner": "v2".
"""

import json
import math
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    """Generate greedily and with a seed; print one JSON line."""
    case = json.loads(sys.argv[1])
    if case.get("runner") == "v2":
        sys.path.append(str(Path(__file__).parents[1] / "engine"))
        from v2_on_cpu import prepare

        prepare(asynchronous=False)
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.distributed.device_communicators import shm_broadcast

    llm = LLM(
        case["target"],
        speculative_config={
            "method": "eagle3",
            "model": case["draft"],
            "num_speculative_tokens": 3,
        },
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        dtype="float32",
        max_num_seqs=4,
        disable_log_stats=False,
    )
    prompts = ["hello world", "def main(", "abc abc abc " * 8, "the end"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    runner = worker.model_runner
    proposer = getattr(runner, "drafter", None) or runner.speculator
    metrics = {metric.name for metric in llm.get_metrics()}
    report = {
        "file": vllm.__file__,
        "tokens": [list(out.outputs[0].token_ids) for out in outputs],
        "tide": [
            getattr(owner, "tide", None) is None
            for owner in (worker, runner, proposer, core.scheduler)
        ],
        "imported": [name for name in sys.modules if name.startswith("vllm_tide")],
        "metrics": sorted(metrics),
        "hash": llm.llm_engine.vllm_config.compute_hash(),
        "sleeps": getattr(shm_broadcast, "busy_loop_limit_s", math.inf) < math.inf,
    }
    # Last: upstream's engine ends here. One prompt takes two steps.
    params = SamplingParams(temperature=1, seed=1, max_tokens=24, ignore_eos=True)
    try:
        outputs = llm.generate(["xyz " * 24, "the end"], params, use_tqdm=False)
        report["seeded"] = [len(out.outputs[0].token_ids) for out in outputs]
    except RuntimeError as error:
        report["seeded"] = str(error)
    print("REPORT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
