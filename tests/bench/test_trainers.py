from bench.harness.trainers import (
    read_events,
    trainer_facts,
    training_seconds,
)


def test_events_of_all_trainers_are_sorted_and_damaged_lines_left_out(tmp_path):
    (tmp_path / "events-a.jsonl").write_text(
        '{"unix": 3, "event": "publish", "version": 1}\n[1]\n{"unix": 5, "ev'
    )
    (tmp_path / "events-b.jsonl").write_text('{"unix": 2, "event": "shift"}\n')
    events = read_events(tmp_path)
    assert [event["event"] for event in events] == ["shift", "publish"]
    assert events[0]["version"] is None and events[1]["holdout_new"] is None


def test_seconds_trained_come_from_the_status_else_from_the_cycles():
    cycles = [
        {"event": "cycle", "seconds": 2.0},
        {"event": "cycle", "seconds": None},
        {"event": "publish", "seconds": 9.0},
    ]
    assert training_seconds([{"training_seconds": 4}, {}], cycles) == 4.0
    assert training_seconds([{"training_seconds": "long"}], cycles) == 2.0
    assert training_seconds([{}], []) is None
    (facts,) = trainer_facts([{"state": "waiting", "secret": 1}])
    assert facts["state"] == "waiting" and facts["rollbacks"] is None
    assert "secret" not in facts
