"""Protocols of the trainer: stored drafts, checkpoints, model folders, a rollback."""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.kill_points.points import Protocol
from tests.train.toys import HIDDEN, LLAMA, ToyTarget
from tests.transport.samples import make_manifest
from vllm_tide.config import FreshConfig, TrainConfig
from vllm_tide.deploy.rollback import roll_back
from vllm_tide.deploy.store import DraftStore, fingerprint_of
from vllm_tide.draft import export
from vllm_tide.draft.checkpoint import read_tensors, save_draft
from vllm_tide.draft.config import read_config
from vllm_tide.draft.fresh import fresh_directory
from vllm_tide.draft.kind import canonical
from vllm_tide.draft.tensor_bytes import from_bytes, to_bytes
from vllm_tide.train import checkpoint
from vllm_tide.train.checkpoint import TrainState
from vllm_tide.train.distributed import OneRank
from vllm_tide.transport import WeightsSegment, WeightsWriter
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.versions import first_version

TOY = ToyTarget()


def tensors_of(version: int) -> dict[str, Tensor]:
    return {"fc.weight": torch.full((4, 6), float(version))}


class Stored(Protocol):
    """A trainer stores a draft, the oldest one is removed, and a bad one is dropped."""

    def begin(self) -> None:
        for version in (1, 2, 3):
            self._store().put(tensors_of(version), version)

    def _store(self) -> DraftStore:
        return DraftStore(self.folder / "heads", "a" * 64)

    def act(self) -> bool:
        store = self._store()
        store.put(tensors_of(4), 4)
        for draft in list(store.drafts()):
            if draft.version == 2:
                store.drop(draft)
        return all(draft.version > 2 for draft in store.drafts())

    def check(self, done: bool) -> None:
        store = self._store()
        versions = []
        for draft in store.drafts():
            assert draft.tensors["fc.weight"].unique().tolist() == [draft.version]
            versions.append(draft.version)
        assert not store.refused or self.fault != "kill"
        assert versions == sorted(versions, reverse=True)
        assert versions[0] == 4 or not done and versions[0] == 3


@functools.cache
def step_of(seed: int):
    torch.set_num_threads(1)  # none is left in a fork
    return OneRank(TOY.draft(seed), TOY.rows, TrainConfig()).step


class Checkpoint(Protocol):
    """A trainer writes its state, of which two are stored; the next one reads it."""

    def begin(self) -> None:
        for steps in (1, 2):
            checkpoint.save(self.folder, step_of(0), TrainState(steps))

    def act(self) -> bool:
        last = checkpoint.latest(self.folder)
        assert last is not None
        steps = checkpoint.load(last, step_of(1)).steps
        checkpoint.save(self.folder, step_of(1), TrainState(steps + 1))
        return True

    def check(self, done: bool) -> None:
        last = checkpoint.latest(self.folder)
        assert last is not None
        state, _ = checkpoint.verify(last, step_of(0).draft)
        assert state.steps >= (3 if done else 2)

    def tidy(self) -> None:
        self.act()
        assert len(list(self.folder.iterdir())) == 2


class Models(Protocol):
    """A target and a draft on disk."""

    def begin(self) -> None:
        self.target, self.draft = self.folder / "target", self.folder / "draft"
        self.target.mkdir()
        (self.target / "config.json").write_text(json.dumps(LLAMA))
        rows = {"model.embed_tokens.weight": TOY.embed, "lm_head.weight": TOY.head}
        save_file(rows, self.target / "model.safetensors")
        save_draft(TOY.draft(), self.draft, torch.float32)


class Saved(Models):
    """A model folder is written over another one."""

    def act(self) -> bool:
        save_draft(TOY.draft(1), self.draft, torch.float32)
        return True

    def check(self, done: bool) -> None:
        assert read_config(self.draft)["hidden_size"] == HIDDEN
        weight = read_tensors(self.draft)["fc.weight"]
        expected = [TOY.draft(seed).named_tensors()["fc.weight"] for seed in (0, 1)]
        assert (
            torch.equal(weight, expected[1])
            or not done
            and torch.equal(weight, expected[0])
        )

    def tidy(self) -> None:
        """Its user writes it again; a private file of a killed one stays."""
        for path in self.draft.glob(".tide-*.tmp"):
            path.unlink()


class Fresh(Models):
    """A server builds its first draft, or reads it."""

    def act(self) -> bool:
        fresh_directory(self.target, FreshConfig(), torch.float32, self._cache)
        return True

    @property
    def _cache(self) -> Path:
        return self.folder / "cache"

    def check(self, done: bool) -> None:
        names = list(self._cache.glob("[!.]*"))
        assert len(names) == 1 or not done and not names
        if done:
            folder = fresh_directory(
                self.target, FreshConfig(), torch.float32, self._cache
            )
            assert folder == names[0]
            assert read_tensors(folder)["fc.weight"].isfinite().all()

    def tidy(self) -> None:
        for path in self._cache.glob("[!.]*"):
            shutil.rmtree(path)
        self.act()


class Exported(Models):
    """A draft is exported into a separate folder, whole or not at all."""

    def act(self) -> bool:
        if (self.folder / "export").exists():
            return True
        draft = export.from_directory(self.draft)
        export.write_export(self.folder / "export", draft, "hf")
        return True

    def check(self, done: bool) -> None:
        folder = self.folder / "export"
        if done or folder.exists():
            names = {path.name for path in folder.iterdir()}
            assert names == {"config.json", "model.safetensors", "README.md"}
            assert read_tensors(folder)["fc.weight"].isfinite().all()

    def tidy(self) -> None:
        """Its user removes the files of a killed export."""
        for path in self.folder.glob(".export-*"):
            shutil.rmtree(path)


class RolledBack(Models):
    """An operator rolls back to the previous draft, while no trainer runs."""

    def begin(self) -> None:
        super().begin()
        self._segment = WeightsSegment.create(1 << 20)
        self._manifest = make_manifest(
            weights=self._segment.name,
            target_path=str(self.target),
            draft_path=str(self.draft),
            tide={},
            created_unix=time.time(),
        )
        with closing(WeightsWriter.attach(self._segment.name)) as writer:
            for version in (1, 2):
                tensors = self._tensors(version)
                self._store().put(tensors, version)
                writer.publish(
                    DraftWeights.encode(to_bytes(tensors), first_version(version))
                )

    def _tensors(self, version: int) -> dict[str, Tensor]:
        given = read_tensors(self.draft)
        return {n: t + version for n, t in given.items() if n != "t2d"}

    def _store(self) -> DraftStore:
        fingerprint = fingerprint_of(self.target, self.draft)
        return DraftStore(self.folder / "heads", fingerprint)

    def _live(self) -> Mapping[str, Tensor]:
        return canonical(from_bytes(self._segment.read().tensors))

    def _holds(self, live: Mapping[str, Tensor], version: int) -> bool:
        expected = self._tensors(version)["fc.weight"]
        return torch.equal(live["fc.weight"], expected)

    def act(self) -> bool:
        if self._holds(self._live(), 2):
            roll_back(self._manifest, self.folder / "heads")
        return self._holds(self._live(), 1)

    def check(self, done: bool) -> None:
        live, newest = self._live(), self._store().newest()
        assert self._holds(live, 1) or not done and self._holds(live, 2)
        if self._holds(live, 1):  # the draft that the next server begins with
            assert newest is not None and newest.version == 1

    def close(self) -> None:
        self._segment.close()


PROTOCOLS: list[type[Protocol]] = [
    *(Stored, Checkpoint, Saved, Fresh, Exported, RolledBack),
]
