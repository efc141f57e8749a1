"""What `patch check` finds, and what no patch may say."""

from __future__ import annotations

import pytest

from tests.patches.world import HEADER, World
from vllm_tide import patching
from vllm_tide.cli.main import main
from vllm_tide.patching import PatchError, PatchState


def test_hunk_that_fits_in_two_places_is_refused(world: World) -> None:
    patch = patching.load_series(world.patches)[1]
    hunks = patch.hunks["vllm/a.py"]
    lines = b"".join(hunks[0].before)
    assert patching.apply_hunks("p", "f", b"x\n" + lines, hunks)
    with pytest.raises(PatchError, match="does not fit"):
        patching.apply_hunks("p", "f", b"x\n" + lines + lines, hunks)


@pytest.mark.parametrize(
    "diff",
    [
        "diff --git a/vllm/n.py b/vllm/n.py\nnew file mode 100644\n",
        "diff --git a/vllm/n.py b/vllm/n.py\nold mode 100644\nnew mode 100755\n",
        "diff --git a/setup.py b/setup.py\n",
        "diff --git a/vllm/n.py b/vllm/n.py\nBinary files differ\n",
        "diff --git a/vllm/n.py b/vllm/n.py\n",
        "diff --git a/vllm/n.py b/vllm/n.py\n@@ -1,2 +1,2 @@\n-a\n",
        "diff --git a/vllm/n.py b/vllm/n.py\n@@ -1,1 +1,1 @@\n-a\n+b\n+c\n",
        "diff --git a/vllm/n.py b/vllm/n.py\n@@ -1,1 +1,1 @@\n-a\n+b\nc\n",
        "diff --git a/vllm/n.py b/vllm/n.py\n@@ -1 @@\n-a\n+b\n",
        "diff --git a/vllm/n.py b/vllm/n.py\n@@ -1 +1 @@\n-a\n+b\n" * 2,
    ],
)
def test_what_the_law_forbids_does_not_parse(diff: str) -> None:
    with pytest.raises(PatchError):
        patching.parse_patch("p", (HEADER + diff).encode())


def check(world: World, *extra: str) -> int:
    return main(["patch", "check", "--patches", str(world.patches), *extra])


def test_check_passes_on_pristine_and_on_patched(world: World) -> None:
    assert check(world, "--target", str(world.site)) == 0
    world.apply()
    assert check(world, "--target", str(world.site)) == 0


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("Drop-When:", "Other-Field:", "header field Drop-When is missing"),
        ("tests/test_it.py", "tests/test_gone.py", "does not exist"),
        ("Forwarded:      no", "Forwarded:      maybe", "Forwarded"),
        ("Subject: [PATCH] Edit", "Subject: [PATCH] Odd", "odd-number-0"),
        ("+last", "+import vllm_tide.hooks", "at module top"),
        ("+last", "+last ", "white space"),
        ("+last", "+least", "out of date"),
    ],
)
def test_check_finds(
    world: World,
    old: str,
    new: str,
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = world.patches / "vllm-0.32.0" / "edit-number-0.patch"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    path.with_name("stray.patch").write_text(path.read_text())
    assert check(world, "--target", str(world.site)) == 1
    said = capsys.readouterr().err
    assert problem in said and "stray.patch is not in series" in said


def test_update_manifest_makes_check_pass_again(world: World) -> None:
    path = world.patches / "vllm-0.32.0" / "edit-number-0.patch"
    path.write_text(path.read_text().replace("+last", "+least"))
    assert check(world, "--target", str(world.site)) == 1
    assert check(world, "--update-manifest", "--pristine", str(world.site)) == 0
    assert world.apply() is PatchState.APPLIED
