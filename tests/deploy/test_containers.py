"""Dockerfile, compose and Kubernetes files: references resolve, few privileges."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_tide.cli import train
from vllm_tide.cli import trainer as commands
from vllm_tide.config import TideConfig, parse_tide
from vllm_tide.patching import VLLM_VERSION
from vllm_tide.speculative import read_json_object

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "scripts" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TARGETS = ("serve", "train")
IMAGES = [f"registry.example.com/tide-{name}:{VERSION}" for name in TARGETS]


def tide_of(file: str) -> TideConfig:
    return parse_tide(read_json_object(str(DEPLOY / file))["tide"])


def parsed(module: Any, argv: list[str], *name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser, *name)
    return parser.parse_args(argv[1:])


def assert_trainer_probe(argv: list[str], patience: float) -> None:
    assert argv[0] == "vllm-tide"
    args = parsed(commands, argv[1:], "status")
    assert args.probe and args.timeout < patience


# --------------------------------------------------------------------- Dockerfile


@dataclass(frozen=True)
class Step:
    """One instruction; `flags` are its leading options, such as `--mount=...`."""

    stage: str
    name: str
    flags: tuple[str, ...]
    text: str

    @property
    def argv(self) -> list[str]:
        """Arguments of an exec form, after CMD."""
        return json.loads(self.text.removeprefix("CMD "))


def read_steps(dockerfile: Path) -> list[Step]:
    """Return steps in order, without comments and empty lines."""
    lines = map(str.strip, dockerfile.read_text().splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    steps, stage = [], ""
    for line in re.sub(r"\s*\\\n", " ", text).splitlines():
        name, value = line.split(maxsplit=1)
        flags = re.match(r"(--[a-z-]+=\S+\s+)*", value)[0]
        value = value.removeprefix(flags)
        stage = value.split()[-1] if name == "FROM" else stage
        steps.append(Step(stage, name, tuple(flags.split()), value))
    return steps


STEPS = read_steps(ROOT / "Dockerfile")
UID = next(s.text.partition("=")[2] for s in STEPS if s.text.startswith("TIDE_UID="))


def steps_of(target: str, name: str) -> list[Step]:
    """Return the steps of a kind in the stages that a target is built from."""
    parents = {s.stage: s.text.split()[0] for s in STEPS if s.name == "FROM"}
    chain = [target]
    while (parent := parents[chain[0]]) in parents:
        chain.insert(0, parent)
    return [step for step in STEPS if step.stage in chain and step.name == name]


def test_the_base_image_has_the_version_of_the_patches() -> None:
    first = STEPS[0]
    assert (first.stage, first.name) == ("", "ARG")
    assert first.text == f"BASE_IMAGE=docker.io/vllm/vllm-openai:v{VLLM_VERSION}"
    outside = [s.text.split()[0] for s in STEPS if s.name == "FROM"]
    assert set(outside) == {"${BASE_IMAGE}", "base"}


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_as_vllms_user_and_report_nothing(target: str) -> None:
    # vLLM's images document user 2000 of group 0, and no user outside of that group.
    assert UID == "2000" and steps_of(target, "USER")[-1].text == "${TIDE_UID}:0"
    env = dict(
        pair.split("=", 1) for s in steps_of(target, "ENV") for pair in s.text.split()
    )
    assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert "HF_HUB_OFFLINE" not in env  # `docker run ... Qwen/Qwen3-8B` downloads
    # A user outside of the image's (OpenShift) has neither of them.
    assert (env["HOME"], env["USER"]) == ("/home/vllm", "vllm")
    assert steps_of(target, "WORKDIR")[-1].text == env["HOME"]
    # Below the volume, which may have root as owner: the folder must be the user's.
    assert env["TIDE_RUN_DIR"] == "/run/tide/run"
    assert env["LD_PRELOAD"] == "${LD_PRELOAD:-$PRELOAD}"  # preloads of a base image
    # Group 0 may write to persistent folders.
    (made,) = (s.text for s in steps_of(target, "RUN") if "useradd" in s.text)
    folders = made.partition('install -d -o "${TIDE_UID}" -g 0 -m 0770')[2]
    named = folders.partition("&&")[0].split()
    assert {"/run/tide", "/var/lib/tide", "/home/vllm/.cache"} <= set(named)
    assert "chmod -R g=u /home/vllm" in made


@pytest.mark.parametrize("target", TARGETS)
def test_one_layer_installs_the_wheel_and_applies_and_checks_the_patches(
    target: str,
) -> None:
    assert not steps_of(target, "COPY") + steps_of(target, "ADD")
    (install,) = (s for s in steps_of(target, "RUN") if "pip install" in s.text)
    assert install.flags == ("--mount=type=bind,source=dist,target=/wheels",)
    pip, *commands = [part.strip() for part in install.text.split("&&")]
    # pip chooses among the wheels of both architectures; none comes from an index.
    assert f"--no-index --find-links=/wheels vllm-tide=={VERSION}" in pip
    assert "--no-deps" in pip  # vLLM's image has the dependencies
    assert commands == [f"vllm-tide patch {do}" for do in ("apply", "check", "status")]


def test_health_checks_are_programs() -> None:
    (check,) = steps_of("serve", "HEALTHCHECK")
    python, flag, code = check.argv
    assert (python, flag) == ("python3", "-c")
    ast.parse(code)
    assert "'/health'" in code and "os.environ.get('PORT', 8000)" in code
    assert "8000" in [step.text for step in steps_of("serve", "EXPOSE")]
    (check,) = steps_of("train", "HEALTHCHECK")
    patience = next(f for f in check.flags if f.startswith("--timeout="))
    assert_trainer_probe(
        check.argv, float(patience.removeprefix("--timeout=").rstrip("s"))
    )


# ------------------------------------------------------------------------ compose

BASE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = BASE["services"]
CONFIG = "kubernetes/base/tide.json"


def test_compose_builds_existing_stages_and_unique_images() -> None:
    stages = {step.stage for step in STEPS}
    for name, service in SERVICES.items():
        assert service["build"]["target"] in stages, name
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert service["image"] == (
            f"localhost/tide-{service['build']['target']}:{VERSION}"
        )
        assert f":v{VLLM_VERSION}" in service["build"]["args"]["BASE_IMAGE"]


def test_server_and_trainer_share_namespaces_that_outlive_them() -> None:
    hold, serve, train = (SERVICES[name] for name in ("hold", "serve", "train"))
    for service in (serve, train):
        assert service["ipc"] == service["pid"] == "service:hold"
        assert {"run:/run/tide", "cache:/home/vllm/.cache"} <= set(service["volumes"])
        # /dev/shm belongs to the service with the joined IPC namespace.
        assert "shm_size" not in service
    assert (hold["ipc"], hold["init"], hold["shm_size"]) == ("shareable", True, "16gb")
    assert f"uid={UID}" in BASE["volumes"]["run"]["driver_opts"]["o"]
    assert tide_of(CONFIG).capture.ring_mib * 4 <= 16384


def test_no_service_has_more_privileges_or_network_than_needed() -> None:
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert "privileged" not in service
        assert "user" not in service  # the image's, which is not root
    # The trainer can be scraped and connects to nothing outside.
    assert SERVICES["train"]["networks"] == ["inside"]
    assert BASE["networks"] == {"inside": {"internal": True}}
    assert "ports" not in SERVICES["train"]
    assert SERVICES["hold"]["network_mode"] == "none"
    assert SERVICES["serve"]["ports"] == ["127.0.0.1:8000:8000"]


def test_prometheus_scrapes_both_and_every_mount_exists() -> None:
    content = yaml.safe_load((DEPLOY / "compose.monitoring.yaml").read_text())
    services = content["services"]
    config = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]  # one: rules join servers and trainers on it
    (targets,) = (one["targets"] for one in job["static_configs"])
    tide = tide_of(CONFIG)
    assert targets == ["serve:8000", f"train:{tide.train.metrics_port}"]
    assert tide.train.metrics_host == "0.0.0.0"  # of the container
    for name in ("prometheus", "grafana"):
        assert "inside" in services[name]["networks"]
        assert services[name]["cap_drop"] == ["ALL"]
    assert services["grafana"]["ports"] == ["127.0.0.1:3000:3000"]
    mounts = [m.split(":") for one in services.values() for m in one["volumes"]]
    assert all((DEPLOY / m[0]).exists() for m in mounts if m[0].startswith("."))
    assert set(config["rule_files"]) <= {m[1] for m in mounts}


@pytest.mark.parametrize("file", ["compose.cuda.yaml", "compose.rocm.yaml"])
def test_an_overlay_has_one_base_and_server_and_trainer_share_the_gpu(
    file: str,
) -> None:
    content = yaml.safe_load((DEPLOY / file).read_text())
    services = content["services"]
    assert set(services) == set(SERVICES)
    (base,) = {service["build"]["args"]["BASE_IMAGE"] for service in services.values()}
    assert base.endswith(f":v{VLLM_VERSION}")
    for name, service in services.items():
        for key, value in service.items():
            if isinstance(value, list):  # Compose refuses a duplicate item
                assert not set(value) & set(SERVICES[name].get(key, []))
    assert services["serve"] == services["train"]
    assert "devices" in services["serve"] or "deploy" in services["serve"]
    config = tide_of(content["configs"]["tide"]["file"])
    assert config.train.device == "cuda"  # ROCm's too
    assert config.train.gpu_share is not None


@pytest.mark.parametrize(
    "file", [CONFIG, "kubernetes/tide-spool.json", "tide.gpu.json"]
)
def test_configurations_are_valid(file: str) -> None:
    tide = tide_of(file)
    assert not tide.train.autostart  # the trainer is a separate container
    model = read_json_object(str(DEPLOY / file))["model"]
    assert model.startswith("/models/")
    assert tide.train.state_dir is not None
    assert tide.train.state_dir.startswith("/var/lib/tide/")


def test_the_gpu_example_has_its_state_where_the_images_have_it() -> None:
    text = files("vllm_tide.examples").joinpath("gpu.json").read_text("utf-8")
    assert '"state_dir": "/var/lib/tide/heads"' in text
    for file in ("README.md", "scripts/deploy/README.md"):
        commands = (ROOT / file).read_text("utf-8").split("docker run ")[1:]
        assert any(
            "-v state:/var/lib/tide" in text.split("```")[0] for text in commands
        )


# --------------------------------------------------------------------- Kubernetes

ONE_POD = list(yaml.safe_load_all((KUBERNETES / "base" / "pod.yaml").read_text()))
TWO_HOSTS = list(yaml.safe_load_all((KUBERNETES / "two-hosts.yaml").read_text()))


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        doc["metadata"]["name"]: doc["spec"]["template"]["spec"]
        for doc in documents
        if doc["kind"] == "Deployment"
    }


(POD,) = pods(ONE_POD).values()
ALL_PODS = [POD, *pods(TWO_HOSTS).values()]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def named(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in containers(pod) if item["name"] == name)


def volume_of(pod: dict[str, Any], name: str, folder: str | Path) -> dict[str, Any]:
    """Return the volume of a container's folder."""
    mounts = {m["mountPath"]: m["name"] for m in named(pod, name)["volumeMounts"]}
    places = [str(p) for p in (Path(folder), *Path(folder).parents)]
    mounted = next(mounts[p] for p in places if p in mounts)
    return next(v for v in pod["volumes"] if v["name"] == mounted)


@pytest.mark.parametrize("pod", ALL_PODS)
def test_pods_run_without_root_or_privileges(pod: dict[str, Any]) -> None:
    user = pod["securityContext"]
    assert user["runAsNonRoot"] is True
    assert user["runAsUser"] == int(UID)
    assert user["runAsGroup"] == user["fsGroup"] == 0  # as vLLM's images document
    assert pod["automountServiceAccountToken"] is False
    for item in containers(pod):
        rights = item["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in item["resources"]["limits"]
        # With registry and tag: another image of that name would have the models.
        assert item["image"] in IMAGES
        if item["image"] == IMAGES[1] and "livenessProbe" in item:
            probe = item["livenessProbe"]
            assert_trainer_probe(probe["exec"]["command"], probe["timeoutSeconds"])


def test_one_pod_shares_pids_memory_and_run_directory_without_network() -> None:
    assert POD["shareProcessNamespace"] is True
    assert named(POD, "serve")["volumeMounts"] == named(POD, "train")["volumeMounts"]
    for path in ("/dev/shm", "/run/tide"):  # noqa: S108 - of the container
        assert volume_of(POD, "serve", path)["emptyDir"]["medium"] == "Memory"
    (policy,) = (doc["spec"] for doc in ONE_POD if doc["kind"] == "NetworkPolicy")
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []


@pytest.mark.parametrize("documents", [ONE_POD, TWO_HOSTS])
def test_network_policies_cover_every_pod(
    documents: list[dict[str, Any]],
) -> None:
    policies = [doc["spec"] for doc in documents if doc["kind"] == "NetworkPolicy"]
    covered = {policy["podSelector"]["matchLabels"]["app"] for policy in policies}
    assert covered == set(pods(documents))
    for policy in policies:
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["egress"] == []
        for rule in policy["ingress"]:
            assert rule["from"] and {} not in rule["from"]
            assert rule["ports"]


def test_two_hosts_share_only_the_spool_and_the_models() -> None:
    made = pods(TWO_HOSTS)
    rule = made["tide-train"]["affinity"]["podAntiAffinity"]
    (rule,) = rule["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"] == {"app": "tide-serve"}
    url = tide_of("kubernetes/tide-spool.json").spool.url
    argv = named(made["tide-train"], "train")["args"]
    assert parsed(train, ["train", *argv]).spool == url
    for name in TARGETS:
        # A folder below the mount: the relay refuses one that is open to others.
        volume = volume_of(made[f"tide-{name}"], name, Path(str(url)).parent)
        assert volume["persistentVolumeClaim"]["claimName"] == "tide-spool"
        models = volume_of(made[f"tide-{name}"], name, "/models")
        assert models["persistentVolumeClaim"]["readOnly"]
    claim = next(doc for doc in TWO_HOSTS if doc["metadata"]["name"] == "tide-spool")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize(
    ("documents", "file"),
    [(ONE_POD, CONFIG), (TWO_HOSTS, "kubernetes/tide-spool.json")],
)
def test_the_tenants_key_and_the_caches_outlive_the_server(
    documents: list[dict[str, Any]], file: str
) -> None:
    pod = next(iter(pods(documents).values()))
    for folder in (str(tide_of(file).train.state_dir), "/home/vllm/.cache"):
        assert "persistentVolumeClaim" in volume_of(pod, "serve", folder)


def kustomization(folder: str) -> dict[str, Any]:
    return yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "cuda", "rocm", "monitoring"])
def test_kustomize_builds_it(folder: str) -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made = {doc["kind"]: doc for doc in yaml.safe_load_all(done.stdout)}
    if folder == "monitoring":
        assert set(made) == {"PodMonitor"}
        return
    pod = made["Deployment"]["spec"]["template"]["spec"]
    (config,) = (v["configMap"] for v in pod["volumes"] if "configMap" in v)
    assert config["name"] == made["ConfigMap"]["metadata"]["name"]
    assert "--speculative-config=/etc/tide/tide.json" in named(pod, "serve")["args"]
    resources = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
    gpus = [name for name in named(pod, "serve")["resources"]["limits"] if "/" in name]
    assert gpus == ([resources[folder]] if folder in resources else [])
    tag = f"-{folder}" if folder in resources else ""
    assert {one["image"] for one in containers(pod)} <= {name + tag for name in IMAGES}
    assert "memory" in named(pod, "serve")["resources"]["limits"]
