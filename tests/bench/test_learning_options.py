import json

import pytest

from bench.harness.common import BenchError
from bench.run import main
from bench.suites import options_of
from bench.suites.day0 import Day0Options
from bench.suites.learning import LearningOptions
from bench.suites.loss import LossOptions
from bench.suites.multi import MultiOptions
from bench.suites.rollback import RollbackOptions
from tests.bench.learning_toys import options_for

KINDS = {
    "learning": LearningOptions,
    "day0": Day0Options,
    "loss": LossOptions,
    "rollback": RollbackOptions,
    "multi": MultiOptions,
}


@pytest.mark.parametrize("suite", tuple(KINDS))
def test_every_suites_own_defaults_pass_its_checks(suite, tmp_path):
    options = options_for(KINDS[suite], suite, tmp_path)
    options.check()
    assert json.loads(json.dumps(options.to_json()))["suite"] == suite


@pytest.mark.parametrize(
    ("suite", "changes", "sentence"),
    [
        ("learning", {"traffic": "both ways"}, "--traffic"),
        ("learning", {"arms": ("frozen", "best")}, "--arms: there is no arm 'best'"),
        ("learning", {"domains": ("c",), "requests": (1,)}, "a shift needs two"),
        ("learning", {"requests": (1, 2)}, "--requests"),
        ("learning", {"tide": {"train": {"stepz": 1}}}, "--tide: tide.train.stepz"),
        ("learning", {"model_sizes": ("6m", "90m")}, "--model-sizes"),
        ("day0", {"final_share": 1.0}, "--final-share"),
        ("day0", {"repeats": 3}, "--repeats"),
        ("loss", {"losses": ("forward_kl+luck",)}, "'luck'"),
        ("loss", {"lookaheads": (17,)}, "--lookaheads"),
        ("loss", {"start": "end"}, "--start"),
        ("rollback", {"plants": ("noise",)}, "--plants"),
        ("rollback", {"domains": ("c", "python")}, "--domains"),
        ("multi", {"domains": ("c",), "requests": (8,)}, "--domains"),
        ("multi", {"requests": (3, 8)}, "--requests"),
        ("multi", {"max_minutes": 0.0}, "--max-minutes"),
    ],
)
def test_what_cannot_run_is_refused_with_the_option(suite, changes, sentence, tmp_path):
    with pytest.raises(BenchError, match=sentence):
        options_for(KINDS[suite], suite, tmp_path, **changes).check()


def test_an_option_of_another_suite_is_refused(tmp_path):
    given = {"json": tmp_path / "a.json", "work": tmp_path, "batches": (1,)}
    with pytest.raises(BenchError, match="--batches is no option of --suite loss"):
        options_of("loss", given)


def test_two_runs_are_one_measurement_whatever_arms_each_measured(tmp_path):
    def identity(**changes):
        return options_for(LearningOptions, "learning", tmp_path, **changes).identity()

    assert identity(arms=("none",), resume=True, max_minutes=3.0) == identity()
    assert identity(output_tokens=7) != identity()


@pytest.fixture
def cli(tmp_path, capsys):
    def run(*args):
        status = main(["--yes", "--json", str(tmp_path / "r.json"), *args])
        return status, capsys.readouterr().err

    return run


def test_the_command_line_reaches_the_suite(cli, monkeypatch):
    from bench import suites as learning_suites

    seen = []
    monkeypatch.setattr(learning_suites, "run", lambda o: seen.append(o) or 0)
    status, _ = cli(
        "--suite", "learning", "--arms", "none,gated", "--requests", "2,3,4,5",
        "--traffic", "both", "--tide", '{"deploy": {"canary": false}}', "--resume",
    )  # fmt: skip
    assert status == 0
    (options,) = seen
    assert isinstance(options, LearningOptions)
    assert options.arms == ("none", "gated") and options.requests == (2, 3, 4, 5)
    assert options.resume and options.tide == {"deploy": {"canary": False}}
    assert options.work.name == "r.json.work"


def test_foreign_options_and_unknown_suites_are_named(cli):
    assert cli("--suite", "rollback", "--losses", "tv")[0] == 2
    status, text = cli("--suite", "control", "--plants", "nan")
    assert status == 2 and "--plants is no option of --suite control" in text
    status, text = cli("--suite", "nope")
    assert status == 2 and "control" in text and "rollback" in text
