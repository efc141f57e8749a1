"""Acceptance as served: vLLM with the draft, on the bundled prompts per domain.

Training metrics are teacher-forced; this is the figure users see.  Needs vLLM.
"""

import itertools
import json
from pathlib import Path

from bench.harness.stream import read_prompts

NUM_PROMPTS, NUM_TOKENS = 64, 96
TEMPERATURES = 0.0, 0.5


def _counters(llm: object) -> dict[str, float]:
    prefix = "vllm:spec_decode_num_"
    return {
        metric.name.removeprefix(prefix): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(prefix) and hasattr(metric, "value")
    }


def measure(
    target: Path, draft: Path, prompts: Path, domains: list[str]
) -> dict[str, dict[str, float]]:
    """Measure acceptance length (1 + accepted per draft) and record it.

    The figures go into the draft's ``provenance.json``, under ``served``.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(target),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=16,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": str(draft),
            "num_speculative_tokens": 3,
        },
    )
    report = {}
    for temperature, domain in itertools.product(TEMPERATURES, domains):
        sampling = SamplingParams(
            temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=0
        )
        texts = read_prompts(prompts, domain)[:NUM_PROMPTS]
        before = _counters(llm)
        llm.generate(texts, sampling, use_tqdm=False)
        delta = {k: v - before.get(k, 0.0) for k, v in _counters(llm).items()}
        drafts = max(1.0, delta.get("drafts", 0.0))
        report[f"{temperature:g}, {domain}"] = {
            "prompts": len(texts),
            "acceptance_length": round(1 + delta["accepted_tokens"] / drafts, 3),
            "drafts": int(drafts),
        }
    path = draft / "provenance.json"
    provenance = json.loads(path.read_text()) | {"served": report}
    path.write_text(json.dumps(provenance, indent=1))
    return report
