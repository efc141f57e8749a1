"""A compiled V1 engine with its log: any lengths, swaps, log lines."""

from __future__ import annotations

import re
import time

import pytest

from tests.engine.offline_engine import OfflineEngine
from tests.engine.records import drafted
from tests.engine.shared_engine import KINDS, Served, engine_case
from tests.engine.test_shared_v1 import PROMPTS
from tests.engine.test_shared_v1_control import VARIED

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    kind = KINDS["v1-control"] | {"tide": {"control": {"policy": "threshold"}}}
    log, run_dir = folder / "log", folder / "run"
    case = engine_case(run_dir, kind, eager=False, log=str(log))
    with OfflineEngine(case) as engine:
        served = Served(engine, run_dir)
        yield served, log
        served.close()


def test_tokens_are_the_targets_own_and_swaps_are_in_place(
    compiled, greedy, own_draft, other_draft
):
    served, log = compiled

    def logs(sentence: str) -> None:
        pattern, until = re.compile(f"INFO .*{sentence}"), time.monotonic() + 60
        while not pattern.findall(log.read_text()):
            assert time.monotonic() < until, (sentence, log.read_text()[-4000:])
            time.sleep(0.05)

    def all_drafts():
        report = served(PROMPTS, forget=True, max_tokens=24, script=[[3, 3]])
        assert report["tokens"] == greedy(PROMPTS, 24)
        assert report["faults"] == report["control_faults"] == {}
        return report, drafted(report["records"])

    logs("captures tokens and hidden states of all requests of all tenants")
    logs("not those with a cache_salt.*vllm-tide capture off.*tide_capture false")
    logs(f"{served.run_dir}; policy 'threshold', up to 5 draft.*no trainer is started")
    disk, by_disk = all_drafts()
    varied = served(PROMPTS, forget=True, max_tokens=24, script=VARIED)
    assert varied["tokens"] == disk["tokens"] and varied["outcomes"]["accepted"] > 10
    assert served.publish(other_draft) == ""
    logs(r"draft 1 is live; pause [\d.]+ ms")
    other, by_other = all_drafts()
    assert served.publish(own_draft, rollback_of=1, to=0, reason="slower") == ""
    logs(r"draft 2 is live, a rollback of 1 to the weights of 0 \('slower'\); pause")
    back, by_back = all_drafts()
    assert disk["addresses"] == other["addresses"] == back["addresses"]
    assert by_disk == by_back != by_other
    served.reader.set_collect(False)
    logs("the trainer requests no rows")
    served.reader.set_collect(True)
    logs("the trainer requests rows again")
    assert log.read_text().count("is live") == 2
