"""A relay that must end, must wait for its spool, or was taken for dead."""

import argparse
import subprocess
import sys
import time

import pytest

from tests.transport.samples import body_of, make_record, make_spec
from tests.transport.spool_toys import CONFIG, ToyEngine
from vllm_tide.cli import relay as cli_relay
from vllm_tide.transport import TransportError, spool_writer
from vllm_tide.transport.process import Holder, pid_namespace, start_time
from vllm_tide.transport.purge import live_keepers
from vllm_tide.transport.ring import Word
from vllm_tide.transport.spool import EngineFolder, EngineState
from vllm_tide.transport.spool_shard import SpoolReader
from vllm_tide.transport.spool_store import StoreError, open_store
from vllm_tide.transport.spool_writer import SpoolWriter
from vllm_tide.transport.weights import _Word

SPEC = make_spec()


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "spool"))


@pytest.fixture
def engine(tmp_path):
    made = ToyEngine(tmp_path / "e1")
    yield made
    made.close()


def seeds_in(store):
    """Seeds of the records of each shard."""
    reader = SpoolReader(EngineFolder(store, "e1"), SPEC)
    found = {}
    for _ in range(50):
        shard = reader.fetch(EngineState(last_shard=9))
        if shard is not None:
            found[shard.number] = [r.draft_version for r in shard.records]
    return found


def writer_of(store, seeds=()):
    writer = SpoolWriter(EngineFolder(store, "e1"), CONFIG)
    for seed in seeds:
        writer.add(body_of(make_record(SPEC, seed)))
    return writer


# Its end


def test_an_engine_that_goes_on_serving_does_not_keep_a_relay_from_ending(
    store, engine
):
    relay = engine.relay(store)
    flush, seeds = relay._writer.flush, iter(range(100))

    def busy():
        engine.serve([next(seeds)])  # the ring is never empty when a drain begins
        return flush()

    relay._writer.flush = busy
    engine.serve([next(seeds)])
    relay.stop()
    assert relay.run() == "stopped"
    assert next(seeds) < 5
    state = EngineFolder(store, "e1").read_state()
    assert not state.running
    assert seeds_in(store)[state.last_shard][0] == 0


def test_the_last_word_is_said_although_the_rows_cannot_be_written(
    store, engine, monkeypatch
):
    relay = engine.relay(store)
    engine.serve([1])
    write = store.write

    def full(name, *parts, durable=True):
        if "records" in name:
            raise StoreError("no space left")
        write(name, *parts, durable=durable)

    monkeypatch.setattr(store, "write", full)
    relay.stop()
    relay.run()
    assert not EngineFolder(store, "e1").read_state().running


# Its start


@pytest.fixture
def pauses(monkeypatch):
    """What the command sleeps; the seventh sleep calls what `mend` holds."""
    slept, mend = [], []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 7:
            mend.pop()()

    monkeypatch.setattr(cli_relay.time, "sleep", sleep)
    return slept, mend


@pytest.mark.parametrize("call", ["open", "write"])
def test_a_spool_out_of_reach_is_tried_again_while_the_engine_lives(
    engine, tmp_path, monkeypatch, pauses, caplog, call
):
    slept, mend = pauses
    down = ["is not mounted"]

    def opened(url):
        store = open_store(url)
        if down and call == "open":
            raise StoreError(f"{url} {down[0]} {len(slept) // 4}")
        write = store.write

        def written(*args, **kwargs):
            if down:
                raise StoreError(f"{url} {down[0]} {len(slept) // 4}")
            write(*args, **kwargs)

        store.write = written
        return store

    monkeypatch.setattr(cli_relay, "open_store", opened)
    seen = []

    def mended():
        down.clear()
        seen.append(live_keepers(engine.run_dir))

    mend.append(mended)
    url = str(tmp_path / "spool")
    relay = cli_relay._connect(engine.manifest, engine.run_dir, url, CONFIG)
    assert slept == [1, 2, 4, 8, 16, 30, 30]
    assert sum("is not mounted" in r.message for r in caplog.records) == 2
    # The ring may hold rows meanwhile: a purge waits for this process.
    assert {keeper.kind for keeper in seen[0]} == {"relay"}
    engine.serve([1])
    relay.tick()
    relay.stop()
    assert relay.run() == "stopped"
    assert seeds_in(open_store(url)) == {1: [1]}


def test_a_spool_out_of_reach_is_given_up_when_the_engine_is_gone(
    engine, tmp_path, monkeypatch, pauses
):
    monkeypatch.setattr(cli_relay, "_prepare", lambda _config: None)
    slept, mend = pauses
    (tmp_path / "file").write_text("")
    mend.append(lambda: (engine.run_dir / "engine-e1.json").unlink())
    parser = argparse.ArgumentParser()
    cli_relay.add_arguments(parser)
    told = ["--run-dir", str(engine.run_dir), "--spool", str(tmp_path / "file")]
    assert cli_relay.run(parser.parse_args(told)) == 0
    assert slept == [1, 2, 4, 8, 16, 30, 30]
    assert live_keepers(engine.run_dir) == set()


def test_what_no_time_mends_is_refused_at_once(engine, store, tmp_path, pauses):
    slept, _ = pauses
    with pytest.raises(TransportError, match="Protocol not known"):
        cli_relay._connect(engine.manifest, engine.run_dir, "nosuch://x", CONFIG)
    relay = engine.relay(store)
    with pytest.raises(TransportError, match="already the trainer"):
        cli_relay._connect(engine.manifest, engine.run_dir, store.url, CONFIG)
    relay.close()
    assert slept == []


# Another in its place


@pytest.fixture
def other():
    """Another live process, as the holder of a claim."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield Holder(child.pid, start_time(child.pid), pid_namespace())
    child.kill()
    child.wait()
    child.stdin.close()


def take_over(engine, holder):
    """Another process takes the relay's claims, as after 10 s without a word."""
    for segment, word in (
        (engine.ring._segment, Word.CONSUMER),
        (engine.weights._segment, _Word.WRITER),
    ):
        segment.store(word, holder.word)
        segment.store(word + 1, holder.namespace)
        segment.store(word + 2, time.monotonic_ns())


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_a_relay_that_lost_its_claim_writes_nothing_more(
    store, engine, other, monkeypatch, asked
):
    monkeypatch.setattr(spool_writer, "SHARD_SECONDS", 1e9)
    relay = engine.relay(store)
    engine.serve([1, 2])
    relay.tick()
    said = EngineFolder(store, "e1").read_state()
    take_over(engine, other)
    writer_of(store, [5]).flush()  # the other one's shard has the number that is next
    if asked:  # SIGTERM came while it hung
        relay.stop()
        relay.run()
    else:
        with pytest.raises(TransportError, match="already the trainer"):
            relay.run()
    assert seeds_in(store) == {1: [5]}
    assert EngineFolder(store, "e1").read_state() == said
    # The other one's claims stand.
    assert engine.ring._segment.load(Word.CONSUMER) == other.word
    assert engine.weights._segment.load(_Word.WRITER) == other.word


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_shard_never_takes_the_number_of_another_relays(store, monkeypatch, when):
    late = writer_of(store, [1])
    write, hung = store.write, []

    def hangs(name, *parts, durable=True):
        if name.endswith(".safetensors") and not hung:
            hung.append(name)
            with monkeypatch.context() as later:
                later.setattr(spool_writer, "steady_unix", lambda: 2e9)
                writer_of(store, [5]).flush()
        write(name, *parts, durable=durable)

    if when == "before":
        writer_of(store, [5]).flush()
    else:
        monkeypatch.setattr(store, "write", hangs)
    with pytest.raises(TransportError, match="another relay's"):
        late.flush()
    assert seeds_in(store) == {1: [5]}
    assert late.blocked
    assert late.flush() == 2  # its records are not lost
    assert seeds_in(store) == {1: [5], 2: [1]}
    assert len(store.sizes("engines/e1/records")) == 4  # and nothing is left over


def test_a_manifest_that_was_written_although_the_storage_failed_is_its_own(
    store, monkeypatch
):
    writer = writer_of(store, [1])
    write = store.write

    def late(name, *parts, durable=True):
        write(name, *parts, durable=durable)
        if name.endswith(".json"):
            raise StoreError("timed out")

    monkeypatch.setattr(store, "write", late)
    with pytest.raises(StoreError):
        writer.flush()
    monkeypatch.undo()
    assert writer.flush() == 1
    assert seeds_in(store) == {1: [1]}
