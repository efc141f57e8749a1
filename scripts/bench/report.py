"""Turns the JSON of a run into one HTML page.

scripts/bench/report.py FILE --out HTML
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.common import BenchError
from bench.harness.session import read_document


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit status."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="HTML")
    args = parser.parse_args(argv)
    try:
        if find_spec("matplotlib") is None:
            raise BenchError("matplotlib is missing: pip install 'vllm-tide[report]'")
        from bench.harness.html import write_html

        write_html(read_document(args.file), args.out)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
