"""Can the spool be reached?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

from vllm_tide.doctor.file_systems import can_be_made
from vllm_tide.doctor.finding import Finding, failed, ok, skipped
from vllm_tide.doctor.subject import Subject
from vllm_tide.transport.header import TransportError
from vllm_tide.transport.spool_store import open_store

NAME = "spool"
_SECONDS = 10.0
_LOOK = "Correct tide.spool.url, its access rights or the network."


def check(subject: Subject) -> Iterator[Finding]:
    """List the spool of the configuration."""
    if subject.tide is None:
        yield skipped(NAME, "The configuration cannot be used.")
    elif not subject.tide.spool.url:
        yield skipped(NAME, "tide.spool.url is not set.")
    else:
        yield judge(subject.tide.spool.url)


def judge(url: str, seconds: float = _SECONDS) -> Finding:
    """List what lies there; a missing directory is not made.

    Args:
        url: As `tide.spool.url`.
        seconds: A back end that retries for minutes is given so long.
    """
    if "://" not in url or url.startswith("file://"):
        folder = Path(url.removeprefix("file://")).expanduser()
        if not folder.exists():
            if can_be_made(folder):
                return ok(NAME, f"{folder} is made by the relay, mode 0700.")
            return failed(NAME, f"{folder} cannot be made.", _LOOK)
    found: list[Finding] = []
    # A thread that cannot be stopped must not keep the command from ending.
    thread = Thread(target=lambda: found.append(_listed(url)), daemon=True)
    thread.start()
    thread.join(seconds)
    if found:
        return found[0]
    return failed(NAME, f"No answer within {seconds:.0f} s.", _LOOK)


def _listed(url: str) -> Finding:
    try:
        store = open_store(url)
        engines = store.folders("")
    except TransportError as error:
        return failed(NAME, str(error), _LOOK)
    return ok(NAME, f"{store.url} can be listed: {len(engines)} folders.")
