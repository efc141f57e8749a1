"""Runs real vLLM offline with TIDE and a scenario; the test process reads the ring.

Argument: JSON case. Prints `READY run_dir` once the engine announced itself, waits for
a line on standard input, generates, prints `REPORT {...}`, waits again, exits.
"""

import json
import os
import sys
from importlib import import_module

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def by_label(name: str, label: str) -> dict[str, float]:
    """A metric of ours by one of its labels."""
    from prometheus_client import REGISTRY

    return {
        sample.labels[label]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"vllm_tide:{name}"
    }


def propose_garbage() -> None:
    """Have a memory on the device that is always certain, of anything."""
    import torch

    from vllm_tide.kernels.ngram_memory import NgramTable

    inner = NgramTable.choose
    random = torch.Generator().manual_seed(0)

    def choose(self, slots, num_sampled, total, texts, longest, drafts, depth, sure):
        own = drafts[:, 0].clone()
        inner(self, slots, num_sampled, total, texts, longest, drafts, depth, sure)
        shape = drafts[:, :depth].shape
        drafts[:, :depth] = torch.randint(0, 256, shape, generator=random)
        self.first[: len(slots)] = -1 - own
        self.whose[slots] = 1

    NgramTable.choose = choose


def main() -> None:
    """Run the case."""
    case = json.loads(sys.argv[1])
    if "log" in case:
        os.environ |= {
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_LOG_STATS_INTERVAL": "0.5",
        }
    if case.get("runner", "v1") != "v1":
        from v2_on_cpu import prepare

        prepare(asynchronous=case["runner"] == "v2-async")
    for name, value in case.get("constants", {}).items():
        module, _, constant = name.rpartition(".")
        setattr(import_module(module), constant, value)
    if "curves" in case:
        from v2_on_cpu import verify_adaptively

        verify_adaptively(*case["curves"])
    if case.get("garbage"):
        propose_garbage()
    from vllm import LLM, SamplingParams

    policy = None
    if "script" in case:
        from offline_control import Scripted

        import vllm_tide.engine.policy_start as policy_start

        policy = Scripted(case["script"], 0)

        def start(worker, control, config, late):
            control.policy = policy

        policy_start.start_predicting = start

    llm = LLM(
        case["target"],
        speculative_config=case["speculative_config"],
        enforce_eager=case.get("eager", True),
        dtype=case.get("dtype", "float32"),
        max_model_len=256,
        disable_log_stats=False,
        **case.get("engine", {}),
    )
    print("READY", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        if work is None:
            break
        if policy is not None and "script" in work:
            policy.script, policy.round = work["script"], -1
        if work.pop("forget", False):  # prompts served before are prefilled anew
            assert llm.reset_prefix_cache()
        params = [
            SamplingParams(
                **{"temperature": 0, "ignore_eos": True, **work.get("params", {})},
                extra_args=extra,
            )
            for extra in work.get("extra", [None] * len(work["prompts"]))
        ]
        prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
        for prompt, salt in zip(prompts, work.get("salts", ()), strict=False):
            if salt is not None:
                prompt["cache_salt"] = salt
        outputs = llm.generate(prompts, params, use_tqdm=False)
        core = llm.llm_engine.engine_core.engine_core
        # With several ranks the workers are processes of their own.
        driver = getattr(core.model_executor, "driver_worker", None)
        tide = None if driver is None else driver.worker.tide
        report = {
            "tokens": [list(out.outputs[0].token_ids) for out in outputs],
            "metrics": {
                metric.name + str(sorted(metric.labels.items())): metric.value
                for metric in llm.get_metrics()
                if hasattr(metric, "value")
            },
            # `get_metrics` leaves out names that are not vLLM's.
            "prefixes": by_label("prefix_verified_tokens_total", "prefix"),
            "prefixes_accepted": by_label("prefix_accepted_tokens_total", "prefix"),
            "contexts": by_label("step_accepted_tokens_count", "context"),
            "contexts_accepted": by_label("step_accepted_tokens_sum", "context"),
        }
        if tide is not None and tide.capture is not None:
            report["rows"] = tide.capture.rows
            report["dropped"] = dict(tide.capture.dropped)
            report["faults"] = dict(tide._faults())
        if tide is not None and tide.swapper is not None:
            report["version"] = tide.swapper.version
            report["refused"] = dict(tide.swapper.stager.refused)
            report["swaps"] = tide.swapper.num_swaps
        if "curves" in case or case.get("stats"):
            report["control"] = tide.control.stats()
            report["control_faults"] = dict(tide.control.faults)
        if policy is not None:
            report["outcomes"] = policy.outcomes
            report["probes"] = policy.probes
            report["control_faults"] = dict(tide.control.faults)
        if driver is not None:
            runner = driver.worker.model_runner
            config = llm.llm_engine.vllm_config
            report["runner"] = type(runner).__module__
            report["async"] = config.scheduler_config.async_scheduling
            draft = runner.get_draft_model()
            parameters = () if draft is None else draft.named_parameters()
            report["addresses"] = {
                name: parameter.data_ptr()
                for name, parameter in parameters
                if parameter.numel()
            }
        print("REPORT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
