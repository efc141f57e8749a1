"""The compose files keep the specification's rules, and the ones that sharing needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.dockerfile_steps import read_steps
from vllm_tide.config import parse_tide
from vllm_tide.dashboards import BOARDS
from vllm_tide.patching import VLLM_VERSION
from vllm_tide.speculative import read_json_object

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "scripts" / "deploy"
BASE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OVERLAYS = ("compose.cuda.yaml", "compose.rocm.yaml")
MONITORING = yaml.safe_load((DEPLOY / "compose.monitoring.yaml").read_text())
CONFIG = "kubernetes/base/tide.json"
SERVICES: dict[str, dict[str, Any]] = BASE["services"]
TAG = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
UID = next(
    step.text.partition("=")[2]
    for step in read_steps(ROOT / "Dockerfile")
    if step.text.startswith("TIDE_UID=")
)

# Of the compose specification: what these files use of it. An unknown key is an error
# there, so it is one here.
TOP = {"name", "services", "volumes", "configs", "networks"}
SERVICE = {
    "build", "cap_drop", "command", "configs", "depends_on", "deploy", "devices",
    "entrypoint", "environment", "group_add", "healthcheck", "image", "init", "ipc",
    "network_mode", "networks", "pid", "ports", "restart", "security_opt",
    "shm_size", "stop_grace_period", "volumes",
}  # fmt: skip


def names(entries: list[Any]) -> set[str]:
    """Named sources of volumes or configs."""
    found = {
        e["source"] if isinstance(e, dict) else e.partition(":")[0] for e in entries
    }
    return {name for name in found if re.fullmatch(r"[a-z_]+", name)}


@pytest.mark.parametrize("file", ["compose.yaml", "compose.monitoring.yaml", *OVERLAYS])
def test_only_keys_of_the_specification(file: str) -> None:
    content = yaml.safe_load((DEPLOY / file).read_text())
    assert {key for key in content if not key.startswith("x-")} <= TOP
    for service in content["services"].values():
        assert set(service) <= SERVICE
        assert set(service.get("build", {})) <= {"context", "target", "args"}
    others = {"prometheus", "grafana"} if "monitoring" in file else set()
    assert set(content["services"]) <= set(SERVICES) | others


def test_what_is_named_is_declared_and_no_more() -> None:
    for kind in ("volumes", "configs", "networks"):
        used = {n for s in SERVICES.values() for n in names(s.get(kind, []))}
        assert used - {"default"} == set(BASE[kind]), kind
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
        assert service["image"] == f"localhost/tide-{service['build']['target']}:{TAG}"
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
    ring = read_json_object(str(DEPLOY / CONFIG))["tide"]["capture"]["ring_mib"]
    assert ring * 4 <= 4096


def test_nobody_has_more_rights_or_network_than_needed() -> None:
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert "privileged" not in service
        assert "user" not in service  # the image's, which is not root
    # The trainer can be scraped and reaches nothing outside.
    assert SERVICES["train"]["networks"] == ["inside"]
    assert BASE["networks"] == {"inside": {"internal": True}}
    assert "ports" not in SERVICES["train"]
    assert SERVICES["hold"]["network_mode"] == "none"
    assert SERVICES["serve"]["ports"] == ["127.0.0.1:8000:8000"]


def test_what_is_measured_and_compiled_outlives_the_containers() -> None:
    for name in ("serve", "train"):
        assert "cache:/home/vllm/.cache" in SERVICES[name]["volumes"]


def test_prometheus_scrapes_both_and_grafana_has_the_boards() -> None:
    services = MONITORING["services"]
    config = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]  # one: rules join servers and trainers on it
    (targets,) = (one["targets"] for one in job["static_configs"])
    tide = parse_tide(read_json_object(str(DEPLOY / CONFIG))["tide"])
    assert targets == ["serve:8000", f"train:{tide.train.metrics_port}"]
    assert tide.train.metrics_host == "0.0.0.0"  # of the container
    for name in ("prometheus", "grafana"):
        assert "inside" in services[name]["networks"]
        assert services[name]["cap_drop"] == ["ALL"]
        assert re.fullmatch(r"docker\.io/\S+:v?\d+\.\d+\.\d+", services[name]["image"])
    assert services["grafana"]["ports"] == ["127.0.0.1:3000:3000"]
    mounts = dict(
        mount.removesuffix(":ro").split(":")
        for one in services.values()
        for mount in one["volumes"]
        if mount.startswith(".")
    )
    assert all((DEPLOY / source).exists() for source in mounts)
    inside = {target: source for source, target in mounts.items()}
    assert config["rule_files"] == [t for t in inside if t.endswith("alerts.yml")]
    boards = yaml.safe_load((DEPLOY / "monitoring/boards.yaml").read_text())
    (provider,) = boards["providers"]
    folder = DEPLOY / inside[provider["options"]["path"]]
    assert {path.name for path in folder.glob("*.json")} == set(BOARDS)
    (source,) = yaml.safe_load((DEPLOY / "monitoring/datasource.yaml").read_text())[
        "datasources"
    ]
    assert source["isDefault"] and source["url"] == "http://prometheus:9090"


def test_no_file_holds_a_secret() -> None:
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


@pytest.mark.parametrize("file", OVERLAYS)
def test_on_a_gpu_server_and_trainer_share_it(file: str) -> None:
    content = yaml.safe_load((DEPLOY / file).read_text())
    serve, train = (content["services"][name] for name in ("serve", "train"))
    assert serve == train
    assert "devices" in serve or "deploy" in serve
    section = read_json_object(str(DEPLOY / content["configs"]["tide"]["file"]))["tide"]
    config = parse_tide(section)
    assert config.train.device == "cuda"  # ROCm's too
    assert config.train.gpu_share is not None


@pytest.mark.parametrize(
    "file", [CONFIG, "kubernetes/tide-spool.json", "tide.gpu.json"]
)
def test_configurations_are_valid(file: str) -> None:
    config = read_json_object(str(DEPLOY / file))
    tide = parse_tide(config["tide"])
    assert not tide.train.autostart  # the trainer is a container of its own
    assert config["model"].startswith("/models/")
    assert tide.train.state_dir is not None
    assert tide.train.state_dir.startswith("/var/lib/tide/")
