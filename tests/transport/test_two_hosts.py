"""Two engines and their relays, real processes that share only a directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.transport.feed_toys import publish
from tests.transport.samples import identity, make_record, make_spec
from tests.transport.test_feeds_shared import drain
from vllm_tide.transport.feed_spool import SpoolSource
from vllm_tide.transport.feeds import Feeds
from vllm_tide.transport.spool import EngineFolder, Store, draft_version
from vllm_tide.transport.versions import first_version

SPEC = make_spec()
ENGINE = """
import subprocess, sys, time
from pathlib import Path
from tests.transport.spool_toys import ToyEngine
folder, spool = Path(sys.argv[1]), sys.argv[2]
engine = ToyEngine(folder, sys.argv[3], tide={"spool": {"url": spool},
    "train": {"nice": 0}})
code = '''
import argparse, sys
from vllm_tide.cli import relay
from vllm_tide.transport import spool_shard
spool_shard.SHARD_SECONDS = 0.05
parser = argparse.ArgumentParser()
relay.add_arguments(parser)
sys.exit(relay.run(parser.parse_args(sys.argv[1:])))
'''
relay = subprocess.Popen([sys.executable, "-c", code, "--run-dir",
    str(engine.run_dir), "--engine", sys.argv[3]])
print("up", flush=True)
deadline = time.monotonic() + 60
engine.serve(range(40))
served, version = 40, 0
while time.monotonic() < deadline:
    if engine.weights.latest_version() != version:
        version = engine.weights.read().version
    engine.weights.report(version)
    time.sleep(0.02)
"""


def _isolated(command):
    """Return the command with a private /dev/shm, where this system permits it."""
    unshare = shutil.which("unshare")
    mount = 'mount -t tmpfs none /dev/shm && exec "$@"'
    if unshare is not None:
        wrap = [unshare, "--mount", "sh", "-c", mount, "sh"]
        if subprocess.run([*wrap, "true"], capture_output=True).returncode == 0:
            return [*wrap, *command], True
    return command, False


def _segments(children) -> set[str]:
    """Return names of the shared memory that the processes have mapped."""
    maps = (Path(f"/proc/{child.pid}/maps").read_text() for child in children)
    return {name for text in maps for name in re.findall(r"/dev/shm/(\S+)", text)}


def _names() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.slow
def test_two_process_trees_share_nothing_but_storage(tmp_path):
    spool = str(tmp_path / "spool")
    children = []
    try:
        for name in ("left", "right"):
            command = [sys.executable, "-c", ENGINE, str(tmp_path / name), spool, name]
            command, isolated = _isolated(command)
            children.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            )
        for child in children:
            assert child.stdout.readline() == "up\n"
        if isolated:
            assert _segments(children) and not _segments(children) & _names()
        feeds = Feeds([SpoolSource(spool, cache=tmp_path / "cache")])
        want = [identity(make_record(SPEC, n)) for n in range(40)]
        assert drain(feeds, count=80, seconds=40) == {"left": want, "right": want}
        target, draft = feeds.reference.models()
        assert (draft / "config.json").exists()
        assert json.loads((target / "config.json").read_text())["vocab_size"] == 20
        version = publish(feeds, 3)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            feeds.heartbeat()
            installed = {feedback.installed for feedback in feeds.versions().values()}
            if installed == {version}:
                break
            time.sleep(0.05)
        assert installed == {version}
        # One engine dies: its relay reports it, and the other continues.
        children[0].send_signal(signal.SIGKILL)
        left = {}
        deadline = time.monotonic() + 30
        while "left" not in left and time.monotonic() < deadline:
            feeds.heartbeat()
            feeds.read()
            left |= feeds.poll().left
            time.sleep(0.05)
        assert left == {"left": "its process has exited"}
        assert feeds.ids == ["right"]
        assert publish(feeds, 4) == version + 1
        feeds.close()
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
    trainer = EngineFolder(Store(spool), "right").read_trainer()
    stored = draft_version(trainer.draft)
    assert stored == first_version(version + 1) and not trainer.running
