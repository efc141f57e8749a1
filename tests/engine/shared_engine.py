"""Kinds of real engines that tests share, and the trainer's end of one."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.engine.offline_engine import OfflineEngine, only_manifest
from tests.engine.records import drain
from vllm_tide.draft.tensor_bytes import to_bytes
from vllm_tide.transport.draft_weights import DraftWeights
from vllm_tide.transport.record import Record
from vllm_tide.transport.ring import RingReader
from vllm_tide.transport.versions import first_version, number_of
from vllm_tide.transport.weights import WeightsWriter

DEMO = Path(__file__).parents[2] / "scripts" / "demo"
# ms: of all draft passes by requests, of the target by rows.
CURVES = [[[1, 0.3], [4, 0.3]], [[1, 10.0], [64, 10.5]]]
STATIC = {"control": {"policy": "static"}}
OFF = {"capture": {"enabled": False}, "swap": {"enabled": False}}
MEMORY = {"test_time": {"memory": "ngram"}}
NO_MEMORY = {"test_time": {"memory": "off"}}


def topk(policy: str) -> dict[str, Any]:
    teacher = {"teacher": "topk", "teacher_topk": 8}
    return {"capture": teacher, "control": {"policy": policy}} | NO_MEMORY


KINDS: dict[str, dict[str, Any]] = {
    # Greedy requests still get greedy drafts.
    "v1": {"runner": "v1", "tide": STATIC, "drawn": "probabilistic"},
    "v1-control": {
        "runner": "v1",
        "tide": topk("adaspec"),
        "steered": True,
        "most": 5,
    },
    "v1-memory": {
        "runner": "v1",
        "tide": OFF | MEMORY | {"control": {"policy": "adaspec"}},
        "steered": True,
        "most": 5,
    },
    "v1-dflash": {
        "runner": "v1",
        "tide": NO_MEMORY | {"control": {"policy": "adaspec"}},
        "steered": True,
        "most": 4,
        "method": "dflash",
        "model": "fresh",
    },
    "v2-dflash": {
        "runner": "v2-async",
        "tide": {"control": {"policy": "threshold"}},
        "steered": True,
        "most": 4,
        "method": "dflash",
        "model": "fresh",
    },
    "v2": {"runner": "v2", "tide": topk("threshold"), "steered": True},
    "v2-async": {
        "runner": "v2-async",
        "tide": {"control": {"policy": "threshold"}},
        "steered": True,
    },
    "v2-everything": {
        "runner": "v2-async",
        "tide": MEMORY | {"control": {"policy": "adaspec", "probe_share": 0.0}},
        "curves": CURVES,
    },
}


def engine_case(run_dir: Path, kind: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Return the case of `offline.py` for a kind; KV blocks for two long requests."""
    ours = ("tide", "most", "method", "model")
    case = {key: kind[key] for key in kind if key not in ours}
    given = kind["tide"]
    tide: dict[str, Any] = {"run_dir": str(run_dir), "train": {"autostart": False}}
    speculative = {
        "method": kind.get("method", "eagle3"),
        "model": kind.get("model", str(DEMO / "draft")),
        "num_speculative_tokens": kind.get("most", 3),
        "draft_sample_method": kind.get("drawn", "greedy"),
        "enable_adaptive_verification": "curves" in kind,
        "tide": tide | given | {"capture": {"ring_mib": 16} | given.get("capture", {})},
    }
    # Chunked prefill: long prompts arrive in several steps, in one batch with other
    # requests' verifications.
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 32}
    engine |= {"enable_prefix_caching": True, "num_gpu_blocks_override": 22}
    return {
        "target": str(DEMO / "target"),
        "speculative_config": speculative,
        "engine": engine | change.pop("engine", {}),
        **case,
        **change,
    }


class Served:
    """An engine, and the trainer's ends of its segments.

    Attributes:
        reader: Of its ring; None without capture.
        prefixes: Verified tokens by cached prefix, of all works.
    """

    def __init__(self, engine: OfflineEngine, run_dir: Path) -> None:
        self.engine, self.run_dir = engine, run_dir
        self.prefixes: Counter[str] = Counter()
        manifest = self.manifest = only_manifest(run_dir)
        self.reader = RingReader.attach(manifest.ring) if manifest.ring else None
        self._writer = (
            WeightsWriter.attach(manifest.weights) if manifest.weights else None
        )

    @property
    def writer(self) -> WeightsWriter:
        assert self._writer is not None
        return self._writer

    def records(self) -> list[Record]:
        """Return the records in the ring without end records."""
        records = [] if self.reader is None else drain(self.reader)
        return [record for record in records if record.num_rows]

    def __call__(self, prompts: list[list[int]], **work: Any) -> dict[str, Any]:
        """Serve prompts and return the report, with `records` of the work.

        `max_tokens`, `temperature`, `stop` are parameters; the rest see `offline.py`.
        """
        given = work.pop("params", {}) | {
            k: work.pop(k) for k in ("max_tokens", "temperature", "stop") if k in work
        }
        if self.reader is not None:
            drain(self.reader)
        report = self.engine.work(prompts, params=given, **work)
        self.prefixes.update(report["prefixes"])
        every = [] if self.reader is None else drain(self.reader)
        report["records"] = [record for record in every if record.num_rows]
        report["ended"] = {record.key for record in every if record.finished}
        return report

    def publish(self, tensors: dict[str, torch.Tensor], **meta: Any) -> str:
        """Publish and serve until installed or refused; return why it was refused."""
        version = first_version(number_of(self.writer.latest_version) + 1)
        self.writer.publish(DraftWeights.encode(to_bytes(tensors), version, meta))
        until = time.monotonic() + 120
        while True:
            self([[1, 2, 3]], max_tokens=4, salts=["pepper"])
            feedback = self.writer.feedback()
            if feedback.installed_version == version:
                return ""
            if feedback.refused_version == version:
                return str(feedback.refused_reason)
            assert time.monotonic() < until, "neither installed nor refused"
            time.sleep(0.05)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
        if self._writer is not None:
            self._writer.close()


def draft_tensors(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)
