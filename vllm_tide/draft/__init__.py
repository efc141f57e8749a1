"""Drafts as trainable modules: shapes, attention, checkpoints, vocabulary.

Runs in the trainer process (and in tests); imports torch, not vllm.
"""

from vllm_tide.draft.checkpoint import export_tensors, load_draft, save_draft
from vllm_tide.draft.config import DraftConfig, DraftError
from vllm_tide.draft.dflash import DFlashDraft
from vllm_tide.draft.dflash_config import DFlashConfig
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.eagle3_config import Eagle3Config
from vllm_tide.draft.kind import draft_config
from vllm_tide.draft.module import Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap

__all__ = [
    "DFlashConfig",
    "DFlashDraft",
    "Draft",
    "DraftConfig",
    "DraftError",
    "Eagle3Config",
    "Eagle3Draft",
    "TargetRows",
    "VocabMap",
    "draft_config",
    "export_tensors",
    "load_draft",
    "save_draft",
]
