"""The draft as it is sent: a safetensors file with a version, and its SHA-256.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import safetensors

from vllm_tide.transport.shm import MALFORMED, TransportError, sanitize_for_log
from vllm_tide.transport.versions import version_name

FORMAT_VERSION = 3
"""Format of a serialised draft and of the weights segment."""

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


class WeightsRefused(TransportError):
    """A draft that must not be installed.

    Args:
        reason: Label for counters: empty, torn, truncated, format, sha256 or stale.
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


class TensorBytes(NamedTuple):
    """A tensor: torch dtype name, shape, and a C-contiguous buffer.

    `draft/tensor_bytes.py` converts it to and from torch.
    """

    dtype: str
    shape: Sequence[int]
    data: Any


@dataclass(frozen=True, eq=False)
class DraftWeights:
    """A serialised draft.

    Args:
        version: See `versions.py`.
        sha256: Digest of `data`.
        data: Private bytes of a safetensors file: bytes or uint8 [n].
    """

    version: int
    sha256: bytes
    data: Any

    @classmethod
    def encode(
        cls,
        tensors: Mapping[str, TensorBytes | tuple[str, Sequence[int], Any]],
        version: int,
        meta: Mapping[str, Any] | None = None,
    ) -> Self:
        """Serialise a draft.

        Raises:
            ValueError: A dtype is unknown, a size is wrong or meta is not valid JSON.
        """
        specs: dict[str, Any] = {}
        # Keep the buffers alive: TensorSpec stores only an address.
        buffers: list[np.ndarray] = []
        for name, (dtype, shape, buffer) in tensors.items():
            if dtype not in _DTYPES:
                raise ValueError(f"tensor {name}: dtype {dtype!r} cannot be published")
            data = _as_bytes(buffer)
            if len(data) != math.prod(shape) * _DTYPES[dtype][1]:
                raise ValueError(
                    f"tensor {name}: {len(data)} bytes do not match {dtype} "
                    f"{tuple(shape)}"
                )
            buffers.append(data)
            specs[name] = tensor_spec(dtype, list(shape), data)
        about = {"format": FORMAT_VERSION, "version": version, "meta": meta or {}}
        body = bytes(safetensors.serialize(specs, {_METADATA: json.dumps(about)}))
        return cls(version, hashlib.sha256(body).digest(), body)

    def verify(self) -> Self:
        """Check digest and header; return self.

        Raises:
            WeightsRefused: With reason sha256 or format.
        """
        if hashlib.sha256(self.data).digest() != self.sha256:
            name = version_name(self.version)
            raise WeightsRefused("sha256", f"version {name} is damaged")
        _ = self._content
        return self

    @property
    def meta(self) -> dict[str, Any]:
        return self._content[0]

    @property
    def tensors(self) -> dict[str, TensorBytes]:
        """The tensors, as views of `data` (uint8 [n])."""
        return self._content[1]

    @cached_property
    def _content(self) -> tuple[dict[str, Any], dict[str, TensorBytes]]:
        data = np.frombuffer(self.data, np.uint8)
        try:
            begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
            header = json.loads(data[8:begin].tobytes())
            about = json.loads(header.pop("__metadata__")[_METADATA])
            if (about["format"], about["version"]) != (FORMAT_VERSION, self.version):
                actual = f"format {about['format']} and version {about['version']}"
                raise ValueError(
                    f"{sanitize_for_log(actual)}, not {FORMAT_VERSION} and "
                    f"{self.version}: run the same vllm_tide on both sides"
                )
            tensors = {
                name: _tensor(data[begin:], **entry) for name, entry in header.items()
            }
            return dict(about["meta"]), tensors
        except MALFORMED as error:
            reason = (
                f"version {version_name(self.version)} cannot be read: "
                f"{sanitize_for_log(error)}"
            )
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
