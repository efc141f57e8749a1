import asyncio
from types import SimpleNamespace

from bench.harness.trainers import TrainerWatch
from bench.suites import multi
from bench.suites.multi import MultiOptions, before_first_swap, multi_streams
from tests.bench.toys import arm_run, options_for, request, scrape


def test_each_server_has_a_domain_in_four_stretches(tmp_path):
    options = options_for(MultiOptions, "multi", tmp_path, requests=(8, 5))
    streams = multi_streams(options)
    assert list(streams) == ["c", "charmaps"]
    assert [r.segment for r in streams["c"]][::2] == ["0 c", "1 c", "2 c", "3 c"]
    assert len({r.segment for r in streams["charmaps"]}) == 3  # 2 + 2 + 1


def test_the_first_drafts_acceptance_ends_with_the_first_swap():
    samples = [
        scrape(t, drafts=t, accepted=t if t < 5 else 3 * t, swaps=t // 5)
        for t in range(10)
    ]
    assert before_first_swap(samples) == 2.0
    assert before_first_swap([]) is None


def member(domain):
    stream = [request(i, f"{i // 2} {domain}", domain) for i in range(8)]
    server = SimpleNamespace(startup_s=1.0, options=SimpleNamespace(engine_cpus=(0,)))
    return multi._Member(domain, server, stream, TrainerWatch(None), f"id-{domain}", {})


def test_both_streams_are_served_at_once_and_reported(tmp_path, monkeypatch):
    members, running = [member("c"), member("charmaps")], []

    async def fake(server, stream, view, hooks):
        running.append(view.arm)
        while len(running) < 2:
            await asyncio.sleep(0.001)
        made = arm_run("x", stream)
        return made.segments, made.samples

    monkeypatch.setattr(multi, "drive", fake)
    monkeypatch.setattr(multi, "finish", lambda *_: None)
    monkeypatch.setattr(multi, "stop", lambda *_: None)
    problems, sections = [], {}
    session = SimpleNamespace(
        left_s=lambda: 30.0,
        document=SimpleNamespace(
            problem=problems.append, section=lambda name: sections.setdefault(name, {})
        ),
    )
    asyncio.run(multi._serve(session, members, tmp_path))
    for one in members:
        multi._report(session, one)
    assert problems == []
    found = sections["servers"]["c"]
    assert found["acceptance_length_last_part"] == 2.0 and found["engine_id"] == "id-c"
    assert "charmaps" in multi.table(sections["servers"])
