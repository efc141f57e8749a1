"""`vllm-tide patch rebase` on a made-up vLLM: where hunks go, and what is written."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.test_patching import LINES, World, git
from vllm_tide import patch_fetch, patch_rebase, patch_series, patching
from vllm_tide.cli.main import main
from vllm_tide.patch_series import PatchError


class NewRelease(World):
    """A series of two patches on 0.32.0, and a folder with 0.33.0's sources."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.write_series(
            {"a.py": {10: "line 10\nadded\n", 30: "changed\n"}},
            {"a.py": {20: "second\n"}, "b.py": {5: "one\n", 8: "two\n"}},
        )
        self.source = folder / "vllm-0.33.0"
        (self.source / "vllm").mkdir(parents=True)
        (self.source / "PKG-INFO").write_text("Name: vllm\nVersion: 0.33.0\n")
        (self.source / "vllm" / "__init__.py").write_text("")
        for name in ("a.py", "b.py"):
            self.change(name, {})

    def change(self, name: str, lines: dict[int, str]) -> None:
        """Writes a file of 0.33.0: 0.32.0's with some lines (1-based) replaced."""
        text = [lines.get(at, line) for at, line in enumerate(LINES, 1)]
        (self.source / "vllm" / name).write_text("".join(text))

    def rebase(self, *words: str) -> int:
        source = ["--source", str(self.source)]
        patches = ["--patches", str(self.patches)]
        return main(["patch", "rebase", "--to", "0.33.0", *source, *patches, *words])

    def states(self) -> list[tuple[str, int, str, int, int]]:
        result = patch_rebase.rebase(self.patches, "0.33.0", self.source)
        return [
            (h.path, h.line, str(h.state), h.offset, h.fuzz)
            for fit in result.fits
            for h in fit.hunks
        ]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewRelease:
    def refuse(*_: object) -> None:
        raise AssertionError("an installed vLLM was looked for")

    made = NewRelease(tmp_path)
    monkeypatch.setattr(patching, "find_target", refuse)
    return made


def test_unchanged_sources_take_every_hunk_as_it_is(world: NewRelease) -> None:
    assert {state for _, _, state, _, _ in world.states()} == {"clean"}
    assert world.rebase() == 0


def test_lines_above_shift_a_hunk(world: NewRelease) -> None:
    world.change("a.py", {1: "new\n" * 4, 2: "", 26: "line 26\nmore\n"})
    assert world.states()[:3] == [
        ("vllm/a.py", 8, "offset", 2, 0),
        ("vllm/a.py", 27, "offset", 3, 0),
        ("vllm/a.py", 17, "offset", 2, 0),
    ]


def test_changed_context_is_fuzz_and_is_reported(
    world: NewRelease, capsys: pytest.CaptureFixture[str]
) -> None:
    world.change("a.py", {8: "other\n", 12: "other\n", 13: "other\n"})
    assert world.states()[0] == ("vllm/a.py", 8, "fuzz", 0, 2)
    assert world.rebase() == 0
    said = capsys.readouterr().out
    assert "vllm/a.py:8: fuzz 2, at line 8 (+0): Its first 1 and last 2 lines" in said
    assert said.splitlines()[-1] == (
        "vLLM 0.32.0 to 0.33.0: 2 of 2 patches apply (hunks: 3 clean, 1 fuzz)"
    )


def test_a_line_between_two_changes_of_a_hunk_may_change(world: NewRelease) -> None:
    world.change("b.py", {6: "other\n"})
    states = [state for state in world.states() if state[0] == "vllm/b.py"]
    assert [(line, state, fuzz) for _, line, state, _, fuzz in states] == [
        (2, "fuzz", 2),
        (6, "fuzz", 1),
    ]


def test_a_changed_line_is_a_conflict_shown_where_it_is(
    world: NewRelease, capsys: pytest.CaptureFixture[str]
) -> None:
    world.change("a.py", {1: "new\n" * 4, 30: "rewritten upstream\n"})
    assert world.rebase("--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["from"], report["to"], report["applies"]) == (
        "0.32.0",
        "0.33.0",
        False,
    )
    first, second = report["patches"]
    assert (first["applies"], second["applies"]) == (False, True)
    clash = first["hunks"][1]
    assert (clash["state"], clash["line"], clash["at_line"]) == ("conflict", 27, 30)
    assert "-line 30\n+rewritten upstream\n" in clash["detail"]
    assert report["hunks"]["conflict"] == 1


def test_lines_that_occur_twice_are_a_conflict(world: NewRelease) -> None:
    twice = "".join(LINES[6:13])
    world.change("a.py", {1: twice + "x\n", 40: "".join(LINES[39:]) + twice})
    states = world.states()
    assert states[0][2] == "conflict"


def test_a_missing_file_and_one_that_upstream_changed_alike(world: NewRelease) -> None:
    (world.source / "vllm" / "b.py").unlink()
    world.change("a.py", {10: "line 10\nadded\n", 30: "changed\n"})
    states = [(path, state) for path, _, state, _, _ in world.states()]
    assert states == [
        ("vllm/a.py", "present"),
        ("vllm/a.py", "present"),
        ("vllm/a.py", "clean"),
        ("vllm/b.py", "conflict"),
    ]


def test_moved_series_is_written_and_applies_with_git(
    world: NewRelease, tmp_path: Path
) -> None:
    world.change("a.py", {1: "new\n" * 4, 12: "other\n"})
    world.change("b.py", {6: "other\n"})
    out = tmp_path / "moved"
    assert world.rebase("--out", str(out)) == 0
    assert patch_series.series_names(out) == patch_series.series_names(world.patches)
    tree = tmp_path / "tree"
    shutil.copytree(world.source, tree)
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    for name in patch_series.series_names(out):
        git(tree, "apply", "--index", str(out / "vllm-0.33.0" / f"{name}.patch"))
    lines = (tree / "vllm" / "a.py").read_text().splitlines()
    assert lines[12:15] == ["line 10", "added", "line 11"]
    assert {"changed", "second", "other"} <= set(lines)
    manifest = json.loads((out / "vllm-0.33.0" / "manifest.json").read_text())
    assert manifest["vllm_version"] == "0.33.0"
    for path, pairs in manifest["files"].items():
        before = patch_series.sha256((world.source / path).read_bytes())
        assert pairs == {before: patch_series.sha256((tree / path).read_bytes())}
    # The header of a patch is word for word the old one's.
    name = patch_series.series_names(out)[0]
    old = (world.patches / "vllm-0.32.0" / f"{name}.patch").read_text()
    new = (out / "vllm-0.33.0" / f"{name}.patch").read_text()
    assert old.partition("diff --git")[0] == new.partition("diff --git")[0]


def test_nothing_is_written_unless_all_applies(
    world: NewRelease, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.change("a.py", {30: "rewritten upstream\n"})
    out = tmp_path / "moved"
    assert world.rebase("--out", str(out)) == 1
    assert not out.exists()
    world.change("a.py", {})
    out.mkdir()
    (out / "mine").write_text("")
    assert world.rebase("--out", str(out)) == 5
    assert "is not an empty folder" in capsys.readouterr().err


def test_a_patch_that_upstream_took_is_dropped(
    world: NewRelease, tmp_path: Path
) -> None:
    world.change("a.py", {10: "line 10\nadded\n", 30: "changed\n"})
    out = tmp_path / "moved"
    assert world.rebase("--out", str(out)) == 0
    assert patch_series.series_names(out) == ["edit-number-1"]


def test_archives_are_read_and_their_version_is_checked(
    world: NewRelease, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "vllm-0.33.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(world.source, "vllm-0.33.0")
    unpacked, world.source = world.source, archive
    assert {state[2] for state in world.states()} == {"clean"}
    world.source = unpacked
    (unpacked / "PKG-INFO").write_text("Name: vllm\nVersion: 0.34.0\n")
    assert world.rebase() == 5
    assert "holds vLLM 0.34.0, not 0.33.0" in capsys.readouterr().err
    world.source = tmp_path / "nothing"
    assert world.rebase() == 5
    assert "cannot be read as a source archive" in capsys.readouterr().err


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes, digest: str) -> None:
    """A package index with one source archive and one wheel."""

    def candidate(version: str, wheel: bool) -> Any:
        link = SimpleNamespace(
            is_wheel=wheel,
            url_without_fragment="",
            hash_name="sha256",
            hash=digest,
        )
        return SimpleNamespace(version=version, link=link)

    found = [candidate("0.33.0", wheel=False), candidate("0.34.0", wheel=True)]
    response = SimpleNamespace(
        raise_for_status=lambda: None, iter_content=lambda _: [content]
    )

    class Command:
        parse_args = staticmethod(lambda words: (None, words))
        get_default_session = staticmethod(
            lambda _: SimpleNamespace(get=lambda *_, **__: response)
        )

        def main_context(self) -> Any:
            from contextlib import nullcontext

            return nullcontext()

        def _build_package_finder(self, **_: Any) -> Any:
            return SimpleNamespace(find_all_candidates=lambda _: found)

    module = SimpleNamespace(create_command=lambda _: Command(), PipError=RuntimeError)
    monkeypatch.setattr(patch_fetch, "import_module", lambda _: module)


def test_fetched_archive_must_have_the_hash_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, b"sources", patch_series.sha256(b"sources"))
    path = patch_fetch.fetch_sdist("0.33.0", tmp_path / "archives")
    assert path.read_bytes() == b"sources"
    with pytest.raises(PatchError, match=r"no source archive of vLLM 0\.34\.0 \(newes"):
        patch_fetch.fetch_sdist("0.34.0", tmp_path)
    fake_pip(monkeypatch, b"sources", patch_series.sha256(b"others"))
    with pytest.raises(PatchError, match="does not have the hash"):
        patch_fetch.fetch_sdist("0.33.0", tmp_path)
    assert not (tmp_path / "vllm-0.33.0.tar.gz").exists()


def test_a_python_without_pip_is_told_to_give_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(patch_fetch, "import_module", missing)
    with pytest.raises(PatchError, match="--source"):
        patch_fetch.fetch_sdist("0.33.0", tmp_path)
