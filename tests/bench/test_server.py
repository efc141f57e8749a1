import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.harness.server import (
    ServerOptions,
    VllmServer,
)

HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_venv(folder: Path, script: str) -> Path:
    """Make a venv with a script of ours as its `vllm` command."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib/python3.11/site-packages/vllm-0.32.0.dist-info").mkdir(parents=True)
    command = folder / "bin" / "vllm"
    command.write_text(f"#!{sys.executable}\n{script}")
    command.chmod(0o755)
    return folder


def options(tmp_path, script=HEALTHY, **changes):
    cpu = min(os.sched_getaffinity(0))
    defaults = {
        "venv": fake_venv(tmp_path / "venv", script),
        "model": tmp_path / "model",
        "log_path": tmp_path / "server.log",
        "engine_cpus": (cpu,),
        "other_cpus": (cpu,),
    }
    return ServerOptions(**(defaults | changes))


@pytest.mark.slow
def test_a_server_starts_is_pinned_and_leaves_no_process(tmp_path):
    with VllmServer(options(tmp_path)) as server:
        server.wait_ready(lambda _: None, timeout_s=60)
        family = psutil.Process(server.pid).children(recursive=True)
        assert len(family) == 1
        assert server.misplaced_threads() == []
        assert server.memory_mib()["api"]["VmRSS"] > 1
        # Its child outlives it: the harness must end it by force and report it.
        assert not server.stop(grace_s=1)
    deadline = time.monotonic() + 5
    while family[0].is_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not family[0].is_running()


@pytest.mark.slow
def test_the_server_gets_its_cores_though_the_client_has_others(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two cores")
    chosen = options(tmp_path, engine_cpus=cpus[:1], other_cpus=cpus[1:2])
    os.sched_setaffinity(0, cpus[1:2])
    try:
        with VllmServer(chosen) as server:
            assert os.sched_getaffinity(server.pid) == set(cpus[:2])
        assert os.sched_getaffinity(0) == set(cpus[1:2])
    finally:
        os.sched_setaffinity(0, cpus)
