"""Several ranks train one draft: the same curve as one, sharded; ranks may die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.harness.server import free_port
from tests.train import rank_child
from tests.train.rank_child import BAD, LOST, STEPS, documents
from vllm_tide.draft import DraftError
from vllm_tide.draft.tensor_bytes import from_bytes
from vllm_tide.train import checkpoint
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.distributed import OneRank, split_documents
from vllm_tide.train.packing import pack
from vllm_tide.train.ranks import RankLost, Ranks, detect_lost_ranks
from vllm_tide.transport.weights import WeightsSegment

SAVED = 4


class Pair:
    """Two ranks of `rank_child` as processes."""

    def __init__(self, out: Path, **options: Any) -> None:
        self.out = out
        common = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.train.rank_child",
                    json.dumps({"out": str(out), **options}),
                ],
                env={**os.environ, **common, "RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def wait(self) -> tuple[list[int], list[str]]:
        """Return exit status and standard error of both."""
        try:
            texts = [rank.communicate(timeout=60)[1] for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()
        return [rank.returncode for rank in self.ranks], texts

    def result(self) -> dict[str, Any]:
        """Return the leader's output, after both ended without an error."""
        codes, texts = self.wait()
        assert codes == [0, 0], "\n".join(texts)
        return json.loads(self.out.read_text())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Return curve, weights, and a checkpoint before step `SAVED` of a one-rank run."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("one")
    draft = rank_child.draft()
    stepper = OneRank(draft, rank_child.TOY.rows, rank_child.KNOBS)

    def after(index: int) -> None:
        if index + 1 == SAVED:
            stepper.save(folder, TrainState(steps=SAVED))

    losses = rank_child.train(stepper, 0, STEPS, after)
    weights = {n: t.detach().clone() for n, t in draft.named_tensors().items()}
    return losses, weights, checkpoint.latest(folder)


def assert_same_curve(got: list[float | None], want: list[float | None]) -> None:
    assert [x is None for x in got] == [x is None for x in want]
    pairs = [(x, y) for x, y in zip(got, want, strict=True) if x is not None]
    np.testing.assert_allclose(*np.array(pairs).T, rtol=1e-5)


def test_documents_are_distributed_evenly_and_requests_stay_together():
    samples = [s for index in range(6) for s in documents(index)]
    samples += [documents(2)[1]]
    for size in (1, 2, 3, 7):
        shares = split_documents(samples, size)
        assert sorted(id(s) for share in shares for s in share) == sorted(
            map(id, samples)
        )
        keys = [{s.key for s in share} for share in shares]
        assert sum(map(len, keys)) == len(set.union(*keys))
        rows = [pack(share).layout.num_rows for share in shares]
        assert max(rows) - min(rows) <= 130
    assert split_documents(samples[:1], 3)[1:] == [[], []]


def test_only_a_failed_collective_is_a_lost_rank():
    with pytest.raises(RankLost, match="another rank"), detect_lost_ranks():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer")
    with pytest.raises(RuntimeError, match="^size mismatch$"), detect_lost_ranks():
        raise RuntimeError("size mismatch")


@pytest.mark.parametrize("device", ["cuda:1", "meta"])
def test_devices_that_ranks_cannot_share_are_refused(device):
    with pytest.raises(DraftError, match=r"tide\.train\.device"):
        Ranks(device)


@pytest.mark.slow
def test_two_ranks_give_the_curve_of_one(one_rank, tmp_path):
    losses, weights, _ = one_rank
    assert losses[BAD] is None and losses[0] > losses[-1]
    saved = tmp_path / "saved"
    pair = Pair(
        tmp_path / "out",
        last=STEPS,
        save=SAVED,
        directory=str(saved),
        full_disk=True,
        restore=True,
    )
    got = pair.result()
    assert_same_curve(got["losses"], losses)
    assert got["share"] <= 0.55
    final = load_file(f"{pair.out}.st")
    for name, value in weights.items():
        torch.testing.assert_close(final[name], value, rtol=1e-3, atol=1e-4)
    # its checkpoint continues with one rank
    draft = rank_child.draft(seed=9)
    stepper = OneRank(draft, rank_child.TOY.rows, rank_child.KNOBS)
    path = checkpoint.latest(saved)
    assert len(list(path.glob("*.safetensors"))) == 2
    state = stepper.load(path)
    assert state.steps == SAVED
    again = rank_child.train(stepper, state.steps, STEPS)
    assert_same_curve(again, losses[SAVED:])


@pytest.mark.slow
def test_a_rank_killed_in_a_step_loses_nothing_published(one_rank, tmp_path):
    """Also: two ranks continue from a checkpoint of one, and two from one of two."""
    losses, _, first = one_rank
    options = {"directory": str(tmp_path / "saved"), "last": STEPS}
    segment = WeightsSegment.create(1 << 20)
    try:
        pair = Pair(
            tmp_path / "out",
            load=str(first),
            save=SAVED + 2,
            segment=segment.name,
            die_in=4,  # its fourth step: one after the checkpoint is done
            **options,
        )
        pair.ranks[1].wait(timeout=60)
        died = time.monotonic()
        codes, texts = pair.wait()
        assert codes == [LOST, -9], "\n".join(texts)
        assert time.monotonic() - died < 20
        assert "another rank of this trainer is gone" in texts[0]
        assert not pair.out.exists()

        sent = from_bytes(segment.read().tensors)
        path = checkpoint.latest(tmp_path / "saved")
        state, _ = checkpoint.verify(path, rank_child.draft())
        assert state.published_version == 1
        # the published draft equals the checkpoint, bit by bit
        draft = rank_child.draft(seed=9)
        OneRank(draft, rank_child.TOY.rows, rank_child.KNOBS).load(path)
        for name, value in draft.named_tensors().items():
            assert torch.equal(sent[name], value)
    finally:
        segment.close()

    got = Pair(tmp_path / "again", load=str(path), **options).result()
    assert got["state"] == SAVED + 2
    assert_same_curve(got["losses"], losses[SAVED + 2 :])
