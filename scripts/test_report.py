"""Sum up the JUnit files of one run of scripts/test.sh; print and store the counts."""

from __future__ import annotations

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

UPSTREAM = re.compile(r"^upstream tests: (\d+) passed, (\d+) failed", re.M)
NUM_SLOWEST = 20


def summarize(folder: Path, broken: int) -> dict[str, Any]:
    """Return the counts of all `*.xml` of a folder and its slowest tests."""
    passed = failed = skipped = 0
    slowest: list[tuple[float, str]] = []
    for report in sorted(folder.glob("*.xml")):
        for suite in ET.parse(report).getroot().iter("testsuite"):
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skips = int(suite.get("skipped", 0))
            failed, skipped = failed + bad, skipped + skips
            passed += int(suite.get("tests", 0)) - bad - skips
        slowest += [
            (float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}")
            for case in ET.parse(report).getroot().iter("testcase")
        ]
    upstream = folder / "upstream.txt"
    if upstream.is_file() and (match := UPSTREAM.search(upstream.read_text())):
        passed, failed = passed + int(match[1]), failed + int(match[2])
    # Count a failed step without a failed test as a failure too.
    failed = failed or broken
    slowest = sorted(slowest, reverse=True)[:NUM_SLOWEST]
    return {
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "slowest": [{"test": name, "seconds": time} for time, name in slowest],
    }


def main() -> int:
    """Run the command; return 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tier", required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--install-seconds", type=int, required=True)
    parser.add_argument("--broken", type=int, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = {
        "tier": args.tier,
        **summarize(args.folder, args.broken),
        "seconds": args.seconds,
        "install_seconds": args.install_seconds,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**report))
    return 1 if args.broken else 0


if __name__ == "__main__":
    sys.exit(main())
