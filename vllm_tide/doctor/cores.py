"""Do engine and trainer have cores of their own?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set

from vllm_tide.doctor.builds import torch_build, vllm_device
from vllm_tide.doctor.finding import Finding, failed, ok, skipped, warning
from vllm_tide.doctor.subject import Subject

NAME = "cores"
BIND = "VLLM_CPU_OMP_THREADS_BIND"


def check(subject: Subject) -> Iterator[Finding]:
    """Compare `tide.train.cpus` with what the engine will take."""
    if subject.tide is None:
        yield skipped(NAME, "The configuration cannot be used.")
        return
    binds = vllm_device(torch_build()) == "cpu"
    yield judge(
        subject.tide.train.cpus,
        os.environ.get(BIND, "auto") if binds else None,
        os.sched_getaffinity(0),
        os.cpu_count() or 1,
    )


def judge(
    trainer: list[int] | None, bind: str | None, allowed: Set[int], total: int
) -> Finding:
    """Judge the division of cores.

    Args:
        trainer: `tide.train.cpus`.
        bind: The engine's binding, "auto", "nobind" or lists of cores; None where the
            engine's work is not on the CPU.
        allowed: Cores of this process.
        total: Cores of the machine.
    """
    have = f"{len(allowed)} of {total} cores allowed"
    try:
        engine = bound_cores(bind)
    except ValueError:
        return failed(
            NAME,
            f"{BIND}={bind!r} is no list of cores.",
            'Write for example "0-6", "0-2|4-6" (one list per rank), auto or nobind.',
        )
    missing = sorted(set(trainer or ()) - set(range(total)))
    if missing:
        text = f"tide.train.cpus names {missing}, and the machine has {total} cores."
        advice = f"Choose from 0..{total - 1}."
        if len(missing) == len(set(trainer or ())):
            return failed(NAME, text, advice)
        return warning(NAME, text, advice)
    if engine is not None and not engine <= allowed:
        return failed(
            NAME,
            f"{BIND}={bind!r} names {sorted(engine - allowed)}, which this process may "
            f"not use ({have}).",
            f"Choose from {written(allowed)}.",
        )
    if len(allowed) == 1:
        return warning(
            NAME,
            f"{have}: a trainer beside the engine slows it down.",
            "Allow more cores, or train elsewhere (tide.spool.url).",
        )
    if trainer is None:
        floats = (
            "the trainer takes cores that the engine leaves, and yields by niceness"
        )
        return ok(NAME, f"{have}; {floats}.")
    return _overlap(set(trainer), engine, bind, allowed, have)


def _overlap(
    trainer: set[int],
    engine: set[int] | None,
    bind: str | None,
    allowed: Set[int],
    have: str,
) -> Finding:
    if bind is None:
        return ok(NAME, f"{have}; trainer on {written(trainer)}.")
    taken = set(allowed) if engine is None else engine
    shared = taken & trainer
    if not shared:
        return ok(
            NAME,
            f"{have}; engine on {written(taken)}, trainer on {written(trainer)}.",
        )
    rest = set(allowed) - trainer
    advice = (
        f'Start the server with {BIND}="{written(rest)}".'
        if rest
        else "Give tide.train.cpus fewer cores."
    )
    how = f"bound to {written(taken)}" if engine is not None else f"{BIND} is {bind}"
    return warning(
        NAME,
        f"{have}; trainer and engine may share {written(shared)} ({how}): both slow "
        "down.",
        advice,
    )


def bound_cores(bind: str | None) -> set[int] | None:
    """Cores of all ranks of an explicit binding; None if vLLM chooses.

    Raises:
        ValueError: It is no list like "0-2,5|8-10".
    """
    if bind is None or bind in ("auto", "nobind"):
        return None
    cores: set[int] = set()
    for part in bind.replace("|", ",").split(","):
        first, dash, last = part.strip().partition("-")
        cores |= set(range(int(first), int(last if dash else first) + 1))
    return cores


def written(cores: Set[int]) -> str:
    """Cores as a list of ranges: "0-2,5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
