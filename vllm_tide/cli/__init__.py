"""The command line, one module a command: see `main`."""

import json
import sys
from pathlib import Path

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def fail(error: object) -> int:
    """Says why a command cannot do it; returns the exit status."""
    print(f"error: {error}", file=sys.stderr)
    return 2


def write_json(path: Path | None, value: object) -> int:
    """Writes the value of `--json OUT`, if that is given; returns the exit status."""
    if path is not None:
        try:
            path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            return fail(f"--json {path}: {error.strerror or error}.")
    return 0
