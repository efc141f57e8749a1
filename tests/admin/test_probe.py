"""`vllm-tide status --probe`: what a container's health check takes for health."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.transport.test_rendezvous import make_manifest
from vllm_tide.cli.main import main
from vllm_tide.transport.admin import AdminSocket
from vllm_tide.transport.rendezvous import write_manifest


def probe(run_dir: Path, *words: str) -> int:
    return main(["status", "--run-dir", str(run_dir), "--timeout", "1", *words])


def leave_socket(run_dir: Path) -> None:
    """What a killed trainer leaves."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(run_dir / "admin-1.sock"))


def test_a_trainer_that_waits_for_an_engine_is_healthy(tmp_path):
    run_dir = tmp_path / "run"
    assert probe(run_dir, "--probe") == 0  # not made yet
    run_dir.mkdir(mode=0o700)
    leave_socket(run_dir)
    assert probe(run_dir, "--probe") == 0
    assert probe(run_dir) == 2  # a person asked: nobody is there


def test_an_engine_without_a_trainer_is_not(tmp_path):
    write_manifest(tmp_path, make_manifest())
    leave_socket(tmp_path)
    assert probe(tmp_path, "--probe") == 2


def test_a_trainer_that_does_not_answer_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    hung = AdminSocket(tmp_path)  # listens, and never polls
    assert probe(tmp_path, "--probe") == 1
    hung.close()
