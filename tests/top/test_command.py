"""The command with a tiny server and a real ring."""

import json

import pytest

from tests.top.page_server import serve_page
from tests.top.samples import page_text, write_status
from tests.transport.samples import make_spec
from tests.transport.test_rendezvous import make_manifest
from vllm_tide.cli.main import main
from vllm_tide.transport import RingWriter
from vllm_tide.transport.rendezvous import write_manifest


@pytest.fixture
def top(tmp_path, capsys, monkeypatch):
    """Run `top --once` and return status and output."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*args):
        argv = ["--run-dir", str(tmp_path / "run"), "--once", "--interval", "0.05"]
        return main(["top", *argv, *args]), capsys.readouterr().out

    return run


def test_once_prints_one_plain_screen(top, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    ring = RingWriter.create(make_spec(), 1 << 16)
    try:
        write_status(tmp_path / "run")
        write_manifest(tmp_path / "run", make_manifest(ring=ring.name))
        with serve_page(page_text()) as server:
            status, screen = top("--url", server.url)
    finally:
        ring.close()
    assert status == 0
    assert screen.count("vllm-tide top") == 1
    assert "\033" not in screen
    assert max(map(len, screen.splitlines())) <= 80
    for part in ("SERVER", "ENGINE", "TRAINER", "0.0 out", "loss"):
        assert part in screen


def test_json_is_one_object_a_line(top, tmp_path):
    write_status(tmp_path / "run")
    with serve_page(page_text()) as server:
        _, line = top("--url", server.url, "--json")
    picture = json.loads(line)
    assert picture["servers"][0]["draft_version"] == 5
    assert picture["trainers"][0]["state"] == "training"


def test_exit_status_1_without_a_server_and_a_ring(top, tmp_path):
    status, screen = top()
    assert status == 1
    assert "none announced" in screen
    assert list(tmp_path.iterdir()) == []
    with serve_page(page_text()) as server:
        url = server.url
    status, screen = top("--url", url)
    assert status == 1
    assert "does not answer (Connection refused)" in screen
