"""The Dockerfile: what it builds on, brings, checks, and whom it runs as."""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.deploy.dockerfile_steps import Step, read_steps, stage_chain
from vllm_tide.cli.trainer import add_arguments
from vllm_tide.patching import VLLM_VERSION

ROOT = Path(__file__).parents[2]
STEPS = read_steps(ROOT / "Dockerfile")
TARGETS = ("serve", "train")


def steps_of(target: str, name: str) -> list[Step]:
    stages = stage_chain(STEPS, target)
    return [step for step in STEPS if step.stage in stages and step.name == name]


def test_base_image_is_the_version_that_the_patches_are_for() -> None:
    first = STEPS[0]
    assert (first.stage, first.name) == ("", "ARG")
    assert first.text == f"BASE_IMAGE=docker.io/vllm/vllm-openai:v{VLLM_VERSION}"
    outside = [s.text.split()[0] for s in STEPS if s.name == "FROM"]
    assert set(outside) == {"${BASE_IMAGE}", "base"}


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_vllms_user_and_report_nothing(target: str) -> None:
    # vLLM's images document user 2000 of group 0, and no user outside of that group.
    assert steps_of(target, "USER")[-1].text == "${TIDE_UID}:0"
    assert "TIDE_UID=2000" in [step.text for step in steps_of(target, "ARG")]
    env = dict(
        pair.split("=", 1) for s in steps_of(target, "ENV") for pair in s.text.split()
    )
    assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert "HF_HUB_OFFLINE" not in env  # `docker run ... Qwen/Qwen3-8B` downloads
    # A user that the image does not know (OpenShift) has neither of them.
    assert (env["HOME"], env["USER"]) == ("/home/vllm", "vllm")
    assert steps_of(target, "WORKDIR")[-1].text == env["HOME"]
    # Below the volume, whose root may be root's: it must be the user's own.
    assert env["TIDE_RUN_DIR"] == "/run/tide/run"


@pytest.mark.parametrize("target", TARGETS)
def test_group_0_may_write_where_something_is_kept(target: str) -> None:
    (made,) = (s.text for s in steps_of(target, "RUN") if "useradd" in s.text)
    folders = made.partition('install -d -o "${TIDE_UID}" -g 0 -m 0770')[2]
    named = folders.partition("&&")[0].split()
    assert {"/run/tide", "/var/lib/tide", "/home/vllm/.cache"} <= set(named)
    assert "chmod -R g=u /home/vllm" in made


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_base_preloads_is_kept(target: str) -> None:
    (env,) = (s.text for s in steps_of(target, "ENV") if "LD_PRELOAD" in s.text)
    assert "LD_PRELOAD=${LD_PRELOAD:-$PRELOAD}" in env.split()
    assert 'PRELOAD=""' in [step.text for step in steps_of(target, "ARG")]


@pytest.mark.parametrize("target", TARGETS)
def test_labels_say_what_the_image_is(target: str) -> None:
    (label,) = steps_of(target, "LABEL")
    named = dict(
        re.findall(r'org\.opencontainers\.image\.([a-z.]+)="([^"]*)"', label.text)
    )
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert named["version"] == config["version"]
    assert named["licenses"] == config["license"]
    assert named["base.name"] == "${BASE_IMAGE}"
    assert named["revision"] == "${REVISION}"
    arguments = {step.text.partition("=")[0] for step in steps_of(target, "ARG")}
    assert {"BASE_IMAGE", "REVISION"} <= arguments  # without them they are empty


@pytest.mark.parametrize("target", TARGETS)
def test_patches_are_applied_and_judged_in_the_layer_that_installs(target: str) -> None:
    installs = [s for s in steps_of(target, "RUN") if "pip install" in s.text]
    assert len(installs) == 1
    commands = [part.strip() for part in installs[0].text.split("&&")]
    assert commands[1:] == [
        "vllm-tide patch apply",
        "vllm-tide patch check",
        "vllm-tide patch status",
    ]
    assert "--no-deps" in commands[0]  # vLLM's image has the dependencies


@pytest.mark.parametrize("target", TARGETS)
def test_the_wheel_of_this_architecture_is_all_that_is_brought(target: str) -> None:
    assert not steps_of(target, "COPY") + steps_of(target, "ADD")
    (install,) = (s for s in steps_of(target, "RUN") if "pip install" in s.text)
    (mount,) = install.flags
    assert mount == "--mount=type=bind,source=dist,target=/wheels"
    # pip chooses among the wheels of both; nothing comes from an index.
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = f"--no-index --find-links=/wheels vllm-tide=={config['version']} "
    assert named in install.text
    how = (ROOT / "Dockerfile").read_text().partition("docker build")[0]
    assert "scripts/wheel.sh dist" in how


def test_health_check_of_the_server_is_a_program() -> None:
    (check,) = steps_of("serve", "HEALTHCHECK")
    python, flag, code = check.words
    assert (python, flag) == ("python3", "-c")
    ast.parse(code)
    assert "'/health'" in code
    assert "os.environ.get('PORT', 8000)" in code
    assert "8000" in [step.text for step in steps_of("serve", "EXPOSE")]


def test_health_check_of_the_trainer_is_a_command_of_ours() -> None:
    (check,) = steps_of("train", "HEALTHCHECK")
    program, *words = check.words
    assert program == "vllm-tide"
    parser = argparse.ArgumentParser()
    add_arguments(parser, "status")
    args = parser.parse_args(words[1:])
    assert args.probe
    patience = next(f for f in check.flags if f.startswith("--timeout="))
    assert args.timeout < int(patience.removeprefix("--timeout=").rstrip("s"))


def test_steps_are_read_with_continuations_comments_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(
        "ARG A=1\nFROM ${A} AS one\nRUN --mount=type=bind,target=/w \\\n"
        "    first \\\n    # said in between\n    && second\nFROM one AS two\nUSER 1\n"
    )
    steps = read_steps(file)
    assert [step.name for step in steps] == ["ARG", "FROM", "RUN", "FROM", "USER"]
    run = steps[2]
    assert (run.text, run.flags) == (
        "first && second",
        ("--mount=type=bind,target=/w",),
    )
    assert (run.stage, run.line) == ("one", 3)
    assert stage_chain(steps, "two") == ["one", "two"]
    file.write_text("FROM a AS b\nnot an instruction\n")
    with pytest.raises(ValueError, match=r"Dockerfile:2: no instruction"):
        read_steps(file)
