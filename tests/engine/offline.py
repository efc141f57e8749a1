"""Run real vLLM offline with TIDE; the test process reads the ring.

Argument: JSON case. Prints `READY` once the engine announced itself. Then each line of
standard input is a work: its prompts are generated, and `REPORT {...}` is printed.
`null` ends it. Counters in a report are of its work alone, faults of all works.

Case, besides the arguments of `LLM`: `runner`, `constants` (dotted names of modules to
values), `curves` (adaptive verification at these costs), `steered` (works set the
policy), `log` (vLLM's log is written).

Work: `prompts`, and perhaps `params`, `extra`, `salts`; `forget` (no prefix and no KV
of an earlier work is used), `script` (policy of a steered engine, see `policy_of`),
`garbage` (the memory proposes random tokens), `spoil` (changes of the draft's
logits, see `spoilt`), `keep_memory` (its state of an earlier work stays), `curves`,
`seed`, `seeds` (one of each request), `each` (more parameters of each request),
`priority` (of each request), `images` (seed of each request's picture, or null),
`answers` (whole answers are reported). For a work that vLLM refuses, `error` is vLLM's
message.
"""

import json
import os
import sys
from importlib import import_module
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def by_label(name: str, label: str) -> dict[str, float]:
    """Return the values of one of our metrics by one of its labels."""
    from prometheus_client import REGISTRY

    return {
        sample.labels[label]: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"vllm_tide:{name}"
    }


def grown(before: Any, after: Any) -> Any:
    """Return the growth of counters, also nested ones, without those that are equal."""
    if isinstance(after, dict):
        added = {key: grown((before or {}).get(key), after[key]) for key in after}
        return {key: value for key, value in added.items() if value not in (0, {})}
    if isinstance(after, (int, float)) and isinstance(before, (int, float)):
        return after - before
    return after


def parameters(params: dict[str, Any], extra: Any, seed: Any) -> Any:
    """Return vLLM's parameters of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = {"temperature": 0, "ignore_eos": True, **params}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(
            **given["structured_outputs"]
        )
        given["ignore_eos"] = False
    if "logit_bias" in given:  # JSON's keys are texts
        given["logit_bias"] = {int(k): v for k, v in given["logit_bias"].items()}
    return SamplingParams(**given, extra_args=extra, seed=seed)


def picture(seed: int) -> Any:
    """Return a picture of random pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), np.uint8)
    return Image.fromarray(pixels)


def answer(out: Any) -> list[dict[str, Any]]:
    """Return every part of a request's completions that tests compare."""

    def listed(positions: Any) -> Any:
        return positions and [
            at and sorted((token, one.logprob, one.rank) for token, one in at.items())
            for at in positions
        ]

    return [
        {
            "text": one.text,
            "token_ids": list(one.token_ids),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
            "logprobs": listed(one.logprobs),
            "prompt_logprobs": listed(out.prompt_logprobs),
        }
        for one in out.outputs
    ]


class Server:
    """One engine, and what a test may change in it.

    Args:
        case: See the module.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        from scripted import Garbage

        self.spoil: list[Any] = []
        self.case = case
        self.v2 = case.get("runner", "v1") != "v1"
        self.control: Any = None
        self.garbage = Garbage()
        if "curves" in case:
            from v2_on_cpu import verify_adaptively

            verify_adaptively(*case["curves"])
        if "test_time" in (case.get("speculative_config") or {}).get("tide", {}):
            self.garbage.on_v2() if self.v2 else self.garbage.on_v1()
        if case.get("steered"):
            self._steer()
        from vllm import LLM

        self.llm = LLM(
            case["target"],
            speculative_config=case["speculative_config"],
            enforce_eager=case.get("eager", True),
            dtype=case.get("dtype", "float32"),
            max_model_len=256,
            disable_log_stats=False,
            **case.get("engine", {}),
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.executor = core.model_executor
        # With several ranks each worker is a separate process.
        driver = getattr(self.executor, "driver_worker", None)
        self.worker = None if driver is None else driver.worker
        self.tide = getattr(self.worker, "tide", None)
        if self.tide is not None and not self.v2:
            self._spoil_drafts()
        self.watch = Watch(self)
        self.counts = self._counts()

    def _steer(self) -> None:
        from scripted import Scripted

        import vllm_tide.engine.policy_start as policy_start

        def start(worker: Any, control: Any, *_: Any, **__: Any) -> None:
            control.policy = Scripted([[0, 0]])

        policy_start.start_policy = start

    def _spoil_drafts(self) -> None:
        """Model Runner V1: let a work change the draft's logits."""
        from scripted import spoilt

        inner = self.tide.on_draft_logits

        def on_draft_logits(logits: Any) -> None:
            spoilt(logits, self.spoil)
            inner(logits)

        self.tide.on_draft_logits = on_draft_logits

    def work(self, work: dict[str, Any]) -> dict[str, Any]:
        """Run one work and return its report."""
        from vllm.exceptions import VLLMClientError

        self._prepare(work)
        none = [None] * len(work["prompts"])
        params = [
            parameters({**work.get("params", {}), **(each or {})}, extra, seed)
            for each, extra, seed in zip(
                work.get("each", none),
                work.get("extra", none),
                work.get("seeds", none),
                strict=True,
            )
        ]
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in work["prompts"]]
        for prompt, seed in zip(prompts, work.get("images", ()), strict=False):
            if seed is not None:
                prompt["multi_modal_data"] = {"image": picture(seed)}
        for prompt, salt in zip(prompts, work.get("salts", ()), strict=False):
            if salt is not None:
                prompt["cache_salt"] = salt
        try:
            outputs = self.llm.generate(
                prompts, params, use_tqdm=False, priority=work.get("priority")
            )
            error_text = ""
        except VLLMClientError as error:
            outputs, error_text = [], str(error)
        report: dict[str, Any] = {"error": error_text}
        report["tokens"] = [list(out.outputs[0].token_ids) for out in outputs]
        if work.get("answers"):
            report["answers"] = [answer(out) for out in outputs]
        report |= self.watch.report()
        self._land()
        before, self.counts = self.counts, self._counts()
        counts = {
            name: grown(before.get(name), now) for name, now in self.counts.items()
        }
        return report | counts | self._state()

    def _prepare(self, work: dict[str, Any]) -> None:
        if work.get("forget"):
            assert self.llm.reset_prefix_cache()
            if self.worker is not None:
                for cache in self.worker.model_runner.kv_caches:
                    cache.zero_()
        if "seed" in work:
            import torch

            torch.manual_seed(work["seed"])
        if "curves" in work:
            self.tide._verification.set_cost_curves(*work["curves"])
        self.garbage.on = work.get("garbage", False)
        self.spoil = work.get("spoil", [])
        steered = self.case.get("steered") or "curves" in self.case
        if steered and self.tide is not None:  # else without speculation
            from scripted import policy_of

            self.control = self.tide.control
            most = self.control.num_speculative_tokens
            if "script" in work or "curves" not in self.case:
                script = work.get("script", [[most, most, 0]])
                self.control.policy = policy_of(script, self.control)
            if not work.get("keep_memory"):
                self._forget_memory()
            for _ in range(most if self.v2 else 0):
                # The depth of the first step was decided by an earlier policy, and a
                # depth
                # grows by one per step.
                if self.control.depth < most:
                    self._land()
        self.watch.begin(len(work["prompts"]))

    def _land(self) -> None:
        """On Model Runner V2 the last steps land with the next one: serve a prompt."""
        if self.v2:
            from vllm import SamplingParams

            last = SamplingParams(max_tokens=1, extra_args={"tide_capture": False})
            self.llm.generate({"prompt_token_ids": [1]}, last, use_tqdm=False)

    def _forget_memory(self) -> None:
        if self.v2 and self.control.memory is not None:
            self.control.memory._table.counts.zero_()
        elif not self.v2 and self.control._memory is not None:
            from vllm_tide.memory.source import SourceRecord

            old = self.control._memory.record
            self.control._memory.record = SourceRecord(
                self.control.capacity, len(old._depth)
            )

    def _counts(self) -> dict[str, Any]:
        """Return every value that only grows."""
        counts: dict[str, Any] = {
            "metrics": {
                metric.name + str(sorted(metric.labels.items())): metric.value
                for metric in self.llm.get_metrics()
                if hasattr(metric, "value")
            },
            # `get_metrics` leaves out names without vLLM's prefix.
            "prefixes": by_label("prefix_verified_tokens_total", "prefix"),
            "prefixes_accepted": by_label("prefix_accepted_tokens_total", "prefix"),
            "contexts": by_label("step_accepted_tokens_count", "context"),
            "contexts_accepted": by_label("step_accepted_tokens_sum", "context"),
        }
        tide = self.tide
        if tide is None:
            return counts
        if tide.capture is not None:
            counts["rows"] = tide.capture.rows
            counts["dropped"] = dict(tide.capture.dropped)
        if tide.swapper is not None:
            counts["refused"] = dict(tide.swapper.stager.refused)
            counts["swaps"] = tide.swapper.num_swaps
        if tide.control is not None:
            memory = getattr(tide.control, "_memory_count", None)
            counts["memory"] = (
                {} if memory is None else dict(enumerate(memory.tolist()))
            )
            if tide.control.policy is not None and self.v2:
                counts["control"] = tide.control.stats()
        return counts

    def _state(self) -> dict[str, Any]:
        """Return the current state."""
        if self.worker is None:
            return {}
        runner = self.worker.model_runner
        config = self.llm.llm_engine.vllm_config
        draft = runner.get_draft_model()
        state: dict[str, Any] = {
            "runner": type(runner).__module__,
            "async": config.scheduler_config.async_scheduling,
            "addresses": {
                name: parameter.data_ptr()
                for name, parameter in (
                    () if draft is None else draft.named_parameters()
                )
                if parameter.numel()
            },
        }
        if self.tide is not None:
            state["faults"] = dict(self.tide._faults())
            if self.tide.control is not None:
                state["control_faults"] = dict(self.tide.control.faults)
            if self.tide.swapper is not None:
                state["version"] = self.tide.swapper.number
        policy = getattr(self.control, "policy", None)
        if self.control is not None:
            state["lost"] = policy is None
            for name in ("outcomes", "confidences"):
                state[name] = getattr(policy, name, None)
            state["policy"] = {} if policy is None else policy.stats()
        return state


class Watch:
    """On Model Runner V1: record what control does in each step of a work."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._drafts: list[dict[str, list[int]]] = []
        self._asked = self._requests = 0
        if server.v2 or not server.case.get("steered") or server.tide is None:
            return
        control, executor = server.tide.control, server.executor
        choose = control.choose
        ask = executor.take_draft_token_ids

        def seen_choose(req_ids: list[str], tokens: Any) -> Any:
            drafts = {}
            if control._planned == req_ids:
                # Request numbers grow over works; vLLM appends a random suffix.
                numbers = [int(req_id.split("-")[0]) for req_id in req_ids]
                names = [str(number % self._requests) for number in numbers]
                drafts = dict(zip(names, tokens, strict=True))
            self._drafts.append(drafts)
            return choose(req_ids, tokens)

        def seen_ask() -> Any:
            self._asked += 1
            return ask()

        control.choose = seen_choose
        executor.take_draft_token_ids = seen_ask

    def begin(self, requests: int) -> None:
        """Forget an earlier work."""
        self._requests = requests
        self._drafts.clear()
        self._asked = 0

    def report(self) -> dict[str, Any]:
        """Record drafts by request in each step; count the scheduler's requests."""
        control = self._server.control
        if self._server.v2 or control is None:
            return {}
        return {
            "drafts": list(self._drafts),
            "asked": self._asked,
            "holes": control._backlog.holes,
        }


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
    server = Server(case)
    print("READY", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        if work is None:
            break
        print("REPORT " + json.dumps(server.work(work)), flush=True)


if __name__ == "__main__":
    main()
