"""What is examined: a configuration, a target, a run directory, a port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_tide.config import ConfigError, TideConfig, parse_tide
from vllm_tide.speculative import mistakes, read_json_object


@dataclass(frozen=True, slots=True)
class Subject:
    """What every check is given.

    Attributes:
        run_dir: Run directory.
        port: Of the server.
        source: The `--config` argument; None when none was given.
        error: What is wrong with the configuration, a line each; empty if nothing.
        speculative: The speculative configuration; empty without one.
        tide: Its `tide` section, defaults without one; None if it cannot be used.
        model: The target, a directory or a hub name; None when not given.
    """

    run_dir: Path
    port: int = 8000
    source: str | None = None
    error: str = ""
    speculative: Mapping[str, Any] = field(default_factory=dict)
    tide: TideConfig | None = TideConfig.model_validate({})
    model: str | None = None

    @property
    def draft(self) -> str | None:
        """The draft as the configuration names it."""
        name = self.speculative.get("model")
        return name if isinstance(name, str) and name else None

    @property
    def revision(self) -> str | None:
        """Revision of the draft on the hub."""
        value = self.speculative.get("revision")
        return value if isinstance(value, str) else None


def make_subject(
    source: str | None, model: str | None, run_dir: Path | None, port: int
) -> Subject:
    """Read the configuration; what is wrong with it becomes part of the subject.

    Args:
        source: File or inline JSON, as for `--speculative-config`.
        model: The target.
        run_dir: None: the configuration's, else where a server would put it.
        port: Of the server.
    """
    speculative: dict[str, Any] = {}
    tide: TideConfig | None = None
    error = ""
    try:
        if source is None:
            tide = TideConfig.model_validate({})
        else:
            speculative = read_json_object(source)
            if speculative.get("tide") is None:
                raise ConfigError(f"tide: {source!r} has no tide section.")
            error = "\n".join(mistakes(speculative, whole=True))
            tide = parse_tide(speculative["tide"])
    except ConfigError as reason:
        error = error or str(reason)
    return Subject(
        run_dir=run_dir or _configured_run_dir(tide),
        port=port,
        source=source,
        error=error,
        speculative=speculative,
        tide=tide,
        model=model,
    )


def _configured_run_dir(tide: TideConfig | None) -> Path:
    from vllm_tide.transport.rendezvous import default_run_dir

    if tide is not None and tide.run_dir:
        return Path(tide.run_dir)
    return default_run_dir()
