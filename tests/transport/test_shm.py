import contextlib
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from vllm_tide import _shm
from vllm_tide.transport.shm import (
    DATA_AT,
    SHM_DIR,
    Header,
    Segment,
    TransportError,
    is_orphaned,
    unlink_if_orphaned,
)

MAGIC = b"TESTTEST"


@pytest.fixture
def segment():
    made = Segment.create("test", MAGIC, 1, {"a": [1, 2]}, 4096)
    yield made
    made.close()


@pytest.mark.parametrize("function", [_shm.crc32c, _shm.crc32c_table])
def test_crc32c_has_the_value_of_the_standard(function):
    assert function(b"123456789") == 0xE3069283
    assert function(b"6789", function(b"12345")) == 0xE3069283
    assert function(b"") == 0
    for size in (1, 7, 8, 63, 3071, 3072, 3073, 12289, 200_003):  # in hardware, too
        data = np.random.default_rng(size).bytes(size)
        assert function(data, 7) == _shm.crc32c(data, 7)


def test_gather_pads_parts_to_eight_bytes_and_checksums_what_it_wrote():
    target = np.full(64, 255, np.uint8)
    parts = (b"abc", np.arange(4, dtype=np.int16), b"", b"x" * 9)
    crc = _shm.gather(target, 8, parts)
    want = b"abc".ljust(8, b"\0") + parts[1].tobytes() + (b"x" * 9).ljust(16, b"\0")
    assert target[8:40].tobytes() == want
    assert crc == _shm.crc32c(want)
    assert (target[:8] == 255).all() and (target[40:] == 255).all()


@pytest.mark.parametrize(
    ("offset", "parts"),
    [(0, (b"x" * 65,)), (57, (b"xxx",)), (64, (b"x",)), (65, ()), (-1, (b"x",))],
)
def test_gather_never_writes_outside_its_target(offset, parts):
    target = np.zeros(64, np.uint8)
    with pytest.raises(ValueError):
        _shm.gather(target, offset, parts)
    assert not target.any()


@pytest.mark.parametrize("offset", [-8, 4, 25, 32, 2**62])
def test_atomics_outside_or_unaligned_are_refused(offset):
    atomics = np.zeros(4, np.uint64)
    with pytest.raises(ValueError):
        _shm.load(atomics, offset)
    with pytest.raises(ValueError):
        _shm.store(atomics, offset, 1)
    with pytest.raises(ValueError):
        _shm.fetch_add(atomics, offset, 1)
    assert not atomics.any()


def test_atomics_hold_the_whole_range_of_u64():
    atomics = np.zeros(4, np.uint64)
    _shm.store(atomics, 8, 2**64 - 1)
    assert _shm.load(atomics, 8) == 2**64 - 1
    assert _shm.fetch_add(atomics, 8, 2) == 2**64 - 1
    assert atomics.tolist() == [0, 1, 0, 0]
    with pytest.raises(OverflowError):
        _shm.store(atomics, 8, -1)
    with pytest.raises((BufferError, TypeError)):
        _shm.store(bytes(16), 0, 1)  # read-only


def test_a_segment_is_allocated_and_private_at_any_umask(segment):
    before = os.umask(0o777)
    try:
        made = Segment.create("test", MAGIC, 1, {}, 4096)
    finally:
        os.umask(before)
    status = os.stat(f"{SHM_DIR}/{made.name}")
    made.close()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= status.st_size == DATA_AT + 4096
    role = uuid.uuid4().hex
    with pytest.raises(TransportError, match="shm-size"):
        Segment.create(role, MAGIC, 1, {}, 1 << 50)
    assert not [name for name in os.listdir(SHM_DIR) if role in name]


def test_close_unlinks_once_but_not_by_other_ends_or_forked_children(segment):
    other = Segment.attach(segment.name, MAGIC, 1)
    other.close()
    pid = os.fork()
    if pid == 0:
        segment.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.path.exists(f"{SHM_DIR}/{segment.name}")
    segment.close()
    segment.close()
    assert not os.path.exists(f"{SHM_DIR}/{segment.name}")


def excluded_from_cores(name):
    """Return the kernel's dump flags of this process's mappings of a segment."""
    flags = []
    mapped = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapped = line
        elif line.startswith("VmFlags:") and name in mapped:
            flags.append("dd" in line.split())
    return flags


def test_shared_memory_is_left_out_of_cores_on_both_sides(segment):
    """It holds users' text."""
    other = Segment.attach(segment.name, MAGIC, 1)
    assert excluded_from_cores(segment.name) == [True, True]
    other.close()
    assert excluded_from_cores(segment.name) == [True]  # the other one is unmapped


@pytest.mark.slow
def test_an_owner_that_exits_normally_unlinks():
    code = (
        "from vllm_tide.transport.shm import Segment\n"
        f"segment = Segment.create('test', {MAGIC!r}, 1, {{}}, 4096)\n"
        "print(segment.name)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert not os.path.exists(f"{SHM_DIR}/{out.stdout.strip()}")


def test_attach_refuses_other_kinds_versions_and_truncated_segments(segment):
    for name in ("vllm_tide2_test_00", "vllm_tide2_/../x", "passwd", ""):
        with pytest.raises(TransportError, match="segment"):
            Segment.attach(name, MAGIC, 1)
    with pytest.raises(TransportError, match="damaged header"):
        Segment.attach(segment.name, b"OTHER___", 1)
    with pytest.raises(TransportError, match="format 513"):
        Segment.attach(segment.name, MAGIC, 2)
    os.truncate(f"{SHM_DIR}/{segment.name}", DATA_AT + 100)
    assert not segment.intact()
    with pytest.raises(TransportError, match="truncated"):
        Segment.attach(segment.name, MAGIC, 1)


def test_every_damaged_byte_of_the_header_is_detected():
    page = Header(MAGIC, 1, 8192, os.getpid(), {"a": 1}).encode().ljust(4096, b"\0")
    assert Header.decode(page) is not None
    for at in [*range(52), *range(256, 256 + 7)]:
        damaged = bytearray(page)
        damaged[at] ^= 0x41
        assert Header.decode(bytes(damaged)) is None, at
    assert Header.decode(page[:-1]) is None


def test_the_other_role_is_exclusive_until_it_is_closed(segment):
    first, second = (Segment.attach(segment.name, MAGIC, 1) for _ in range(2))
    assert not segment.claimed() and first.owner_alive()
    first.claim(3, "reader")
    assert first.claimed() and second.claimed() and segment.claimed()
    with pytest.raises(TransportError, match=rf"process {os.getpid()} is already the"):
        second.claim(3, "reader")
    second.close()
    assert segment.claimed()  # a closed descriptor of the file releases nothing
    first.close()
    assert not segment.claimed() and not first.claimed()


@pytest.mark.slow
@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_a_killed_owner_is_dead_at_once_though_its_forked_child_lives(reaped):
    """The child inherits the mapping and the descriptors."""
    reader, tell = os.pipe()
    owner = os.fork()
    if owner == 0:
        os.setpgid(0, 0)
        made = Segment.create("test", MAGIC, 1, {}, 4096)
        if os.fork() == 0:
            os.write(tell, made.name.encode())
        time.sleep(60)
        os._exit(0)
    name = os.read(reader, 200).decode()
    other = Segment.attach(name, MAGIC, 1)
    try:
        assert other.owner_alive() and not is_orphaned(name)
        os.kill(owner, signal.SIGKILL)
        os.waitid(os.P_PID, owner, os.WEXITED | (0 if reaped else os.WNOWAIT))
        assert not other.owner_alive() and is_orphaned(name)
        assert unlink_if_orphaned(name) and not is_orphaned(name)
    finally:
        os.killpg(owner, signal.SIGKILL)  # the child
        if not reaped:
            os.waitpid(owner, 0)
        other.close()
        os.close(reader)
        os.close(tell)


@pytest.mark.slow
def test_a_killed_claimant_is_replaced_at_once(segment):
    pid = os.fork()
    if pid == 0:
        mine = Segment.attach(segment.name, MAGIC, 1)
        mine.claim(3, "reader")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert segment.load(3) == pid and not segment.claimed()
    other = Segment.attach(segment.name, MAGIC, 1)
    other.claim(3, "reader")
    assert segment.load(3) == os.getpid() and segment.claimed()
    other.close()


def test_a_segment_that_cannot_be_opened_is_not_considered_dead(segment):
    """Without a free descriptor a live engine's segments would have been removed."""
    spare = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.open("/dev/null", os.O_RDONLY))
        assert not is_orphaned(segment.name)
    finally:
        for each in spare:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
