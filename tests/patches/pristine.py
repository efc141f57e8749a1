"""An unpatched vLLM next to the patched one: links, and originals of patched files."""

from __future__ import annotations

from pathlib import Path

from vllm_tide.patching import (
    find_target,
    load_manifest,
    patches_root,
    read_pristine,
)


def make_pristine(folder: Path) -> Path:
    """Make `folder/vllm` equal to upstream's wheel; use it through PYTHONPATH.

    Files are links to the installed ones, except the patched files, which are written
    as upstream has them.
    """
    target = find_target()
    manifest = load_manifest(patches_root())
    touched = set(manifest["files"])
    parents = {str(parent) for path in touched for parent in Path(path).parents}

    def mirror(relative: str) -> None:
        (folder / relative).mkdir(parents=True)
        for child in sorted((target / relative).iterdir()):
            path = f"{relative}/{child.name}"
            if child.name == "__pycache__":
                continue
            if path in touched:
                content = read_pristine(target, manifest, path)
                (folder / path).write_bytes(content)
            elif path in parents:
                mirror(path)
            else:
                (folder / path).symlink_to(child)

    mirror("vllm")
    # importlib.metadata must find the version next to the package.
    for info in target.glob("vllm*.dist-info"):
        if "tide" not in info.name:
            (folder / info.name).symlink_to(info)
    return folder
