"""Pinning: who runs where, and who shares."""

import pytest

from tests.doctor.samples import make_subject
from vllm_tide.doctor import cores, preload
from vllm_tide.doctor.cores import bound_cores, judge, written
from vllm_tide.doctor.finding import Status

ALL = {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("trainer", "bind", "allowed", "status", "part"),
    [
        (None, "auto", ALL, Status.OK, "takes cores that the engine leaves"),
        ([3], "0-2", ALL, Status.OK, "engine on 0-2, trainer on 3"),
        ([3], "0-3", ALL, Status.WARNING, "may share 3"),
        ([2, 3], "0,1|2,3", ALL, Status.WARNING, "may share 2-3"),
        ([3], "auto", ALL, Status.WARNING, f"{cores.BIND} is auto"),
        ([3], "nobind", ALL, Status.WARNING, "may share 3"),
        ([3], None, ALL, Status.OK, "trainer on 3"),
        ([9], "0-2", ALL, Status.FAILED, "names [9]"),
        ([3, 9], "0-2", ALL, Status.WARNING, "names [9]"),
        (None, "0-7", ALL, Status.FAILED, "may not use"),
        (None, "x-y", ALL, Status.FAILED, "is no list of cores"),
        (None, "auto", {2}, Status.WARNING, "slows it down"),
    ],
)
def test_division_of_cores(trainer, bind, allowed, status, part):
    found = judge(trainer, bind, allowed, 4)
    assert found.status is status, found
    assert part in found.sentence


def test_the_advice_leaves_the_trainer_s_cores_out():
    assert f'{cores.BIND}="0-2"' in judge([3], "auto", ALL, 4).advice


def test_this_machine_is_judged(tmp_path, monkeypatch):
    monkeypatch.setenv(cores.BIND, "no-list")
    (found,) = cores.check(make_subject(tmp_path))
    expected = (
        Status.FAILED if cores.vllm_device(cores.torch_build()) == "cpu" else None
    )
    assert expected is None or found.status is expected


def test_lists_of_cores():
    assert bound_cores("0-2,5|8-9") == {0, 1, 2, 5, 8, 9}
    assert bound_cores("auto") is None
    assert written({0, 1, 2, 5}) == "0-2,5"
    assert written(set()) == ""


def test_preload(tmp_path):
    omp = tmp_path / "libiomp5.so"
    tc = tmp_path / "libtcmalloc_minimal.so.4"
    for library in (omp, tc):
        library.write_bytes(b"")
    assert preload.judge(f"{omp}:{tc}", True).sentence.endswith("is preloaded.")
    assert "tcmalloc is not" in preload.judge(f"{omp}", True).sentence
    none = preload.judge("", True)
    assert none.status is Status.WARNING
    assert "scripts/env.sh" in none.advice
    assert "pip install intel-openmp" in preload.judge("", False).advice
    assert preload.judge(str(tc), True).status is Status.WARNING


def test_a_preloaded_library_that_is_gone_is_named(tmp_path):
    found = preload.judge(f"{tmp_path}/libiomp5.so", True)
    assert found.status is Status.WARNING
    assert "does not exist" in found.sentence
