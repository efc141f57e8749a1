"""Runs real vLLM offline under a scripted policy; records every drafted token.

Argument: JSON case with `scripts`, one after the other from an empty cache: of each
engine step, cycled, how many draft steps, and which share of the drafts is verified; or
the name of a real policy. Prints a `REPORT {...}` for each.

With `garbage` the memory proposes random tokens at every place.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Scripted:
    """A policy that does what the case says, whatever it observes."""

    def __init__(self, script: list[list[int]], seed: int) -> None:
        """Keep the script: [steps, most verified, probe] per engine step."""
        import numpy as np

        self.script = script
        self.random = np.random.default_rng(seed)
        self.round = -1
        self.size = 0
        self.limit = [0, 0, 0]
        self.drafted = 0
        self.confidences: list[list[float]] = []
        self.probes: list[list[float]] = []
        self.outcomes = {"verified": 0, "accepted": 0, "emitted": 0}
        self.memory = self.remembered = None

    def plan(self, batch, now):
        """The script's next line."""
        from vllm_tide.control.batch import Plan

        self.round += 1
        self.size = len(batch.slots)
        self.memory = batch.memory
        self.limit = self.script[self.round % len(self.script)]
        self.drafted = 0
        return Plan(self.limit[0], "script", bool(self.limit[2]))

    def go_on(self, step, confidence):
        """Until the script's number of steps."""
        assert len(confidence) == self.size
        self.drafted = step
        self.confidences.append([float(value) for value in confidence])
        return step < self.limit[0]

    def choose(self):
        """A random prefix of each request's drafts, or all of them."""
        import numpy as np

        most = min(self.limit[1], self.drafted)
        lengths = np.full(self.size, most)
        if self.limit[1] < 0:
            lengths = self.random.integers(0, self.drafted + 1, self.size)
        self.remembered = None
        if self.memory is not None:
            # Any of either source, at any length.
            there = (self.memory.survival >= 0).sum(axis=0)
            self.remembered = (self.random.random(self.size) < 0.6) & (there > 0)
            other = self.random.integers(0, there + 1)
            lengths = np.where(self.remembered, other, lengths)
        return lengths

    def observe(self, outcome):
        """Add up what the adapter reports."""
        self.outcomes["verified"] += int(outcome.verified.sum())
        self.outcomes["accepted"] += int(outcome.accepted.sum())
        self.outcomes["emitted"] += int(outcome.emitted.sum())
        if outcome.probe is not None:
            slots, confidence, hit = outcome.probe
            self.probes += [
                [int(s), float(c), int(h)]
                for s, c, h in zip(slots, confidence, hit, strict=True)
            ]

    def add(self, slot, sampled, now):
        """Nothing to keep."""

    def drop(self, slot):
        """Nothing to forget."""

    def draft_swapped(self):
        """Nothing was learnt."""

    def stats(self):
        """What the adapter needs for its report."""
        return {"rounds": self.round, "draft_steps": 0, "length_hist": []}


def policy_of(script, control):
    """The policy of a script, or the real one of that name."""
    from vllm_tide.control.online_time import OnlineTime
    from vllm_tide.control.policies import ControlSettings, make_policy

    if not isinstance(script, str):
        return Scripted(script, 0)
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "scripts")]
    from tests.control.toys import published

    most = control.num_speculative_tokens
    settings = ControlSettings(k_max=most, max_requests=control.capacity)
    return make_policy(script, settings, OnlineTime(published("Llama-3.3-70B")))


def propose_garbage(memory):
    """Have a memory that is always certain, of anything."""
    import numpy as np

    random, most = np.random.default_rng(0), memory.index._most

    def propose(slots, text):
        tokens = random.integers(0, 256, (len(slots), most))
        return tokens, np.full(len(slots), 16)

    memory.index.propose = propose


def main() -> None:
    """Run the case."""
    case = json.loads(sys.argv[1])
    for name, value in case.get("constants", {}).items():
        module, _, constant = name.rpartition(".")
        setattr(import_module(module), constant, value)
    from vllm import LLM, SamplingParams

    import vllm_tide.engine.policy_start as policy_start

    steered = []

    def start(worker, control, config):
        control.policy = Scripted([[0, 0, 0]], 0)
        steered.append((worker, control))
        if case.get("garbage"):
            propose_garbage(control._memory)

    policy_start.start_policy = start
    speculative = case["speculative_config"]
    llm = LLM(
        case["target"],
        speculative_config=speculative,
        enforce_eager=case.get("eager", True),
        dtype="float32",
        max_model_len=256,
        disable_log_stats=False,
        **case.get("engine", {}),
    )
    drafts: list[dict[str, list[int]]] = []
    if steered:
        ((worker, control),) = steered
        inner = control.choose

        def choose(req_ids, tokens):
            if control._planned == req_ids:
                # Requests are numbered on and on; vLLM appends a random suffix.
                numbers = [int(req_id.split("-")[0]) for req_id in req_ids]
                names = [str(number % len(case["prompts"])) for number in numbers]
                drafts.append(dict(zip(names, tokens, strict=True)))
            else:
                drafts.append({})
            return inner(req_ids, tokens)

        control.choose = choose
        probe, written = control._probe, [0]

        def watched(*args):
            table = worker.model_runner.input_batch.token_ids_cpu
            before = table.copy()
            probe(*args)
            written[0] += int((table != before).sum())

        control._probe = watched
    asked = [0]
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    ask = executor.take_draft_token_ids

    def counted():
        asked[0] += 1
        return ask()

    executor.take_draft_token_ids = counted
    params = SamplingParams(**{"temperature": 0, "ignore_eos": True, **case["params"]})
    prompts = [{"prompt_token_ids": ids} for ids in case["prompts"]]
    for script in case["scripts"]:
        assert llm.reset_prefix_cache()
        if steered:
            # No script finds what another has drafted.
            for cache in worker.model_runner.kv_caches:
                cache.zero_()
            control.policy = policy = policy_of(script, control)
            proposed = control._memory_count.copy()
            drafts.clear()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        report = {"tokens": [list(out.outputs[0].token_ids) for out in outputs]}
        if steered:
            report |= {
                "drafts": drafts,
                "probes": getattr(policy, "probes", []),
                "written": written[0],
                "confidences": getattr(policy, "confidences", []),
                "outcomes": getattr(policy, "outcomes", {}),
                "memory": (control._memory_count - proposed).tolist(),
                "counts": policy.stats(),
                "asked": asked[0],
                "holes": control._backlog.holes,
                "lost": control.policy is None,
                "faults": dict(control.faults),
            }
        print("REPORT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
