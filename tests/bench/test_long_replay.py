"""The replay of long outputs: what a walk over equal tokens counts."""

from __future__ import annotations

import json
import sys

import torch

from bench import long_replay
from bench.long_replay import Stream, figures, main, walk


def stream(tokens, prompt=4):
    none = torch.zeros(len(tokens), 1)
    return Stream("c", prompt, tokens, none, none)


def test_a_walk_goes_on_behind_what_was_accepted():
    tokens = list(range(20))
    drafted = torch.full((12, 3), -1)
    drafted[0] = torch.tensor([5, 6, 7])  # all right: four tokens
    drafted[4] = torch.tensor([9, 0, 11])  # the third is not reached
    steps = walk(stream(tokens), drafted, memory=False)
    assert steps == [(0, 4), (4, 2), *((at, 1) for at in range(6, 12))]
    found = figures([steps, [(0, 2), (300, 4)]], 3)
    assert found["by_stream"] == [1.5, 3.0]
    assert found["acceptance_length"] == 1.8
    assert found["by_position"] == [round(14 / 9, 4), 4.0, None, None, None]


def test_the_memory_drafts_where_a_stream_repeats_itself():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 20
    wrong = torch.zeros(170, 3, dtype=torch.int64)
    alone = walk(stream(tokens), wrong, memory=False)
    both = walk(stream(tokens), wrong, memory=True)
    assert sum(made for _, made in alone) / len(alone) == 1.0
    assert sum(made for _, made in both) / len(both) > 3.0


def test_all_cases_replay_the_same_tokens(tmp_path, monkeypatch):
    out, counted = tmp_path / "out.json", {}
    asked = figures

    def spy(steps, updates):
        counted[len(counted)] = [sum(m for _, m in some) for some in steps]
        return asked(steps, updates)

    monkeypatch.setattr(long_replay, "figures", spy)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    given = "--streams 2 --tokens 40 --stride 16 --exact-streams 1 --strides 4"
    monkeypatch.setattr(sys, "argv", ["x", "--json", str(out), *given.split()])
    main()
    found = json.loads(out.read_text())
    assert list(found["cases"]) == [
        "frozen", "shared", "private", "memory", "both", "exact frozen", "exact 4",
    ]  # fmt: skip
    assert found["cases"]["frozen"]["over_frozen"] == 1.0
    assert found["cases"]["shared"]["updates"] > 0
    assert found["cases"]["exact 4"]["updates"] > 0
    assert [set(s) for s in found["streams"]] == [{"domain", "distinct"}] * 2
    # A case that walks over fewer tokens would look better or worse by them.
    for sums in counted.values():
        assert all(abs(n - counted[0][0]) <= 2 * long_replay.DEPTH for n in sums)
    # The verify loop with a cache, and the rows drafted in blocks: the same drafts.
    first = found["cases"]["frozen"]["by_stream"][0]
    assert abs(found["cases"]["exact frozen"]["by_stream"][0] - first) < 0.05
