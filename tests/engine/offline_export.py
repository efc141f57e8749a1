"""Load an exported draft in vLLM offline, as `vllm serve` would; report the outputs.

Argument: JSON with `model` and perhaps `speculative_config`.
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
    """Generate greedily and print one JSON line."""
    import vllm
    from vllm import LLM, SamplingParams

    case = json.loads(sys.argv[1])
    llm = LLM(
        **case,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
    )
    prompts = [{"prompt_token_ids": list(text)} for text in (b"hello", b"abc abc abc")]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    core = llm.llm_engine.engine_core.engine_core
    drafter = core.model_executor.driver_worker.worker.model_runner.drafter
    propose, drafted = drafter.propose, []

    def listening(*args, **more):
        out = propose(*args, **more)
        drafted.append(out.tolist())
        return out

    drafter.propose = listening
    outputs = llm.generate(prompts, params, use_tqdm=False)
    speculative = llm.llm_engine.vllm_config.speculative_config
    report = {
        "file": vllm.__file__,
        "tokens": [list(out.outputs[0].token_ids) for out in outputs],
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "draft": type(drafter.model).__name__,
        "drafted": drafted,
    }
    print("REPORT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
