"""The command line, one module a command: see `main`."""

import sys

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def fail(error: object) -> int:
    """Says why a command cannot do it; returns the exit status."""
    print(f"error: {error}", file=sys.stderr)
    return 2
