"""What `build_and_try.sh` is made of, without building: it is run by hand, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.deploy.try_load import alive, counter
from tests.deploy.dockerfile_steps import read_steps
from vllm_tide.config import parse_tide
from vllm_tide.speculative import read_json_object

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "deploy" / "build_and_try.sh"
TEXT = SCRIPT.read_text(encoding="utf-8")


@pytest.mark.slow
def test_bash_reads_it_and_it_says_how_it_is_used() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    done = subprocess.run([str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--json FILE" in done.stdout and "TIDE_TRY_SECONDS" in done.stdout
    assert "set -euo" not in done.stdout
    assert subprocess.run([str(SCRIPT)], capture_output=True).returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_finds_nothing() -> None:
    subprocess.run(["shellcheck", str(SCRIPT)], check=True)


def test_it_runs_the_images_as_their_own_user() -> None:
    steps = read_steps(ROOT / "Dockerfile")
    (uid,) = {s.text for s in steps if s.text.startswith("TIDE_UID=")}
    assert f"owner={uid.partition('=')[2]}:0" in TEXT
    assert {"serve", "train"} <= {step.stage for step in steps}


def test_its_configuration_is_valid(tmp_path: Path) -> None:
    text = TEXT.partition("<< 'JSON'\n")[2].partition("\nJSON\n")[0]
    (tmp_path / "tide.json").write_text(text)
    config = read_json_object(str(tmp_path / "tide.json"))
    tide = parse_tide(config["tide"])
    assert not tide.train.autostart and config["model"] == "/models/draft"


def test_counters_are_added_up() -> None:
    page = '# TYPE a_total counter\na_total{x="1"} 2.0\na_total{x="2"} 3.0\nb_total 7\n'
    assert (counter(page, "a_total"), counter(page, "b_total")) == (5, 7)
    assert counter(page, "c_total") == 0


@pytest.mark.slow
def test_an_ended_process_is_not_alive() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert alive([os.getpid()]) and not alive([os.getpid(), ended.pid])
    ended.wait()
