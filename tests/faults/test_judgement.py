"""What the fault suite counts as right, and how it draws, counts and reports."""

import json

import psutil
import pytest
import torch

from bench.harness.client import RequestResult
from tests.faults import leaks
from tests.faults.counters import EventCounts, read_metrics, read_status, total
from tests.faults.leaks import LeakWatch, Usage, left_behind
from tests.faults.load import Ask, Load, judged
from tests.faults.reference import Known, _first
from tests.faults.report import by_kind, read_rows, table, write
from tests.faults.suite import FAULTS, Row, plan
from tests.faults.trainer import OFFERED, PASSED_ON, order, spoilt

ASK = Ask(1, (5, 6), (1, 2, 3))


def result(tokens=(1, 2, 3), error=None):
    return RequestResult(1, "faults", 0.0, token_ids=list(tokens), error=error)


def test_only_the_right_tokens_are_right():
    assert judged(ASK, result()) == ""
    assert judged(ASK, result((1, 9, 3))) == "wrong token: number 1 of 3 is 9"
    assert judged(ASK, result((1, 2))) == "wrong length: 2 tokens of 3"
    assert judged(ASK, result((1, 2, 3, 4))) == "wrong length: 4 tokens of 3"
    assert judged(ASK, result((9,))) == "wrong token: number 0 of 1 is 9"
    assert judged(ASK, result((), "HTTP 400: no")) == "HTTP 400: no"


def test_an_output_ends_where_it_is_in_doubt():
    assert _first([False, False, True, False]) == 2
    assert _first([False, False]) == 2


def test_the_load_asks_for_known_beginnings():
    known = [Known((1,), tuple(range(30))), Known((2,), tuple(range(150)))]
    load = Load(None, known, 0)
    for _ in range(50):
        ask = load.ask((100, 170))
        assert ask.prompt == (2,) and 100 <= ask.max_tokens <= 150
        assert ask.right == tuple(range(ask.max_tokens))


def test_a_plan_has_every_kind_and_grows_at_its_end():
    kinds = [fault.kind for fault in FAULTS]
    assert len(set(kinds)) == len(kinds)
    long = plan(300, 7)
    assert {f.kind for f in long[: len(kinds)]} == set(kinds)
    assert plan(50, 7) == long[:50] and plan(5, 7) == long[:5]
    assert plan(300, 8) != long


def test_metrics_are_summed_over_all_labels_but_the_reason():
    page = (
        "# HELP x y\n"
        'vllm_tide:refused_drafts_total{engine="0",model_name="m",reason="norm"} 2.0\n'
        'vllm_tide:refused_drafts_total{engine="0",model_name="m",reason="shape"} 1.0\n'
        'vllm:num_preemptions_total{engine="0"} 3.0\n'
        'vllm:e2e_bucket{le="+Inf"} 9.0\n'
    )
    found = read_metrics(page)
    assert found == {
        "vllm_tide:refused_drafts_total{norm}": 2.0,
        "vllm_tide:refused_drafts_total{shape}": 1.0,
        "vllm:num_preemptions_total": 3.0,
    }
    assert total(found, "vllm_tide:refused_drafts_total") == 3.0
    assert total(found, "vllm_tide:refused_drafts_total{norm}") == 2.0
    assert total(found, "absent") == 0.0


def test_events_are_counted_once_and_broken_lines_are_seen(tmp_path):
    path, counts = tmp_path / "events-e.jsonl", EventCounts(tmp_path)
    path.write_text('{"event": "keep"}\n{"event": "ke')
    assert counts.read() == {"event:keep": 1.0} == counts.read()
    path.write_text('{"event": "keep"}\n{"event": "ke{"event": "left"}\n')
    assert counts.read() == {"event:keep": 1.0}
    assert counts.broken == 1


def test_the_newest_status_counts(tmp_path):
    for name, unix, count in (("a", 2.0, 5), ("b", 1.0, 9)):
        status = {"updated_unix": unix, "rollbacks": count}
        (tmp_path / f"trainer-{name}.json").write_text(json.dumps(status))
    (tmp_path / "trainer-c.json").write_text("{")
    assert read_status(tmp_path)["trainer:rollbacks"] == 5.0


@pytest.mark.parametrize("what", PASSED_ON)
def test_a_spoilt_head_differs_in_what_it_says(what):
    good = {"fc.weight": torch.ones(4, 3), "norm.weight": torch.ones(3)}
    bad = spoilt(good, what, 5)
    assert good["fc.weight"].shape == (4, 3) and set(good) == {
        "fc.weight",
        "norm.weight",
    }
    same = set(bad) == set(good) and all(
        bad[n].shape == good[n].shape
        and bad[n].dtype == good[n].dtype
        and torch.equal(bad[n], good[n])
        for n in good
    )
    assert not same


def test_orders_wait_in_the_order_they_were_given(tmp_path):
    paths = [order(tmp_path, what, 1) for what in OFFERED]
    assert sorted(tmp_path.glob("order-*.json")) == paths
    assert json.loads(paths[0].read_text()) == {"what": OFFERED[0], "seed": 1}


def test_growth_is_a_leak_once_a_process_is_warm(monkeypatch):
    held = [Usage(100.0, 10)]
    monkeypatch.setattr(leaks, "usage_of", lambda _: held[0])
    watch, me = LeakWatch(warm_s=0.0), psutil.Process()
    assert watch.look("engine", me) == ""
    held[0] = Usage(250.0, 50)
    assert watch.look("engine", me) == ""
    held[0] = Usage(260.0, 50)
    assert watch.look("engine", me) == "engine has 260.0 MiB, 100.0 at first"
    held[0] = Usage(100.0, 80)
    assert watch.look("engine", me) == "engine has 80 file descriptors, 10 at first"
    young = LeakWatch(warm_s=1e9)
    for mib in (10.0, 1000.0):
        held[0] = Usage(mib, 10)
        assert young.look("engine", me) == ""


def test_segments_that_nobody_uses_are_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(leaks, "SHM_DIR", str(tmp_path))
    for name in ("a", "b"):
        (tmp_path / name).touch()
    assert left_behind({"a", "b", "c", ""}, {"a"}) == ["b"]


def test_a_result_is_read_back_to_go_on_from(tmp_path):
    rows = [Row("fill_ring", "ok", 1.5, 2.0), Row("fill_ring", "a hang", 40.0, 0.0)]
    path = tmp_path / "faults.json"
    kinds = by_kind(rows)
    write(path, {"count": 2, "kinds": kinds}, rows)
    document = json.loads(path.read_text())
    assert document["rows"][1] == {
        "kind": "fill_ring", "outcome": "a hang", "recovery_s": 40.0,
    }  # fmt: skip
    assert kinds["fill_ring"]["ok"] == 1
    assert "fill_ring" in table(kinds) and "1/2" in table(kinds)
    head, again = read_rows(path)
    assert head["count"] == 2
    assert [(r.kind, r.outcome) for r in again] == [(r.kind, r.outcome) for r in rows]
