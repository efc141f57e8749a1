"""Send requests until a draft is swapped in; run by `build_and_try.sh`.

usage: try_load.py --url URL --prompts FILE --seconds S --pids "PID ..."

Prints {"served": bool, "captured_rows": n, "swaps": n}. Exits early if one of the
processes ends. It uses only the standard library, because it runs with the system's
Python.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CLIENTS = 4
START_S = 600.0
"""Maximum start time of the server (s)."""


def request_bytes(url: str, body: dict[str, object] | None = None) -> bytes:
    """Send a GET, or a POST with a JSON body; return the response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read()


def counter(page: str, name: str) -> int:
    """Return the sum of a counter over its labels."""
    values = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, flags=re.MULTILINE)
    return int(sum(map(float, values)))


def alive(pids: list[int]) -> bool:
    """Return whether all processes run; a zombie has ended."""
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
    return True


def wait_ready(url: str, pids: list[int]) -> bool:
    """Wait for `/health`; return whether the server answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and alive(pids):
        try:
            request_bytes(f"{url}/health")
            return True
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    return False


def main() -> int:
    """Run the load and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--pids", default="")
    args = parser.parse_args()
    pids = [int(pid) for pid in args.pids.split()]
    result = {"served": False, "captured_rows": 0, "swaps": 0}
    lines = gzip.decompress(args.prompts.read_bytes()).splitlines()
    prompts = itertools.cycle([json.loads(line)["prompt"] for line in lines])

    def complete(prompt: str) -> str:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 64, "temperature": 0}
        reply = json.loads(request_bytes(f"{args.url}/v1/completions", body))
        return str(reply["choices"][0]["text"])

    try:
        if not wait_ready(args.url, pids):
            print("the server did not start", file=sys.stderr)
            return 1
        deadline = time.monotonic() + args.seconds
        with ThreadPoolExecutor(CLIENTS) as pool:
            while not result["swaps"] and time.monotonic() < deadline:
                texts = list(pool.map(complete, itertools.islice(prompts, 4 * CLIENTS)))
                result["served"] = all(texts)
                page = request_bytes(f"{args.url}/metrics").decode()
                result["captured_rows"] = counter(page, "vllm_tide:captured_rows_total")
                result["swaps"] = counter(page, "vllm_tide:swaps_total")
                if not alive(pids):
                    print("server or trainer ended", file=sys.stderr)
                    return 1
        # The new draft serves too.
        result["served"] = result["served"] and bool(complete(next(prompts)))
    except (OSError, ValueError, KeyError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        result["served"] = False
        return 1
    finally:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
