"""The command as scripts run it, beside a tiny server and a real ring."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.top.page_server import serve_page
from tests.top.samples import page_text, write_status
from tests.transport.samples import make_spec
from tests.transport.test_rendezvous import make_manifest
from vllm_tide.transport import RingWriter
from vllm_tide.transport.rendezvous import write_manifest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "vllm_tide", "top"]


def top(*args, **env):
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"} | env,
        timeout=60,
    )


def test_once_prints_one_plain_screen(tmp_path):
    ring = RingWriter.create(make_spec(), 1 << 16)
    try:
        write_manifest(tmp_path, make_manifest(ring=ring.name))
        write_status(tmp_path)
        with serve_page(page_text()) as server:
            args = ["--run-dir", tmp_path, "--url", server.url, "--once"]
            done = top(*args, "--interval", 0.1, TERM="xterm")
    finally:
        ring.close()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("vllm-tide top") == 1
    assert "\033" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    for part in ("SERVER", "ENGINE", "TRAINER", "0.0 out", "loss"):
        assert part in done.stdout


def test_json_is_one_object_a_line(tmp_path):
    write_status(tmp_path)
    with serve_page(page_text()) as server:
        args = ["--run-dir", tmp_path, "--url", server.url, "--once", "--json"]
        done = top(*args, "--interval", 0.1)
    told = json.loads(done.stdout)
    assert told["servers"][0]["draft_version"] == 5
    assert told["trainers"][0]["state"] == "training"


def test_nobody_there_exits_1(tmp_path):
    done = top("--run-dir", tmp_path / "none", "--once", "--interval", 0.1)
    assert done.returncode == 1
    assert "none announced" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_gone_is_said(tmp_path):
    with serve_page(page_text()) as server:
        url = server.url
    args = ["--run-dir", tmp_path, "--url", url, "--once", "--interval", 0.1]
    done = top(*args)
    assert done.returncode == 1
    assert "does not answer (Connection refused)" in done.stdout


def test_without_a_terminal_screens_follow_each_other_until_interrupted(tmp_path):
    write_status(tmp_path)
    args = ["--run-dir", str(tmp_path), "--interval", "0.1"]
    with subprocess.Popen(
        [*COMMAND, *args],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        # Ignored where the tests themselves run in a shell's background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        seen = 0
        for text in process.stdout:
            seen += text.startswith("vllm-tide top")
            if seen == 3:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=30) == 0


def test_a_reader_that_leaves_is_no_error(tmp_path):
    args = f"--run-dir {tmp_path} --interval 0.05"
    shell = f"{sys.executable} -m vllm_tide top {args} | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "args",
    [["--interval", "0"], ["--interval", "nan"], ["--url", "ftp://x"], ["--nothing"]],
)
def test_bad_arguments_are_refused(args):
    done = top(*args)
    assert done.returncode == 2
    assert "error:" in done.stderr
