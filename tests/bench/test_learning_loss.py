import json

import pytest
import torch
from safetensors.torch import save_file

from bench.harness.common import BenchError
from bench.harness.samples import save_samples
from bench.suites import loss as loss_job
from bench.suites import loss as loss_suite
from bench.suites.loss import (
    MIXES,
    LossJob,
    LossOptions,
    LossTask,
    jobs_of,
    parse_mix,
    run,
    run_job,
    run_start,
    summarise,
    table,
)
from tests.bench.learning_toys import options_for
from tests.train.toys import HIDDEN, VOCAB, ToyTarget
from vllm_tide.draft import save_draft
from vllm_tide.train.sample import Branch

TOY = ToyTarget()


def document(key):
    branch = Branch(
        10,
        torch.tensor([3, 5], dtype=torch.int32),
        torch.randn(2, 3 * HIDDEN, generator=torch.Generator().manual_seed(key)),
        torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(key)),
    )
    from dataclasses import replace

    return replace(TOY.document(7 * key, 24, 4, key), branches=(branch,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A toy target, a draft and captured samples on disk."""
    folder = tmp_path_factory.mktemp("loss")
    (folder / "target").mkdir()
    config = {"vocab_size": VOCAB, "hidden_size": HIDDEN}
    (folder / "target" / "config.json").write_text(json.dumps(config))
    save_file(
        {"model.embed_tokens.weight": TOY.embed, "lm_head.weight": TOY.head},
        folder / "target" / "model.safetensors",
    )
    save_draft(TOY.draft(), folder / "draft", torch.float32)
    parts = {"0 c": [document(key) for key in range(12)]}
    save_samples(folder / "samples.st", parts, {"shared": []})
    return folder


def task(folder, **changes):
    given = {
        "samples": folder / "samples.st",
        "target": folder / "target",
        "draft": folder / "draft",
        "shape": folder / "draft",
        "holdout_every": 4,
        "steps": 3,
        "depth": 3,
        "train": {"batch_tokens": 128},
    }
    return LossTask(**(given | changes))


def test_mixes_name_terms_and_weights():
    assert parse_mix("forward_kl") == {"forward_kl": 1.0}
    assert parse_mix("reverse_kl+discard") == {"reverse_kl": 1.0, "discard": 0.5}
    assert parse_mix("nla:0.5+tv:2") == {"nla": 0.5, "tv": 2.0}
    assert len({str(parse_mix(text)) for text in MIXES}) == len(MIXES) == 8


@pytest.mark.parametrize("text", ["", "kl", "tv+tv", "tv:x", "tv:-1", "tv:inf", "tv:0"])
def test_a_mix_that_is_none_is_refused(text):
    with pytest.raises(BenchError, match="--losses"):
        parse_mix(text)


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_trains_and_is_evaluated_in_all_forms(mix, folder):
    record = run_job(task(folder), LossJob(mix, 4, 1))
    assert record["steps"] == 3 and record["tokens"] > 0
    assert record["requests"] == 3  # every fourth of twelve
    for form in ("greedy", "mass", "argmax_mass"):
        assert 1.0 <= record[form] <= 4.0
    json.dumps(record, allow_nan=False)


def test_training_can_begin_with_a_fresh_layer(folder):
    told = run_start(task(folder, draft=None))
    assert told["rows"] == run_start(task(folder))["rows"] > 0


def test_seeds_are_the_outer_loop(tmp_path):
    options = options_for(
        LossOptions, "loss", tmp_path, losses=("tv", "nla"), seeds=(0, 1)
    )
    jobs = jobs_of(options)
    assert len(jobs) == 8 and {job.seed for job in jobs[:4]} == {0}
    assert len({job.name for job in jobs}) == 8


def test_the_summary_has_mean_spread_and_gain_best_first():
    def record(mix, seed, greedy):
        values = dict.fromkeys(("greedy", "mass", "argmax_mass"), greedy)
        errors = {f"{name}_error": 0.1 for name in values}
        return {"mix": mix, "lookahead": 5, "seed": seed, "train_s": 2.0} | (
            values | errors
        )

    records = [record("tv", 0, 1.5), record("nla", 0, 2.0), record("nla", 1, 2.2)]
    found = summarise(records, {"greedy": 1.4})
    assert [row["mix"] for row in found] == ["nla", "tv"]
    assert found[0]["greedy"] == {
        "mean": 2.1,
        "spread": 0.1414,
        "error": 0.1,
        "gain": 0.7,
    }
    assert found[1]["greedy"]["spread"] is None and found[1]["mass"]["gain"] is None
    assert "nla" in table(found)
    assert summarise([], None) == []


class InlinePool:
    """Runs jobs at once, in this process."""

    def __init__(self, workers, context, initializer, initargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *args):
        from concurrent.futures import Future

        done = Future()
        done.set_result(function(*args))
        return done


def test_the_suite_trains_what_is_missing_on_samples_given(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(loss_suite, "ProcessPoolExecutor", InlinePool)
    monkeypatch.setattr(loss_job, "_loaded", None)
    given = {
        "target": folder / "target",
        "draft": folder / "draft",
        "samples": folder / "samples.st",
        "lookaheads": (3,),
        "seeds": (0,),
        "steps": 2,
        "batch_tokens": 64,
        "holdout_every": 4,
    }
    first = options_for(LossOptions, "loss", tmp_path, losses=("tv",), **given)
    assert run(first) == 0
    more = options_for(
        LossOptions, "loss", tmp_path, losses=("tv", "nla"), resume=True, **given
    )
    assert run(more) == 0
    report = json.loads(more.json.read_text())
    assert set(report["results"]["jobs"]) == {"tv @3 #0", "nla @3 #0"}
    assert {row["mix"] for row in report["results"]["summary"]} == {"tv", "nla"}
    assert report["results"]["stream"]["branch_rows"] == 24
    assert report["results"]["start"]["requests"] == 3 and report["complete"]
