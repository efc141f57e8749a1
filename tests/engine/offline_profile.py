"""Runs `vllm-tide profile` on Model Runner V2 and reports what it measured.

Calls the command's own functions, so that the engine can be looked into. Argument: JSON
case with `arguments` of the command line and `asynchronous`.
"""

import json
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> int:
    """Run the command; its status."""
    case = json.loads(sys.argv[1])
    from v2_on_cpu import prepare

    prepare(case["asynchronous"])
    import vllm_tide.engine.profiler as profile
    from vllm_tide.cli.main import main as command

    inner = profile.measure_worker

    def measure_worker(worker, *args):
        samples, facts = inner(worker, *args)
        report = {
            "state": state(worker),
            "shapes": [
                [s.requests, s.context, s.verified, s.prefill, s.steps, s.first_rows]
                for s in samples
            ],
            "times": [[s.target_s, s.draft_first_s, s.draft_next_s] for s in samples],
        }
        print("REPORT " + json.dumps(report), flush=True)
        return samples, facts

    profile.measure_worker = measure_worker
    return command(case["arguments"])


def state(worker):
    """What measuring left behind."""
    tide = worker.tide
    return {
        "requests": worker.model_runner.req_states.num_reqs,
        "slots": len(tide.control._book.table.slot_of),
        "policy": tide.control.policy is not None,
        "faults": dict(tide._faults() + tide.control.faults),
        "lost": tide._log.lost,
        "async": tide._async,
    }


if __name__ == "__main__":
    sys.exit(main())
