"""A profile's steps on Model Runner V2: how far ahead they run, and what they know."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_tide.config import ControlConfig
from vllm_tide.control.policies import StaticPolicy, ThresholdPolicy
from vllm_tide.engine.profile_steps import StepsV2, steps_of

K, VOCAB = 3, 11


class Worker:
    """Launches steps; each accepts one of the tokens drafted for `a`, none for `b`."""

    use_v2_model_runner = True

    def __init__(self, asynchronous: bool) -> None:
        self.drafts: list[torch.Tensor] = []
        self.lengths: list[int] = []
        self.model_runner = SimpleNamespace(
            device=torch.device("cpu"),
            vocab_size=VOCAB,
            req_states=SimpleNamespace(draft_tokens=torch.full((4, K), -1)),
        )
        control = SimpleNamespace(trims=not asynchronous, reading=None)
        self.tide = SimpleNamespace(control=control)
        scheduler = SimpleNamespace(async_scheduling=asynchronous)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler)

    def execute_model(self, output) -> None:
        self.output = output
        drafts = self.model_runner.req_states.draft_tokens
        self.drafts.append(drafts.clone())
        self.lengths.append(output.num_spec_tokens_to_schedule)
        drafts.fill_(-1)

    def sample_tokens(self, grammar_output):
        number = len(self.lengths)
        self.tide.control.reading = lambda: number
        names = list(self.output.num_scheduled_tokens)
        spec = self.output.scheduled_spec_decode_tokens
        tokens = [[7, 7] if name == "a" and name in spec else [7] for name in names]
        found = SimpleNamespace(req_ids=names, sampled_token_ids=tokens)
        return SimpleNamespace(get_output=lambda: found)


def step(new=(), ended=(), **drafts):
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=10) for name in new
        ],
        finished_req_ids=set(ended),
        num_scheduled_tokens={name: 1 + n for name, n in drafts.items()},
        scheduled_spec_decode_tokens={
            name: [-1] * n for name, n in drafts.items() if n
        },
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_is_taken_when_as_many_more_were_launched_as_a_server_launches(
    asynchronous,
):
    worker, taken = Worker(asynchronous), []
    steps = steps_of(worker)
    assert isinstance(steps, StepsV2) and steps.uniform == asynchronous
    steps.run(step(new="ab", a=0, b=0), 0, taken.append)
    assert taken == ([] if asynchronous else [1])
    assert steps.progress("ab") == ([11, 11], [1, 1])
    steps.run(step(a=3, b=2), 2, taken.append)
    assert taken == ([1] if asynchronous else [1, 2])
    # Under way all counts as accepted; then 2 of 3 and 2 of 2 were rejected.
    assert steps.progress("ab")[0] == ([15, 14] if asynchronous else [13, 12])
    steps.run(step(ended="b", a=1), 1, taken.append)
    assert steps.progress("a")[0] == [15]
    steps.settle()
    assert taken == [1, 2, 3] and steps.progress("a")[0] == [15]
    assert worker.lengths == [0, 2, 1]


def test_what_is_verified_are_tokens_wherever_less_was_drafted():
    worker = Worker(asynchronous=True)
    steps = steps_of(worker)
    for number in range(3):
        steps.run(step(new="a" if not number else "", a=2), 0, lambda sample: None)
    for drafts in worker.drafts:
        assert drafts.min() >= 0 and drafts.max() < VOCAB


@pytest.mark.vllm
@pytest.mark.parametrize("policy", ["adaspec", "tide_gate", "threshold"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_without_times_a_policy_stands_in_that_needs_none(
    policy, adaptive, monkeypatch, caplog
):
    from vllm_tide.engine import policy_start
    from vllm_tide.engine.worker_v2 import WorkerTideV2

    monkeypatch.setattr(policy_start, "stored_times", lambda *given: None)
    tide = WorkerTideV2.__new__(WorkerTideV2)
    tide.control = SimpleNamespace(
        policy=None,
        num_speculative_tokens=3,
        capacity=8,
        trims=True,
        cut_on_device=False,
    )
    tide._leader, tide._worker, tide._adaptive = True, None, adaptive
    tide._config = SimpleNamespace(control=ControlConfig(policy=policy))
    tide.warm_up()
    if adaptive and policy != "threshold":
        assert tide.control.policy is None  # vLLM measures times when it captures
    else:
        kind = ThresholdPolicy if policy == "threshold" else StaticPolicy
        assert type(tide.control.policy) is kind
    said = [r.getMessage() for r in caplog.records if "'static'" in r.getMessage()]
    assert len(said) == (policy != "threshold" and not adaptive)
    assert all("run `vllm-tide profile`" in line for line in said)
