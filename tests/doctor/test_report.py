"""What the whole says: exit codes, text for people, JSON for scripts."""

import json

import pytest

from vllm_tide.doctor import examination
from vllm_tide.doctor.finding import Status, failed, ok, skipped, warning
from vllm_tide.doctor.report import as_json, as_text, exit_code
from vllm_tide.doctor.subject import Subject

FINE = ok("a", "Fine.")
LEFT = skipped("b", "Does not apply.")
MEANT = warning("c", "Works, badly.", "Mend it.")
BROKEN = failed("d", "Does not work.", "Replace it.")


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
    long = warning("name", "word " * 40, "advice " * 40)
    text = as_text([FINE, long, BROKEN], columns=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "-> Replace it." in text
    assert text.splitlines()[-1] == "1 ok, 1 warning, 1 failed, 0 skipped"


def test_a_long_path_is_not_broken():
    path = "/" + "x" * 200
    assert path in as_text([ok("a", f"At {path}.")], columns=80)


def test_a_check_that_breaks_is_a_finding_and_hides_no_other(monkeypatch, tmp_path):
    from vllm_tide.doctor import configuration

    def broken(subject):
        raise RuntimeError("boom")

    monkeypatch.setattr(configuration, "check", broken)
    subject = Subject(run_dir=tmp_path / "run")
    found = list(examination.examine(subject, ("configuration", "run_directory")))
    assert [finding.status for finding in found] == [Status.FAILED, Status.OK]
    assert "RuntimeError: boom" in found[0].sentence


def test_whatever_is_not_fine_says_what_to_do(tmp_path):
    subject = Subject(run_dir=tmp_path / "run", port=1)
    for finding in examination.examine(subject):
        assert finding.sentence.endswith("."), finding
        if finding.status in (Status.WARNING, Status.FAILED):
            assert finding.advice, finding


def test_nothing_is_left_behind(tmp_path):
    subject = Subject(run_dir=tmp_path / "deep" / "run")
    list(examination.examine(subject))
    assert list(tmp_path.iterdir()) == []
