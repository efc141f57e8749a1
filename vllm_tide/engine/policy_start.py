"""Gives the controller its time model and its policy, before anything is served."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_tide.config import ConfigError, ControlConfig
from vllm_tide.control.costs import KeptPassTimes
from vllm_tide.control.fit import fit
from vllm_tide.control.online_time import OnlineTime
from vllm_tide.control.policies import (
    ControlSettings,
    StaticPolicy,
    ThresholdPolicy,
    make_policy,
)
from vllm_tide.control.profile_store import (
    ProfileMismatch,
    StoredProfile,
    default_path,
    load,
    profile_key,
    save,
)
from vllm_tide.control.time_model import TimeModel
from vllm_tide.engine.control_v1 import ControlV1
from vllm_tide.engine.control_v2 import ControlV2
from vllm_tide.engine.facts import facts as timing_facts
from vllm_tide.engine.profiler import measure

logger = logging.getLogger("vllm.tide")


def start_policy(worker: Any, control: ControlV1, config: ControlConfig) -> None:
    """Load the profile of these models on this machine, or measure one; then decide.

    Raises:
        ConfigError: `tide.control.profile` cannot be used.
    """
    if config.policy == "static":  # it is here for the memory, and weighs no times

        def start_static() -> None:
            control.policy = StaticPolicy(control.num_speculative_tokens)

        if control.leader:
            control.start = start_static
            start_static()
        return
    facts = timing_facts(worker)
    stored = _stored(config, facts) if control.leader else None
    # Measuring runs the models on all ranks together, so all must agree to do it.
    if control.agree(int(stored is None)):
        logger.info("vllm_tide: measuring the models' forward times")
        samples = measure(
            worker, quick=True, num_speculative_tokens=control.num_speculative_tokens
        )
        if control.leader:
            stored = _fitted(samples, facts)
    if stored is None:
        return
    model, settings = stored.model, _settings(control, config)
    method = worker.vllm_config.speculative_config.draft_sample_method
    if method != "greedy" and config.policy == "adaspec" and settings.verify:
        # Which tokens are worth it depends on confidences after them, so on what was
        # drawn: cutting by it would bias the output. When to stop drafting does not.
        settings = replace(settings, verify=False)
        logger.warning(
            "vllm_tide: tide.control.verify is off: with draft_sample_method %r every "
            "drafted token is verified, because a token may not be cut for what was "
            "drawn after it; set draft_sample_method to 'greedy' to have it cut.",
            method,
        )

    def start() -> None:
        control.times = OnlineTime(model)
        control.policy = make_policy(config.policy, settings, control.times)

    control.start = start
    start()


def needs_times(config: ControlConfig) -> bool:
    """True if the policy predicts times, from a profile or what stands in for one."""
    return config.policy not in ("static", "threshold")


def start_predicting(
    worker: Any,
    control: ControlV2,
    config: ControlConfig,
    profile: TimeModel | None = None,
    *,
    late: bool = False,
) -> None:
    """The same on Model Runner V2, where a start measures nothing.

    `vllm-tide profile` does, in an engine of its own; what was measured is found here.
    Without times a static length stands in: a policy that chooses by confidence alone
    would hide from the canary what its lengths cost.

    Args:
        profile: Stands in for a profile; None: the stored one.
        late: vLLM will measure times: without any a policy is given later.

    Raises:
        ConfigError: `tide.control.profile` cannot be used.
    """
    settings = _settings(control, config)
    # What is drafted is verified whole where nothing can be cut.
    cuts = control.trims or control.cut_on_device
    settings = replace(settings, verify=settings.verify and cuts, explore=control.trims)
    if profile is None:
        profile = stored_times(worker, config)
    if profile is None and needs_times(config):
        if late:
            return
        logger.warning(
            "vllm_tide: tide.control.policy is 'static' instead of %r, so no length is "
            "weighed against what it costs: there are no forward times; run "
            "`vllm-tide profile` with the options of this server.",
            config.policy,
        )

    def start() -> None:
        if config.policy == "threshold":
            control.policy = ThresholdPolicy(settings.k_max)
            return
        if profile is None:
            control.policy = StaticPolicy(settings.k_max)
            return
        control.times = OnlineTime(profile)
        times = KeptPassTimes(control.times, control.lengths)
        control.policy = make_policy(config.policy, settings, times)

    control.start = start
    start()


def stored_times(worker: Any, config: ControlConfig) -> TimeModel | None:
    """The profile's time model, if the policy needs one and there is one.

    Raises:
        ConfigError: `tide.control.profile` cannot be used.
    """
    if not needs_times(config):
        return None
    stored = _stored(config, timing_facts(worker))
    return None if stored is None else stored.model


def _settings(control: ControlV1 | ControlV2, config: ControlConfig) -> ControlSettings:
    return ControlSettings(
        k_max=control.num_speculative_tokens,
        min_gain=config.min_gain,
        probe_share=config.probe_share,
        verify=config.verify,
        max_requests=control.capacity,
    )


def _stored(config: ControlConfig, facts: dict[str, Any]) -> StoredProfile | None:
    if config.profile is not None:
        try:
            return load(Path(config.profile).expanduser(), facts)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tide.control.profile: {config.profile!r} cannot be used: {error} "
                "Make one with `vllm-tide profile`, or leave the knob out."
            ) from None
    path = default_path(profile_key(facts))
    try:
        return load(path, facts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ProfileMismatch) as error:
        logger.warning("vllm_tide: profile %s is measured anew: %s", path, error)
        return None


def _fitted(samples: list[Any], facts: dict[str, Any]) -> StoredProfile:
    model, report = fit(samples, tuple(facts["graph_sizes"]))
    path = default_path(profile_key(facts))
    try:
        save(path, model, facts, report)
    except OSError as error:
        logger.warning("vllm_tide: profile not kept at %s: %s", path, error)
    median = report.median_abs_error
    logger.info("vllm_tide: forward times fitted; median error %.1f%%", 100 * median)
    return StoredProfile(model=model, facts=facts, report=report)
