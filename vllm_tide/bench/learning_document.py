"""The JSON file of a learning suite, complete after every step; and what it keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_tide.json_text import json_text

from .client import RequestResult
from .learning_options import SuiteOptions

SCHEMA = 1


def write_json(path: Path, data: Any) -> None:
    """Replace a file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json_text(data), encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


class SuiteDocument:
    """The report while it grows.

    Attributes:
        data: What is written.
        resumed: Results of an earlier run are in it.
    """

    def __init__(self, options: SuiteOptions) -> None:
        """Begin a report, or go on with an equal one if `options.resume`."""
        self.path = options.json
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "suite": options.suite,
            "complete": False,
            "stopped": None,
            "problems": [],
            "results": {},
            "options": json.loads(json.dumps(options.to_json())),
            "environment": {},
        }
        before = read_json(self.path) if options.resume else None
        self.resumed = before is not None and self._identity(before) == json.loads(
            json.dumps({"suite": options.suite, **options.identity()})
        )
        if before is not None and self.resumed:
            self.data["results"] = before.get("results", {})
        self.data["identity"] = {"suite": options.suite, **options.identity()}

    @property
    def results(self) -> dict[str, Any]:
        """The suite's own part."""
        results: dict[str, Any] = self.data["results"]
        return results

    def section(self, name: str) -> dict[str, Any]:
        """Return an object of the suite's own part, made if it is not there."""
        found: dict[str, Any] = self.results.setdefault(name, {})
        return found

    def problem(self, text: str) -> None:
        """Note what went wrong; the run goes on."""
        if text not in self.data["problems"]:
            self.data["problems"].append(text)

    def write(self) -> None:
        """Write, atomically."""
        write_json(self.path, self.data)

    @staticmethod
    def _identity(data: dict[str, Any]) -> Any:
        return data.get("identity")


class Outputs:
    """Token ids of every arm, kept in files so that a later run can compare.

    Args:
        folder: Where.
    """

    def __init__(self, folder: Path) -> None:
        """Make nothing yet."""
        self._folder = folder

    def save(self, name: str, results: Sequence[RequestResult]) -> None:
        """Keep the ids of an arm."""
        rows = [
            {
                "index": r.index,
                "segment": r.segment,
                "prompt": r.prompt_token_ids,
                "tokens": r.token_ids,
                "error": r.error,
                "start_s": r.start_s,
                "end_s": r.end_s,
                "ttft_s": r.ttft_s,
            }
            for r in results
        ]
        write_json(self._folder / f"{name}.json", {"requests": rows})

    def load(self, name: str) -> list[RequestResult]:
        """Return what was kept of an arm; empty if nothing was."""
        data = read_json(self._folder / f"{name}.json") or {}
        return [
            RequestResult(
                index=row["index"],
                segment=row["segment"],
                start_s=row["start_s"],
                ttft_s=row["ttft_s"],
                end_s=row["end_s"],
                prompt_token_ids=row["prompt"],
                token_ids=row["tokens"],
                error=row["error"],
            )
            for row in data.get("requests", ())
        ]
