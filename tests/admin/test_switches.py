"""Where `capture off` and `pause` are stored, and what they outlive."""

from __future__ import annotations

import os
import shutil
import threading
import time
from types import SimpleNamespace

import pytest

from tests.transport.samples import make_manifest, make_spec
from vllm_tide.capture import switch
from vllm_tide.capture.recorder import Recorder
from vllm_tide.capture.switch import PAUSED, Switch, Switches, watch_capture_switch
from vllm_tide.cli import trainer
from vllm_tide.cli.main import main
from vllm_tide.config import CaptureConfig
from vllm_tide.transport import RingReader, RingWriter
from vllm_tide.transport.admin import AdminSocket
from vllm_tide.transport.rendezvous import durable_folder, write_manifest
from vllm_tide.transport.ring import Collect


@pytest.fixture
def recorder():
    """Return an engine's recorder; a trainer reads its ring and requests all rows."""
    ring = RingWriter.create(make_spec(), 1 << 16)
    reader = RingReader.attach(ring.name)
    reader.set_collect(Collect.FULL)
    yield Recorder(ring, CaptureConfig())
    reader.close()
    ring.close()


@pytest.fixture(params=[False, True], ids=["home", "state_dir"])
def state(request, tmp_path, monkeypatch):
    """Return `tide.train.state_dir` as arguments; none for the user's directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(switch, "POLL_S", 0.02)
    return [str(tmp_path / "kept")] if request.param else []


def announce(run_dir, state):
    train = {"state_dir": state[0]} if state else {}
    write_manifest(run_dir, make_manifest(tide={"train": train}))


def switch_off(name, run_dir, state):
    if name == "capture":
        assert main(["capture", "off", "--run-dir", str(run_dir)]) == 0
    else:  # as a trainer does
        assert Switch(run_dir, PAUSED, *state).set(True) == ""


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["capture", "pause"])
def test_a_switch_outlives_a_reboot_and_a_moved_pod(recorder, tmp_path, state, name):
    """Their run directory is a tmpfs: it is empty afterwards."""
    run_dir = tmp_path / "run"
    announce(run_dir, state)
    switch_off(name, run_dir, state)
    shutil.rmtree(run_dir)
    announce(run_dir, state)
    watch_capture_switch(recorder, run_dir, *state).set()
    assert recorder.collect_mode is Collect.NOTHING
    assert Switch(run_dir, PAUSED, *state).on == (name == "pause")
    assert main(["capture", "on", "--run-dir", str(run_dir)]) == 0
    Switch(run_dir, PAUSED, *state).set(False)
    watch_capture_switch(recorder, run_dir, *state).set()
    assert recorder.collect_mode is Collect.FULL


@pytest.mark.parametrize("name", ["capture", "pause"])
def test_commands_wait_until_engines_capture_again(
    recorder, tmp_path, state, name, monkeypatch, capsys
):
    waits, expected = [], [Collect.FULL]

    def sleep(seconds):
        waits.append(seconds)
        until(lambda: recorder.collect_mode is expected[0])

    monkeypatch.setattr(trainer, "time", SimpleNamespace(sleep=sleep))
    run_dir = tmp_path / "run"
    announce(run_dir, state)
    switch_off(name, run_dir, state)
    closing = watch_capture_switch(recorder, run_dir, *state)
    assert recorder.collect_mode is Collect.NOTHING
    where = ["--run-dir", str(run_dir)]
    command = ["capture", "on"] if name == "capture" else ["resume"]
    assert main([*command, *where]) == 0
    assert recorder.collect_mode is Collect.FULL
    expected[0] = Collect.NOTHING
    assert main(["capture", "off", *where]) == 0
    capsys.readouterr()
    assert main(["resume", *where]) == 0
    assert "capture is off" in capsys.readouterr().out
    assert set(waits) == {2 * switch.POLL_S}
    closing.set()


def test_an_engine_that_never_captures_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(switch, "POLL_S", 0.0)
    where = ["--run-dir", str(tmp_path / "run")]
    assert main(["purge", "--all", *where, "--timeout", "0.1"]) == 1
    assert "no engine, trainer or relay runs in" in capsys.readouterr().err
    manifest = make_manifest(tide={"capture": {"enabled": False}}, ring="")
    write_manifest(tmp_path / "run", manifest)
    assert main(["purge", "--all", *where, "--timeout", "0.1"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert main(["capture", "on", *where]) == 0
    output = capsys.readouterr().out
    assert "1 configured to capture nothing" in output and "follow" not in output


@pytest.mark.parametrize("end", ["stopped", "reboot"])
@pytest.mark.parametrize("name", ["capture", "pause"])
def test_a_switch_is_undone_without_an_engine(tmp_path, state, name, end):
    """The command finds `tide.train.state_dir` in the file, or it is an option."""
    run_dir = tmp_path / "run"
    announce(run_dir, state)
    off, on = {"capture": (["off"], ["on"]), "pause": ([], [])}[name]
    command = [name, "--run-dir", str(run_dir)]
    assert main([*command, *off]) == 0
    if end == "reboot":
        shutil.rmtree(run_dir)
        run_dir.mkdir(mode=0o700)
    else:
        for manifest in run_dir.glob("engine-*.json"):
            manifest.unlink()
    folders = switch.switch_folders(run_dir, *state)
    assert switch.switches_on(folders)
    command[0] = {"capture": "capture", "pause": "resume"}[name]
    options = ["--state-dir", *state] if state and end == "reboot" else []
    assert main([*command, *options, *on]) == 1  # done; no engine follows
    assert not switch.switches_on(folders)


def test_a_relative_state_directory_is_recorded_as_absolute(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    command = ["--run-dir", str(run_dir)]
    assert main(["pause", *command, "--state-dir", "state"]) == 1  # no engine
    monkeypatch.chdir("/")
    assert main(["resume", *command]) == 1
    state_dir = str(tmp_path / "state")
    assert not switch.switches_on(switch.switch_folders(run_dir, state_dir))


def test_a_pause_that_would_not_last_is_no_success(tmp_path, state, capsys):
    run_dir, asked = tmp_path / "run", []
    announce(run_dir, state)
    trainer = AdminSocket("trainer", run_dir)
    answer = {"ok": True, "paused": True, "was_paused": False}

    def answer_with(**more):
        done = threading.Event()

        def poll():
            while not done.is_set():
                trainer.poll(lambda request: asked.append(request) or answer | more)
                time.sleep(0.01)

        thread = threading.Thread(target=poll)
        thread.start()
        try:
            return main(["pause", "--run-dir", str(run_dir)])
        finally:
            done.set()
            thread.join()

    assert answer_with() == 0
    assert answer_with(note="the file cannot be changed") == 1
    assert "paused; the file cannot be changed" in capsys.readouterr().out
    assert len(asked) == 2
    trainer.close()


def test_a_restored_switch_is_undone_without_an_engine(tmp_path, state):
    run_dir = tmp_path / "run"
    announce(run_dir, state)
    assert main(["pause", "--run-dir", str(run_dir)]) == 0
    switches = Switches(run_dir, *state)  # of the engine, which runs on
    os.rename(run_dir, tmp_path / "moved")
    run_dir.mkdir(mode=0o700)
    assert switches.read() == [PAUSED]
    switches.close()
    assert main(["resume", "--run-dir", str(run_dir)]) == 1  # done; no engine follows
    assert not switch.switches_on(switch.switch_folders(run_dir, *state))


DAMAGED = ["", "{}", "[1]", '{"folders": 1}', '{"folders": [1]}', "[" * 60_000]
DAMAGED += ['{"folders": ["/a\\u0000b"]}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_switch_file_of_another_version_is_a_switch(tmp_path, text):
    (tmp_path / PAUSED).write_text(text)
    paused = Switch(tmp_path, PAUSED, str(tmp_path / "kept"))
    assert paused.on
    assert paused.set(False) == "" and not (tmp_path / PAUSED).exists()


@pytest.mark.parametrize("name", ["capture_off.json", "paused.json"])
def test_a_directory_that_vanishes_while_a_switch_is_on_stays_off(
    recorder, tmp_path, state, name
):
    """Also where the switch is stored nowhere else, as by an older version.

    The engine itself makes the directory again.
    """
    run_dir = tmp_path / "run"
    announce(run_dir, state)
    (run_dir / name).write_text("{}")
    ended = watch_capture_switch(recorder, run_dir, *state)
    try:
        for _ in range(2):
            shutil.rmtree(run_dir)
            time.sleep(0.1)
            assert recorder.off
            announce(run_dir, state)
            until((run_dir / name).exists)  # for engines that start there, and for `on`
            assert recorder.off
        for each in ("capture_off.json", "paused.json"):
            assert Switch(run_dir, each, *state).set(False) == ""
        until(lambda: not recorder.off)
        shutil.rmtree(run_dir)
        time.sleep(0.1)
        assert not recorder.off
    finally:
        ended.set()


def test_switches_of_two_run_directories_are_two(recorder, tmp_path, state):
    for name in ("one", "two"):
        announce(tmp_path / name, state)
    switch_off("capture", tmp_path / "one", state)
    watch_capture_switch(recorder, tmp_path / "two", *state).set()
    assert not recorder.off


def test_a_switch_that_may_not_outlive_a_reboot_is_reported(tmp_path, state, capsys):
    run_dir = tmp_path / "run"
    announce(run_dir, state)
    folder = tmp_path / ("kept" if state else "home")
    folder.touch()  # no directory
    switch_off("capture", run_dir, state)
    captured = capsys.readouterr()
    assert "capture is off" in captured.out
    assert "not after a reboot" in captured.err
    assert "tide.train.state_dir" in captured.err and str(folder) in captured.err


def test_a_persistent_switch_is_not_reported_as_temporary(tmp_path, state, capsys):
    run_dir = tmp_path / "run"
    announce(run_dir, state)
    switch_off("capture", run_dir, state)
    (copy,) = tmp_path.glob("[hk]*/**/capture_off.json")
    copy.unlink()
    copy.mkdir()
    assert main(["capture", "on", "--run-dir", str(run_dir)]) == 2
    captured = capsys.readouterr()
    assert "capture is on" not in captured.out and str(copy) in captured.err


def test_a_pause_and_its_end_need_no_trainer(recorder, tmp_path, state, capsys):
    """Else a pause that outlived its trainer could not be ended."""
    run_dir = tmp_path / "run"
    where = ["--run-dir", str(run_dir)]
    assert main(["pause", *where]) == 1 and not run_dir.exists()
    announce(run_dir, state)
    assert main(["pause", *where]) == 0
    assert "paused (no trainer is running)" in capsys.readouterr().out
    assert Switch(run_dir, PAUSED, *state).on
    watch_capture_switch(recorder, run_dir, *state).set()
    assert recorder.off
    assert main(["resume", *where]) == 0
    assert "resumed (no trainer is running)" in capsys.readouterr().out
    watch_capture_switch(recorder, run_dir, *state).set()
    assert not recorder.off


def test_a_trainer_without_its_socket_is_not_ignored(tmp_path, state, capsys):
    """It follows the files as soon as it can; until then the command reports it."""
    run_dir = tmp_path / "run"
    announce(run_dir, state)
    trainer = AdminSocket("trainer", durable_folder(run_dir, *state or [None]))
    assert main(["pause", "--run-dir", str(run_dir)]) == 1
    assert f"paused (trainer {os.getpid()} does not answer" in capsys.readouterr().out
    assert Switch(run_dir, PAUSED, *state).on
    assert main(["rollback", "--run-dir", str(run_dir)]) == 1
    assert "nothing was rolled back" in capsys.readouterr().err
    # Nor one that has just lost its run directory.
    shutil.rmtree(run_dir)
    announce(run_dir, state)
    assert main(["pause", "--run-dir", str(run_dir)]) == 1
    trainer.close()
    assert main(["pause", "--run-dir", str(run_dir)]) == 0
    # Nor one that has only claimed a ring.
    ring = RingWriter.create(make_spec(), 1 << 16)
    write_manifest(run_dir, make_manifest("e2", ring=ring.name))
    reader = RingReader.attach(ring.name)
    assert main(["pause", "--run-dir", str(run_dir)]) == 1
    reader.close()
    assert main(["pause", "--run-dir", str(run_dir)]) == 0
    ring.close()


def test_a_trainer_follows_the_files_but_not_their_loss(tmp_path, monkeypatch):
    """A pause holds if its files could not be written, or vanish with their folders."""
    run_dir, state = tmp_path / "run", str(tmp_path / "state")
    run_dir.mkdir(0o700)
    ours, switches = Switch(run_dir, PAUSED, state), Switches(run_dir, state)
    Switch(run_dir, PAUSED, state).set(True)  # by a command
    assert ours.follow(switches) and ours.on
    shutil.rmtree(run_dir)
    shutil.rmtree(state)
    assert not ours.follow(switches) and ours.on
    run_dir.mkdir(0o700)
    assert not ours.follow(switches) and ours.on
    Switch(run_dir, PAUSED, state).set(False)
    assert ours.follow(switches) and not ours.on

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_tide.capture.switch.write_private", full)
    assert "No space left" in ours.set(True)
    assert not ours.follow(switches) and ours.on
    switches.close()
