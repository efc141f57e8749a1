import pytest

from bench import suites
from bench.harness.common import BenchError
from bench.run import main
from bench.suites import kind_of
from bench.suites.multi import MultiOptions
from tests.bench.toys import options_for


@pytest.mark.parametrize(
    ("suite", "changes", "sentence"),
    [
        ("rollback", {"tide": {"train": {"stepz": 1}}}, "--tide: tide.train.stepz"),
        ("rollback", {"plants": ("noise",)}, "--plants"),
        ("rollback", {"domains": ("c", "python")}, "--domains"),
        ("multi", {"domains": ("c",), "requests": (8,)}, "--domains"),
        ("multi", {"requests": (3, 8)}, "--requests"),
        ("multi", {"max_minutes": 0.0}, "--max-minutes"),
    ],
)
def test_impossible_options_are_refused_by_name(suite, changes, sentence, tmp_path):
    with pytest.raises(BenchError, match=sentence):
        options_for(kind_of(suite), suite, tmp_path, **changes).check()


@pytest.fixture
def cli(tmp_path, capsys):
    def run(*args):
        status = main(["--yes", "--json", str(tmp_path / "r.json"), *args])
        return status, capsys.readouterr().err

    return run


def test_the_command_line_reaches_the_suite(cli, monkeypatch):
    seen = []
    monkeypatch.setattr(suites, "run", lambda o: seen.append(o) or 0)
    status, _ = cli(
        "--suite", "multi", "--requests", "20,30",
        "--tide", '{"deploy": {"canary": false}}',
    )  # fmt: skip
    assert status == 0
    (options,) = seen
    assert isinstance(options, MultiOptions) and options.requests == (20, 30)
    assert options.tide == {"deploy": {"canary": False}}
    assert options.work.name == "r.json.work"


def test_foreign_options_and_unknown_suites_are_named(cli):
    status, text = cli("--suite", "long", "--plants", "nan")
    assert status == 2 and "--plants is not an option of --suite long" in text
    status, text = cli("--suite", "nope")
    assert status == 2 and "multi" in text and "rollback" in text
