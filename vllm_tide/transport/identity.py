"""Identity of an engine: engines of one trainer need the same target, draft and rows.

Computed from files alone, in milliseconds: the hash of a target covers its
configuration, the layout of its tensors and samples of their bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from vllm_tide.transport.rendezvous import EngineManifest, read_small
from vllm_tide.transport.shm import MALFORMED, TransportError

# Configuration keys that do not affect the model.
_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash")
ROWS = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of the target's tensors that a trainer reads."""
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 16
_MAX_HEADER_BYTES = 100_000_000
_MAX_CONFIG_BYTES = 16 << 20

# Key of an identity: description of a difference.
_DIFFERENCES = {
    "target": "serves another target",
    "draft": "serves a draft of another shape or vocabulary",
    "aux_layer_ids": "captures other layers",
    "feature_dtype": "has features of another type",
    "teacher": "has another tide.capture.teacher or teacher_topk",
    "shared": "shares other tensors between draft and target",
}


def identity_of(manifest: EngineManifest) -> dict[str, str]:
    """Return the identity of an engine on this host, by key.

    Raises:
        TransportError: A directory cannot be read.
    """
    topk = f":{manifest.teacher_topk}" if manifest.teacher != "hidden" else ""
    return {
        "target": target_fingerprint(Path(manifest.target_path)),
        "draft": draft_fingerprint(Path(manifest.draft_path)),
        "aux_layer_ids": ",".join(map(str, manifest.aux_layer_ids)),
        "feature_dtype": manifest.feature_dtype,
        "teacher": manifest.teacher + topk,
        "shared": ",".join(sorted(manifest.shared)),
    }


def difference(
    engine_id: str, identity: dict[str, str], other_id: str, other: dict[str, str]
) -> str:
    """Return why an engine cannot share a trainer with another; empty if it can."""
    for part, description in _DIFFERENCES.items():
        if identity.get(part) != other.get(part):
            return (
                f"engine {engine_id} {description} than engine {other_id}: start a "
                f"separate trainer for it (vllm-tide train --engine {engine_id})"
            )
    return ""


def target_fingerprint(folder: Path) -> str:
    """Return the SHA-256 (hex) of a target's configuration, layout and byte samples."""
    digest = hashlib.sha256(_config(folder))
    for path in _tensor_files(folder):
        try:
            with open(path, "rb") as file:
                size = path.stat().st_size
                length = int.from_bytes(file.read(8), "little")
                digest.update(f"{size}:{length}".encode())
                digest.update(file.read(min(length, size, _MAX_HEADER_BYTES)))
                _sample(digest, file, 8 + length, size)
        except OSError as error:
            raise _unreadable(path, error) from error
    return digest.hexdigest()


def rows_fingerprint(folder: Path) -> str:
    """Return the SHA-256 (hex) of a target's configuration and samples of its rows.

    Covers the tensors named `ROWS`, so a trainer needs no other files of a target.
    """
    digest = hashlib.sha256(_config(folder))
    rows: dict[str, tuple[Path, dict[str, Any], int]] = {}
    for path in _tensor_files(folder):
        header, begin = read_header(path)
        rows |= {n: (path, e, begin) for n, e in header.items() if n.endswith(ROWS)}
    for name, (path, entry, begin) in sorted(rows.items()):
        digest.update(f"{name}:{entry['dtype']}:{entry['shape']};".encode())
        first, end = entry["data_offsets"]
        try:
            with open(path, "rb") as file:
                _sample(digest, file, begin + first, begin + end)
        except OSError as error:
            raise _unreadable(path, error) from error
    return digest.hexdigest()


def _sample(digest: hashlib._Hash, file: BinaryIO, begin: int, end: int) -> None:
    for at in range(begin, end, max((end - begin) // _NUM_SAMPLES, 1)):
        file.seek(at)
        digest.update(file.read(min(_SAMPLE_BYTES, end - at)))


def draft_fingerprint(folder: Path) -> str:
    """Return the SHA-256 (hex) of a draft's structure, without its weights.

    It covers the configuration, the tensors' names, shapes and dtypes, and the
    vocabulary.
    """
    digest = hashlib.sha256(_config(folder))
    for path in _tensor_files(folder):
        header, begin = read_header(path)
        for name in sorted(header):
            entry = header[name]
            digest.update(f"{name}:{entry['dtype']}:{entry['shape']};".encode())
            if name.endswith("d2t"):
                digest.update(read_tensor(path, entry, begin))
    return digest.hexdigest()


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors header by tensor name, and the offset of the data.

    Each entry has a `dtype` (string), a `shape` and `data_offsets` into the data.
    """
    try:
        with open(path, "rb") as file:
            with safe_open(path, "np"):  # checks lengths, types and offsets
                pass
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
    except OSError as error:
        raise _unreadable(path, error) from error
    except (SafetensorError, *MALFORMED) as error:
        raise TransportError(f"{path} is damaged or no safetensors file") from error
    return header, 8 + length


def read_tensor(path: Path, entry: dict[str, Any], begin: int) -> bytes:
    """Return the bytes of one tensor; `entry` and `begin` are of `read_header`."""
    first, end = entry["data_offsets"]
    try:
        with open(path, "rb") as file:
            file.seek(begin + first)
            return file.read(end - first)
    except OSError as error:
        raise _unreadable(path, error) from error


def _config(folder: Path) -> bytes:
    path = folder / "config.json"
    try:
        value = json.loads(read_small(path, _MAX_CONFIG_BYTES))
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if k not in _VOLATILE}
        return json.dumps(value, sort_keys=True).encode()
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise TransportError(f"{path} is not valid JSON") from error


def _tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _unreadable(path: Path, error: OSError) -> TransportError:
    return TransportError(f"cannot read {path}: {error.strerror}")
