"""Credentials of `tide.spool.url`: where a server must not write them."""

from __future__ import annotations

import json
import pickle
import subprocess
from types import SimpleNamespace

import pytest

from vllm_tide.cli import relay as cli_relay
from vllm_tide.config import SpoolConfig, parse_tide, without_credentials
from vllm_tide.engine.arguments import speculative_config_argument
from vllm_tide.engine.trainer_process import TrainerProcess
from vllm_tide.transport.rendezvous import SPOOL_VARIABLE

URL = "s3://me:word@host/bucket?sig=abc"
PLAIN = "s3://host/bucket"


@pytest.mark.parametrize(
    ("text", "public"),
    [
        (URL, PLAIN),
        ("x://token@host/a", "x://host/a"),
        ("x://me:p@s:/w?rd@host/a", "x://host/a"),
        (
            "no x://me:word@host/a today, and x://b/c",
            "no x://host/a today, and x://b/c",
        ),
        ("/srv/spool", "/srv/spool"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("is it running?", "is it running?"),
    ],
)
def test_public_part_of_a_url(text, public):
    assert without_credentials(text) == public


def test_the_command_lines_section_is_printed_without_credentials():
    given = {"method": "eagle3", "model": "x/y", "num_speculative_tokens": 3}
    section = {"spool": {"url": URL}, "control": {"policy": "static"}}
    config = speculative_config_argument(json.dumps({**given, "tide": section}))
    for shown in (repr(config), f"{config}", repr(pickle.loads(pickle.dumps(config)))):
        assert "word" not in shown and "abc" not in shown
        assert PLAIN in shown
    assert config["tide"]["spool"]["url"] == URL
    assert json.loads(json.dumps(config))["tide"] == section
    assert parse_tide(config["tide"]).spool.url == URL
    tide = parse_tide(config["tide"])
    assert "word" not in repr(tide)
    announced = tide.model_dump()["spool"]["url"]  # in a manifest
    assert (type(announced), announced) == (str, PLAIN)


def test_a_relay_gets_credentials_from_its_environment_alone(tmp_path, monkeypatch):
    started = []

    def popen(command, env, **_):
        started.append((command, env))
        return SimpleNamespace(pid=1, poll=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", popen)
    process = TrainerProcess("e1", tmp_path, "0", SpoolConfig(url=URL))
    process._launch(0.0)
    ((command, env),) = started
    assert not any("word" in part for part in command)
    assert env[SPOOL_VARIABLE] == URL
    monkeypatch.setenv(SPOOL_VARIABLE, URL)
    monkeypatch.setattr(cli_relay, "_prepare", lambda _config: None)
    manifest = SimpleNamespace(engine_id="e1", tide={"spool": {"url": PLAIN}})
    monkeypatch.setattr(cli_relay, "_find", lambda *_, **__: manifest)
    urls = []
    monkeypatch.setattr(cli_relay, "Store", lambda url: SimpleNamespace(url=url))

    class Relay:
        def __init__(self, _manifest, _run_dir, store, _config):
            urls.append(store.url)

        def stop(self): ...

        def run(self):
            return "stopped"

    monkeypatch.setattr(cli_relay, "Relay", Relay)
    assert cli_relay.run(_all_bytes(tmp_path)) == 0
    assert cli_relay.run(_all_bytes(tmp_path, spool="/else")) == 0
    assert urls == [URL, "/else"]


def _all_bytes(run_dir, spool=None):
    return SimpleNamespace(run_dir=run_dir, spool=spool, engine=None, wait=False)
