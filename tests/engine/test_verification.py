"""Adaptive verification at our step costs: upstream's manager on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.engine.idle_scheduler import idle_scheduler
from tests.engine.test_control_v2 import SURE, K, begun, landed
from vllm_tide.capture.guard import LIMIT
from vllm_tide.config import ControlConfig, TideConfig
from vllm_tide.control.costs import FirstPassAlways
from vllm_tide.control.step_times import KNOTS, StepTimes
from vllm_tide.control.time_model import ForwardModel, TimeModel
from vllm_tide.engine import verification
from vllm_tide.engine.scheduler import SchedulerTide
from vllm_tide.engine.steps import StepLog

pytestmark = pytest.mark.vllm

REQS = 2
DRAFT = ForwardModel((1, 64), (3e-4, 4e-4), 0.0)
TARGET = ForwardModel((1, 64), (6e-3, 6.9e-2), 1e-5)
TIMES = TimeModel(TARGET, DRAFT, DRAFT, host=1e-3)
SURVIVAL = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2]])
DRAFTS = {"a": [-1] * K, "b": [-1] * K}
TOKENS = {"a": 1 + K, "b": 1 + K}


@pytest.fixture
def make(monkeypatch):
    """Makes a manager over two decoding requests, with upstream's flat costs."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as upstream

    from vllm_tide.engine.verification import StepCostVerification

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: None)
    monkeypatch.setattr(
        upstream,
        "_assign_draft_token_budget_compiled",
        upstream._assign_draft_token_budget,
    )
    group = SimpleNamespace(broadcast_object=lambda value, src: value)
    monkeypatch.setattr(upstream, "get_tp_group", lambda: group)

    def made(
        context: int = 100,
        full_verify_share: float = 0.0,
        times=TIMES,
        young=False,
        costs=None,
    ):
        states = SimpleNamespace(
            num_speculative_steps=K,
            device=torch.device("cpu"),
            max_num_reqs=REQS,
            max_num_batched_tokens=64,
            req_id_to_index={"a": 0, "b": 1},
            num_computed_tokens_np=np.full(REQS, 50, np.int32),
            prefill_len=SimpleNamespace(np=np.full(REQS, 9, np.int32)),
        )
        control = begun(trims=False)
        control._shape = (REQS, context, REQS * K, 0)
        manager = StepCostVerification(
            control,
            full_verify_share,
            costs,
            req_states=states,
            query_start_loc=torch.zeros(REQS + 1, dtype=torch.int32),
            num_bonus_tokens=1,
            max_total_logits=1000,
        )
        manager.set_cost_curves([(1, 1.0)], [(1, 10.0), (64, 10.0)])
        if times is not None:
            manager._times = FirstPassAlways(StepTimes(times))
        chances = SURVIVAL / np.column_stack([np.ones(REQS), SURVIVAL[:, :-1]])
        manager._stale_confidences[0].np[:] = chances
        manager._confidence_probs.copy_(torch.from_numpy(chances))
        manager._steps_since_swap = 0 if young else 1000
        return manager

    return made


def order(manager, limit=np.inf, version=0, step_costs=True):
    costs = {"step_costs": (limit, StepTimes(TIMES).learnt())} if step_costs else None
    step = SimpleNamespace(tide=costs, num_spec_tokens_to_schedule=K)
    manager.begin_step(step, version)


def best(context: int, limit: float = np.inf) -> int:
    """Return the budget of most tokens per second by brute force."""
    model = FirstPassAlways(StepTimes(TIMES))
    drafting = model.draft_curve(REQS, context, 10, K)[K]
    scores = np.sort(SURVIVAL.ravel())[::-1]
    rates = {}
    for budget in range(REQS * K + 1):
        target = model.target_curve(REQS, context, REQS * K)[budget]
        seconds = target + drafting
        if budget == 0 or seconds <= limit:
            rates[budget] = (REQS + scores[:budget].sum()) / seconds
    return max(rates, key=rates.__getitem__)


def verified(manager) -> int:
    return manager.get_num_tokens(TOKENS, DRAFTS) - REQS


def test_a_longer_context_raises_the_cost_and_verifies_more(make):
    counts = []
    for context in (0, 200, 400, 800):
        manager = make(context)
        order(manager)
        counts.append(verified(manager))
        assert counts[-1] == best(context)
        assert manager._control._shape == (REQS, context, counts[-1], 0)
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1]


def test_only_the_plain_step_exceeds_its_time_limit(make):
    free = best(0)
    counts = []
    for limit in (np.inf, 13e-3, 11.5e-3, 1e-9):
        manager = make(0)
        order(manager, limit)
        counts.append(verified(manager))
        assert counts[-1] == best(0, limit)
        assert np.isfinite(manager.cost_tables[1][REQS])
    assert counts[0] == free > counts[1] > counts[2] > counts[3] == 0


@pytest.mark.parametrize("step_costs", [False, True])
def test_upstream_decides_unchanged_without_costs_or_times(make, step_costs):
    manager = make(times=None)
    order(manager, step_costs=step_costs)
    manager.set_cost_curves([(1, 1.0)], [(REQS, 1.0), (5, 1.1), (10, 9.0)])
    assert verified(manager) == 3  # up to the stair


def test_upstreams_measurements_are_refined_alike_on_every_rank(make):
    tables = []
    ranks = [make(times=None, costs=tables.append) for _ in range(2)]
    stair = [(1, 1.0)], [(REQS, 1.0), (5, 1.1), (10, 9.0)]
    for manager in ranks:
        manager.set_cost_curves(*stair)
    assert tables[-2] == tables[-1] and len(tables) == 4  # `make` gives curves too
    seen = StepTimes(tables[-1])
    learnt = seen.learnt()
    for limit, drafts in ((np.inf, 3), (1e-9, 0)):
        for manager in ranks:
            manager._steps_since_swap = 1000
            order = {"step_costs": (limit, learnt)}
            manager.begin_step(
                SimpleNamespace(tide=order, num_spec_tokens_to_schedule=K), 0
            )
            assert verified(manager) == drafts
            assert manager.guard.faults == {}
    # Serving measured that few rows take longer than some.
    seen.target.take([*(3.0 if rows <= 4 else 0.0 for rows in KNOTS), 0.0])
    order = {"step_costs": (np.inf, seen.learnt())}
    ranks[0].begin_step(SimpleNamespace(tide=order, num_spec_tokens_to_schedule=K), 0)
    assert verified(ranks[0]) > 3


def test_drafts_are_verified_whole_until_the_estimator_has_learned(
    make,
):
    manager = make(800, full_verify_share=0.5, young=True)
    order(manager)
    cut = best(800)
    assert [verified(manager) for _ in range(200)] == [REQS * K] * 200
    assert manager.verify_chance == 1.0
    for expected, chance in ((cut, 0.0), (REQS * K, 0.5)) * 2:
        order(manager)
        assert manager.verify_chance == 0.0, "unknown until the step is planned"
        assert (verified(manager), manager.verify_chance) == (expected, chance)
    order(manager, version=1)
    assert verified(manager) == REQS * K
    order(manager, limit=1e-9, version=1)
    assert verified(manager) == 0  # a limit applies then too


def test_a_fault_of_tide_keeps_upstreams_costs(make):
    manager = make(800)
    order(manager)
    manager._step_costs = ("nonsense",)
    assert verified(manager) == REQS * K  # upstream's cost is flat here
    assert manager.guard.faults == {"step_costs": 1}
    for _ in range(LIMIT):
        verified(manager)
    assert manager.guard.tripped
    for _ in range(3001):  # steps, not seconds: all ranks explore in the same one
        order(manager)
    assert not manager.guard.tripped


def test_the_host_reads_what_the_device_verified(make):
    manager = make(800)
    order(manager)
    total = manager.get_num_tokens(TOKENS, DRAFTS)
    rows, _ = manager.compact_batch(
        np.full(REQS, K), np.full(REQS, 1 + K), np.array([0, 5, 10])
    )
    logits, bounds, budget = manager.reallocate_drafts(["a", "b"], torch.arange(REQS))
    assert rows.sum() == total and budget == total - REQS
    log = StepLog(16, REQS, K, torch.device("cpu"))
    batch = SimpleNamespace(
        req_ids=["a", "b"],
        num_reqs=REQS,
        num_tokens=total,
        query_start_loc=bounds,
        query_start_loc_np=np.append(0, np.cumsum(rows)).astype(np.int32),
        cu_num_logits=logits,
        cu_num_logits_np=np.array([0, 5, 10], np.int32),
        num_draft_tokens_per_req=np.full(REQS, K, np.int32),
        is_prefilling_np=np.zeros(REQS, bool),
        idx_mapping_np=np.arange(REQS),
        seq_lens=torch.tensor([60, 70], dtype=torch.int32),
        input_ids=torch.arange(16, dtype=torch.int32),
        max_query_len=1 + K,
    )
    step = log.open(batch, np.full(REQS, 9, np.int32), 0)
    output = SimpleNamespace(
        num_sampled=torch.ones(REQS, dtype=torch.int32),
        sampled_token_ids=torch.zeros(REQS, 1 + K, dtype=torch.int64),
    )
    drafted = torch.zeros(REQS, K, dtype=torch.int64)
    log.fill(step, batch, output, torch.full((REQS, K), 0.5), drafted)
    assert step.rows == total
    assert list(log.landed()) == [step]
    # The surest tokens of all, which are no even split.
    least = np.sort(SURVIVAL.ravel())[::-1][budget - 1]
    drafts = (least <= SURVIVAL).sum(axis=1)
    assert step.drafts.tolist() == drafts.tolist() != [budget // 2, budget // 2]
    assert step.trimmed.tolist() == (K - drafts).tolist()
    assert step.bounds.tolist() == [0, 1 + drafts[0], total]
    assert step.logit_ends.tolist() == [1 + drafts[0], total]
    assert step.start.tolist() == [60 - 1 - drafts[0], 70 - 1 - drafts[1]]


def test_costs_go_from_the_leader_through_the_scheduler_to_every_rank():
    control = begun(trims=False)
    assert control.step_costs() is None
    control.times = StepTimes(TIMES)
    control.times.target.take([0.5] * (len(KNOTS) + 1))
    scheduler = SchedulerTide(K, idle_scheduler(), TideConfig())
    assert scheduler.control() is None
    scheduler.observe({"depth": 2, "step_costs": control.step_costs()})
    limit, learnt = scheduler.control()["step_costs"]
    other = StepTimes(TIMES)
    other.take(learnt)
    assert limit == np.inf and other.target.factor(3) == np.exp(0.5)
    control.stop()
    assert control.step_costs() is None


def test_the_limit_is_the_tightest_that_plain_decoding_meets():
    control = begun(trims=False)
    control.times = StepTimes(TIMES)
    slo = control._requests.slo
    slo.add(control._requests.slot_of["a"], 60.0)
    slo.add(control._requests.slot_of["b"], 1e-4)  # no step is that fast
    for _ in range(2):
        control.learn(landed(SURE, 4, trimmed=np.array([0, 2])))
    assert 200.0 < control.step_costs()[0] <= 240.0
    assert control.stats()["trimmed_tokens"] == 4


def worker(control):
    from vllm_tide.engine.worker_v2 import WorkerTideV2

    tide = WorkerTideV2.__new__(WorkerTideV2)
    flag = {"enable_adaptive_verification": True}
    tide._runner = SimpleNamespace(
        device=torch.device("cuda"),
        speculator=SimpleNamespace(acceptance_estimator=object(), **flag),
        rejection_sampler=SimpleNamespace(**flag),
    )
    config = SimpleNamespace(speculative_config=SimpleNamespace(**flag))
    tide._worker = SimpleNamespace(vllm_config=config)
    tide._config = SimpleNamespace(control=ControlConfig(policy="threshold"))
    tide._leader, tide._async, tide._adaptive = True, True, True
    tide._group = None
    tide._verification, tide.control = None, control
    tide.begun_anew = []
    tide.warm_up = lambda: tide.begun_anew.append(control.cut_on_device)
    return tide


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_backend_without_mixed_lengths_gives_a_cap_and_one_warning(
    asynchronous, caplog
):
    control = begun(trims=False)
    control.cut_on_device = True
    tide = worker(control)
    tide._async = asynchronous

    def refuse(**upstream):
        if tide._runner.speculator.enable_adaptive_verification:
            raise ValueError("FlashAttentionBackend allows none.")

    for _ in range(2):  # upstream makes the KV cache twice
        assert tide.make_verification(refuse) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "allows none. Until then tide.control limits" in caplog.text
    runner = tide._runner
    assert not runner.rejection_sampler.enable_adaptive_verification
    assert runner.speculator.acceptance_estimator is None
    assert not tide._worker.vllm_config.speculative_config.enable_adaptive_verification
    assert tide.begun_anew == [False] and not control.trims


@pytest.mark.parametrize(
    ("probe_share", "whole_steps"), [(0.005, 0.01), (0.3, 0.01), (0, 0)]
)
def test_the_frequency_of_whole_drafts_is_no_share_of_time(
    monkeypatch, probe_share, whole_steps
):
    """The canary needs those steps: less exploration must not starve it."""
    given = []

    class Recorded:
        UPSTREAM = ()

        def __init__(self, control, full_verify_share, *_, **__):
            given.append(full_verify_share)

    monkeypatch.setattr(verification, "StepCostVerification", Recorded)
    tide = worker(begun(trims=False))
    section = TideConfig.model_validate({"control": {"probe_share": probe_share}})
    tide._config = section
    assert isinstance(tide.make_verification(lambda: object()), Recorded)
    assert given == [whole_steps]
