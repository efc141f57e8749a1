"""Sample one prompt many times offline, with or without a draft; print JSON.

Argument: JSON with target, draft (path or null), num_samples, seed and sampling.
"""

import json
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    """Sample and print one line per set of sampling parameters."""
    from vllm import LLM, SamplingParams

    case = json.loads(sys.argv[1])
    speculative = None
    if case["draft"]:
        speculative = {
            "method": "eagle3",
            "model": case["draft"],
            "num_speculative_tokens": 3,
        }
    llm = LLM(
        case["target"],
        speculative_config=speculative,
        enforce_eager=True,
        max_model_len=64,
        max_num_batched_tokens=512,
        dtype="float32",
        max_num_seqs=64,
        seed=case["seed"],
        disable_log_stats=False,
    )
    report = []
    for sampling in case["sampling"]:
        params = SamplingParams(max_tokens=4, ignore_eos=True, **sampling)
        prompts = ["hello world"] * case["num_samples"]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        report.append([list(out.outputs[0].token_ids) for out in outputs])
    drafted = [
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:spec_decode_num_draft_tokens"
    ]
    print("REPORT " + json.dumps({"tokens": report, "drafted": sum(drafted)}))


if __name__ == "__main__":
    main()
