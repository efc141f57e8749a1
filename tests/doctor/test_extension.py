"""The extension is tried, not only imported."""

import builtins

import pytest

from vllm_tide import _shm
from vllm_tide.doctor import extension
from vllm_tide.doctor.finding import Status


class Wrapped:
    """The extension with some functions replaced."""

    def __init__(self, **replaced):
        self._replaced = replaced

    def __getattr__(self, name):
        return self._replaced.get(name, getattr(_shm, name))


def test_the_real_one_works():
    assert extension.judge(_shm).status is Status.OK


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("fetch_add", lambda words, at, value: 0),
        ("compare_exchange", lambda words, at, expected, desired: False),
        ("compare_exchange", lambda words, at, expected, desired: True),
        ("crc32c", lambda data: 0),
        ("load", lambda words, at: 0),
    ],
)
def test_a_wrong_result_is_named(name, wrong):
    found = extension.judge(Wrapped(**{name: wrong}))
    assert found.status is Status.FAILED
    assert name in found.sentence


def test_one_that_does_not_load_fails(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if args and args[2] and "_shm" in args[2]:
            raise ImportError("undefined symbol: nothing")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    (found,) = extension.check(None)
    assert found.status is Status.FAILED
    assert "undefined symbol" in found.sentence
