"""Compare captured records with a Transformers forward over the same tokens."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.records import floats
from vllm_tide.transport.record import Record

AUX_LAYERS = (1, 3, 5)  # of the demo's draft
CLOSE = {"atol": 0.02, "rtol": 0.02}


class Oracle:
    """Transformers' forward in float32."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: list[int]) -> tuple[torch.Tensor, ...]:
        """Return features [S, 3H], final hidden [S, H] and log-probabilities [S, V]."""
        with torch.no_grad():
            out = self.model(torch.tensor([tokens]), output_hidden_states=True)
        states = out.hidden_states
        features = torch.cat([states[i][0] for i in AUX_LAYERS], dim=-1)
        return features, states[-1][0], torch.log_softmax(out.logits[0], dim=-1)

    def check_record(self, record: Record, committed: dict[int, int]) -> None:
        """Compare every row of a record; `committed` holds tokens by position."""
        prefix = [committed[i] for i in range(record.start)]
        features, hidden, logprobs = self(prefix + record.token_ids.tolist())
        rows = slice(record.start, record.start + record.num_rows)
        torch.testing.assert_close(floats(record.features), features[rows], **CLOSE)
        taught = slice(record.start + record.teacher_start, rows.stop)
        if record.teacher_hidden is not None:
            given = floats(record.teacher_hidden)
            torch.testing.assert_close(given, hidden[taught], **CLOSE)
        if record.teacher_topk_ids is not None:
            ids = torch.from_numpy(record.teacher_topk_ids).long()
            top = torch.from_numpy(record.teacher_topk_logprobs.copy())
            want = logprobs[taught].gather(1, ids)
            torch.testing.assert_close(top, want, atol=1e-3, rtol=1e-3)
            tail = 1 - want.exp().sum(-1)
            got = torch.from_numpy(record.teacher_tail_logprob.copy()).exp()
            torch.testing.assert_close(got, tail, atol=1e-3, rtol=1e-2)

    def check(
        self, records: list[Record], sequences: list[list[int]]
    ) -> list[tuple[int, ...]]:
        """Replay records in order and return the committed tokens of each request.

        Args:
            sequences: Served tokens, used where a prefix cache left rows out.
        """
        committed: dict[int, dict[int, int]] = {}
        for record in records:
            mine = committed.setdefault(record.key, {})
            for j in range(record.num_accepted + 1):
                mine[record.start + j] = int(record.token_ids[j])
            if record.start > 0 and 0 not in mine:
                (full,) = {
                    tuple(s)
                    for s in sequences
                    if s[record.start : record.start + 1] == [mine[record.start]]
                    and len(s) > record.start
                }
                for i in range(record.start):
                    mine.setdefault(i, full[i])
            self.check_record(record, mine)
            if record.next_token >= 0:
                mine[record.start + record.num_accepted + 1] = record.next_token
        return [tuple(m[i] for i in sorted(m)) for m in committed.values()]

    def check_whole(self, records: list[Record], sequences: list[list[int]]) -> None:
        """As `check`, and every token but the last, never an input, has its row."""
        rebuilt = self.check(records, sequences)
        for sequence in sequences:
            assert any(r[: len(sequence)] == tuple(sequence) for r in rebuilt)
