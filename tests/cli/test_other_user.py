"""Commands of a user without permission for their files: one line, no traceback."""

from __future__ import annotations

import json
import os

import pytest

from vllm_tide.cli.main import main

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="seteuid needs root")
NOBODY = 65534


@pytest.fixture
def closed(tmp_path):
    """A folder of root without permissions for others, with a draft."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    tmp_path.chmod(0o700)
    return tmp_path


def section(closed, tide, model="fresh"):
    whole = {"model": model, "num_speculative_tokens": 3, "tide": tide}
    return json.dumps(whole).replace("CLOSED", str(closed))


def answered(argv, capsys):
    """Return status and output as another user; late imports run as root."""
    main(argv)
    capsys.readouterr()
    os.seteuid(NOBODY)
    try:
        status = main(argv)
    finally:
        os.seteuid(0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["config", "check", "MODEL"], "model: 'CLOSED/draft' cannot be read (Permis"),
        (["dashboards", "export", "CLOSED/x"], "CLOSED/x' cannot be written (P"),
        (["status", "--run-dir", "CLOSED/r"], "CLOSED/r cannot be read (Permission"),
        (
            ["top", "--once", "--interval", "0.05", "--run-dir", "CLOSED/r"],
            "run this as the server's user",
        ),
        (["capture", "on", "--run-dir", "CLOSED/r"], "CLOSED/r cannot be read (Permis"),
        (
            ["export", "CLOSED/o", "--from", "CLOSED/draft"],
            "CLOSED/draft/config.json: P",
        ),
        (["compare", "CLOSED/draft", "CLOSED/draft"], "CLOSED/draft: Permission den"),
        (["plan", "--cluster", "CLOSED/draft/config.json"], "(Permission denied)"),
        (["patch", "status", "--target", "CLOSED"], "Permission denied"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_an_unreadable_path_gives_one_line(argv, sentence, closed, capsys):
    model = section(closed, {}, "CLOSED/draft")
    argv = [w.replace("MODEL", model).replace("CLOSED", str(closed)) for w in argv]
    status, _, err = answered(argv, capsys)
    assert status == 2
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert sentence.replace("CLOSED", str(closed)) in line


def test_doctor_names_the_directory_and_not_the_installation(closed, capsys):
    tide = {"train": {"state_dir": "CLOSED/s"}, "spool": {"url": "CLOSED/spool"}}
    where = ["--run-dir", str(closed / "run"), "--json"]
    argv = ["doctor", "--config", section(closed, tide), *where]
    status, out, _ = answered(argv, capsys)
    report = {check["name"]: check for check in json.loads(out)["checks"]}
    assert status == 1
    for name in ("run directory", "state directory", "spool"):
        assert report[name]["status"] == "failed", report[name]
        text = report[name]["sentence"] + report[name]["advice"]
        assert str(closed) in text and "report this" not in text, report[name]
