"""Findings of `patch check`, and forbidden content of patches."""

from __future__ import annotations

import pytest

from tests.patches.world import HEADER, World
from vllm_tide import patching
from vllm_tide.cli.main import main
from vllm_tide.patching import PatchError, PatchState


def test_a_hunk_that_fits_in_two_places_is_refused(world: World) -> None:
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
def test_forbidden_content_does_not_parse(diff: str) -> None:
    with pytest.raises(PatchError):
        patching.parse_patch("p", (HEADER + diff).encode())


def check(world: World, *extra: str) -> int:
    return main(["patch", "check", "--patches", str(world.patches), *extra])


def test_check_passes_on_pristine_and_on_patched(world: World) -> None:
    assert check(world, "--target", str(world.site)) == 0
    world.apply()
    assert check(world, "--target", str(world.site)) == 0


def test_a_change_of_the_series_needs_a_new_manifest(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    path = world.patches / "vllm-0.32.0" / "edit-number-0.patch"
    path.write_text(path.read_text().replace("+last", "+least"))
    assert check(world, "--target", str(world.site)) == 1
    assert "out of date" in capsys.readouterr().err
    assert check(world, "--update-manifest", "--pristine", str(world.site)) == 0
    assert world.apply() is PatchState.APPLIED
