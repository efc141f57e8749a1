"""How sure a draft is of each token: the highest probability of a row of its logits.

In every draft pass, mostly inside its captured graph, of which a softmax would hold two
float32 tables of the whole vocabulary for good. On a device the kernel of the top-k
teacher lists one token instead, in memory that is made once.
"""

from __future__ import annotations

import torch

from vllm_tide.kernels.topk_teacher import TopKWorkspace, topk_teacher


class Sureness:
    """Fills a table of confidences, draft step by draft step.

    Args:
        max_reqs: Most rows of logits.
        depth: Draft steps.
        vocab: Entries of a row; rows of another length allocate.
        device: Where the draft runs.

    Attributes:
        table: float32 [max_reqs, depth], on the device.
    """

    def __init__(
        self, max_reqs: int, depth: int, vocab: int, device: torch.device
    ) -> None:
        self.table = torch.zeros(max_reqs, depth, device=device)
        self._vocab = vocab
        self._workspace = None
        if device.type != "cpu":
            self._workspace = TopKWorkspace(max_reqs, vocab, 1, device)

    def keep(self, logits: torch.Tensor, draft_step: torch.Tensor) -> None:
        """Take the logits of a draft step; waits for nothing.

        Args:
            logits: [n, vocab], n at most `max_reqs`.
            draft_step: int64 [], which step; on the device, as graphs are replayed.
        """
        sure = self._highest(logits)
        where = draft_step.expand(len(sure), 1)
        self.table[: len(sure)].scatter_(1, where, sure)

    def _highest(self, logits: torch.Tensor) -> torch.Tensor:
        if self._workspace is None:
            return torch.softmax(logits.float(), dim=-1).amax(dim=-1, keepdim=True)
        fits = logits.shape[1] == self._vocab
        top = topk_teacher(logits, 1, self._workspace if fits else None)
        return top.logprobs.exp_()
