"""Fake `vllm serve` and trainer processes that record which others run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from bench.harness.arm import WARM_UP_PROMPTS
from bench.harness.server import ENDINGS
from tests.bench.test_server import fake_venv

# In `argv[2]`, the target: a file by process, named after its pid; `requests`, a line
# for each one; `fails`, a JSON object of arms to how; `hangs`, if no request ends.
SERVER = """
import http.server, json, os, signal, subprocess, sys, time
from pathlib import Path

target, config = Path(sys.argv[2]), {}
if "--speculative-config" in sys.argv:
    text = sys.argv[sys.argv.index("--speculative-config") + 1]
    config = json.loads(text if text.startswith("{") else Path(text).read_text())
tide = config.get("tide")
K = config.get("num_speculative_tokens", 0)
arm = f"static{K}" if K else "none"
if tide is not None:
    arm = "tide"
fails = json.loads((target / "fails").read_text()).get(arm)
if fails == "at start":
    sys.exit("no memory left")
(target / f"{os.getpid()}.pid").write_text(arm)
if arm == "tide":
    run_dir = Path(tide["run_dir"])
    (run_dir / "trainer-1.json").write_text(json.dumps({"state": "waiting"}))
    code = "import time; time.sleep(600)"
    command = [sys.executable, "-c", code, "vllm_tide", "train"]
    trainer = subprocess.Popen(command, start_new_session=True)
    (target / f"{trainer.pid}.pid").write_text("trainer")

    def end(*_):
        trainer.terminate()
        trainer.wait()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
drafts = 0

def states():
    found = {}
    for path in target.glob("*.pid"):
        try:
            stat = Path(f"/proc/{path.stem}/stat").read_text()
        except OSError:
            continue
        if path.stem != str(os.getpid()):
            found[path.read_text()] = stat.rpartition(")")[2].split()[0]
    return found

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        for name in ("drafts", "accepted_tokens"):
            line = f"vllm:spec_decode_num_{name}_total {drafts}\\n"
            self.wfile.write(line.encode())
    def do_POST(self):
        global drafts
        text = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(text or '{"prompt": "", "max_tokens": 0}')
        line = json.dumps([arm, body["prompt"], states()])
        with open(target / "requests", "a") as out:
            out.write(line + "\\n")
        drafts += K > 0
        warm = body["prompt"] in WARM_UP
        while (target / "hangs").exists() and not warm:
            time.sleep(1)
        self.send_response(200)
        self.end_headers()
        if fails == "amid" and not warm:
            os._exit(1)
        tokens = list(range(body["max_tokens"]))
        for first in range(0, len(tokens), max(1, K)):
            part = {"token_ids": tokens[first : first + max(1, K)]}
            event = "data: " + json.dumps({"choices": [part]}) + "\\n\\n"
            self.wfile.write(event.encode())
            self.wfile.flush()
    def log_message(self, *args): pass

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def demo(folder: Path) -> tuple[Path, Path]:
    """A target with processes that fail nowhere, and prompts of two domains."""
    target, prompts = folder / "target", folder / "prompts"
    for made in (target, prompts, folder / "draft"):
        made.mkdir(parents=True)
    (target / "fails").write_text("{}")
    for domain in ("math", "sql"):
        rows = [json.dumps({"prompt": f"{domain} {i}"}) for i in range(8)]
        (prompts / f"{domain}.jsonl").write_text("\n".join(rows))
    return target, prompts


def fake_quickstart_venv(folder: Path) -> Path:
    """Return an environment with that `vllm`; its Python is this one."""
    made = fake_venv(folder, f"WARM_UP = {WARM_UP_PROMPTS!r}\n{SERVER}")
    python = made / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return made


def as_a_terminal_starts(command: list[str]) -> list[str]:
    """A command that ignores no signal, as a child of ``nohup`` would.

    Not by `preexec_fn`: a process that forks after OpenMP has computed may hang, and
    its child is bound to one core.
    """
    code = f"for ending in {[int(ending) for ending in ENDINGS]}:\n"
    code += "    signal.signal(ending, signal.SIG_DFL)\n"
    code = f"import os, signal, sys\n{code}os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", code, *command]


def what_ran(target: Path) -> list[tuple[str, str, dict[str, str]]]:
    """Return arm, prompt, and the states of the other processes, of each request."""
    path = target / "requests"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines]
    return [tuple(row) for row in events if row[1] not in WARM_UP_PROMPTS]


def running(target: Path) -> dict[str, int]:
    """Return live processes of servers and trainers."""
    pids = {path.read_text(): int(path.stem) for path in target.glob("*.pid")}
    return {name: pid for name, pid in pids.items() if _runs(pid)}


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(reached: Callable[[], object]) -> None:
    """Wait, for a minute at most."""
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)
