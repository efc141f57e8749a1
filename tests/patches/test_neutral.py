"""With `tide` unset, patched vLLM behaves as upstream's: one test per patch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import toys
from tests.patches.pristine import make_pristine

pytestmark = pytest.mark.vllm

PROBE = Path(__file__).with_name("probe.py")


def run_probe(case: dict[str, str], pythonpath: Path | None) -> dict[str, Any]:
    # Only what the patches import: an empty list allows no plugin, unset all of them.
    env = os.environ | {"VLLM_PLUGINS": ""}
    if pythonpath is not None:
        env["PYTHONPATH"] = str(pythonpath)
    done = subprocess.run(
        [sys.executable, str(PROBE), json.dumps(case)],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("REPORT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("REPORT "))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = toys.make_target(folder / "target")
    draft = toys.make_draft(folder / "draft", target)
    return {"target": str(target), "draft": str(draft)}


@pytest.fixture(scope="module")
def reports(
    case: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("neutral")
    pristine = make_pristine(folder / "pristine")
    upstream = run_probe(case, pristine)
    assert upstream["file"].startswith(str(pristine))
    return upstream, run_probe(case, None)


def test_outputs_are_upstreams_token_for_token(reports):
    upstream, patched = reports
    assert patched["tokens"] == upstream["tokens"]


def test_worker_patches_leave_everything_none(reports):
    _, patched = reports
    assert patched["tide"] == [True] * 4
    assert not patched["sleeps"]


def test_patches_of_model_runner_v2_leave_outputs_and_everything_none(reports, case):
    """Greedy tokens do not depend on the runner: upstream's V1 gives the reference."""
    upstream, _ = reports
    patched = run_probe(case | {"runner": "v2"}, None)
    assert patched["tokens"] == upstream["tokens"]
    assert patched["tide"] == [True] * 4
    assert patched["imported"] == []


def test_seeded_request_with_a_prompt_of_two_steps_is_served_on_a_cpu(reports):
    upstream, patched = reports
    assert "does not use offset" in upstream["seeded"]
    assert patched["seeded"] == [24, 24]


def test_capture_patch_never_imports_the_package(reports):
    _, patched = reports
    assert patched["imported"] == []


def test_metrics_patch_adds_no_metric(reports):
    upstream, patched = reports
    assert patched["metrics"] == upstream["metrics"]
    assert not [name for name in patched["metrics"] if "tide" in name]


def test_config_patch_keeps_the_compile_hash(reports):
    upstream, patched = reports
    assert patched["hash"] == upstream["hash"]


def test_config_patch_parses_inline_json_as_before():
    script = (
        "import sys, json;"
        "from vllm.engine import arg_utils as a;"
        "text = '{\"num_speculative_tokens\": 2}';"
        "assert a._speculative_config_argument(text) == json.loads(text);"
        "sys.modules['vllm_tide.engine.arguments'] = None;"
        "assert a._speculative_config_argument(text) == json.loads(text);"
        "assert a._speculative_config_argument('null') is None;"
        "a._speculative_config_argument('tide.json')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=280
    )
    assert "ArgumentTypeError: neither inline JSON nor is vllm_tide" in done.stderr
