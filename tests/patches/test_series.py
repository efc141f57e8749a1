"""The committed series follows the rules; the commands have no heavy imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tide import patching
from vllm_tide.cli import main as cli

ROOT = Path(__file__).parents[2]


PATCHES = patching.load_series(ROOT / "patches")
FIELDS = "Why", "Why-Not-Plugin", "Neutral-When", "Guarded-By", "Forwarded", "Drop-When"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_every_patch_follows_the_rules(patch: patching.Patch) -> None:
    mail, _, body = patch.header.partition("\n\n")
    subject = re.search(r"^Subject: (?:\[PATCH[^]]*\] )?(.*(?:\n .*)*)", mail, re.M)
    assert subject is not None
    text = " ".join(subject[1].split()).lower()
    assert re.sub(r"[^a-z0-9]+", "-", text).strip("-") == patch.name
    body = re.sub(r"[ \t]*\n[ \t]+", " ", body)
    fields = dict(re.findall(r"^([A-Z][A-Za-z-]+):[ \t]+(.*)$", body, re.M))
    assert all(fields.get(name) for name in FIELDS)
    assert re.match(r"(no|not-needed|https://\S+)$", fields["Forwarded"])
    for guard in re.findall(r"[^,\s]+", fields["Guarded-By"]):
        assert (ROOT / guard.partition("::")[0]).is_file(), guard
    for _, line in patch.added:
        assert not re.match(rb"(from|import)\s+vllm_tide", line)
        assert line.rstrip(b"\r\n") == line.rstrip()


def test_series_names_each_file_once() -> None:
    names = patching.series_names(ROOT / "patches")
    files = patching.manifest_path(ROOT / "patches").parent.glob("*.patch")
    assert sorted(names) == sorted(path.stem for path in files)


def test_the_manifest_is_of_this_series() -> None:
    manifest = patching.load_manifest(ROOT / "patches")
    assert manifest["patches"] == {patch.name: patch.sha256 for patch in PATCHES}
    assert manifest["files"].keys() == {path for p in PATCHES for path in p.hunks}


@pytest.mark.vllm
def test_series_applies_cleanly_to_the_installed_vllm() -> None:
    assert cli.main(["patch", "check"]) == 0


@pytest.mark.slow
def test_patch_command_imports_neither_torch_nor_vllm_nor_numpy() -> None:
    code = (
        "import sys; from vllm_tide.cli.main import main; main(['patch', 'check']);"
        "print(sorted({'torch', 'vllm', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_ledger_names_every_patch_and_no_other() -> None:
    rows = (ROOT / "patches" / "README.md").read_text().splitlines()
    start = rows.index("## Ledger")
    names = [row.split("`")[1] for row in rows[start:] if row.startswith("| `")]
    names = [name for name in names if not name.startswith("vllm-tide")]
    assert names == patching.series_names(ROOT / "patches")
