"""Two tensor-parallel ranks: they follow the leader's lengths, and switch together."""

from __future__ import annotations

import pytest

from tests.engine.offline_engine import OfflineEngine
from tests.engine.shared_engine import MEMORY, Served, engine_case
from tests.engine.test_shared_v1 import PROMPTS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
]


def test_ranks_follow_the_leader_and_switch_together(
    greedy, own_draft, other_draft, tmp_path, monkeypatch
):
    """The workers are separate processes, and AdaSpec decides on the first."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    tide = MEMORY | {"control": {"policy": "adaspec", "probe_share": 0.2}}
    engine = {"tensor_parallel_size": 2, "num_gpu_blocks_override": None}
    run_dir = tmp_path / "run"
    kind = {"runner": "v1", "tide": tide}
    case = engine_case(run_dir, kind, engine=engine)
    plain = greedy(PROMPTS, 24)
    with OfflineEngine(case) as started:
        served = Served(started, run_dir)
        assert served(PROMPTS, max_tokens=24)["tokens"] == plain
        for tensors in (other_draft, own_draft):
            assert served.publish(tensors) == ""
            report = served(PROMPTS, max_tokens=24)
            assert report["tokens"] == plain
            versions = {r.draft_version for r in report["records"] if r.start}
            assert versions == {served.writer.latest_version}
        served.close()
