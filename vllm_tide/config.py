"""The `tide` section of what is given to `--speculative-config`.

One strict tree: a default is written once, here; an unknown key is an error that
says what was probably meant. Runs in every process; imports neither torch nor vLLM.
"""

from __future__ import annotations

import difflib
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

MIB = 1 << 20
DEVICE, PRINTABLE = r"^(cpu|cuda(:[0-9]+)?)$", r"^[ -~]+$"
LossTerm = Literal["forward_kl", "reverse_kl", "next_token", "lk_hybrid", "discard"]


class ConfigError(ValueError):
    """A knob has a wrong value; the message names the knob and what to do."""


def _whole(value: Any) -> Any:
    """An integral float as an int: some writers of JSON know no other numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
# YAML reads a bare `off` as false.
_YAML_OFF = BeforeValidator(lambda value: "off" if value is False else value)


def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise ValueError(
            "must be an absolute path, as each process has a folder it is relative to"
        )
    return path


_CREDENTIALS = re.compile(r"(?<=://)([^/\s]*:\S*|[^/\s]*)@|\?\S+")


def without_credentials(text: str) -> str:
    """A URL, or a sentence with one, without user, password and query."""
    return _CREDENTIALS.sub("", text)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CaptureConfig(_Section):
    """Rows that the engine copies out of live traffic, and how many."""

    enabled: bool = Field(True, description="Copy rows of live traffic to the ring.")
    sample_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="Share of requests captured, chosen once per request (0 to 1)."
    )
    consent: Annotated[Literal["opt_out", "opt_in", "off"], _YAML_OFF] = Field(
        "opt_out",
        description="Who is captured: `opt_out` all but requests with vllm_xargs "
        "tide_capture false; `opt_in` only those with tide_capture true; `off` nobody.",
    )
    salted: bool = Field(
        False, description="Capture requests with a cache_salt too, though kept apart."
    )
    teacher: Literal["hidden", "topk"] = Field(
        "hidden",
        description="Teacher stored with each row: the final hidden state, or the "
        "top-k log-probabilities with a tail bucket.",
    )
    teacher_topk: Annotated[Whole, Field(ge=1, le=1024)] = Field(
        64, description="Log-probabilities of a top-k teacher (1 to 1024; at most all)."
    )
    ring_mib: Annotated[Whole, Field(ge=1, le=65536)] = Field(
        256, description="Size of the shared-memory ring (MiB)."
    )


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
        description="Largest share of time that the trainer keeps its GPU busy (0 to "
        "1); null: 0.1 on a GPU that also serves, else 1.",
    )
    cpus: list[Annotated[Whole, Field(ge=0)]] | None = Field(
        None,
        description="CPU cores the trainer is pinned to; null: where it is started, "
        "with the server on the cores that the engine's threads are not bound to.",
    )
    nice: Annotated[Whole, Field(ge=0, le=19)] = Field(
        10, description="Niceness of the trainer (0 to 19): at 10 it needs idle cores."
    )
    learning_rate: Annotated[float, Field(gt=0, le=1)] = Field(
        1e-3, description="Peak learning rate of AdamW."
    )
    ttt_steps: Annotated[Whole, Field(ge=1, le=16)] = Field(
        3, description="Training-time-test steps (EAGLE-3): draft depth trained."
    )
    batch_tokens: Annotated[Whole, Field(ge=64)] = Field(
        1024, description="Rows packed into one optimizer step (tokens)."
    )
    min_new_tokens: Annotated[Whole, Field(ge=1)] = Field(
        512, description="New captured tokens that start a training cycle (tokens)."
    )
    steps_per_cycle: Annotated[Whole, Field(ge=1)] = Field(
        32,
        description="Optimizer steps between two evaluations, at most; on a slow "
        "device as many as 20 seconds take, 4 at least.",
    )
    max_passes: Annotated[Whole, Field(ge=1)] = Field(
        8,
        description="How often a document is trained on, at most, and no more than 4 "
        "times in one cycle: what is learnt by heart can be asked for.",
    )
    buffer_tokens: Annotated[Whole, Field(ge=1024)] = Field(
        131072, description="Captured tokens kept for training, newest first (tokens)."
    )
    max_age_s: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Age at which a captured request is forgotten, held-out ones too "
        "(seconds); null keeps it until newer ones take its place.",
    )
    holdout_share: Annotated[float, Field(gt=0, le=0.5)] = Field(
        0.1, description="Share of requests held out for evaluation (0 to 0.5)."
    )
    min_gain: Annotated[float, Field(ge=0)] = Field(
        0.01, description="Smallest published gain in acceptance length (tokens)."
    )
    loss: dict[LossTerm, Annotated[float, Field(ge=0)]] = Field(
        {"forward_kl": 1.0},
        description="Weight of each loss term: forward_kl, reverse_kl, next_token, "
        "lk_hybrid on committed rows; discard (top-k filtered KL) on rejected "
        "branches, which are trained on only when it is named.",
        min_length=1,
    )
    attention: Literal["auto", "packed", "flex", "xformers"] = Field(
        "auto",
        description="Attention of the trainer: `packed` is our own and runs anywhere; "
        "`flex` is Torch's FlexAttention, `xformers` its block-diagonal biases.",
    )
    tenant_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="Largest share of the training buffer that one tenant "
        "(vllm_xargs: tide_tenant) may fill (0 to 1).",
    )
    state_dir: str | None = Field(
        None,
        description="Where the last good draft, checkpoints, the tenants' key and "
        "switches are kept; null: `heads` in the run directory, key and switches in "
        "the user's state one.",
    )
    checkpoint_cycles: Annotated[Whole, Field(ge=0)] = Field(
        0, description="Cycles between two checkpoints of the trainer; 0 writes none."
    )
    metrics_port: Annotated[Whole, Field(ge=0, le=65535)] = Field(
        0, description="Port of the trainer's own /metrics; 0 opens none."
    )
    metrics_host: Annotated[str, Field(min_length=1)] = Field(
        "127.0.0.1", description="Its address; 0.0.0.0 shows it to other machines."
    )


class ScheduleConfig(_Section):
    """When the trainer collects and trains (TIDE, algorithm 1)."""

    mode: Literal["always", "tide"] = Field(
        "always",
        description="`always` trains whenever there is new data; `tide` is the paper's "
        "gate with one global average.",
    )


class DeployConfig(_Section):
    """When a better draft is published, and when it is taken back."""

    canary: bool = Field(
        True,
        description="Compare served speed after a swap with that before; go back to "
        "the draft before when it fell.",
    )
    canary_requests: Annotated[Whole, Field(ge=2)] = Field(
        48, description="Requests begun after the swap that decide, at most."
    )
    min_requests: Annotated[Whole, Field(ge=0)] = Field(
        0, description="Requests between two publications, at least."
    )
    min_seconds: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Seconds between two publications, at least."
    )


class FreshConfig(_Section):
    """The draft built for `"model": "fresh"`."""

    draft_vocab_size: Annotated[Whole, Field(ge=64)] | None = Field(
        None,
        description="Tokens of the draft; null: 4096 where a CPU trains it, 32768 on a "
        "GPU, at most the target's.",
    )


class SpoolConfig(_Section):
    """Records and drafts through storage, for engines and trainers on two hosts."""

    # It is printed, dumped and announced without the credentials that it may have.
    url: Annotated[str, PlainSerializer(without_credentials)] | None = Field(
        None,
        repr=False,
        description="Directory or fsspec URL that both hosts share, its credentials in "
        "fsspec's own configuration; null: none.",
    )
    max_gib: Annotated[float, Field(gt=0)] = Field(
        8.0, description="Records kept in the spool, oldest removed first (GiB)."
    )
    max_age_s: Annotated[float, Field(gt=0)] = Field(
        86400.0, description="Age at which a shard of records is removed (seconds)."
    )


class ControlConfig(_Section):
    """Choice of how many tokens are drafted and verified, request by request."""

    policy: Literal["static", "adaspec", "threshold"] = Field(
        "adaspec",
        description="Who chooses the speculative length: `static` always drafts "
        "num_speculative_tokens; `adaspec` maximises expected tokens per second from "
        "the draft's confidence and measured times; `threshold` stops drafting when "
        "the mean confidence falls.",
    )
    slo_tpot_ms: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Limit of a request's time per output token (ms)."
    )
    client_slo_tpot_ms: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Least limit that a request may bring (ms, tide_slo_tpot_ms), "
        "smaller ones are raised to it; null: requests bring none. They cost a batch a "
        "tenth of its tokens per second at most (adaspec only).",
    )
    min_gain: Annotated[float, Field(ge=0, le=10)] = Field(
        0.02,
        description="Smallest predicted gain of drafting (0.02 = 2%).",
    )
    probe_share: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.005,
        description="Share of time that exploration may lose: while drafting is off, "
        "to see whether it would pay again; while on, to measure steps without drafts; "
        "and a quarter of it more to verify tokens that do not pay (0: none of it).",
    )
    verify: bool = Field(
        True, description="Leave out drafted tokens whose verification does not pay."
    )


class TestTimeConfig(_Section):
    """Adaptation inside one generation."""

    __test__ = False  # to pytest

    memory: Annotated[Literal["off", "ngram"], _YAML_OFF] = Field(
        "off",
        description="Draft from the request's own text where that has been right more "
        "often than the draft: `ngram` looks its last tokens up (greedy drafts).",
    )
    adapt: Annotated[Literal["off", "shared", "exact"], _YAML_OFF] = Field(
        "off",
        description="Train a fast draft on requests while they run: `shared` one of "
        "all long ones, served while it is better; `exact` one request at a time, as "
        "Test-Time Speculation does. What it learns of a request is served to all.",
    )
    stride: Annotated[Whole, Field(ge=1)] | None = Field(
        None,
        description="New tokens of all long requests between two of its steps, with "
        "`exact` verify steps; null: 64 and 10.",
    )
    min_tokens: Annotated[Whole, Field(ge=0)] = Field(
        256, description="Generated tokens from which on a request is long (tokens)."
    )


class SwapConfig(_Section):
    """Installation of a published draft."""

    enabled: bool = Field(True, description="Install published drafts.")


_NO_LEARNING = {"train": {"autostart": False}, "swap": {"enabled": False}}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {},
    "observe": _NO_LEARNING | {"control": {"policy": "static"}},
    "control": _NO_LEARNING | {"capture": {"enabled": False}},
    "learn": {"control": {"policy": "static"}},
}
"""Defaults of each `tide.preset`, section by section, where others than `full`'s."""


class TideConfig(_Section):
    """Root of the `tide` section."""

    preset: Literal["full", "observe", "control", "learn"] = Field(
        "full",
        description="Which defaults the other knobs have: `full` all parts; `observe` "
        "capture and reports only; `control` no capture and no learning; `learn` "
        "everything at a static length.",
    )
    run_dir: Annotated[str, AfterValidator(_absolute)] | None = Field(
        None,
        description="Directory (absolute, mode 0700) where server and trainer meet; "
        "null means $TIDE_RUN_DIR, else a per-user directory.",
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
    if get_origin(root) is dict:  # its keys are named by a Literal
        return list(get_args(get_args(root)[0]))
    return list(getattr(root, "model_fields", {}))


_WORDS = {
    "string_pattern_mismatch": "must be {words}",
    "too_short": "must have at least {min_length} entry",
    "value_error": "{error}",
}
"""Sentences in the place of pydantic's own, by its type of error."""
_PATTERNS = {DEVICE: "cpu, cuda or cuda:N", PRINTABLE: "printable ASCII"}


def explained(error: ValidationError, model: Any) -> Iterator[str]:
    """A sentence for each of pydantic's errors about a model."""
    start = "tide." if model is TideConfig else ""
    for found in error.errors():
        loc = tuple(part for part in found["loc"] if part != "[key]")
        knob = start + ".".join(map(str, loc))
        facts = found.get("ctx", {})
        facts["words"] = _PATTERNS.get(facts.get("pattern", ""))
        text = _WORDS.get(found["type"], "{msg}").format(msg=found["msg"], **facts)
        said = f"{text}, got {found.get('input')!r:.200}."
        if found["type"] == "missing":
            said = "missing."
        if found["type"] == "extra_forbidden" or len(loc) < len(found["loc"]):
            known = _known_keys(model, loc[:-1])
            near = difflib.get_close_matches(str(loc[-1]), known, n=1)
            names = ", ".join(known)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {names}."
            said = f"unknown key; {hint}"
        yield f"{knob}: {said}"


def _why_not_adapt(tide: TideConfig) -> str:
    """Why running requests cannot be trained on; empty where nothing is against it."""
    how, back = tide.test_time.adapt, "or set tide.test_time.adapt to 'off'."
    if how == "off":
        return ""
    capture = tide.capture
    if not capture.enabled or capture.consent == "off" or not capture.sample_rate:
        return (
            f"{how!r} trains on rows of running requests, of which none is captured; "
            f"change tide.capture.enabled, consent or sample_rate, {back}"
        )
    if not tide.swap.enabled:
        return f"{how!r} swaps drafts; set tide.swap.enabled to true, {back}"
    if tide.spool.url is not None:
        return (
            f"{how!r} needs rows within a second, and a spool takes longer; run the "
            f"trainer on the engine's host and set tide.spool.url to null, {back}"
        )
    if tide.schedule.mode != "always":
        return (
            f"{how!r} needs rows at any time, which tide.schedule.mode "
            f"{tide.schedule.mode!r} pauses; set that to 'always', {back}"
        )
    return ""


def parse_tide(section: Any) -> TideConfig:
    """Validate a `tide` section.

    Raises:
        ConfigError: A line for each mistake, a sentence naming the knob.
    """
    if not isinstance(section, dict):
        kind = type(section).__name__
        raise ConfigError(f"tide: must be an object like {{}}, got {kind}.")
    for name, values in PRESETS.get(str(section.get("preset")), {}).items():
        given = section.get(name, {})
        if isinstance(given, dict):
            section = {**section, name: {**values, **given}}
    try:
        tide = TideConfig.model_validate(section)
    except ValidationError as error:
        raise ConfigError("\n".join(explained(error, TideConfig))) from None
    if why := _why_not_adapt(tide):
        raise ConfigError(f"tide.test_time.adapt: {why}")
    return tide


def trainer_wanted(config: TideConfig) -> bool:
    """True if a server with this configuration starts a trainer, or a relay."""
    trains = config.train.autostart and config.capture.enabled
    return trains or config.spool.url is not None
