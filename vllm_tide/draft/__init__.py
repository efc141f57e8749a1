"""The EAGLE-3 draft as a trainable module: shapes, attention, checkpoints, vocabulary.

Runs in the trainer process (and in tests); imports torch, not vllm.
"""

from vllm_tide.draft.checkpoint import export_tensors, load_draft, save_draft
from vllm_tide.draft.config import DraftError, Eagle3Config
from vllm_tide.draft.eagle3 import Eagle3Draft
from vllm_tide.draft.target import TargetRows
from vllm_tide.draft.vocab import VocabMap

__all__ = [
    "DraftError",
    "Eagle3Config",
    "Eagle3Draft",
    "TargetRows",
    "VocabMap",
    "export_tensors",
    "load_draft",
    "save_draft",
]
