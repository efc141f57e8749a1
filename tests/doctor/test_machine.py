"""Shared memory, directories: real files, planted faults."""

import os

import pytest

from tests.doctor.samples import make_subject, write_draft
from vllm_tide.config import MIB, TideConfig
from vllm_tide.doctor import run_directory, shared_memory, state_directory
from vllm_tide.doctor.file_systems import can_be_made, is_memory
from vllm_tide.doctor.finding import Status
from vllm_tide.doctor.shared_memory import Space, judge, needed
from vllm_tide.transport.shm import SHM_DIR

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root")


def test_the_ring_and_two_slots_of_twice_the_draft_are_needed():
    tide = TideConfig()
    ring, slots, known = needed(tide, 100 * MIB)
    assert known
    assert ring == pytest.approx(256 * MIB, abs=MIB)
    assert slots == pytest.approx(402 * MIB, abs=MIB)
    assert needed(tide, None)[1:] == (0, False)


def space(size, free, available=None):
    number = None if available is None else available * MIB
    return Space(size * MIB, free * MIB, number)


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (space(1000, 900), Status.OK),
        (space(64, 64), Status.FAILED),
        (space(320, 310), Status.WARNING),
        (space(1000, 900, available=100), Status.WARNING),
    ],
)
def test_room_is_compared_with_the_need(tmp_path, found, status):
    finding = judge(tmp_path, found, 290 * MIB, 10 * MIB, slots_known=True)
    assert finding.status is status
    assert "needs 300 MiB (ring 290 MiB, weights 10 MiB)" in finding.sentence


def test_a_ring_larger_than_the_file_system_fails(tmp_path):
    if shared_memory.space(shared_memory.Path(SHM_DIR)).free > 65536 * MIB:
        pytest.skip("this machine has room for the largest ring there is")
    subject = make_subject(
        tmp_path,
        {"capture": {"ring_mib": 65536}},
        draft=write_draft(tmp_path / "draft"),
    )
    (found,) = shared_memory.check(subject)
    assert found.status is Status.FAILED
    assert "tide.capture.ring_mib" in found.advice


def test_a_folder_that_is_not_there_cannot_be_written(tmp_path):
    found = shared_memory.rights(tmp_path / "gone")
    assert found.status is Status.FAILED


def test_trying_to_write_leaves_nothing():
    before = set(os.listdir(SHM_DIR))
    assert shared_memory.rights(shared_memory.Path(SHM_DIR)) is None
    assert set(os.listdir(SHM_DIR)) <= before


def test_a_run_directory_that_does_not_exist_yet_is_fine(tmp_path):
    assert run_directory.judge(tmp_path / "a" / "b").status is Status.OK
    assert list(tmp_path.iterdir()) == []


def test_a_private_run_directory_is_ok_and_an_open_one_a_warning(tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    assert run_directory.judge(run).status is Status.OK
    run.chmod(0o755)
    found = run_directory.judge(run)
    assert found.status is Status.WARNING
    assert "0755" in found.sentence
    assert run.stat().st_mode & 0o777 == 0o755  # looked at, not changed


@ROOT_ONLY
def test_another_user_s_run_directory_fails(tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    os.chown(run, 12345, -1)
    found = run_directory.judge(run)
    assert found.status is Status.FAILED
    assert "12345" in found.sentence


def test_a_file_a_link_and_an_impossible_place_fail(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for path in (file, link, file / "below"):
        assert run_directory.judge(path).status is Status.FAILED, path


MOUNTS = """\
20 1 0:1 / / rw - ext4 /dev/sda rw
21 20 0:2 / /run rw shared:1 - tmpfs tmpfs rw
22 21 0:3 / /run/my\\040disk rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "memory"),
    [
        ("/run/x", True),
        ("/runner", False),
        ("/run/my disk/y", False),
        ("/", False),
    ],
)
def test_the_nearest_mount_decides(path, memory, monkeypatch):
    from vllm_tide.doctor import file_systems

    monkeypatch.setattr(file_systems, "nearest_existing", lambda path: path)
    assert is_memory(file_systems.Path(path), MOUNTS) is memory


def test_real_mounts_are_read(tmp_path):
    assert is_memory(shared_memory.Path(SHM_DIR) / "not" / "there")


def test_a_state_directory_in_memory_is_a_warning(tmp_path):
    folder = tmp_path / "heads"
    assert state_directory.judge(folder, in_memory=False).status is Status.OK
    found = state_directory.judge(folder, in_memory=True)
    assert found.status is Status.WARNING
    assert "tide.train.state_dir" in found.advice
    assert not folder.exists()


def test_a_state_directory_that_is_a_file_fails(tmp_path):
    file = tmp_path / "heads"
    file.write_text("")
    assert state_directory.judge(file, in_memory=False).status is Status.FAILED


def test_the_default_state_directory_is_in_the_run_directory(tmp_path):
    (found,) = state_directory.check(make_subject(tmp_path))
    assert str(tmp_path / "run" / "heads") in found.sentence


def test_can_be_made(tmp_path):
    assert can_be_made(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert not can_be_made(tmp_path / "file" / "b")
