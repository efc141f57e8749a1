"""Schema of the `tide` section of `--speculative-config`.

It contains all defaults. An unknown key is an error that suggests the closest known
key. Used in every process; imports neither torch nor vLLM.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)

MIB, GIB = 1 << 20, 1 << 30
_FEATURE_BYTES = 2  # bfloat16
DEVICE, PRINTABLE = r"^(cpu|cuda(:[0-9]+)?)$", r"^[ -~]+$"
LossTerm = Literal["forward_kl", "reverse_kl", "next_token", "lk_hybrid", "discard"]


class ConfigError(ValueError):
    """Invalid value of a knob; the message names the knob and the remedy."""


def _whole(value: Any) -> Any:
    """Convert an integral float to int, because some JSON writers emit floats only."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
# YAML reads a bare `off` as false.
_YAML_OFF = BeforeValidator(lambda value: "off" if value is False else value)


def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise ValueError(
            "must be an absolute path, because processes have different folders"
        )
    return path


def _absolute_or_home(path: str) -> str:
    return path if path.startswith("~") else _absolute(path)


_CREDENTIALS = re.compile(r"(?<=://)([^/\s]*:\S*|[^/\s]*)@|\?\S+")


def without_credentials(text: str) -> str:
    """Remove user, password and query from URLs in a text."""
    return _CREDENTIALS.sub("", text)


def _storage(url: str) -> str:
    from fsspec.registry import available_protocols  # type: ignore[import-untyped]

    if "://" not in url:
        return _absolute_or_home(url)
    protocol = url.partition("://")[0].partition("::")[0]
    if protocol not in available_protocols():
        near = difflib.get_close_matches(protocol, available_protocols(), 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else "see fsspec's list"
        raise ValueError(f"must be a directory or a URL of fsspec; {hint}")
    return url


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )


class CaptureConfig(_Section):
    """Capture of live traffic's rows in the engine."""

    enabled: bool = Field(True, description="Copy rows of live traffic to the ring.")
    sample_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="Share of requests captured, chosen once per request (0 to 1)."
    )
    consent: Annotated[Literal["opt_out", "opt_in", "off"], _YAML_OFF] = Field(
        "opt_out",
        description="Captured requests: `opt_out` all but those with vllm_xargs "
        "tide_capture false; `opt_in` only those with tide_capture true; `off` none.",
    )
    salted: bool = Field(False, description="Capture requests with a cache_salt too.")
    teacher: Literal["hidden", "topk"] = Field(
        "hidden",
        description="Teacher stored with each row: the final hidden state, or the "
        "top-k log-probabilities with a tail bucket.",
    )
    teacher_topk: Annotated[Whole, Field(ge=1, le=1024)] = Field(
        64, description="Log-probabilities per row of a top-k teacher (1 to 1024)."
    )
    ring_mib: Annotated[Whole, Field(ge=1, le=65536)] = Field(
        256,
        description="Size of the shared-memory ring (MiB); if it is not given, at "
        "least two steps of the most rows.",
    )

    def ring_bytes(self, num_aux: int, hidden_size: int, rows: int) -> int:
        """Return the size of the ring: `ring_mib` if given, else at least two steps.

        256 MiB hold less than one prefill chunk of a large model, which would never be
        captured whole.

        Args:
            rows: Most rows of a step.
        """
        size = self.ring_mib * MIB
        if "ring_mib" in self.model_fields_set:
            return size
        values = num_aux + (self.teacher == "hidden")
        return max(size, 2 * rows * values * hidden_size * _FEATURE_BYTES)


class TrainConfig(_Section):
    """The sidecar trainer."""

    autostart: bool = Field(
        True, description="Start and stop `vllm-tide train` with a capturing server."
    )
    device: Annotated[str, Field(pattern=DEVICE)] = Field(
        "cpu", description="Trainer's device: `cpu`, `cuda` or `cuda:N` (ROCm too)."
    )
    gpu_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Largest share of time in which the trainer uses its GPU (0 to 1); "
        "null: 0.1 on a GPU that also serves, else 1.",
    )
    cpus: list[Annotated[Whole, Field(ge=0)]] | None = Field(
        None,
        description="CPU cores of the trainer; null: all, or, if a server starts it, "
        "the cores that no engine thread is bound to.",
    )
    nice: Annotated[Whole, Field(ge=0, le=19)] = Field(
        10, description="Niceness of the trainer (0 to 19); 10 needs idle cores."
    )
    learning_rate: Annotated[float, Field(gt=0, le=1)] = Field(
        1e-3, description="Peak learning rate of AdamW."
    )
    ttt_steps: Annotated[Whole, Field(ge=1, le=16)] = Field(
        3, description="Training-time-test steps of EAGLE-3: draft depth trained."
    )
    batch_tokens: Annotated[Whole, Field(ge=64)] = Field(
        1024, description="Rows packed into one optimizer step (tokens)."
    )
    min_new_tokens: Annotated[Whole, Field(ge=1)] = Field(
        512, description="New captured tokens that start a training cycle (tokens)."
    )
    steps_per_cycle: Annotated[Whole, Field(ge=1)] = Field(
        32,
        description="Most optimizer steps between two evaluations; on a slow device as "
        "many as fit in 20 seconds, at least 4.",
    )
    max_passes: Annotated[Whole, Field(ge=1)] = Field(
        8,
        description="Most training passes over a document, and at most 4 in one cycle: "
        "memorized text could be extracted from the draft.",
    )
    buffer_tokens: Annotated[Whole, Field(ge=1024)] = Field(
        131072,
        description="Size of the training buffer; the newest rows stay (tokens).",
    )
    max_age_s: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Age at which a captured request is deleted, held-out ones too "
        "(seconds); null: when newer ones replace it.",
    )
    holdout_share: Annotated[float, Field(gt=0, le=0.5)] = Field(
        0.1, description="Share of requests held out for evaluation (0 to 0.5)."
    )
    min_gain: Annotated[float, Field(ge=0)] = Field(
        0.01, description="Smallest gain in acceptance length to publish (tokens)."
    )
    loss: dict[LossTerm, Annotated[float, Field(ge=0)]] = Field(
        {"forward_kl": 1.0},
        description="Weight of each loss term: forward_kl, reverse_kl, next_token, "
        "lk_hybrid on committed rows; discard (top-k filtered KL) on rejected "
        "branches, which are not used without it.",
        min_length=1,
    )
    attention: Literal["auto", "packed", "flex", "xformers"] = Field(
        "auto",
        description="Attention of the trainer: `packed`, of this package, runs on all "
        "devices; `flex` is Torch's FlexAttention; `xformers` is xFormers with "
        "block-diagonal biases.",
    )
    tenant_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="Largest share of the training buffer that one tenant "
        "(vllm_xargs: tide_tenant) may fill (0 to 1).",
    )
    state_dir: Annotated[str, AfterValidator(_absolute_or_home)] | None = Field(
        None,
        description="Directory of the last good draft, checkpoints, tenant key and "
        "switches; null: a folder of the run directory, and the user's state directory "
        "for key and switches.",
    )
    checkpoint_cycles: Annotated[Whole, Field(ge=0)] = Field(
        0, description="Cycles between two checkpoints of the trainer; 0: none."
    )
    metrics_port: Annotated[Whole, Field(ge=0, le=65535)] = Field(
        0, description="Port of the trainer's /metrics; 0: none."
    )
    metrics_host: Annotated[str, Field(min_length=1)] = Field(
        "127.0.0.1", description="Address of this port; 0.0.0.0: all interfaces."
    )


class ScheduleConfig(_Section):
    """Times at which the trainer collects and trains (TIDE, algorithm 1)."""

    mode: Literal["always", "tide"] = Field(
        "always",
        description="`always` trains on new data, less often the longer it shows no "
        "gain; `tide` is the paper's gate with one global average.",
    )


class DeployConfig(_Section):
    """Publication of a better draft, and rollback."""

    canary: bool = Field(
        True,
        description="Compare served speed before and after a swap; roll back to the "
        "previous draft if it fell by more than 2% and two standard errors.",
    )
    canary_requests: Annotated[Whole, Field(ge=2)] = Field(
        48, description="Most requests after a swap that the canary evaluates."
    )
    min_requests: Annotated[Whole, Field(ge=0)] = Field(
        0, description="Fewest requests between two publications."
    )
    min_seconds: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Shortest time between two publications (seconds)."
    )


class FreshConfig(_Section):
    """Draft that is built for `"model": "fresh"`."""

    draft_vocab_size: Annotated[Whole, Field(ge=64)] | None = Field(
        None,
        description="Vocabulary of the draft (tokens); null: 4096 if trained on a CPU, "
        "32768 on a GPU, at most the target's.",
    )


class SpoolConfig(_Section):
    """Exchange of records and drafts through storage, between two hosts."""

    # Printed, dumped and written to manifests without credentials.
    url: (
        Annotated[str, AfterValidator(_storage), PlainSerializer(without_credentials)]
        | None
    ) = Field(
        None,
        repr=False,
        description="Directory or fsspec URL shared by both hosts, with credentials in "
        "fsspec's configuration; null: no spool.",
    )
    max_gib: Annotated[float, Field(gt=0)] = Field(
        8.0, description="Most records in the spool; the oldest are removed (GiB)."
    )
    max_age_s: Annotated[float, Field(gt=0)] = Field(
        86400.0, description="Age at which a shard of records is removed (seconds)."
    )


class ControlConfig(_Section):
    """Number of tokens that are drafted and verified, for each request."""

    policy: Literal["static", "adaspec", "threshold"] = Field(
        "adaspec",
        description="Policy of the speculative length: `static` always drafts "
        "num_speculative_tokens; `adaspec` maximises expected tokens per second from "
        "the draft's confidence and measured times; `threshold` stops drafting if "
        "the mean confidence is low.",
    )
    slo_tpot_ms: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Limit of each request's time per output token (ms)."
    )
    client_slo_tpot_ms: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Smallest limit that a request may set (ms, tide_slo_tpot_ms); "
        "smaller ones are raised to it; null: requests cannot set limits. They reduce "
        "a batch's tokens per second by at most a tenth (adaspec only).",
    )
    min_gain: Annotated[float, Field(ge=0, le=10)] = Field(
        0.02,
        description="Smallest predicted gain of drafting (0.02 = 2%).",
    )
    probe_share: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.005,
        description="Share of time that exploration may cost: drafting while it is "
        "off, and steps without drafts while it is on. Verifying tokens without an "
        "expected gain may cost a quarter of it more (0: no exploration).",
    )
    verify: bool = Field(
        True, description="Do not verify drafted tokens without an expected gain."
    )


class TestTimeConfig(_Section):
    """Adaptation during the generation of a request."""

    __test__ = False  # not a pytest class

    memory: Annotated[Literal["auto", "off", "ngram"], _YAML_OFF] = Field(
        "auto",
        description="Draft from the request's own text where its acceptance is higher: "
        "`ngram` is prompt lookup of the last tokens (greedy drafts); `auto` is "
        "`ngram` on Model Runner V1 with control and without `adapt`, else `off`.",
    )
    adapt: Annotated[Literal["off", "shared", "exact"], _YAML_OFF] = Field(
        "off",
        description="Train a fast draft on running requests: `shared` one draft on all "
        "long requests, served while it is better; `exact` on one request at a time, "
        "as in Test-Time Speculation. The fast draft serves all requests.",
    )
    stride: Annotated[Whole, Field(ge=1)] | None = Field(
        None,
        description="New tokens of all long requests per optimizer step of the fast "
        "draft (`exact`: verify steps); null: 64 (`exact`: 10).",
    )
    min_tokens: Annotated[Whole, Field(ge=0)] = Field(
        256, description="Generated tokens from which a request is long (tokens)."
    )


class SwapConfig(_Section):
    """Installation of a published draft."""

    enabled: bool = Field(
        True, description="Install published drafts; without, no trainer is started."
    )


_NO_LEARNING = {"train": {"autostart": False}, "swap": {"enabled": False}}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {},
    "observe": _NO_LEARNING | {"control": {"policy": "static"}},
    "control": _NO_LEARNING | {"capture": {"enabled": False}},
    "learn": {"control": {"policy": "static"}},
}
"""Defaults of each `tide.preset` by section, where they differ from `full`."""


class TideConfig(_Section):
    """Root of the `tide` section."""

    preset: Literal["full", "observe", "control", "learn"] = Field(
        "full",
        description="Defaults of the other knobs: `full` all parts; `observe` capture "
        "and reports only; `control` no capture and no training; `learn` all parts "
        "with a static length.",
    )
    run_dir: Annotated[str, AfterValidator(_absolute)] | None = Field(
        None,
        description="Directory (absolute, mode 0700) shared by server and trainer; "
        "null: $TIDE_RUN_DIR, else a per-user directory.",
    )
    capture: CaptureConfig = CaptureConfig.model_validate({})
    train: TrainConfig = TrainConfig.model_validate({})
    control: ControlConfig = ControlConfig.model_validate({})
    test_time: TestTimeConfig = TestTimeConfig.model_validate({})
    swap: SwapConfig = SwapConfig.model_validate({})
    schedule: ScheduleConfig = ScheduleConfig.model_validate({})
    deploy: DeployConfig = DeployConfig.model_validate({})
    fresh: FreshConfig = FreshConfig.model_validate({})
    spool: SpoolConfig = SpoolConfig.model_validate({})


def _known_keys(root: Any, path: tuple[str | int, ...]) -> list[str]:
    for part in path:
        if get_origin(root) is list and isinstance(part, int):
            root = get_args(root)[0]
            continue
        field = root.model_fields.get(part) if hasattr(root, "model_fields") else None
        if field is None:
            return []
        root = field.annotation
    if get_origin(root) is dict:  # with a Literal of its keys
        return list(get_args(get_args(root)[0]))
    return list(getattr(root, "model_fields", {}))


def shown(value: Any) -> str:
    """Return a value as JSON, shortened; a user writes JSON, not Python."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_MOST_SHOWN = 200  # characters
_MESSAGES = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object like {{}}",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be {expected}",
    "int_type": "must be an integer",
    "list_type": "must be a list like [0, 1]",
    "model_type": "must be an object like {{}}",
    "string_type": "must be a string",
    "string_pattern_mismatch": "must be {pattern_text}",
    "too_short": "must have at least {min_length} entry",
    "value_error": "{error}",
}
"""Messages that replace pydantic's, by its type of error."""
_PATTERNS = {DEVICE: "cpu, cuda or cuda:N", PRINTABLE: "printable ASCII"}


def explained(error: ValidationError, model: Any) -> Iterator[str]:
    """Yield a sentence for each of pydantic's errors about a model."""
    start = "tide." if model is TideConfig else ""
    for one in error.errors():
        loc = tuple(part for part in one["loc"] if part != "[key]")
        knob = start + ".".join(map(str, loc))
        facts = one.get("ctx", {})
        facts["pattern_text"] = _PATTERNS.get(facts.get("pattern", ""))
        text = _MESSAGES.get(one["type"], "{msg}").format(msg=one["msg"], **facts)
        given = shown(one.get("input"))
        given = without_credentials(given) if knob == "tide.spool.url" else given
        message = f"{text}, got {given}."
        if one["type"] == "missing":
            message = "missing."
        if one["type"] == "extra_forbidden" or len(loc) < len(one["loc"]):
            known = _known_keys(model, loc[:-1])
            near = difflib.get_close_matches(str(loc[-1]), known, n=1)
            sections = _known_keys(model, ())
            own = [s for s in sections if loc[-1] in _known_keys(model, (s,))]
            near = [f"{start}{own[0]}.{loc[-1]}"] if len(own) == 1 else near
            names = ", ".join(known)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {names}."
            message = f"unknown key; {hint}"
        yield f"{knob}: {message}"


def _adapt_conflict(tide: TideConfig) -> str:
    """Return the knob that conflicts with `test_time.adapt`; empty if none does."""
    how, back = tide.test_time.adapt, "or set tide.test_time.adapt to 'off'."
    if how == "off":
        return ""
    capture = tide.capture
    if not capture.enabled or capture.consent == "off" or not capture.sample_rate:
        return (
            f"{how!r} trains on rows of running requests, but none are captured; "
            f"change tide.capture.enabled, consent or sample_rate, {back}"
        )
    if not tide.swap.enabled:
        return f"{how!r} swaps drafts; set tide.swap.enabled to true, {back}"
    if tide.spool.url is not None:
        return (
            f"{how!r} needs rows within a second, but a spool is slower; run the "
            f"trainer on the engine's host and set tide.spool.url to null, {back}"
        )
    if tide.schedule.mode != "always":
        return (
            f"{how!r} needs rows at all times, but tide.schedule.mode "
            f"{tide.schedule.mode!r} pauses them; set it to 'always', {back}"
        )
    return ""


def parse_tide(section: Any) -> TideConfig:
    """Validate a `tide` section.

    Raises:
        ConfigError: One line per error, each with the name of the knob.
    """
    if not isinstance(section, dict):
        raise ConfigError(f"tide: must be an object like {{}}, got {shown(section)}.")
    for name, values in PRESETS.get(str(section.get("preset")), {}).items():
        given = section.get(name, {})
        if isinstance(given, dict):
            section = {**section, name: {**values, **given}}
    try:
        tide = TideConfig.model_validate(section)
    except ValidationError as error:
        raise ConfigError("\n".join(explained(error, TideConfig))) from None
    if conflict := _adapt_conflict(tide):
        raise ConfigError(f"tide.test_time.adapt: {conflict}")
    return tide


def starts_trainer(config: TideConfig) -> bool:
    """Return whether a server with this configuration starts a trainer or relay.

    It needs the rows of capture, and a segment for its drafts.
    """
    configured = config.train.autostart or config.spool.url is not None
    return configured and config.capture.enabled and config.swap.enabled


def trains_here(config: TideConfig) -> bool:
    """Return whether the server starts a trainer, and not a relay to another host."""
    return starts_trainer(config) and config.spool.url is None
