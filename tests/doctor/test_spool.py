"""The spool is listed, never made."""

import time

import pytest

from tests.doctor.samples import make_subject
from vllm_tide.doctor import spool
from vllm_tide.doctor.finding import Status
from vllm_tide.transport.header import TransportError


def test_not_configured_is_skipped(tmp_path):
    (found,) = spool.check(make_subject(tmp_path))
    assert found.status is Status.SKIPPED


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_directory_is_listed_and_a_missing_one_not_made(tmp_path, prefix):
    folder = tmp_path / "spool"
    url = f"{prefix}{folder}"
    assert "is made by the relay" in spool.judge(url).sentence
    assert not folder.exists()
    folder.mkdir(mode=0o700)
    (folder / "engine").mkdir()
    found = spool.judge(url)
    assert found.status is Status.OK
    assert "1 folders" in found.sentence


def test_a_directory_open_to_all_fails(tmp_path):
    folder = tmp_path / "spool"
    folder.mkdir()
    folder.chmod(0o777)
    found = spool.judge(str(folder))
    assert found.status is Status.FAILED
    assert "open to every user" in found.sentence


def test_a_file_fails(tmp_path):
    file = tmp_path / "spool"
    file.write_text("")
    assert spool.judge(str(file)).status is Status.FAILED
    assert spool.judge(str(file / "below")).status is Status.FAILED


def test_a_url_of_fsspec_is_listed(tmp_path):
    pytest.importorskip("fsspec")
    assert spool.judge("memory://spool-of-a-test").status is Status.OK


def test_an_unknown_protocol_fails_without_the_password():
    found = spool.judge("nonsense://user:secret@host/x")
    assert found.status is Status.FAILED
    assert "secret" not in found.sentence


def test_a_back_end_that_hangs_does_not_hang_us(monkeypatch, tmp_path):
    def hang(url):
        time.sleep(1)
        raise TransportError("too late")

    monkeypatch.setattr(spool, "open_store", hang)
    began = time.monotonic()
    found = spool.judge(f"{tmp_path}", seconds=0.1)
    assert found.status is Status.FAILED
    assert time.monotonic() - began < 0.9
