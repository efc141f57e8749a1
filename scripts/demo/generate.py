"""Batched continuations by the target, greedy or sampled.

Plain ``transformers`` generation with left padding: the demo must be buildable
without a server.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

BATCH = 256  # prompts at once: a step of so small a target is all overhead


class Generator:
    """Holds one exported target and continues prompts with it."""

    def __init__(self, folder: Path) -> None:
        """Load the target in fp32; eos is also the padding token."""
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        self.eos = int(self.model.config.eos_token_id)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        return [e.ids for e in self.tokenizer.encode_batch(list(texts))]

    @torch.no_grad()
    def continue_ids(
        self,
        prompts: Sequence[list[int]],
        num_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[list[int]]:
        """Return the new token ids of each prompt, cut before the end token."""
        torch.manual_seed(seed)
        sampling = {"do_sample": False}
        if temperature > 0.0:
            sampling = {
                "do_sample": True,
                "temperature": temperature,
                "top_k": 0,
                "top_p": 1.0,
            }
        out: list[list[int]] = []
        for begin in range(0, len(prompts), BATCH):
            rows = prompts[begin : begin + BATCH]
            width = max(len(row) for row in rows)
            ids = torch.full((len(rows), width), self.eos)
            mask = torch.zeros_like(ids)
            for i, row in enumerate(rows):
                ids[i, width - len(row) :] = torch.tensor(row)
                mask[i, width - len(row) :] = 1
            result = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                pad_token_id=self.eos,
                **sampling,
            )
            for row in result[:, width:].tolist():
                end = row.index(self.eos) if self.eos in row else len(row)
                out.append(row[:end])
        return out
