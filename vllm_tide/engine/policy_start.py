"""Creation of the time model and the policy, before the server accepts requests."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from vllm_tide.config import ControlConfig
from vllm_tide.control.adaspec import AdaSpecPolicy, ControlSettings
from vllm_tide.control.costs import FirstPassAlways
from vllm_tide.control.policies import StaticPolicy, ThresholdPolicy
from vllm_tide.control.step_times import StepTimes
from vllm_tide.control.time_model import NO_PASS, ForwardModel, TimeModel
from vllm_tide.engine.control_v1 import ControlV1
from vllm_tide.engine.control_v2 import ControlV2

logger = logging.getLogger("vllm.tide")

# Guesses: time of a target step, and smallest share of it that a draft pass takes.
_STEP_S, _LEAST_SHARE = 10e-3, 0.02


def first_guess(worker: Any) -> TimeModel:
    """Return initial step times, correct up to a factor that is fitted while serving.

    AdaSpec's linear forward time (eq. 2) for a forward bound by memory bandwidth: it
    reads the weights once, and the KV cache of each token of context.

    Args:
        worker: vLLM's `Worker`.
    """
    config = worker.vllm_config
    model, parallel = config.model_config, config.parallel_config
    drafter = config.speculative_config.draft_model_config
    target = _weight_bytes(model, parallel)
    share = max(_weight_bytes(drafter, parallel) / target, _LEAST_SHARE)

    def forward(seconds: float, of: Any) -> ForwardModel:
        alpha = _STEP_S * _token_bytes(of, parallel) / target
        return ForwardModel((1,), (seconds,), alpha)

    draft = forward(share * _STEP_S, drafter)
    speculative = config.speculative_config
    if not speculative.parallel_drafting:
        return TimeModel(forward(_STEP_S, model), draft, draft)
    rows = 1 + speculative.num_speculative_tokens
    return TimeModel(forward(_STEP_S, model), draft, NO_PASS, block_rows=rows)


def _weight_bytes(model: Any, parallel: Any) -> float:
    """Return the approximate weights read by a forward: 12 h^2 per layer, and lm_head.

    The loaded model is no better source, because CPU kernels hold packed copies.
    """
    width, layers = model.get_hidden_size(), model.get_num_layers(parallel)
    own = getattr(model.hf_text_config, "draft_vocab_size", None)
    vocabulary = own or model.get_vocab_size()
    weights = (12.0 * layers * width + vocabulary) * width
    return weights * float(model.dtype.itemsize)


def _token_bytes(model: Any, parallel: Any) -> int:
    """Return the size of a token's keys and values."""
    heads = model.get_num_kv_heads(parallel) * model.get_num_layers(parallel)
    return 2 * heads * model.get_head_size() * int(model.dtype.itemsize)


def start_policy(
    worker: Any,
    control: ControlV1 | ControlV2,
    config: ControlConfig,
    measured: TimeModel | None = None,
) -> None:
    """Start the policy, on the leader.

    Args:
        measured: Times measured by vLLM; None uses `first_guess`.
    """
    on_v2 = isinstance(control, ControlV2)
    settings = ControlSettings(
        k_max=control.num_speculative_tokens,
        min_gain=config.min_gain,
        probe_share=config.probe_share,
        verify=config.verify,
        max_requests=control.capacity,
    )
    if isinstance(control, ControlV2):
        # Without a way to cut drafts, all drafted tokens are verified.
        cuts = control.trims or control.cut_on_device
        verify = settings.verify and cuts
        settings = replace(settings, verify=verify, explore=control.trims)
    elif config.policy == "adaspec" and settings.verify:
        settings = replace(settings, verify=_cuts_without_bias(worker))
    prior = None
    if config.policy == "adaspec" or (config.policy == "threshold" and not on_v2):
        prior = measured or first_guess(worker)

    def start() -> None:
        if prior is None:
            kind = StaticPolicy if config.policy == "static" else ThresholdPolicy
            control.policy = kind(settings.k_max)
            return
        times = control.times = StepTimes(prior, guessed=measured is None)
        if config.policy == "threshold":
            control.policy = ThresholdPolicy(settings.k_max, times)
        elif isinstance(control, ControlV2):
            always = FirstPassAlways(times, control.lengths)
            control.policy = AdaSpecPolicy(settings, always)
        else:
            control.policy = AdaSpecPolicy(settings, times)

    control.start = start
    start()


def _cuts_without_bias(worker: Any) -> bool:
    """Return whether drafts may be cut on Model Runner V1.

    The cut depends on later confidences, so on tokens drawn after it. With sampled
    drafts that would bias the output; stopping the draft early does not.
    """
    method = worker.vllm_config.speculative_config.draft_sample_method
    if method != "greedy":
        logger.warning(
            "vllm_tide: tide.control.verify is off: with draft_sample_method %r all "
            "drafted tokens are verified, because a cut that depends on sampled drafts "
            "would bias the output; set draft_sample_method to 'greedy' to cut drafts.",
            method,
        )
    return bool(method == "greedy")
