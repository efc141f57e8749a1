"""Makes a stream for `online_replay.py` without a server.

    replay_samples.py --target DIR --draft DIR --prompts DIR --domains python,c,python
        --requests 16,48,16 --seed 0 --out FILE

The target continues the prompts greedily, each prompt once, and one forward pass gives
what the engine would capture.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.options import list_of
from bench.harness.samples import save_samples
from bench.harness.stream import choose_prompts, read_prompts, segment_name
from demo.generate import Generator
from demo.traces import capture
from vllm_tide.draft.config import Eagle3Config, read_config
from vllm_tide.train.sample import Sample


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("--target", "--draft", "--prompts", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--domains", type=list_of(str), default=("python", "c"))
    parser.add_argument("--requests", type=list_of(int), default=(16, 48))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = Generator(args.target)
    shape = Eagle3Config.from_json(read_config(args.draft), read_config(args.target))
    layers = shape.aux_layer_ids
    parts: dict[str, list[Sample]] = {}
    used: dict[str, int] = {}
    key = 0
    stretches = zip(args.domains, args.requests, strict=True)
    for place, (domain, count) in enumerate(stretches):
        skip = used.get(domain, 0)
        used[domain] = skip + count
        prompts = read_prompts(args.prompts, domain)
        chosen = choose_prompts(prompts, skip + count, domain, args.seed)[skip:]
        texts = [text for _, text in chosen]
        rows = [e.ids for e in generator.tokenizer.encode_batch(texts)]
        continued = generator.continue_ids(rows, args.max_tokens)
        whole = [a + b for a, b in zip(rows, continued, strict=True)]
        part = parts[segment_name(place, domain)] = []
        for row, ids in zip(rows, whole, strict=True):
            [(features, hidden)] = capture(generator, [ids], layers)
            tokens, key = torch.tensor(ids), key + 1
            part.append(
                Sample.offline(
                    tokens, features, hidden, num_prompt_tokens=len(row), key=key
                )
            )
    save_samples(args.out, parts, {"shared": []})


if __name__ == "__main__":
    main()
