"""The report: exit codes, text for people, JSON for scripts."""

import pytest

from vllm_tide.doctor import machine
from vllm_tide.doctor.run import (
    Status,
    Subject,
    as_text,
    coloured,
    examine,
    exit_code,
    failed,
    ok,
    report,
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
        ([MEANT, BROKEN, FINE], 1, 1),
        ([], 0, 0),
    ],
)
def test_the_worst_finding_gives_the_exit_code(findings, code, strict):
    assert exit_code(findings) == code
    assert exit_code(findings, strict=True) == strict
    assert report(findings, "1", code)["exit_code"] == code


def test_the_text_has_advice_and_fits_the_width():
    long = warning("word " * 40, "advice " * 40, "name")
    text = as_text([FINE, long, BROKEN], columns=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "-> Replace it." in text
    assert text.splitlines()[-1] == "1 ok, 1 warning, 1 failed, 0 skipped"


def test_a_terminal_shows_the_status_in_colour():
    lines = coloured(as_text([FINE, BROKEN], columns=80)).splitlines()
    assert lines[0].startswith("\x1b[32mok\x1b[0m ")
    assert lines[1].startswith("\x1b[31mfailed\x1b[0m ") and "\x1b" not in lines[-1]


def test_a_failing_check_is_a_finding_and_hides_no_other(monkeypatch, tmp_path):
    def broken(subject):
        raise RuntimeError("boom")

    monkeypatch.setattr(machine, "run_directory", broken)
    subject = Subject(run_dir=tmp_path / "run")
    findings = list(examine(subject, ("run_directory", "extension")))
    statuses = [finding.status for finding in findings]
    assert statuses == [Status.FAILED, Status.OK]
    assert findings[0].name == "run directory"
    assert "RuntimeError: boom" in findings[0].sentence


def test_a_whole_report_is_ordered_gives_advice_and_leaves_nothing(tmp_path):
    findings = list(examine(Subject(run_dir=tmp_path / "deep" / "run")))
    names = [finding.name for finding in findings]
    assert names[:2] == ["Python", "vLLM"]
    assert names[-2:] == ["state directory", "spool"]
    assert len(set(names)) == len(names) == 17
    for finding in findings:
        assert finding.sentence.endswith("."), finding
        if finding.status in (Status.WARNING, Status.FAILED):
            assert finding.advice, finding
    assert list(tmp_path.iterdir()) == []
