"""What the whole says: exit codes, text for people, JSON for scripts."""

import json
import sys
from importlib import import_module

import pytest

from vllm_tide.doctor.run import (
    Status,
    Subject,
    as_json,
    as_text,
    examine,
    exit_code,
    failed,
    ok,
    skipped,
    warning,
)

FINE = ok("Fine.", name="a")
LEFT = skipped("Does not apply.", name="b")
MEANT = warning("Works, badly.", "Mend it.", "c")
BROKEN = failed("Does not work.", "Replace it.", "d")


@pytest.mark.parametrize(
    ("findings", "code", "strict"),
    [
        ([FINE, LEFT], 0, 0),
        ([FINE, MEANT, LEFT], 0, 1),
        ([MEANT, BROKEN, FINE], 2, 2),
        ([], 0, 0),
    ],
)
def test_the_worst_finding_gives_the_exit_code(findings, code, strict):
    assert exit_code(findings) == code
    assert exit_code(findings, strict=True) == strict
    assert json.loads(as_json(findings, "1", code))["exit_code"] == code


def test_json_has_every_field_of_every_finding():
    told = json.loads(as_json([FINE, MEANT], "0.1", 1))
    assert told == {
        "status": "warning",
        "exit_code": 1,
        "vllm_tide": "0.1",
        "checks": [
            {"name": "a", "status": "ok", "sentence": "Fine.", "advice": ""},
            {
                "name": "c",
                "status": "warning",
                "sentence": "Works, badly.",
                "advice": "Mend it.",
            },
        ],
    }


def test_text_says_what_to_do_and_keeps_to_the_width():
    long = warning("word " * 40, "advice " * 40, "name")
    text = as_text([FINE, long, BROKEN], columns=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "-> Replace it." in text
    assert text.splitlines()[-1] == "1 ok, 1 warning, 1 failed, 0 skipped"


def test_a_long_path_is_not_broken():
    path = "/" + "x" * 200
    assert path in as_text([ok(f"At {path}.", name="a")], columns=80)


@pytest.mark.parametrize("name", ["configuration", "run_directory", "profile"])
def test_a_check_that_breaks_is_a_finding_and_hides_no_other(
    name, monkeypatch, tmp_path
):
    from vllm_tide.doctor import run

    def broken(subject):
        raise RuntimeError("boom")

    module = import_module(f"vllm_tide.doctor.{run.CHECKS[name]}")
    monkeypatch.setattr(module, name, broken)
    findings = list(examine(Subject(run_dir=tmp_path / "run"), (name, "extension")))
    statuses = [finding.status for finding in findings]
    assert statuses == [Status.FAILED, Status.OK]
    assert findings[0].name == name.replace("_", " ")
    assert "RuntimeError: boom" in findings[0].sentence


def test_a_module_that_does_not_import_hides_no_other(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm_tide.doctor.state", None)
    subject = Subject(run_dir=tmp_path / "run")
    findings = list(examine(subject, ("profile", "spool", "extension")))
    statuses = [finding.status for finding in findings]
    assert statuses == [Status.FAILED, Status.FAILED, Status.OK]


def test_the_report_has_these_checks_in_this_order(tmp_path):
    subject = Subject(run_dir=tmp_path / "run", port=1)
    assert [finding.name for finding in examine(subject)] == [
        "Python",
        "vLLM",
        "torch",
        "triton",
        "safetensors",
        "numpy",
        "prometheus-client",
        "device",
        "patches",
        "extension",
        "configuration",
        "draft fit",
        "shared memory",
        "run directory",
        "cores",
        "preload",
        "GPUs",
        "server port",
        "trainer port",
        "profile",
        "state directory",
        "spool",
    ]


def test_whatever_is_not_fine_says_what_to_do(tmp_path):
    subject = Subject(run_dir=tmp_path / "run", port=1)
    for finding in examine(subject):
        assert finding.sentence.endswith("."), finding
        if finding.status in (Status.WARNING, Status.FAILED):
            assert finding.advice, finding


def test_nothing_is_left_behind(tmp_path):
    subject = Subject(run_dir=tmp_path / "deep" / "run")
    list(examine(subject))
    assert list(tmp_path.iterdir()) == []
