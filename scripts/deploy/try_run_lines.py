"""Carries out a Dockerfile's steps in a root folder; started by `try_run_lines.sh`.

usage: try_run_lines.py ROOT

ROOT is a writable view of this machine's files. RUN, ENV, ARG, WORKDIR and USER
take effect; then the health checks that need no server run as the image's user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from string import Template

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

from scripts.deploy.dockerfile_steps import Step, read_steps  # noqa: E402


class Machine:
    """What the steps change: files below a root, environment, folder, user."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = dict(os.environ)
        self.folder, self.user = "/", "0:0"

    def take(self, step: Step) -> None:
        """Carry out one step."""
        if step.name == "RUN":
            print(f"--- RUN (line {step.line}) {step.text}", flush=True)
            for flag in step.flags:
                words = flag.removeprefix("--mount=").split(",")
                mount = dict(word.split("=", 1) for word in words)
                place = self.root / mount["target"].lstrip("/")
                shutil.copytree(HERE / mount["source"], place)
            self.run(["/bin/sh", "-c", step.text])
        elif step.name == "ENV":
            for pair in step.text.split():
                key, _, value = pair.partition("=")
                # A shell fills in `${NAME:-$OTHER}` as a build does.
                say = ["sh", "-c", f'printf %s "{value}"']
                self.env[key] = subprocess.check_output(say, env=self.env, text=True)
        elif step.name == "ARG":
            key, _, value = step.text.partition("=")
            self.env.setdefault(key, value.strip('"'))
        elif step.name == "WORKDIR":
            self.folder = step.text
            (self.root / self.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.name == "USER":
            user = Template(step.text).substitute(self.env)
            self.user = user if ":" in user else f"{user}:{user}"

    def run(self, command: list[str]) -> None:
        """Run a command in the root as the user; raises if it fails."""
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', self.folder, *command]
        chroot = [
            "chroot",
            f"--userspec={self.user}",
            str(self.root),
            *inside,
        ]
        subprocess.run(chroot, env=self.env, check=True)


def main() -> int:
    """Run it; returns the exit status."""
    machine = Machine(Path(sys.argv[1]))
    steps = read_steps(HERE / "Dockerfile")
    count = 0
    try:
        for step in steps:
            if step.stage == "base":
                machine.take(step)
                count += step.name == "RUN"
        check = next(s for s in steps if s.name == "HEALTHCHECK" and s.stage == "train")
        checks = [
            ["vllm-tide", "patch", "status"],
            ["sh", "-c", "test $(id -u) != 0 && install -d -m 0700 /run/tide/run"],
            check.words,
        ]
        for words in checks:
            print(f"--- as user {machine.user}: {' '.join(words)}", flush=True)
            machine.run(words)
    except subprocess.CalledProcessError as error:
        print(f"try_run_lines: failed ({error.returncode})", file=sys.stderr)
        return 1
    print(f"try_run_lines: {count} RUN lines and {len(checks)} checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
