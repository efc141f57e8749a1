"""Whether a row that we read may have been overwritten by a CUDA graph before.

Graphs share a pool of memory: what one of them returned lies in blocks that a graph
captured later writes too. Each capture's blocks are recorded; a replay marks them
written; each tensor that capture or the step log reads is looked up in what was marked
since the target's forward of its step. In vLLM's default compile mode, on the null GPU,
where addresses are real. Prints `RESULT {...}`: reads, and those that came too late.

Torch gives a block that was freed in a pool only to the stream that freed it. vLLM
0.32.0 captures target and draft on streams of their own, so their blocks lie apart as
long as torch, which has 32 streams and hands them out in turn, does not give the draft
the target's again. Argument `one` makes it do so; `apart` leaves it as it happens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402

DEMO = Path(os.environ.get("TIDE_DEMO", Path(__file__).parents[1] / "demo"))
MAX_ENTRIES = 1 << 20


class Aliases:
    """Which bytes graphs wrote since the target's forward ended, and who read them."""

    def __init__(self) -> None:
        self._written: list[tuple[int, int]] = []
        self.read: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        graph, aliases = torch.cuda.CUDAGraph, self
        begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            begin(graph, *args, **kwargs)
            _remember(enabled="all", context=None, max_entries=MAX_ENTRIES)

        def capture_end(graph: Any) -> None:
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            _remember(enabled=None)
            end(graph)
            graph.blocks = {
                (event["addr"], event["addr"] + event["size"])
                for event in trace
                if event["action"] == "alloc"
            }

        def replayed(graph: Any) -> None:
            replay(graph)
            aliases._written += graph.blocks

        graph.capture_begin, graph.capture_end = capture_begin, capture_end
        graph.replay = replayed

    def target_ran(self) -> None:
        """What was written until now was read by, or is of, the target's forward."""
        self._written.clear()

    def reads(self, **tensors: Any) -> None:
        """Look up what is about to be read."""
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            start = tensor.data_ptr()
            end = start + tensor.nbytes
            self.read[name] += 1
            late = any(low < end and start < high for low, high in self._written)
            self.late[name] += late


def _remember(**how: Any) -> None:
    torch.cuda.memory._record_memory_history(clear_history=True, **how)


def capture_on_one_stream() -> None:
    """Every manager of graphs gets the stream that the first one got."""
    from vllm.distributed import parallel_state

    make, first = parallel_state.GraphCaptureContext, []

    def context(stream: Any) -> Any:
        first.append(stream)
        return make(first[0])

    parallel_state.GraphCaptureContext = context


def watch(aliases: Aliases) -> None:
    """Look up every tensor where our code reads it."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_tide.engine.capture import Capture
    from vllm_tide.engine.device_stage import DeviceStage
    from vllm_tide.engine.steps import StepBuffer

    def before(owner: Any, name: str, look: Callable[..., None]) -> None:
        inner = getattr(owner, name)

        def looked(*args: Any, **kwargs: Any) -> Any:
            look(*args[1:], **kwargs)
            return inner(*args, **kwargs)

        setattr(owner, name, looked)

    def rows(aux: Any, hidden: Any, wanted: Any, top: Any) -> None:
        tensors = {f"aux_hidden_states[{i}]": part for i, part in enumerate(aux)}
        tensors = {"hidden_states": hidden} | tensors
        tensors = {name: part[: wanted[-1] + 1] for name, part in tensors.items()}
        tensors |= {f"topk[{i}]": part for i, part in enumerate(top or ())}
        aliases.reads(**tensors)

    def numbers(batch: Any, sampled: Any, confidence: Any, drafts: Any) -> None:
        aliases.reads(
            seq_lens=batch.seq_lens,
            token_ids=batch.input_ids[: batch.num_tokens],
            num_sampled=sampled.num_sampled,
            sampled_token_ids=sampled.sampled_token_ids,
            confidence=confidence,
            draft_tokens=drafts,
        )

    before(GPUModelRunner, "sample", lambda *args: aliases.target_ran())
    before(Capture, "on_logits", lambda logits: aliases.reads(logits=logits))
    before(DeviceStage, "fill", rows)
    before(StepBuffer, "fill", numbers)


def main() -> None:
    """Serve requests whose prefills join running decodes, and count."""
    aliases = Aliases()
    watch(aliases)
    if sys.argv[1] == "one":
        capture_on_one_stream()
    from vllm import LLM, SamplingParams
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    with tempfile.TemporaryDirectory() as run_dir:
        tide = {"run_dir": run_dir, "capture": {"teacher": "topk"}}
        tide |= {"control": {"policy": "static"}, "swap": {"enabled": False}}
        llm = LLM(
            str(DEMO / "target"),
            speculative_config={
                "method": "eagle3",
                "model": str(DEMO / "draft"),
                "num_speculative_tokens": 3,
                "tide": tide,
            },
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=16,
            gpu_memory_utilization=0.1,
        )
        engine = llm.llm_engine
        worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
        aliases.read.clear(), aliases.late.clear()
        for i in range(96):  # each joins what decodes, at many batch sizes
            prompt = [(7 * i + j) % 4000 + 5 for j in range(20 + i % 30)]
            sampling = SamplingParams(
                temperature=0, max_tokens=8 + i % 20, ignore_eos=True, detokenize=False
            )
            engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, sampling)
            for _ in range(i // 16):
                engine.step()
        while engine.has_unfinished_requests():
            engine.step()
        found = {
            "piecewise": len(CUDAGraphWrapper._all_instances),
            "faults": dict(worker.tide._faults()),
            "read": dict(aliases.read),
            "late": {name: count for name, count in aliases.late.items() if count},
        }
        engine.engine_core.engine_core.shutdown()
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
