"""The patch state on a made-up vLLM, and which patch is not in place."""

import pytest

from tests.patches.world import World
from vllm_tide.doctor.finding import Status
from vllm_tide.doctor.patches import judge


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.write_series({"a.py": {3: "first\n"}}, {"b.py": {7: "second\n"}})
    return made


def examined(world):
    return judge(world.site, world.patches)


def test_applied_and_intact_is_ok(world):
    world.apply()
    assert examined(world).status is Status.OK


def test_an_unpatched_vllm_fails_and_names_every_patch(world):
    found = examined(world)
    assert found.status is Status.FAILED
    assert "edit-number-0, edit-number-1" in found.sentence
    assert "vllm-tide patch apply" in found.advice


def test_only_the_patch_that_is_gone_is_named(world):
    world.apply()
    (world.package / "b.py").write_bytes(
        (world.site.parent / "pristine" / "vllm" / "b.py").read_bytes()
    )
    found = examined(world)
    assert found.status is Status.FAILED
    assert "Not in place: edit-number-1." in found.sentence


def test_a_foreign_edit_asks_for_a_new_vllm(world):
    world.apply()
    with (world.package / "a.py").open("a") as file:
        file.write("an edit of somebody's\n")
    found = examined(world)
    assert found.status is Status.FAILED
    assert found.sentence.startswith("foreign: vllm/a.py")
    assert "Reinstall vLLM" in found.advice


def test_a_missing_file_fails(world):
    world.apply()
    (world.package / "a.py").unlink()
    found = examined(world)
    assert found.status is Status.FAILED
    assert "edit-number-0" in found.sentence


def test_no_vllm_at_all_fails(tmp_path):
    found = judge(tmp_path)
    assert found.status is Status.FAILED
    assert "no vllm package" in found.sentence
