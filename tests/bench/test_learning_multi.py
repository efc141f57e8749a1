import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

from bench.harness.trainers import Look, TrainerWatch, trainer_process
from bench.suites import multi as multi_suite
from bench.suites.multi import (
    MultiOptions,
    before_first_swap,
    install_lags,
    multi_streams,
    stretch_figures,
)
from tests.bench.learning_toys import arm_run, options_for, request, scrape


def test_each_server_has_a_domain_in_four_stretches(tmp_path):
    options = options_for(MultiOptions, "multi", tmp_path, requests=(8, 5))
    streams = multi_streams(options)
    assert list(streams) == ["c", "charmaps"]
    assert [r.segment for r in streams["c"]][::2] == ["0 c", "1 c", "2 c", "3 c"]
    assert len({r.segment for r in streams["charmaps"]}) == 3  # 2 + 2 + 1


def test_the_first_heads_acceptance_ends_with_the_first_swap():
    samples = [
        scrape(t, drafts=t, accepted=t if t < 5 else 3 * t, swaps=t // 5)
        for t in range(10)
    ]
    assert before_first_swap(samples) == 2.0
    assert before_first_swap([]) is None


def look(t_s, published, installed):
    told = {"published": published, "installed": installed, "refused": 0}
    return Look(t_s, None, {"e": told})


def test_lags_run_from_the_publication_to_the_installation():
    looks = [
        look(0, 0, 0),
        look(1, 1, 0),
        look(3, 1, 1),
        look(4, 2, 1),
        look(5, 3, 1),
        look(9, 3, 3),  # version 2 was overtaken
    ]
    assert install_lags(looks, "e") == [2, 5, 4]
    assert install_lags(looks, "other") == []


def test_a_pause_inside_a_stretch_is_measured():
    rises = [0, 10, 10, 10, 20, 30]
    samples = [scrape(t, generated=g, swaps=t) for t, g in enumerate(rises)]
    found = stretch_figures(samples, 0.5, 4.5)
    assert found == {
        "seconds": 3.0,
        "output_tokens_per_s": 3.33,
        "swaps": 3,
        "longest_pause_s": 2.0,
    }
    assert stretch_figures(samples, 7, 9)["seconds"] is None


def test_the_trainer_gets_the_run_directory_and_its_configuration(tmp_path):
    options = options_for(MultiOptions, "multi", tmp_path)
    python = options.venv / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@" >&2\nexec sleep 60\n')
    python.chmod(0o755)
    run_dir = tmp_path / "run"
    with trainer_process(options, "multi", {"run_dir": "x"}, run_dir) as process:
        log = options.work / "logs" / "multi-trainer.log"
        while not log.read_text():
            assert process.poll() is None
        text = log.read_text()
    assert process.returncode is not None
    assert f"-m vllm_tide train --run-dir {run_dir}" in text
    config = json.loads(Path(text.split("--config ")[1].strip()).read_text())
    assert config == {"tide": {"run_dir": "x"}}


class Stopped:
    """A process that notes when it was stopped and let go."""

    def __init__(self):
        self.calls = []

    def suspend(self):
        self.calls.append("suspend")

    def resume(self):
        self.calls.append("resume")


def member(domain, process=None):
    stream = [request(i, f"{i // 2} {domain}", domain) for i in range(8)]
    server = SimpleNamespace(
        processes=lambda: {"engine": [process]} if process else {},
        startup_s=1.0,
        options=SimpleNamespace(engine_cpus=(0,)),
    )
    watch = TrainerWatch(None)
    return multi_suite._Member(domain, server, stream, watch, f"id-{domain}", {})


def test_the_last_server_is_stopped_in_the_middle_and_let_go(tmp_path, monkeypatch):
    process = Stopped()
    members = [member("c"), member("charmaps", process)]

    async def fake(server, stream, view, hooks):
        for item in stream:
            hooks.on_result(item)
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.6)
        made = arm_run("x", stream)
        return made.segments, made.samples

    monkeypatch.setattr(multi_suite, "drive", fake)
    options = options_for(MultiOptions, "multi", tmp_path, stall_s=0.1)
    problems, sections = [], {}
    session = SimpleNamespace(
        options=options,
        say=lambda _: None,
        left_s=lambda: 30.0,
        document=SimpleNamespace(
            problem=problems.append, section=lambda name: sections.setdefault(name, {})
        ),
    )
    stall = asyncio.run(multi_suite._serve(session, options, members, tmp_path))
    assert process.calls == ["suspend", "resume"] and stall[1] - stall[0] >= 0.1

    monkeypatch.setattr(multi_suite, "finish", lambda *_: None)
    monkeypatch.setattr(multi_suite, "stop", lambda *_: None)
    for item in members:
        multi_suite._report(session, options, item, stall)
    assert problems == []
    found = sections["servers"]["c"]
    assert found["acceptance_length_last_part"] == 2.0
    assert found["install_lag_s"]["heads"] == 0 and found["engine_id"] == "id-c"
    assert "charmaps" in multi_suite.table(sections["servers"])
