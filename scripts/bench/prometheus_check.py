r"""Do the boards' queries and the alerts' expressions find data on a real server?

Starts a real Prometheus (Debian: `apt-get install prometheus`) that scrapes a server
and its trainer for some minutes, with the package's rules loaded, then asks it for
every expression. Without `--server` it starts both, on the demo models under load. A
server that is given must be under load; for every panel to have data it needs
`tide.control.policy` adaspec, a `tide.control.slo_tpot_ms`, `tide.test_time.memory`
ngram and `adapt` shared, capture, and a trainer (`tide.train.metrics_port`) that ends a
cycle while it is scraped and whose first draft is swapped in only then: one panel
compares with the checkpoint's. Example::

    python scripts/bench/prometheus_check.py --server http://localhost:8000 \
        --trainer http://localhost:8001 --minutes 5 --json prometheus.json

A panel query has data if a series has a number that is finite. An alert has data if
each of its selectors finds series: its expression itself is empty until it fires.
Metrics that appear with their first fault may be missing. Exit status 1: something has
no data, or a target could not be scraped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from bench.harness.server import free_port
from vllm_tide.dashboards import ALERTS, BOARDS, contents

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.dashboards.promql import filled, metrics_in  # noqa: E402
from tests.faults.command import add_places, run_command  # noqa: E402
from tests.faults.load import Load  # noqa: E402
from tests.faults.reference import Known  # noqa: E402
from tests.faults.scene import Places, serving  # noqa: E402
from tests.faults.trainer import AGAIN, order  # noqa: E402

JOB = "vllm_tide"
# Counters by reason that are made with the first fault of that reason.
NEED_A_FAULT = {"vllm_tide:faults_total", "vllm_tide:refused_drafts_total"}
SWAP_AFTER = 0.4
"""Share of the time of scraping in which the checkpoint's draft serves."""
TPOT_LIMIT_MS = 50.0
_SELECTOR = re.compile(r"(?:vllm|vllm_tide):\w+(?:\{[^}]*\})?")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table.

    Attributes:
        kind: panel, annotation, alert or selector (of the alert before).
        name: Title and letter of a query, name of an alert.
        expr: As it was sent.
        num_series: With a finite number.
        num_instances: Of these series; 0 where they have no such label.
        ok: It has data, or is empty as it should be.
        note: Why it is ok without data; an alert's state; Prometheus' error.
    """

    kind: str
    name: str
    expr: str
    num_series: int
    num_instances: int
    ok: bool
    note: str = ""


class Prometheus:
    """The HTTP API of a running one.

    Args:
        url: Where it listens.
        began: Unix time of the first scrape.
        step_s: Resolution of range queries.
    """

    def __init__(self, url: str, began: float, step_s: int) -> None:
        self._url = url
        self._began = began
        self._step_s = step_s

    def get(self, path: str, **query: str) -> Any:
        """The `data` of an answer.

        Raises:
            ValueError: Prometheus says what is wrong with the request.
        """
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None

    def series(self, expr: str, newest: bool) -> list[dict[str, str]]:
        """Labels of series with a finite number, now or since the beginning."""
        if newest:
            found = self.get("query", query=expr)["result"]
            samples = [(one["metric"], [one["value"]]) for one in found]
        else:
            found = self.get(
                "query_range",
                query=expr,
                start=f"{self._began:.3f}",
                end=f"{time.time():.3f}",
                step=str(self._step_s),
            )["result"]
            samples = [(one["metric"], one["values"]) for one in found]
        return [
            labels
            for labels, values in samples
            if any(math.isfinite(float(value)) for _, value in values)
        ]

    def down(self) -> list[str]:
        """What could not be scraped last time, and why."""
        targets = self.get("targets", state="active")["activeTargets"]
        return [
            f"{one['scrapeUrl']}: {one['lastError']}"
            for one in targets
            if one["health"] != "up"
        ]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", default=[], metavar="URL")
    parser.add_argument("--trainer", action="append", default=[], metavar="URL")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--scrape-seconds", type=int, default=5)
    parser.add_argument(
        "--needs-fault",
        action="append",
        default=[],
        metavar="METRIC",
        help="also may be missing, beside " + ", ".join(sorted(NEED_A_FAULT)),
    )
    parser.add_argument(
        "--select",
        action="append",
        default=[],
        metavar="VARIABLE=VALUE",
        help="of the boards' job, model_name, instance, engine; default: all",
    )
    add_places(parser)
    return parser.parse_args()


def targets(urls: list[str]) -> Iterator[dict[str, Any]]:
    """Scrape configurations; all of one job, as the rules want it."""
    for place, url in enumerate(urls):
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        path = parts.path.rstrip("/") or "/metrics"
        labelled = {"targets": [parts.netloc], "labels": {"job": JOB}}
        yield {
            "job_name": f"{JOB}_{place}",
            "scheme": parts.scheme,
            "metrics_path": path,
            "static_configs": [labelled],
        }


@contextmanager
def prometheus(
    urls: list[str], scrape_s: int, rules: str | None = None
) -> Iterator[Prometheus]:
    """A Prometheus of its own, with the package's rules unless others are given."""
    binary = shutil.which("prometheus")
    if binary is None:
        sys.exit("error: no prometheus in PATH; Debian has it (prometheus).")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / ALERTS).write_text(rules or contents()[ALERTS], encoding="utf-8")
        period = f"{scrape_s}s"
        config = {
            "global": {
                "scrape_interval": period,
                "scrape_timeout": period,
                "evaluation_interval": period,
            },
            "rule_files": [ALERTS],
            "scrape_configs": list(targets(urls)),
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        command = [
            binary,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
        ]
        # Not a pipe: nobody would read it.
        process = subprocess.Popen(command)
        try:
            wait_until_ready(process, f"http://{address}/-/ready")
            yield Prometheus(f"http://{address}", time.time(), scrape_s)
        finally:
            process.terminate()
            process.wait(timeout=30)


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until Prometheus answers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    sys.exit("error: Prometheus did not start; its last lines are above.")


def check(
    server: Prometheus,
    minutes: float,
    scrape_s: int,
    excused: set[str],
    selected: dict[str, str],
) -> list[Line]:
    """A line for every query of the boards and every rule."""
    window = f"{4 * scrape_s}s"  # as Grafana chooses it
    shown = f"{max(1, round(minutes))}m"
    lines = []
    for name, expr, newest in panel_queries():
        sent = filled(expr, __rate_interval=window, __range=shown, **selected)
        lines.append(judged(server, "panel", name, sent, newest, excused))
    for board in BOARDS:
        for item in json.loads(contents()[board])["annotations"]["list"]:
            sent = filled(item["expr"], **selected)
            *numbers, error = ask(server, sent, newest=False)
            note = error or "needs an event"
            name = item["name"]
            lines.append(Line("annotation", name, sent, *numbers, not error, note))
    states = {
        rule["name"]: rule["state"]
        for group in server.get("rules", type="alert")["groups"]
        for rule in group["rules"]
    }
    for group in yaml.safe_load(contents()[ALERTS])["groups"]:
        for rule in group["rules"]:
            name, expr = rule["alert"], rule["expr"].strip()
            *numbers, error = ask(server, expr, newest=True)
            note = error or states[name]
            lines.append(Line("alert", name, expr, *numbers, not error, note))
            for part in dict.fromkeys(_SELECTOR.findall(expr)):
                lines.append(judged(server, "selector", name, part, False, excused))
    return lines


def panel_queries() -> Iterator[tuple[str, str, bool]]:
    """Title and letter, expression, whether only its newest value is shown."""
    for board in BOARDS:
        for panel in json.loads(contents()[board])["panels"]:
            for target in panel.get("targets", ()):
                name = f"{panel['title']} {target['refId']}"
                yield name, target["expr"], target["instant"]


def judged(
    server: Prometheus,
    kind: str,
    name: str,
    expr: str,
    newest: bool,
    excused: set[str],
) -> Line:
    """What must have data unless it waits for a fault."""
    number, instances, error = ask(server, expr, newest)
    waits = sorted(metrics_in(expr) & excused)
    note = error or (f"needs a fault ({waits[0]})" if waits and not number else "")
    ok = not error and bool(number or waits)
    return Line(kind, name, expr, number, instances, ok, note)


def ask(server: Prometheus, expr: str, newest: bool) -> tuple[int, int, str]:
    """Numbers of series and instances; what Prometheus says against the expression."""
    try:
        found = server.series(expr, newest)
    except ValueError as error:
        return 0, 0, str(error)
    return len(found), len({one["instance"] for one in found if "instance" in one}), ""


def show(lines: list[Line]) -> None:
    """Print the table; an expression only where something is wrong with it."""
    width = max(len(line.name) for line in lines)
    for line in lines:
        name = line.name
        if line.kind == "selector":
            if line.ok and not line.note:
                continue
            name = f"  {line.expr}"
        ok = "ok" if line.ok else "NO DATA"
        numbers = f"{line.num_series:4}  {line.num_instances:4}"
        print(f"{line.kind:10}  {name:{width}}  {numbers}  {ok}  {line.note}")
        if not line.ok and line.kind != "selector":
            print(f"            {' '.join(line.expr.split())}")


def main() -> int:
    """Start a server unless one is given, then check."""
    args = parse_args()
    if args.server:
        return look(args)
    return run_command(args, lambda *found: asyncio.run(serve_and_look(*found)))


async def serve_and_look(
    args: argparse.Namespace, places: Places, known: Sequence[Known]
) -> int:
    """Check a server and a trainer of our own, which swaps a head in the middle."""
    port = free_port()
    limit = {"policy": "adaspec", "slo_tpot_ms": TPOT_LIMIT_MS}
    test_time = {"memory": "ngram", "adapt": "shared", "min_tokens": 8, "stride": 16}
    train = {"metrics_port": port}
    knobs = {"control": limit, "train": train, "test_time": test_time}
    async with serving(places, lambda s: Load(s, known, args.seed), knobs=knobs) as own:
        args.server, args.trainer = [own.server.url], [f"http://127.0.0.1:{port}"]
        swap = order, places.run_dir, AGAIN, 0
        asyncio.get_running_loop().call_later(SWAP_AFTER * 60 * args.minutes, *swap)
        return await asyncio.to_thread(look, args)


def look(args: argparse.Namespace) -> int:
    """Scrape, ask, print."""
    with prometheus(args.server + args.trainer, args.scrape_seconds) as server:
        print(f"scraping for {args.minutes:g} minutes", file=sys.stderr)
        time.sleep(60 * args.minutes)
        down = server.down()
        excused = NEED_A_FAULT | set(args.needs_fault)
        selected = dict(one.split("=", 1) for one in args.select)
        lines = check(server, args.minutes, args.scrape_seconds, excused, selected)
    show(lines)
    for target in down:
        print(f"NOT SCRAPED {target}")
    if args.json is not None:
        table = {"not_scraped": down, "lines": [asdict(line) for line in lines]}
        args.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    missing = [line for line in lines if not line.ok]
    kinds = [line.kind for line in lines]
    print(
        f"{kinds.count('panel')} panel queries, {kinds.count('alert')} alerts with "
        f"{kinds.count('selector')} selectors: {len(missing)} without data, "
        f"{len(down)} targets not scraped"
    )
    return 1 if missing or down else 0


if __name__ == "__main__":
    sys.exit(main())
