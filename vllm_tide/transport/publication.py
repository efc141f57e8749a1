"""A draft as bytes: one safetensors file with its metadata, and its SHA-256 beside it.

The weights segment, the spool and who passes drafts on hold the same bytes; only the
two ends that need tensors read them. The digest is the only check: a writer of this
user is not hostile, so bytes with the right digest are what was written.

Encoding uses the safetensors library. Decoding reads its simple format here, because
the library wants ``bytes`` and hands out copies: two more passes over the weights
under the interpreter lock of a serving process. A test holds the two equal.
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

from vllm_tide.transport.shm import MALFORMED, TransportError, said

FORMAT_VERSION = 2
"""Of a draft's bytes and of the segment that holds them."""
MAX_VERSION = 2**63 - 1
"""Versions are counted from 1."""

_METADATA = "vllm_tide"  # the one key of the file's metadata; its value is JSON

# Name as torch says it: (name in a safetensors header, bytes of an element).
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
"""dtype as torch names it, shape, and a C-contiguous buffer of its bytes."""


class WeightsRefused(TransportError):  # noqa: N818 - a refusal, not a fault of ours
    """A publication that must not be installed.

    Args:
        reason: A label for counters: empty, torn, truncated, format, sha256 or stale.
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


class TensorBytes(NamedTuple):
    """One tensor: dtype as torch names it, shape, its bytes (uint8, row-major).

    It is a `TensorInput` too.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class Publication:
    """A draft as the trainer sent it; the bytes are private to the caller."""

    version: int
    parent_version: int
    created_unix_ns: int
    meta: dict[str, Any]
    tensors: dict[str, TensorBytes]


class DraftBlob(NamedTuple):
    """A draft as it is stored and passed on: private bytes and their SHA-256."""

    version: int
    sha256: bytes
    data: Any  # bytes, or uint8 [n] that nobody else holds

    def verify(self) -> None:
        """Compare bytes and digest; WeightsRefused (sha256) if they differ."""
        if hashlib.sha256(self.data).digest() != self.sha256:
            raise WeightsRefused("sha256", f"version {self.version} is damaged")


def encode(
    tensors: Mapping[str, TensorInput], version: int, parent: int, meta: dict[str, Any]
) -> DraftBlob:
    """Serialise a draft.

    Raises:
        ValueError: If a dtype is unknown, a size is wrong or meta is no JSON.
    """
    specs: dict[str, Any] = {}
    buffers: list[np.ndarray] = []  # TensorSpec holds a bare address
    for name, (dtype, shape, buffer) in tensors.items():
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name}: dtype {dtype!r} cannot be published")
        data = _as_bytes(buffer)
        if len(data) != math.prod(shape) * _DTYPES[dtype][1]:
            raise ValueError(
                f"tensor {name}: {len(data)} bytes do not make {dtype} {tuple(shape)}"
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
    """Verify and read a draft; its tensors are views of the blob.

    Raises:
        WeightsRefused: sha256 or format.
    """
    blob.verify()
    data = np.frombuffer(blob.data, np.uint8)
    try:
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:begin].tobytes())
        about = json.loads(header.pop("__metadata__")[_METADATA])
        if (about["format"], about["version"]) != (FORMAT_VERSION, blob.version):
            raise ValueError(
                f"format {said(about['format'])} and version {said(about['version'])}, "
                f"not {FORMAT_VERSION} and {blob.version}: run the same vllm_tide on "
                "both sides"
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
        raise WeightsRefused(
            "format", f"version {blob.version} cannot be read: {said(error)}"
        ) from error


def _tensor(
    data: np.ndarray, dtype: str, shape: list[int], data_offsets: list[int]
) -> TensorBytes:
    name, size = _DTYPE_NAMES[dtype]
    begin, end = data_offsets
    tensor = TensorBytes(name, tuple(map(int, shape)), data[begin:end])
    if min(tensor.shape, default=0) < 0 or len(tensor.data) != math.prod(shape) * size:
        raise ValueError("a tensor has the wrong size")
    return tensor


def _as_bytes(buffer: Any) -> np.ndarray:
    """A buffer's bytes as uint8 [n], without a copy where that is possible."""
    array = buffer if isinstance(buffer, np.ndarray) else np.asarray(memoryview(buffer))
    if array.size == 0:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def tensor_spec(dtype: str, shape: list[int], data: np.ndarray) -> Any:
    """A tensor as `safetensors.serialize` takes it; holds a bare address of `data`."""
    if hasattr(safetensors, "TensorSpec"):
        return safetensors.TensorSpec(
            dtype=dtype, shape=shape, data_ptr=data.ctypes.data, data_len=data.nbytes
        )
    # safetensors before 0.8
    return {"dtype": dtype, "shape": shape, "data": data.tobytes()}
