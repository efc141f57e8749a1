"""Serialised drafts: one safetensors file with metadata, and its SHA-256.

The weights segment, the spool and the relay store the same bytes; only the trainer and
the engine decode them. The digest is the only check, because writers of the same user
are trusted.

Encoding uses the safetensors library. Decoding is implemented here: the library takes
``bytes`` and returns copies, two more passes over the weights that hold the GIL of a
serving process. A test compares both decoders.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import safetensors

from vllm_tide.transport.shm import MALFORMED, TransportError, sanitize_for_log

FORMAT_VERSION = 2
"""Format of a serialised draft and of the weights segment."""
MAX_VERSION = 2**63 - 1
"""Maximum draft version; versions start at 1."""

_METADATA = "vllm_tide"  # the only key of the file's metadata; its value is JSON

# torch dtype name: (safetensors dtype name, bytes per element).
_DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
}
_DTYPE_NAMES = {code: (name, size) for name, (code, size) in _DTYPES.items()}

TensorInput = tuple[str, Sequence[int], Any]
"""torch dtype name, shape, and a C-contiguous buffer."""


class WeightsRefused(TransportError):
    """A publication that must not be installed.

    Args:
        reason: Label for counters: empty, torn, truncated, format, sha256 or stale.
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


class TensorBytes(NamedTuple):
    """A `TensorInput`: torch dtype name, shape, and bytes (uint8, row-major)."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class Publication:
    """A draft as published by the trainer; the tensors are private copies."""

    version: int
    parent_version: int
    created_unix_ns: int
    meta: dict[str, Any]
    tensors: dict[str, TensorBytes]


class DraftBlob(NamedTuple):
    """A serialised draft: private bytes and their SHA-256."""

    version: int
    sha256: bytes
    data: Any  # bytes or uint8 [n], referenced only here

    def verify(self) -> None:
        """Verify the digest; raise WeightsRefused (sha256) if it differs."""
        if hashlib.sha256(self.data).digest() != self.sha256:
            raise WeightsRefused("sha256", f"version {self.version} is damaged")


def encode(
    tensors: Mapping[str, TensorInput], version: int, parent: int, meta: dict[str, Any]
) -> DraftBlob:
    """Serialise a draft.

    Raises:
        ValueError: A dtype is unknown, a size is wrong or meta is not valid JSON.
    """
    specs: dict[str, Any] = {}
    buffers: list[np.ndarray] = []  # keep them alive: TensorSpec stores only an address
    for name, (dtype, shape, buffer) in tensors.items():
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name}: dtype {dtype!r} cannot be published")
        data = _as_bytes(buffer)
        if len(data) != math.prod(shape) * _DTYPES[dtype][1]:
            raise ValueError(
                f"tensor {name}: {len(data)} bytes do not match {dtype} {tuple(shape)}"
            )
        buffers.append(data)
        specs[name] = tensor_spec(dtype, list(shape), data)
    about = {
        "format": FORMAT_VERSION,
        "version": version,
        "parent_version": parent,
        "created_unix_ns": time.time_ns(),
        "meta": meta,
    }
    body = bytes(safetensors.serialize(specs, {_METADATA: json.dumps(about)}))
    return DraftBlob(version, hashlib.sha256(body).digest(), body)


def decode(blob: DraftBlob) -> Publication:
    """Verify and decode a draft; its tensors are views of the blob.

    Raises:
        WeightsRefused: With reason sha256 or format.
    """
    blob.verify()
    data = np.frombuffer(blob.data, np.uint8)
    try:
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:begin].tobytes())
        about = json.loads(header.pop("__metadata__")[_METADATA])
        if (about["format"], about["version"]) != (FORMAT_VERSION, blob.version):
            actual = f"format {about['format']} and version {about['version']}"
            raise ValueError(
                f"{sanitize_for_log(actual)}, not {FORMAT_VERSION} and {blob.version}: "
                "run the same vllm_tide on both sides"
            )
        return Publication(
            version=blob.version,
            parent_version=int(about["parent_version"]),
            created_unix_ns=int(about["created_unix_ns"]),
            meta=dict(about["meta"]),
            tensors={
                name: _tensor(data[begin:], **entry) for name, entry in header.items()
            },
        )
    except MALFORMED as error:
        reason = f"version {blob.version} cannot be read: {sanitize_for_log(error)}"
        raise WeightsRefused("format", reason) from error


def _tensor(
    data: np.ndarray, dtype: str, shape: list[int], data_offsets: list[int]
) -> TensorBytes:
    name, size = _DTYPE_NAMES[dtype]
    begin, end = data_offsets
    tensor = TensorBytes(name, tuple(map(int, shape)), data[begin:end])
    if min(tensor.shape, default=0) < 0 or len(tensor.data) != math.prod(shape) * size:
        raise ValueError("the size of a tensor does not match its shape")
    return tensor


def _as_bytes(buffer: Any) -> np.ndarray:
    """Return the bytes of a buffer as uint8 [n], without a copy if possible."""
    array = buffer if isinstance(buffer, np.ndarray) else np.asarray(memoryview(buffer))
    if array.size == 0:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def tensor_spec(dtype: str, shape: list[int], data: np.ndarray) -> Any:
    """Return a tensor for `safetensors.serialize`; it stores the address of `data`."""
    if hasattr(safetensors, "TensorSpec"):
        return safetensors.TensorSpec(
            dtype=dtype, shape=shape, data_ptr=data.ctypes.data, data_len=data.nbytes
        )
    # safetensors < 0.8
    return {"dtype": dtype, "shape": shape, "data": data.tobytes()}
