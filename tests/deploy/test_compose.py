"""The compose files keep the specification's rules, and the ones that sharing needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.deploy.dockerfile_steps import read_steps
from vllm_tide.config import parse_tide
from vllm_tide.patching import VLLM_VERSION
from vllm_tide.speculative import read_json_object

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "scripts" / "deploy"
BASE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OVERLAYS = ("compose.cuda.yaml", "compose.rocm.yaml")
SERVICES: dict[str, dict[str, Any]] = BASE["services"]
UID = next(
    step.text.partition("=")[2]
    for step in read_steps(ROOT / "Dockerfile")
    if step.text.startswith("TIDE_UID=")
)

# Of the compose specification: what these files use of it. An unknown key is an error
# there, so it is one here.
TOP = {"name", "services", "volumes", "configs", "secrets"}
SERVICE = {
    "build", "cap_drop", "command", "configs", "depends_on", "deploy", "devices",
    "entrypoint", "environment", "group_add", "healthcheck", "image", "init", "ipc",
    "network_mode", "pid", "ports", "restart", "secrets", "security_opt", "shm_size",
    "stop_grace_period", "volumes",
}  # fmt: skip


def names(entries: list[Any]) -> set[str]:
    """Named sources of volumes, configs or secrets."""
    found = {
        e["source"] if isinstance(e, dict) else e.partition(":")[0] for e in entries
    }
    return {name for name in found if re.fullmatch(r"[a-z_]+", name)}


@pytest.mark.parametrize("file", ["compose.yaml", *OVERLAYS])
def test_only_keys_of_the_specification(file: str) -> None:
    content = yaml.safe_load((DEPLOY / file).read_text())
    assert {key for key in content if not key.startswith("x-")} <= TOP
    for service in content["services"].values():
        assert set(service) <= SERVICE
        assert set(service.get("build", {})) <= {"context", "target", "args"}
    assert set(content["services"]) <= set(SERVICES)


def test_what_is_named_is_declared_and_no_more() -> None:
    for kind in ("volumes", "configs", "secrets"):
        used = {n for s in SERVICES.values() for n in names(s.get(kind, []))}
        assert used == set(BASE[kind]), kind
    for service in SERVICES.values():
        for other, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert "healthcheck" in SERVICES[other]


def test_targets_and_context_exist() -> None:
    stages = {step.stage for step in read_steps(ROOT / "Dockerfile")}
    for name, service in SERVICES.items():
        assert service["build"]["target"] in stages, name
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        # An image is built the same way wherever it is named.
        assert service["image"] == f"tide-{service['build']['target']}"
        assert f":v{VLLM_VERSION}" in service["build"]["args"]["BASE_IMAGE"]


def test_server_and_trainer_share_namespaces_that_outlive_them() -> None:
    hold, serve, train = (SERVICES[name] for name in ("hold", "serve", "train"))
    for service in (serve, train):
        assert service["ipc"] == service["pid"] == "service:hold"
        assert "run:/run/tide" in service["volumes"]
        # /dev/shm is that of the service whose IPC namespace is joined.
        assert "shm_size" not in service
    assert (hold["ipc"], hold["init"], hold["shm_size"]) == ("shareable", True, "4gb")
    assert f"uid={UID}" in BASE["volumes"]["run"]["driver_opts"]["o"]
    ring = read_json_object(str(DEPLOY / "tide.json"))["tide"]["capture"]["ring_mib"]
    assert ring * 4 <= 4096


def test_nobody_has_more_rights_or_network_than_needed() -> None:
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert "privileged" not in service
        assert "user" not in service  # the image's, which is not root
    assert SERVICES["train"]["network_mode"] == "none"
    assert SERVICES["serve"]["ports"] == ["127.0.0.1:8000:8000"]


def test_admin_token_comes_from_a_file_and_becomes_the_users_own() -> None:
    assert BASE["secrets"]["admin_token"] == {"file": "./admin.token"}
    script = SERVICES["hold"]["entrypoint"][-1]
    assert (
        "install -m 0600 /run/secrets/admin_token /run/tide/run/admin.token" in script
    )
    text = "".join(path.read_text() for path in DEPLOY.glob("*.yaml"))
    assert not re.search(r"(token|secret)\s*[:=]\s*[0-9a-f]{16}", text, re.IGNORECASE)


@pytest.mark.parametrize("file", OVERLAYS)
def test_an_overlay_builds_all_images_on_one_base(file: str) -> None:
    services = yaml.safe_load((DEPLOY / file).read_text())["services"]
    assert set(services) == set(SERVICES)
    bases = {service["build"]["args"]["BASE_IMAGE"] for service in services.values()}
    assert len(bases) == 1
    assert bases.pop().endswith(f":v{VLLM_VERSION}")


@pytest.mark.parametrize("file", OVERLAYS)
def test_lists_of_an_overlay_repeat_nothing(file: str) -> None:
    # Compose joins them, and refuses an item that is there twice.
    for name, service in yaml.safe_load((DEPLOY / file).read_text())[
        "services"
    ].items():
        for key, value in service.items():
            if isinstance(value, list):
                assert not set(value) & set(SERVICES[name].get(key, []))


@pytest.mark.parametrize("file", ["tide.json", "tide-spool.json"])
def test_configurations_are_valid(file: str) -> None:
    config = read_json_object(str(DEPLOY / file))
    tide = parse_tide(config["tide"])
    assert not tide.train.autostart  # the trainer is a container of its own
    assert config["model"].startswith("/models/")
    assert tide.train.state_dir is not None
    assert tide.train.state_dir.startswith("/var/lib/tide/")
