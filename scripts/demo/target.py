"""Target stage: train a small Llama on the token streams by wall-clock budget.

The learning rate follows elapsed time, not steps, so ``--minutes`` is met on
any machine.  A complete Hugging Face export is replaced atomically every few
minutes: a run that is stopped leaves a usable model.

Matrices inside the layers are trained with Muon, the rest (embeddings, norms)
with AdamW: at this size and budget Muon reaches a given loss in fewer tokens.
"""

import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from . import corpus, tokens

HELD_OUT_TOKENS = 512
# Share of each domain in the training mix.
MIX = {
    "python": 0.30,
    "tests": 0.08,
    "docs_en": 0.13,
    "c": 0.05,
    "markup": 0.02,
    "decimal_tests": 0.015,
    "charmaps": 0.015,
    "json": 0.10,
    "sql": 0.08,
    "logs": 0.07,
    "html": 0.08,
    "diffs": 0.06,
}


@dataclass(frozen=True)
class TargetOptions:
    """Settings of one training run; ``start`` is an export to go on from."""

    minutes: float = 75.0
    sequences_per_step: int = 16
    short_tokens: int = 256
    long_tokens: int = 512
    long_from: float = 0.65
    muon_lr: float = 7e-3
    adam_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup_share: float = 0.02
    export_every_s: float = 300.0
    seed: int = 0
    bf16: bool = True
    start: str | None = None


def model_config() -> LlamaConfig:
    """Return the architecture: 4.4M parameters, 8.9 MB in bf16."""
    return LlamaConfig(
        vocab_size=tokens.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=480,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        rms_norm_eps=1e-5,
    )


def batches(
    work: Path, sequences_per_step: int, sequence_tokens: int, seed: list[int]
) -> Iterator[torch.Tensor]:
    """Yield token batches, each sequence from a domain drawn by ``MIX``.

    Within a domain the stream is cut at a new offset on every pass, so repeats
    are never the same sequences.
    """
    rng = np.random.default_rng(seed)
    length = sequence_tokens + 1
    names = list(MIX)
    shares = np.array([MIX[n] for n in names])
    streams = {n: tokens.stream(work, n, "train") for n in names}
    queues: dict[str, list[int]] = {n: [] for n in names}
    while True:
        rows = []
        for index in rng.choice(len(names), sequences_per_step, p=shares):
            name = names[index]
            if not queues[name]:
                shift = int(rng.integers(0, length))
                starts = np.arange(shift, len(streams[name]) - length, length)
                queues[name] = list(rng.permutation(starts))
            start = queues[name].pop()
            rows.append(streams[name][start : start + length].astype(np.int64))
        yield torch.from_numpy(np.stack(rows))


def lr_scale(progress: float, warmup_share: float) -> float:
    """Linear warm-up, then a cosine to two percent of the peak."""
    if progress < warmup_share:
        return progress / warmup_share
    rest = min(1.0, (progress - warmup_share) / (1.0 - warmup_share))
    return 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * rest))


def make_optimizers(
    model: LlamaForCausalLM, options: TargetOptions
) -> list[torch.optim.Optimizer]:
    """Split parameters between Muon (layer matrices) and AdamW (the rest)."""
    matrices, decayed, plain = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "layers" in name:
            matrices.append(parameter)
        elif parameter.ndim == 2:
            decayed.append(parameter)
        else:
            plain.append(parameter)
    muon = torch.optim.Muon(
        matrices,
        lr=options.muon_lr,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": options.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=options.adam_lr,
        betas=(0.9, 0.95),
    )
    return [muon, adam]


def export(
    model: LlamaForCausalLM, work: Path, folder: Path, provenance: dict[str, object]
) -> None:
    """Write a complete Hugging Face model folder and swap it in at once."""
    staging = folder.with_name(folder.name + ".new")
    shutil.rmtree(staging, ignore_errors=True)
    state = {
        name: value.detach().to(torch.bfloat16)
        for name, value in model.state_dict().items()
    }
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(state)
    copy.generation_config = GenerationConfig(eos_token_id=0)
    copy.save_pretrained(staging)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(work / "tokenizer" / name, staging / name)
    (staging / "model.safetensors").chmod(0o644)  # saved readable by owner only
    (staging / "provenance.json").write_text(json.dumps(provenance, indent=1))
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    staging.rename(folder)


@torch.no_grad()
def held_out_losses(
    model: LlamaForCausalLM, work: Path, num_sequences: int
) -> dict[str, float]:
    """Return nats per token of each domain over evenly spaced held-out sequences."""
    losses = {}
    for domain in corpus.DOMAINS:
        stream = tokens.stream(work, domain, "held_out").astype(np.int64)
        length = HELD_OUT_TOKENS + 1
        starts = np.arange(0, len(stream) - length, length)
        chosen = np.linspace(0, len(starts) - 1, min(num_sequences, len(starts)))
        total = 0.0
        for index in chosen.astype(int):
            row = torch.from_numpy(stream[starts[index] : starts[index] + length])
            logits = model(row[None, :-1], use_cache=False).logits[0]
            total += torch.nn.functional.cross_entropy(logits.float(), row[1:]).item()
        losses[domain] = round(total / len(chosen), 4)
    return losses


def machine() -> dict[str, object]:
    """Describe the machine and software for the provenance record."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "cores_allowed": len(os.sched_getaffinity(0)),
    }


def train(work: Path, options: TargetOptions) -> dict[str, object]:
    """Train for ``options.minutes`` and leave the export in ``work/target``."""
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(model_config())
    # Residual writers start small, so depth does not inflate the stream.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(1.0 / math.sqrt(2 * model.config.num_hidden_layers))
    if options.start:
        earlier = LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32)
        model.load_state_dict(earlier.state_dict())
    forward = torch.compile(model)
    optimizers = make_optimizers(model, options)
    peaks = [[g["lr"] for g in o.param_groups] for o in optimizers]
    provenance: dict[str, object] = {
        "what": "demo target of vllm_tide, trained on files of CPython itself",
        "corpus": json.loads((work / "corpus" / "summary.json").read_text()),
        "tokens": json.loads((work / "tokens" / "counts.json").read_text()),
        "mix": MIX,
        "options": {**vars(options), "start": options.start and "an earlier export"},
        "machine": machine(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    budget_s = options.minutes * 60.0
    step, num_tokens, mean_loss, elapsed = 0, 0, 0.0, 0.0
    checkpoint = work / "target.checkpoint.pt"
    if checkpoint.exists():
        # Tensors and numbers only: torch loads no other objects by default.
        state = torch.load(checkpoint, weights_only=True)
        step, num_tokens, mean_loss, elapsed = state["progress"]
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
    begin = time.monotonic() - elapsed
    next_export = elapsed + options.export_every_s
    log = (work / "target.log").open("a")
    # Short sequences first: attention is a third of the cost at 512 tokens.
    per_step = options.sequences_per_step
    seeds = [options.seed, step]
    short = batches(work, per_step, options.short_tokens, [*seeds, 0])
    long = batches(work, per_step, options.long_tokens, [*seeds, 1])
    while (elapsed := time.monotonic() - begin) < budget_s:
        batch = next(long if elapsed > options.long_from * budget_s else short)
        scale = lr_scale(elapsed / budget_s, options.warmup_share)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group, lr in zip(optimizer.param_groups, peak, strict=True):
                group["lr"] = lr * max(scale, 1e-3)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            logits = forward(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        num_tokens += batch[:, 1:].numel()
        mean_loss += (loss.item() - mean_loss) * (1.0 if step == 1 else 0.03)
        if step % 20 == 0:
            rate = num_tokens / (time.monotonic() - begin)
            log.write(
                f"step {step} time {elapsed:.0f} s loss {mean_loss:.4f} "
                f"scale {scale:.3f} tokens/s {rate:.0f}\n"
            )
            log.flush()
        if elapsed >= next_export:
            next_export += options.export_every_s
            losses = held_out_losses(model, work, num_sequences=6)
            log.write(f"held-out {json.dumps(losses)}\n")
            provenance |= {"steps": step, "wall_s": elapsed, "final": False}
            provenance["held_out_loss_quick"] = losses
            export(model, work, work / "target", provenance)
            kept = {
                "progress": (step, num_tokens, mean_loss, time.monotonic() - begin),
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            }
            torch.save(kept, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    provenance |= {
        "steps": step,
        "trained_tokens": num_tokens,
        "wall_s": time.monotonic() - begin,
        "final": True,
    }
    provenance.pop("held_out_loss_quick", None)
    provenance["held_out_loss"] = held_out_losses(model, work, num_sequences=60)
    export(model, work, work / "target", provenance)
    checkpoint.unlink(missing_ok=True)
    return provenance
