"""Engine in this process, with direct access to its steps and its worker."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from place import ROOT, Place  # adds scripts to the path
from safetensors.torch import load_file, save_file

from depths import Depths

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}


class Engine:
    """Greedy engine with vLLM's default graphs.

    `more` is passed to `vllm.LLM`, except `adaptive`: keys of the speculative config.
    """

    def __init__(
        self, place: Place, models: tuple[Path, Path], k: int, tide: Any, **more: Any
    ) -> None:
        spec: dict[str, Any] | None = {"method": "eagle3", "model": str(models[1])}
        spec |= {"num_speculative_tokens": k} | more.pop("adaptive", {})
        if not k:
            spec = None
        elif tide is not None:
            section = {"run_dir": str(place.work / "run")}
            section |= {"train": {"autostart": False}}
            spec["tide"] = section | tide
        if place.dry:
            sys.path.insert(0, str(ROOT / "scripts" / "null_gpu"))
            from engine import patch_step_results

            patch_step_results()
            more |= {"gpu_memory_utilization": 0.05, "max_num_seqs": 8}
        from vllm import LLM

        more = {"max_model_len": 2048, "dtype": "bfloat16", **more}
        more |= {"enable_prefix_caching": False, "disable_log_stats": False}
        began = time.perf_counter()
        self.llm = LLM(str(models[0]), speculative_config=spec, **more)
        self.start_s = time.perf_counter() - began
        self.engine = self.llm.llm_engine
        self.step = self.engine.step
        core = self.engine.engine_core.engine_core
        self.worker = core.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        self.tide = getattr(self.worker, "tide", None)
        self.depths = None if self.tide is None else Depths(self.tide)
        self.modes: Counter[str] = Counter()  # of the steps' CUDA graphs
        manager, self._names = self.runner.cudagraph_manager, itertools.count()
        dispatch = manager.dispatch

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            result = dispatch(*args, **kwargs)
            self.modes[result.cg_mode.name] += 1
            return result

        manager.dispatch = dispatched

    def add(self, prompt: list[int], tokens: int, **more: Any) -> str:
        """Queue a request; return its name."""
        from vllm import SamplingParams

        more |= {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        name, params = str(next(self._names)), SamplingParams(detokenize=False, **more)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def drain(self) -> None:
        """Abort all requests."""
        self.engine.abort_request([str(i) for i in range(next(self._names))])
        while self.engine.has_unfinished_requests():
            self.step()

    def serve(self, prompts: list[list[int]], batch: int, seconds: float) -> Any:
        """Serve a closed loop of 128-token requests; return speed and acceptance."""
        live: dict[str, int] = {}
        total, times, waiting = 0, [], itertools.cycle(prompts)
        before, began = self._counters(), time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            while len(live) < batch:
                live[self.add(next(waiting), 128)] = 0
            for output in self.step():
                count = len(output.outputs[0].token_ids)
                total += count - live[output.request_id]
                live[output.request_id] = count
                if output.finished:
                    del live[output.request_id]
            times.append(1e3 * (time.perf_counter() - now))
        rate, after = total / (time.perf_counter() - began), self._counters()
        self.drain()
        times.sort()
        figures = {"tokens_per_s": rate, "worst_ms": times[-1]}
        figures |= {f"p{p}_ms": times[len(times) * p // 100] for p in (50, 99)}
        accepted = after[1] - before[1]
        return figures | {"accepted": accepted / max(after[0] - before[0], 1)}

    def _counters(self) -> list[float]:
        named = {metric.name: metric for metric in self.llm.get_metrics()}
        names = "num_drafts", "num_accepted_tokens"
        metrics = [named.get(f"vllm:spec_decode_{name}") for name in names]
        return [metric.value if metric else 0.0 for metric in metrics]

    def publish(self, draft: Path, version: int) -> None:
        """Publish the draft's weights unchanged as another version."""
        shared = self.tide.swapper.shared
        publish_draft(self.tide._segment.name, draft, version, shared)


def publish_draft(segment: str, draft: Path, version: int, shared: set[str]) -> None:
    """Publish a draft's weights, except `shared` ones, in a segment."""
    from vllm_tide.draft.tensor_bytes import to_bytes
    from vllm_tide.transport.draft_weights import DraftWeights
    from vllm_tide.transport.versions import first_version
    from vllm_tide.transport.weights import WeightsWriter

    stored = load_file(draft / "model.safetensors").items()
    tensors = to_bytes({name: t for name, t in stored if name not in shared})
    writer = WeightsWriter.attach(segment)
    writer.publish(DraftWeights.encode(tensors, first_version(version)))
    writer.close()


def shape(place: Place) -> tuple[Path, Path]:
    """Write folders with an 8B's shape and an EAGLE-3 draft with dummy weights."""
    # Hidden size, layers, vocabulary size, draft vocabulary size.
    h, layers, vocab, v = (
        (256, 8, 4096, 512) if place.dry else (4096, 32, 128256, 32000)
    )
    wide, heads, kv = h * 7 // 2, h // 128, min(8, h // 128)
    base = {
        "model_type": "llama", "hidden_size": h, "intermediate_size": wide,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 128,
        "vocab_size": vocab, "max_position_embeddings": 8192, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "num_hidden_layers": layers,
        "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False,
    }  # fmt: skip
    eagle = base | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    aux = [2, layers // 2, layers - 3]
    eagle |= {"eagle_aux_hidden_state_layer_ids": aux, "draft_vocab_size": v}
    sizes = {
        "self_attn.q_proj": (h, 2 * h), "self_attn.k_proj": (kv * 128, 2 * h),
        "self_attn.v_proj": (kv * 128, 2 * h), "self_attn.o_proj": (h, h),
        "mlp.gate_proj": (wide, h), "mlp.up_proj": (wide, h),
        "mlp.down_proj": (h, wide), "hidden_norm": (h,), "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }  # fmt: skip
    sizes = {f"midlayer.{name}": size for name, size in sizes.items()}
    sizes |= {"fc": (h, 3 * h), "norm": (h,), "lm_head": (v, h)}
    tensors = {f"{n}.weight": torch.full(s, 0.02).bfloat16() for n, s in sizes.items()}
    # One folder for all steps: vLLM's cache of compiled code depends on the path.
    root = place.file.parent / f"shape-{h}"
    target, draft = root / "target", root / "draft"
    if (root / "done").exists():
        return target, draft
    for folder, config in (target, base), (draft, eagle):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors | {"d2t": torch.zeros(v).long()}, draft / "model.safetensors")
    (root / "done").touch()
    return target, draft
