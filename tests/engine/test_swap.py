"""Published drafts are installed between two steps, or refused and counted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import toys
from tests.engine.offline_engine import OfflineEngine, only_manifest
from vllm_tide.draft import delta
from vllm_tide.engine.staging import wire_view
from vllm_tide.transport.record import Phase
from vllm_tide.transport.ring import RingReader
from vllm_tide.transport.weights import WeightsWriter

pytestmark = pytest.mark.vllm

PROMPTS = [list(b"hello world"), list(b"def main(argv):"), list(b"abc abc abc")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = toys.make_target(folder / "target")
    drafts = {
        name: toys.make_draft(folder / name, target, seed=seed)
        for name, seed in (("a", 1), ("b", 2))
    }
    return {"target": target, **drafts}


def case(models: dict[str, Path], draft: str, run_dir: Path, **more: Any) -> dict:
    return {
        "target": str(models["target"]),
        "speculative_config": {
            "method": "eagle3",
            "model": str(models[draft]),
            "num_speculative_tokens": 3,
            # The test is the trainer, and each step drafts.
            "tide": {
                "preset": "learn",
                "run_dir": str(run_dir),
                "capture": {"ring_mib": 16},
                "train": {"autostart": False},
            },
        },
        **more,
    }


def on_wire(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As a trainer publishes them: name to (type, shape, bytes)."""
    return {
        name: (
            str(t.dtype).removeprefix("torch."),
            tuple(t.shape),
            wire_view(t.contiguous()),
        )
        for name, t in tensors.items()
    }


def drafted(reader: RingReader) -> list[list[int]]:
    """Drafted tokens, in order of generation."""
    found = []
    while (record := reader.read()) is not None:
        if record.phase == Phase.VERIFY and record.num_rows > 1:
            found.append(record.token_ids[1:].tolist())
    return found


def settled(engine: OfflineEngine, **work: Any) -> dict[str, Any]:
    """Generate twice: the first steps carry the order, the next ones obey it."""
    time.sleep(0.5)
    engine.work(PROMPTS[:1], params={"max_tokens": 8}, **work)
    time.sleep(0.1)
    return engine.work(PROMPTS[:1], params={"max_tokens": 8}, **work)


def publish(
    writer: WeightsWriter, tensors: dict[str, torch.Tensor], version: int, **meta: Any
) -> None:
    writer.publish(
        on_wire(tensors), version=version, parent_version=version - 1, meta=meta
    )


@pytest.fixture(scope="module")
def from_disk(models, tmp_path_factory) -> tuple[Any, list]:
    """What draft b gives when it is loaded from disk: the same compiled or not."""
    folder = tmp_path_factory.mktemp("b")
    with OfflineEngine(case(models, "b", folder, eager=True)) as engine:
        reader = RingReader.attach(only_manifest(folder).ring)
        report = engine.work(PROMPTS, params={"max_tokens": 16})
        return report["tokens"], drafted(reader)


@pytest.fixture(scope="module")
def serving_a(request, models, tmp_path_factory) -> Iterator[Any]:
    """An engine started with draft a, and its trainer's ends."""
    folder = tmp_path_factory.mktemp("a")
    with OfflineEngine(case(models, "a", folder, eager=request.param)) as engine:
        manifest = only_manifest(folder)
        assert manifest.draft_sample_method == "greedy"  # vLLM's default
        reader = RingReader.attach(manifest.ring)
        yield engine, reader, WeightsWriter.attach(manifest.weights)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("serving_a", [True, False], indirect=True)
def test_a_swapped_draft_drafts_exactly_as_one_loaded_from_disk(
    models, from_disk, serving_a
):
    runs = {"b": from_disk}
    engine, reader, writer = serving_a
    report = engine.work(PROMPTS, params={"max_tokens": 16})
    runs["a"] = (report["tokens"], drafted(reader))
    publish(writer, load_file(models["b"] / "model.safetensors"), 1)
    report = settled(engine)
    assert report["version"] == 1
    assert report["refused"] == {}
    assert report["faults"] == {}
    drafted(reader)
    report = engine.work(PROMPTS, params={"max_tokens": 16})
    runs["swapped"] = (report["tokens"], drafted(reader))
    assert writer.feedback().installed_version == 1
    # And back: the target was not touched by either.
    publish(writer, load_file(models["a"] / "model.safetensors"), 2)
    assert settled(engine)["version"] == 2
    drafted(reader)
    report = engine.work(PROMPTS, params={"max_tokens": 16})
    runs["back"] = (report["tokens"], drafted(reader))
    assert runs["a"][0] == runs["b"][0] == runs["swapped"][0] == runs["back"][0]
    assert runs["a"][1] != runs["b"][1]
    for got, want in (("swapped", "b"), ("back", "a")):
        assert runs[got][1] == runs[want][1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.alone
def test_all_tensor_parallel_ranks_switch_together(models, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    engine_options = {"tensor_parallel_size": 2, "max_num_seqs": 4}
    runs = {}
    for name in ("a", "b"):
        run = case(models, name, tmp_path / name, engine=engine_options)
        with OfflineEngine(run) as engine:
            manifest = only_manifest(tmp_path / name)
            reader = RingReader.attach(manifest.ring)
            if name == "a":
                writer = WeightsWriter.attach(manifest.weights)
                publish(writer, load_file(models["b"] / "model.safetensors"), 1)
                for _ in range(20):
                    settled(engine)
                    if writer.feedback().installed_version == 1:
                        break
                assert writer.feedback().installed_version == 1
                drafted(reader)
            report = engine.work(PROMPTS, params={"max_tokens": 16})
            runs[name] = (report["tokens"], drafted(reader))
    assert runs["a"][0] == runs["b"][0]
    assert runs["a"][1] == runs["b"][1]


@pytest.mark.parametrize("serving_a", [True], indirect=True)
def test_bad_publications_are_refused_and_the_old_draft_keeps_serving(
    models, serving_a
):
    good = load_file(models["b"] / "model.safetensors")

    def broken(**change: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**good, **change}

    nan = good["fc.weight"].clone()
    nan[3, 5] = float("nan")
    bad = [
        ("not_finite", broken(**{"fc.weight": nan})),
        ("shape", broken(**{"fc.weight": good["fc.weight"][:, :-1].clone()})),
        ("norm", broken(**{"fc.weight": good["fc.weight"] * 1e4})),
        ("names", {k: v for k, v in good.items() if k != "norm.weight"}),
        ("names", broken(**{"extra.weight": torch.zeros(2)})),
        ("shared", broken(**{"embed_tokens.weight": torch.zeros(toys.VOCAB, 64)})),
    ]
    engine, reader, writer = serving_a
    first = engine.work(PROMPTS, params={"max_tokens": 12})
    before = drafted(reader)
    start = first["version"]  # a's, whatever was installed in between
    reasons: dict[str, int] = {}
    for version, (reason, tensors) in enumerate(bad, start + 1):
        publish(writer, tensors, version)
        reasons[reason] = reasons.get(reason, 0) + 1
        report = settled(engine)
        assert report["refused"] == reasons
        assert report["version"] == start
        feedback = writer.feedback()
        assert feedback.refused_version == version
        assert feedback.refused_reason == reason
    drafted(reader)
    report = engine.work(PROMPTS, params={"max_tokens": 12})
    assert report["tokens"] == first["tokens"]
    after = drafted(reader)
    assert after == before
    # A good one still gets in after all that.
    publish(writer, good, version + 1)
    assert settled(engine)["version"] == version + 1


@pytest.mark.parametrize("serving_a", [True], indirect=True)
def test_a_change_of_low_rank_drafts_as_the_tensors_that_it_makes(models, serving_a):
    """Of one base, then of another."""
    stored = {name: load_file(models[name] / "model.safetensors") for name in "ab"}
    engine, reader, writer = serving_a
    report = engine.work(PROMPTS, params={"max_tokens": 4})
    version, refused = report["version"], report["refused"]

    def until(true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        end = time.monotonic() + 120
        while not true(report := settled(engine)):
            assert time.monotonic() < end, report
        return report

    def served(tensors: dict[str, torch.Tensor], **meta: Any) -> tuple[list, list]:
        nonlocal version
        version += 1
        publish(writer, tensors, version, **meta)
        report = until(lambda report: report["version"] == version)
        assert report["refused"] == refused
        drafted(reader)
        report = engine.work(PROMPTS, params={"max_tokens": 16})
        assert report["faults"] == {}
        return report["tokens"], drafted(reader)

    def fast(name: str, by: float) -> tuple[dict, dict]:
        base = stored[name]
        more = {n: t.float() for n, t in base.items()}
        more["lm_head.weight"] = by * more["lm_head.weight"].flip(0)
        more["norm.weight"] = more["norm.weight"] * 2
        told = delta.factors({n: t.float() for n, t in base.items()}, more, rank=3)
        marks = {"base": delta.fingerprint(base)}
        return told, {"adaptation": {"base": version}, "delta": marks}

    plain = served(stored["a"])
    for name in "ab":
        if name == "b":
            assert served(stored["b"])[1] != plain[1]
        told, meta = fast(name, 0.5)
        assert set(told) == {"lm_head.weight.u", "lm_head.weight.v", "norm.weight"}
        changed = served(told, **meta)
        whole = served(delta.apply(stored[name], told))
        assert changed[0] == plain[0] and changed == whole != plain
        # A change of what is no base any more.
        before, wrong = version, fast(name, 0.25)
        publish(writer, wrong[0], version + 1, **wrong[1])
        refused["base"] = refused.get("base", 0) + 1
        report = until(lambda report: report["refused"] == refused)
        assert report["version"] == before
        version += 1


@pytest.mark.timeout(600)
def test_the_servers_log_says_what_is_captured_and_what_changes(models, tmp_path):
    """By vLLM's own logger: its handler, its format, its level."""
    log, run_dir = tmp_path / "log", tmp_path / "run"
    started = case(models, "a", run_dir, log=str(log))

    def said(sentence: str) -> None:
        pattern, until = re.compile(f"INFO .*{sentence}"), time.monotonic() + 60
        while not (found := pattern.findall(log.read_text())):
            assert time.monotonic() < until, (sentence, log.read_text()[-4000:])
            time.sleep(0.05)
        assert len(found) == 1, found

    with OfflineEngine(started) as engine:
        said(
            "captures tokens and hidden states of 100% of the requests, of every tenant"
        )
        said("not say tide_capture false and have no cache_salt.*vllm-tide capture off")
        said(f"{run_dir}; policy 'static', up to 3 draft.*no trainer is started")
        manifest = only_manifest(run_dir)
        reader = RingReader.attach(manifest.ring)
        writer = WeightsWriter.attach(manifest.weights)
        weights = load_file(models["b"] / "model.safetensors")

        def serve(version: int) -> None:
            until = time.monotonic() + 60
            while engine.work(PROMPTS, params={"max_tokens": 8})["version"] != version:
                assert time.monotonic() < until
                time.sleep(0.1)

        serve(0)
        publish(writer, weights, 1)
        serve(1)
        said(r"draft 1 is live; pause [\d.]+ ms")
        publish(writer, weights, 2, rollback_of=1, to=0, reason="slower")
        serve(2)
        said(
            r"draft 2 is live, a rollback of 1 to the weights of 0 \('slower'\); pause"
        )
        reader.set_collect(False)
        said("the trainer asks for no rows")
        reader.set_collect(True)
        said("the trainer asks for rows again")
    assert log.read_text().count("is live") == 2
