"""The `tide` section of what is given to `--speculative-config`.

One strict tree: a default is written once, here; an unknown key is an error that
says what was probably meant. Runs in every process; imports neither torch nor vLLM.
"""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

logger = logging.getLogger("vllm_tide")

MIB = 1 << 20
LossTerm = Literal[
    "forward_kl", "reverse_kl", "next_token", "tv", "nla", "lk_hybrid", "discard"
]


class ConfigError(ValueError):
    """A knob has a wrong value; the message names the knob and what to do."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CaptureConfig(_Section):
    """What the engine copies out of live traffic, and how much."""

    enabled: bool = Field(True, description="Copy rows of live traffic to the ring.")
    sample_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="Share of requests captured, chosen once per request (0 to 1)."
    )
    consent: Literal["opt_out", "opt_in", "off"] = Field(
        "opt_out",
        description="Who is captured: `opt_out` all but requests with vllm_xargs "
        "tide_capture false; `opt_in` only those with tide_capture true; `off` nobody.",
    )
    salted: bool = Field(
        False,
        description="Capture requests with a cache_salt too: their sender asked to be "
        "kept apart from others.",
    )
    teacher: Literal["hidden", "topk", "both"] = Field(
        "hidden",
        description="Teacher stored with each row: the final hidden state, the "
        "top-k log-probabilities with a tail bucket, or both.",
    )
    teacher_topk: Annotated[int, Field(ge=1, le=1024)] = Field(
        64, description="Number of log-probabilities of a top-k teacher (1 to 1024)."
    )
    feature_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Type of captured features and hidden teachers."
    )
    ring_mib: Annotated[int, Field(ge=1, le=65536)] = Field(
        256, description="Size of the shared-memory ring (MiB)."
    )


class TrainConfig(_Section):
    """The sidecar trainer."""

    autostart: bool = Field(
        True,
        description="Start and stop `vllm-tide train` with the server, unless "
        "`tide.capture.enabled` is false.",
    )
    device: Annotated[str, Field(pattern="^(cpu|cuda(:[0-9]+)?)$")] = Field(
        "cpu",
        description="Where the trainer computes: `cpu`, `cuda` or `cuda:N` (ROCm too).",
    )
    gpu_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Largest share of time that the trainer keeps its GPU busy (0 to "
        "1); null: 0.1 on a GPU that also serves, else 1.",
    )
    cpus: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        description="CPU cores the trainer is pinned to; null: where it is started, "
        "with the server on the cores that the engine's threads are not bound to.",
    )
    nice: Annotated[int, Field(ge=0, le=19)] = Field(
        10, description="Scheduling niceness of the trainer (0 to 19)."
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Type of the forward pass; master weights are fp32."
    )
    learning_rate: Annotated[float, Field(gt=0, le=1)] = Field(
        1e-3, description="Peak learning rate of AdamW."
    )
    drop_worse: bool = Field(
        True,
        description="Drop a candidate that a cycle made worse than the live draft, and "
        "go on from that one with half the learning rate, which grows again with "
        "every cycle that does no harm.",
    )
    weight_decay: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Decoupled weight decay of AdamW."
    )
    grad_clip: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Largest global gradient norm."
    )
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = Field(
        3, description="Training-time-test steps (EAGLE-3): draft depth trained."
    )
    step_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        0.8, description="Weight of each further training-time-test step."
    )
    batch_tokens: Annotated[int, Field(ge=64)] = Field(
        2048, description="Rows packed into one optimizer step (tokens)."
    )
    max_sample_tokens: Annotated[int, Field(ge=16)] = Field(
        1024, description="Longest window of one request used in a step (tokens)."
    )
    min_new_tokens: Annotated[int, Field(ge=1)] = Field(
        4096, description="New captured tokens that start a training cycle (tokens)."
    )
    steps_per_cycle: Annotated[int, Field(ge=1)] = Field(
        32, description="Optimizer steps between two evaluations, at most."
    )
    max_passes: Annotated[int, Field(ge=1)] = Field(
        8,
        description="How often a document is trained on, at most, and no more than 4 "
        "times in one cycle: what is learnt by heart can be asked for.",
    )
    buffer_tokens: Annotated[int, Field(ge=1024)] = Field(
        131072, description="Captured tokens kept for training, newest first (tokens)."
    )
    max_age_s: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Age at which a captured request is forgotten, held-out ones too "
        "(seconds since the trainer took it in); null keeps it until newer ones take "
        "its place.",
    )
    holdout_share: Annotated[float, Field(gt=0, le=0.5)] = Field(
        0.1, description="Share of requests held out for evaluation (0 to 0.5)."
    )
    holdout_tokens: Annotated[int, Field(ge=256)] = Field(
        8192,
        description="Held-out tokens kept, a random choice of recent ones with a floor "
        "for each tenant and group (tokens).",
    )
    min_gain: Annotated[float, Field(ge=0)] = Field(
        0.01,
        description="Smallest gain in expected acceptance length (tokens), recent "
        "requests before old ones, that is published.",
    )
    seed: int = Field(0, description="Seed of sampling, shuffling and initialisation.")
    loss: dict[LossTerm, Annotated[float, Field(ge=0)]] = Field(
        {"forward_kl": 1.0},
        description="Weight of each loss term: forward_kl, reverse_kl, next_token, tv, "
        "nla, lk_hybrid on committed rows; discard (top-k filtered KL) on rejected "
        "branches, which are trained on only when it is named.",
        min_length=1,
    )
    lk_eta: Annotated[float, Field(ge=0)] = Field(
        3.0, description="How fast `lk_hybrid` moves from KL to TV as acceptance grows."
    )
    discard_topk: Annotated[int, Field(ge=1, le=1024)] = Field(
        10, description="Teacher tokens kept by the `discard` term (1 to 1024)."
    )
    max_branches: Annotated[int, Field(ge=0, le=4096)] = Field(
        64, description="Rejected branches kept per request, at most."
    )
    attention: Literal["auto", "packed", "flex", "xformers", "reference"] = Field(
        "auto",
        description="Attention of the trainer: `packed` is our own and runs anywhere; "
        "`flex` is Torch's FlexAttention, `xformers` its block-diagonal biases.",
    )
    age_half_life_s: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Age at which a sample counts half when batches are drawn "
        "(seconds); null counts all alike.",
    )
    tenant_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="Largest share of the training buffer that one tenant "
        "(vllm_xargs: tide_tenant) may fill (0 to 1).",
    )
    state_dir: str | None = Field(
        None,
        description="Where the last good head, checkpoints and the tenants' key are "
        "kept; null means `heads` in the run directory, and the key in the user's "
        "state directory.",
    )
    checkpoint_cycles: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Cycles between two checkpoints of the trainer (weights, moments, "
        "step size); 0 writes none.",
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="Port of the trainer's own /metrics; 0 opens none."
    )
    metrics_host: Annotated[str, Field(min_length=1)] = Field(
        "127.0.0.1",
        description="Address that port is opened on; 0.0.0.0 lets a Prometheus on "
        "another machine or outside of the container read it.",
    )
    keep_last_good: bool = Field(
        True, description="A restarted server begins with the last good head."
    )


class ScheduleConfig(_Section):
    """When the trainer collects and trains (TIDE, algorithm 1)."""

    mode: Literal["always", "tide", "gated"] = Field(
        "always",
        description="`always` trains whenever there is new data; `tide` is the paper's "
        "gate with one global average; `gated` watches groups of similar requests.",
    )
    short_decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.9, description="Decay per request of the short average of acceptance."
    )
    long_decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.99, description="Decay per request of the long average of acceptance."
    )
    epsilon: Annotated[float, Field(ge=0, le=1)] = Field(
        0.05,
        description="Fall of the short average below the long one that counts as a "
        "shift (accepted share of drafted tokens, 0 to 1).",
    )
    init_requests: Annotated[int, Field(ge=1)] = Field(
        16, description="Requests that set the first averages."
    )
    max_groups: Annotated[int, Field(ge=1, le=64)] = Field(
        8, description="Groups of similar requests watched by `gated` (1 to 64)."
    )
    patience: Annotated[int, Field(ge=1)] = Field(
        3,
        description="Cycles without improvement after which training pauses; with "
        "`gated` each waits for twice the tokens of the one before, and one more is "
        "tried whenever the requests since the shift have doubled.",
    )


class DeployConfig(_Section):
    """When a better head is published, and when it is taken back."""

    canary: bool = Field(
        True,
        description="Compare served speed after a swap with the window before and go "
        "back to the head before when it fell.",
    )
    canary_requests: Annotated[int, Field(ge=2)] = Field(
        48, description="Requests begun after the swap that decide, at most."
    )
    canary_tolerance: Annotated[float, Field(ge=0, le=1)] = Field(
        0.02,
        description="Relative fall of served speed over plain decoding that is let "
        "pass.",
    )
    backoff_cycles: Annotated[int, Field(ge=0)] = Field(
        2,
        description="Cycles that publish nothing after a rollback; doubled at each "
        "further one.",
    )
    min_requests: Annotated[int, Field(ge=0)] = Field(
        0, description="Requests between two publications, at least."
    )
    min_seconds: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Seconds between two publications, at least."
    )


class FreshConfig(_Section):
    """The head built for `"model": "fresh"`."""

    draft_vocab_size: Annotated[int, Field(ge=64)] | None = Field(
        None,
        description="Tokens the head can draft; null takes all up to 65536, else "
        "32768 of them.",
    )
    intermediate_size: Annotated[int, Field(ge=64)] | None = Field(
        None, description="Width of the head's MLP; null takes the target's."
    )
    seed: int = Field(0, description="Seed of the head's random matrices.")


class SpoolConfig(_Section):
    """Records and heads through storage, for engines and trainers on two hosts."""

    url: str | None = Field(
        None,
        description="Directory or fsspec URL that engines and the trainer share; null "
        "uses shared memory only.",
    )
    shard_mib: Annotated[int, Field(ge=1, le=4096)] = Field(
        16, description="Size at which a shard of records is closed (MiB)."
    )
    shard_seconds: Annotated[float, Field(gt=0)] = Field(
        5.0, description="Age at which a shard of records is closed (seconds)."
    )
    max_gib: Annotated[float, Field(gt=0)] = Field(
        8.0, description="Records kept in the spool, oldest removed first (GiB)."
    )
    max_age_s: Annotated[float, Field(gt=0)] = Field(
        86400.0, description="Age at which a shard of records is removed (seconds)."
    )


class ControlConfig(_Section):
    """How many tokens are drafted and verified, request by request."""

    policy: Literal["static", "adaspec", "threshold", "tide_gate"] = Field(
        "adaspec",
        description="Who chooses the speculative length: `static` always drafts "
        "num_speculative_tokens; `adaspec` maximises expected tokens per second from "
        "the draft's confidence and measured times; `threshold` stops drafting when "
        "the mean confidence falls; `tide_gate` switches a fixed length on and off.",
    )
    profile: str | None = Field(
        None,
        description="File of `vllm-tide profile`; null uses the cached profile of "
        "this model and machine. Without one Model Runner V1 measures at start-up, and "
        "V2 takes vLLM's, measured for adaptive verification; else lengths are static.",
    )
    slo_tpot_ms: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Limit of a request's time per output token (ms), kept where a "
        "length exists that keeps it.",
    )
    client_slo_tpot_ms: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Least limit that a request may bring (ms, tide_slo_tpot_ms), "
        "smaller ones are raised to it; null: requests bring none. They cost a batch a "
        "tenth of its tokens per second at most (adaspec only).",
    )
    min_gain: Annotated[float, Field(ge=0, le=10)] = Field(
        0.02,
        description="Smallest predicted gain over plain decoding for which the draft "
        "runs (0.02 = 2%).",
    )
    hysteresis: Annotated[float, Field(ge=0, le=10)] = Field(
        0.02, description="Further gain needed to switch drafting on again."
    )
    probe_share: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.01,
        description="Share of time spent on looking: while drafting is off, whether "
        "it would pay again; while on (half of it), what a step takes undrafted (0 "
        "never looks).",
    )
    threshold: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.6, description="Mean confidence below which `threshold` stops drafting."
    )
    verify: bool = Field(
        True,
        description="Leave out drafted tokens whose verification does not pay.",
    )
    calibrate: bool = Field(
        True, description="Learn acceptance from verification results."
    )
    half_life_tokens: Annotated[int, Field(ge=10)] = Field(
        2000, description="Verified tokens after which what was learnt counts half."
    )
    catchup_mib: Annotated[int, Field(ge=0, le=65536)] = Field(
        64,
        description="Memory for features of tokens the draft has not seen while "
        "drafting was off (MiB); older ones leave a hole in its KV cache.",
    )


class SwapConfig(_Section):
    """How a published draft is installed."""

    enabled: bool = Field(True, description="Install published drafts.")
    max_norm_ratio: Annotated[float, Field(gt=1)] = Field(
        16.0,
        description="A tensor whose norm grew by more than this factor is refused.",
    )
    draft_kv: Literal["keep", "reset"] = Field(
        "keep",
        description="Prefixes cached before a swap: keep them, with the old draft's "
        "KV, or reset the prefix cache; running requests keep their blocks.",
    )


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {},
    "observe": {
        "train": {"autostart": False},
        "control": {"policy": "static"},
        "swap": {"enabled": False},
    },
    "control": {
        "capture": {"enabled": False},
        "train": {"autostart": False},
        "swap": {"enabled": False},
    },
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
    run_dir: str | None = Field(
        None,
        description="Directory (mode 0700) where server and trainer find each other; "
        "null means $TIDE_RUN_DIR, else a per-user directory.",
    )
    capture: CaptureConfig = CaptureConfig.model_validate({})
    train: TrainConfig = TrainConfig.model_validate({})
    control: ControlConfig = ControlConfig.model_validate({})
    swap: SwapConfig = SwapConfig.model_validate({})
    schedule: ScheduleConfig = ScheduleConfig.model_validate({})
    deploy: DeployConfig = DeployConfig.model_validate({})
    fresh: FreshConfig = FreshConfig.model_validate({})
    spool: SpoolConfig = SpoolConfig.model_validate({})


def _known_keys(root: Any, path: tuple[str | int, ...]) -> list[str]:
    for part in path:
        field = root.model_fields.get(part) if hasattr(root, "model_fields") else None
        if field is None:
            return []
        root = field.annotation
    if get_origin(root) is dict:  # its keys are named by a Literal
        return list(get_args(get_args(root)[0]))
    return list(getattr(root, "model_fields", {}))


def explained(error: ValidationError, model: Any) -> Iterator[tuple[str, str]]:
    """Dotted key and sentence of each of pydantic's errors.

    Args:
        error: What it found.
        model: The model that was validated.
    """
    start = "tide." if model is TideConfig else ""
    for found in error.errors():
        loc = tuple(part for part in found["loc"] if part != "[key]")
        knob = start + ".".join(map(str, loc))
        said = f"{found['msg']}, got {found.get('input')!r}."
        if found["type"] == "extra_forbidden" or len(loc) < len(found["loc"]):
            known = _known_keys(model, loc[:-1])
            near = difflib.get_close_matches(str(loc[-1]), known, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}."
            )
            said = f"unknown key; {hint}"
        yield knob, f"{knob}: {said}"


def package_version() -> str:
    """Of this package; empty where it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("vllm-tide")
    return ""


def parse_tide(section: Any, version: str | None = None) -> TideConfig:
    """Validate a `tide` section.

    Args:
        section: The JSON value under the key `tide`.
        version: Of the package that wrote it: keys that another one knows are ignored.

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
        return TideConfig.model_validate(section)
    except ValidationError as error:
        extra = [e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"]
        if not extra or version in (None, package_version()):
            said = (sentence for _, sentence in explained(error, TideConfig))
            raise ConfigError("\n".join(said)) from None
        section = copy.deepcopy(section)
    for *path, key in extra:
        inner = section
        for part in path:
            inner = inner[part]
        del inner[key]
    names = ", ".join(".".join(map(str, loc)) for loc in extra)
    told = "tide: vllm_tide %.60r told knobs that %r does not know, ignored: %.200r"
    logger.warning(told, version, package_version(), names)
    return parse_tide(section)
