"""Swaps in one worker: stage, install at the given step, restore after a failure.

Used by `worker.py`; `install_ordered` runs on the model's thread between two steps.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from vllm_tide.engine.install import install, shared_with_target, verify_installed
from vllm_tide.engine.staged_draft import (
    DeviceBuffer,
    DraftContract,
    StagedDraft,
    Stager,
    overflow_check,
)
from vllm_tide.tracing import open_tracing
from vllm_tide.transport.versions import number_of, step_of, version_name
from vllm_tide.transport.weights import WeightsSegment

logger = logging.getLogger("vllm.tide")

MAX_NORM_RATIO = 64.0
"""Largest norm of a tensor, relative to the checkpoint's."""


class Swapper:
    """Installation of drafts, and the last good draft for restoring.

    Args:
        checkpoint: Directory of the draft that the server started with.
        group: vLLM's tensor-parallel group, or None with one rank.
        cores: Cores for the thread that checks publications.

    Attributes:
        version: Version of the live draft; 0 is the checkpoint's.
        seconds: Durations of installations since the last report.
    """

    def __init__(
        self,
        draft: nn.Module,
        target: nn.Module,
        vllm_config: Any,
        checkpoint: Path,
        segment: WeightsSegment,
        group: Any = None,
        cores: set[int] | None = None,
    ) -> None:
        self._draft = draft
        self._config = vllm_config
        self._checkpoint = checkpoint
        self._segment = segment
        self._group = group
        self.shared = shared_with_target(draft, target)
        reference = checkpoint_tensors(checkpoint)
        contract = DraftContract(
            reference,
            MAX_NORM_RATIO,
            self.shared,
            vllm_config.model_config.get_vocab_size(),
        )
        device = next(draft.parameters()).device
        self._buffer: DeviceBuffer | None = None
        if device.type != "cpu":
            dtype = vllm_config.speculative_config.draft_model_config.dtype
            self._buffer = DeviceBuffer(reference, self.shared, dtype, device)
        self.stager = Stager(
            segment,
            contract,
            cores,
            self._buffer,
            overflow_check(checkpoint, vllm_config),
        )
        self._last_good: StagedDraft | None = None
        self.version = 0
        self.num_swaps = 0
        self.seconds: list[float] = []
        self._last_seconds = 0.0
        self._tracing = open_tracing("engine")

    @property
    def number(self) -> int:
        """Number of the live draft, that of its base for a fast draft.

        Control keeps its statistics of the draft while this is unchanged.
        """
        return number_of(self.version)

    def ready_version(self) -> int:
        """Return the version that is staged and can be installed, or 0."""
        return self.stager.staged_version

    def install_ordered(self, version: int) -> None:
        """Install `version` on this rank; all ranks call this at the same step.

        Several ranks first agree that all have staged the version, and then that all
        have installed it, so ranks never serve different drafts. A bad draft raises no
        exception; the last good one is installed again.
        """
        staged = self.stager.take(version)
        if self._group is not None and not self._all_agree(staged is not None):
            return
        if staged is None:
            return
        began = time.perf_counter()
        reason, installed = "another rank could not install it", True
        try:
            tensors = staged.on_device or staged.tensors
            install(self._draft, self._config, tensors, self.shared)
            if self._buffer is not None:
                self._buffer.installed()
            elif self._group is None:
                verify_installed(self._draft, staged.tensors)
        except Exception as error:  # noqa: BLE001 - the serving boundary
            reason, installed = f"{type(error).__name__}: {error}", False
        if self._group is not None:
            installed = self._all_agree(installed)
        if not installed:
            self.stager.refuse(version, "install", reason)
            self._restore()
        else:
            self._last_good = staged
            self.version = version
            self.num_swaps += 1
            self._last_seconds = time.perf_counter() - began
            self.seconds.append(self._last_seconds)
            self._log_swap(staged)
        self.stager.done(staged, time.perf_counter() - began)
        self.report()
        if self._tracing is not None:
            served = self.version == version
            facts = {"version": number_of(version), "installed": served}
            self._tracing.span("swap", time.perf_counter() - began, facts)

    def report(self) -> None:
        self._segment.report(
            self.version,
            self.stager.last_refused_version,
            self.stager.last_refusal,
            1e3 * self._last_seconds,
        )

    def _log_swap(self, staged: StagedDraft) -> None:
        if self._group is not None and self._group.rank_in_group:
            return
        back = [staged.facts.get(key) for key in ("rollback_of", "to", "reason")]
        text = ", a rollback of {!r:.20} to the weights of {!r:.20} ({!r:.200})"
        logger.log(
            logging.DEBUG if step_of(staged.version) else logging.INFO,
            "vllm_tide: draft %s is live%s; pause %.1f ms.",
            version_name(staged.version),
            "" if back[0] is None else text.format(*back),
            1e3 * self._last_seconds,
        )

    def close(self) -> None:
        self.stager.close()
        if self._buffer is not None:
            self._buffer.close()

    def _all_agree(self, flag_here: bool) -> bool:
        flag = torch.tensor([int(flag_here)])
        torch.distributed.all_reduce(
            flag, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group
        )
        return bool(flag.item())

    def _restore(self) -> None:
        try:
            if self._last_good is not None:
                tensors = self._last_good.tensors
            else:
                tensors = checkpoint_tensors(self._checkpoint)
            install(self._draft, self._config, tensors, self.shared)
        except Exception as error:  # noqa: BLE001 - the serving boundary
            self.stager.refuse(
                self.version,
                "restore",
                f"{type(error).__name__}; acceptance is low until the next swap or a "
                "restart, outputs stay correct.",
            )


def checkpoint_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors checkpoint, without `t2d`, which vLLM ignores."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors.update(load_file(file))
    tensors.pop("t2d", None)
    return tensors
