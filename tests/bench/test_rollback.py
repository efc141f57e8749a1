import json
from dataclasses import replace

import pytest
import torch

from bench.harness import session
from bench.suites import rollback as rollback_suite
from bench.suites.planting import (
    parse_plant,
    planted,
)
from bench.suites.rollback import (
    RollbackOptions,
    run,
    table,
    trial_problems,
    trials_of,
)
from tests.bench.toys import arm_run, options_for, request, result
from vllm_tide.config import parse_tide
from vllm_tide.engine.staged_draft import DraftContract, DraftRefused

HEAD = {
    "fc.weight": torch.randn(8, 12, generator=torch.Generator().manual_seed(0)),
    "lm_head.weight": torch.randn(16, 8, generator=torch.Generator().manual_seed(1)),
    "norm.weight": torch.linspace(0.5, 1.5, 8),
    "d2t": torch.zeros(16, dtype=torch.int64),
}


def test_the_engine_refuses_a_draft_with_nan():
    contract = DraftContract(HEAD, 16.0)
    with pytest.raises(DraftRefused, match="NaN"):
        contract.check(planted(HEAD, parse_plant("nan"), 0))
    assert not HEAD["fc.weight"].isnan().any()


@pytest.mark.parametrize("name", ["permuted", "noise0.1"])
def test_the_engine_does_not_detect_worse_drafts(name):
    spoilt = planted(HEAD, parse_plant(name), 0)
    DraftContract(HEAD, 16.0).check(spoilt)
    assert not torch.equal(spoilt["fc.weight"], HEAD["fc.weight"])
    assert torch.equal(spoilt["d2t"], HEAD["d2t"])
    again = planted(HEAD, parse_plant(name), 0)
    assert torch.equal(again["fc.weight"], spoilt["fc.weight"])
    if name == "noise0.1":  # a share of the tensor's own spread
        added = spoilt["fc.weight"] - HEAD["fc.weight"]
        assert 0.07 < added.std() / HEAD["fc.weight"].std() < 0.13


def events(*rows):
    return [{"t_s": t, "event": kind, **more} for t, kind, more in rows]


def test_trials_are_read_from_the_event_log():
    log = events(
        (4.0, "publish", {"version": 1}),
        (4.1, "planted", {"version": 1, "plant": "nan"}),
        (4.5, "refused", {"version": 1, "reason": "not_finite"}),
        (10.0, "publish", {"version": 2}),
        (10.1, "planted", {"version": 2, "plant": "permuted"}),
        (15.0, "publish", {"version": 3, "rollback_of": 2}),
        (15.0, "rollback", {"version": 2, "requests": 4, "reason": "fell"}),
        (20.0, "publish", {"version": 4}),
        (20.1, "planted", {"version": 4, "plant": "noise0.1"}),
    )
    results = [result(request(i), i, i + 1.0) for i in range(30)]
    nan, permuted, noise = trials_of(log, results)
    assert (nan["outcome"], nan["requests_until"]) == ("refused", 0)
    assert permuted["outcome"] == "rolled_back" and permuted["requests_on_it"] == 4
    assert permuted["requests_until"] == 5  # ended after 10.0, up to 15.0
    assert permuted["decided_after_s"] == 5.0 and permuted["restored_version"] == 3
    assert noise["outcome"] == "undecided" and noise["requests_until"] is None
    trials = [nan, permuted, noise]
    assert trial_problems(trials, ["nan", "permuted", "noise0.1"]) == []
    nan["outcome"], permuted["outcome"] = "kept", "undecided"
    assert trial_problems(trials, ["nan", "permuted", "noise0.1", "noise0.3"]) == [
        "noise0.3: was never published",
        "nan: kept, not refused",
        "permuted: undecided, not rolled back",
    ]
    assert "undecided" in table(trials)


def test_the_suite_reports_canaries_and_compares_outputs(tmp_path, monkeypatch):
    def planted_arm(_, options, stream, config, watch, run_dir):
        assert parse_tide(config["tide"]).schedule.mode == "tide"
        log = [
            {"unix": 1.0, "event": "publish", "version": 1},
            {"unix": 1.0, "event": "planted", "version": 1, "plant": "nan"},
            {"unix": 2.0, "event": "refused", "version": 1, "reason": "not_finite"},
        ]
        text = "\n".join(json.dumps(row) for row in log)
        (run_dir / "events-e.jsonl").write_text(text)
        made = arm_run("planted", stream)
        for sample in made.samples:
            watch.on_sample(sample)
        return made

    monkeypatch.setattr(rollback_suite, "_serve", planted_arm)
    monkeypatch.setattr(
        session, "run_arm", lambda arm, stream: arm_run(arm.name, stream)
    )
    options = options_for(
        RollbackOptions, "rollback", tmp_path, plants=("nan",),
        baseline_requests=4, trial_requests=4,
    )  # fmt: skip
    assert run(options) == 0
    assert run(replace(options, plants=("nan", "permuted"))) == 1
    report = json.loads(options.json.read_text())
    assert report["problems"] == ["permuted: was never published"]
    (trial,) = report["results"]["trials"]
    assert trial["outcome"] == "refused"
    assert report["results"]["identity"]["arms"]["planted"]["identical"]
