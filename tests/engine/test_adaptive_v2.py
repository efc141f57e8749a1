"""Adaptive verification under our control, in a real engine: upstream's manager cuts
drafts at the step costs of a time model that began with upstream's own costs.

Model Runner V2 in Triton's interpreter, eager, with costs that were never measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.offline_engine import OfflineEngine
from tests.engine.test_v2 import PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DEMO = Path(__file__).parents[2] / "scripts" / "demo"
WORK = {"params": {"max_tokens": 16}}
# ms: of all draft passes by requests, of the target by rows.
DRAFT = [[1, 0.3], [4, 0.3]]
FLAT = [[1, 10.0], [64, 10.5]]
STEEP = [[3, 1.0], [64, 200.0]]
ALL = {"policy": "threshold"}  # drafts as deep as it may, see `constants`
ADASPEC = {"policy": "adaspec", "probe_share": 0.0}


def serve(
    runner: str, run_dir: Path, curves: Any = None, control: Any = None
) -> dict[str, Any]:
    case: dict[str, Any] = {
        "target": str(DEMO / "target"),
        "runner": runner,
        "speculative_config": None,
        "constants": {"vllm_tide.control.policies.THRESHOLD": 1e-9},
        "engine": {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "block_size": 32,
            "enable_prefix_caching": False,
        },
    }
    if curves is not None:
        case["curves"] = curves
        case["speculative_config"] = {
            "method": "eagle3",
            "model": str(DEMO / "draft"),
            "num_speculative_tokens": 3,
            "enable_adaptive_verification": True,
            "tide": {
                "run_dir": str(run_dir),
                "train": {"autostart": False},
                "capture": {"ring_mib": 16},
                "control": control,
            },
        }
    with OfflineEngine(case) as engine:
        return engine.work(PROMPTS, **WORK)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return serve("v1", tmp_path_factory.mktemp("plain"))["tokens"]


def test_drafts_are_cut_to_what_pays_and_the_text_stays(plain, tmp_path):
    report = serve("v2", tmp_path, [DRAFT, STEEP], ALL)
    assert report["tokens"] == plain
    assert report["control_faults"] == report["faults"] == {}
    found = report["control"]
    assert 0 < found["trimmed_tokens"] < found["drafted_tokens"]


def test_adaspec_begins_with_the_costs_that_vllm_measured(plain, tmp_path):
    report = serve("v2-async", tmp_path, [DRAFT, FLAT], ADASPEC)
    assert report["tokens"] == plain
    assert report["control_faults"] == report["faults"] == {}
    found = report["control"]
    # Times are predicted, and were compared with what was measured.
    assert found["predicted_step_s"] > 0 and found["time_error"] >= 0
    assert found["draft_steps"] > 0 and found["verified_tokens"] > 0
