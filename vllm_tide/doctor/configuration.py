"""Can the configuration be read, and are all its knobs valid?"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_tide.config import TideConfig
from vllm_tide.doctor.finding import Finding, failed, ok, skipped
from vllm_tide.doctor.subject import Subject

_ADVICE = "'vllm-tide config reference' lists every knob, 'config example' whole files."


def check(subject: Subject) -> Iterator[Finding]:
    """The sentence that the server itself would say."""
    if subject.error:
        for sentence in subject.error.splitlines():
            yield failed("configuration", sentence, _ADVICE)
    elif subject.source is None or subject.tide is None:
        yield skipped("configuration", "No --config given: the defaults are examined.")
    else:
        yield ok("configuration", f"Valid: {_summary(subject.tide)}.")


def _summary(tide: TideConfig) -> str:
    parts = [f"control {tide.control.policy}"]
    capture = tide.capture
    parts.append(f"ring {capture.ring_mib} MiB" if capture.enabled else "no capture")
    if tide.spool.url:
        parts.append("trainer behind a spool")
    elif tide.train.autostart:
        parts.append("trainer started with the server")
    else:
        parts.append("trainer started by hand")
    if not tide.swap.enabled:
        parts.append("no swaps")
    return ", ".join(parts)
