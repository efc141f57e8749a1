"""A publication: named tensors with their manifest, as the bytes of one slot.

Body of a slot: a fixed head, the manifest (JSON), then a safetensors serialisation.
The head carries the SHA-256 of the manifest, the manifest that of every tensor.

Encoding uses the safetensors library. Decoding reads its simple format here, because
the library wants ``bytes`` and hands out copies: two more passes over the weights
under the interpreter lock of a serving process. A test holds the two equal.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import safetensors

from vllm_tide.transport.header import MALFORMED, TransportError

FORMAT_VERSION = 1
MAX_VERSION = 2**63 - 1
"""Versions are counted from 1; a larger one is damage."""

_MAX_DIMS = 8
_MAX_DIM = 2**48

SLOT_MAGIC = b"VTIDEPUB"
# magic, version, bytes of the manifest, bytes of the tensors, SHA-256 of the manifest
SLOT_HEAD = struct.Struct("<8sQQQ32s")

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


def encode(
    tensors: Mapping[str, TensorInput], version: int, parent: int, meta: dict[str, Any]
) -> tuple[bytes, bytes, bytes]:
    """Serialise: the slot's head, the manifest and the tensors.

    Raises:
        ValueError: If a dtype is unknown, a size is wrong or meta is no JSON.
    """
    specs: dict[str, Any] = {}
    described: dict[str, Any] = {}
    kept: list[np.ndarray] = []  # TensorSpec holds a bare address
    for name, (dtype, shape, buffer) in tensors.items():
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name}: dtype {dtype!r} cannot be published")
        data = _as_bytes(buffer)
        if len(data) != math.prod(shape) * _DTYPES[dtype][1]:
            raise ValueError(
                f"tensor {name}: {len(data)} bytes do not make {dtype} {tuple(shape)}"
            )
        kept.append(data)
        specs[name] = tensor_spec(dtype, list(shape), data)
        digest = hashlib.sha256(data.data).hexdigest()
        described[name] = {"dtype": dtype, "shape": list(shape), "sha256": digest}
    manifest = json.dumps(
        {
            "version": version,
            "parent_version": parent,
            "created_unix_ns": time.time_ns(),
            "meta": meta,
            "tensors": described,
        },
        separators=(",", ":"),
    ).encode()
    body = bytes(safetensors.serialize(specs, None))
    digest_bytes = hashlib.sha256(manifest).digest()
    head = SLOT_HEAD.pack(SLOT_MAGIC, version, len(manifest), len(body), digest_bytes)
    return head, manifest, body


def decode(version: int, manifest_sha256: bytes, manifest: bytes, body: np.ndarray) -> (
    Publication
):  # fmt: skip
    """Verify and read a slot.

    Args:
        body: uint8, private copy; the tensors are views of it.

    Raises:
        WeightsRefused: sha256 or format.
    """
    if hashlib.sha256(manifest).digest() != manifest_sha256:
        raise WeightsRefused("sha256", f"the manifest of version {version} is damaged")
    try:
        fields = json.loads(manifest)
        if fields["version"] != version:
            raise ValueError("the manifest is of another version")
        if not 0 <= int(fields["parent_version"]) <= MAX_VERSION:
            raise ValueError("parent_version is no version")
        tensors = _read_safetensors(body)
        described = fields["tensors"]
        if tensors.keys() != described.keys():
            raise ValueError("the manifest lists other tensors")
        for name, tensor in tensors.items():
            entry = described[name]
            if (tensor.dtype, list(tensor.shape)) != (entry["dtype"], entry["shape"]):
                raise ValueError(f"{name} is not as the manifest says")
            if hashlib.sha256(tensor.data.data).hexdigest() != entry["sha256"]:
                raise WeightsRefused(
                    "sha256", f"tensor {name} of version {version} is damaged"
                )
        return Publication(
            version=version,
            parent_version=int(fields["parent_version"]),
            created_unix_ns=int(fields["created_unix_ns"]),
            meta=dict(fields["meta"]),
            tensors=tensors,
        )
    except MALFORMED as error:
        raise WeightsRefused(
            "format", f"version {version} cannot be read: {error}"
        ) from error


def _read_safetensors(body: np.ndarray) -> dict[str, TensorBytes]:
    if len(body) < 8:
        raise ValueError("the tensors are cut short")
    length = int.from_bytes(body[:8].tobytes(), "little")
    if length > len(body) - 8:
        raise ValueError("the header of the tensors runs past the end")
    header = json.loads(body[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    data = body[8 + length :]
    tensors: dict[str, TensorBytes] = {}
    for name, entry in header.items():
        dtype, size = _DTYPE_NAMES[entry["dtype"]]
        shape = tuple(int(dim) for dim in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
        # Bounded before they are multiplied: the product of many has no bound.
        if len(shape) > _MAX_DIMS or not all(0 <= dim <= _MAX_DIM for dim in shape):
            raise ValueError(f"{name} has no shape of a tensor")
        if not 0 <= begin <= end <= len(data):
            raise ValueError(f"{name} runs past the end")
        if end - begin != math.prod(shape) * size:
            raise ValueError(f"{name} has the wrong size")
        tensors[name] = TensorBytes(dtype, shape, data[begin:end])
    return tensors


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
