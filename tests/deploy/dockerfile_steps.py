"""Reads a Dockerfile into steps: what the tests judge."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"([A-Z]+)\s+(.*)", re.DOTALL)
_FLAG = re.compile(r"--[a-z-]+=\S+\s+")


@dataclass(frozen=True)
class Step:
    """One instruction.

    Attributes:
        stage: Name of its build stage; empty before the first.
        name: RUN, COPY, ...
        flags: What it begins with, such as `--mount=...`.
        text: The rest, on one line.
        line: Line of the file it begins at.
    """

    stage: str
    name: str
    flags: tuple[str, ...]
    text: str
    line: int

    @property
    def words(self) -> list[str]:
        """The words of an exec form, after CMD; raises ValueError for a shell form."""
        return [str(word) for word in json.loads(self.text.removeprefix("CMD "))]


def read_steps(dockerfile: Path) -> list[Step]:
    """Steps of a Dockerfile, in order; comments and empty lines left out."""
    steps: list[Step] = []
    stage, text, begun = "", "", 0
    for number, raw in enumerate(dockerfile.read_text().splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        begun = begun or number
        if line.endswith("\\"):
            text += line[:-1].rstrip() + " "
            continue
        match = _INSTRUCTION.match(text + line)
        if match is None:
            raise ValueError(f"{dockerfile}:{begun}: no instruction: {text + line}")
        name, rest = match.groups()
        if name == "FROM":
            stage = rest.split()[-1]
        flags = []
        while flag := _FLAG.match(rest):
            flags.append(flag[0].strip())
            rest = rest[flag.end() :]
        steps.append(Step(stage, name, tuple(flags), rest, begun))
        text, begun = "", 0
    return steps


def stage_chain(steps: list[Step], target: str) -> list[str]:
    """The stages that `target` is built from, itself last; external images left out."""
    parents = {s.stage: s.text.split()[0] for s in steps if s.name == "FROM"}
    chain = [target]
    while (parent := parents[chain[0]]) in parents:
        chain.insert(0, parent)
    return chain
