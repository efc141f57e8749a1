"""The Kubernetes examples: references resolve, and what must be shared is shared."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.dockerfile_steps import read_steps
from vllm_tide.cli import train
from vllm_tide.cli import trainer as commands
from vllm_tide.config import parse_tide
from vllm_tide.speculative import read_json_object

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "scripts" / "deploy" / "kubernetes"
ONE_POD = list(yaml.safe_load_all((DEPLOY / "base" / "pod.yaml").read_text()))
TWO_HOSTS = list(yaml.safe_load_all((DEPLOY / "two-hosts.yaml").read_text()))
TAG = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SERVE, TRAIN = (
    f"registry.example.com/tide-{name}:{TAG}" for name in ("serve", "train")
)
UID = next(
    int(step.text.partition("=")[2])
    for step in read_steps(ROOT / "Dockerfile")
    if step.text.startswith("TIDE_UID=")
)


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        doc["metadata"]["name"]: doc["spec"]["template"]["spec"]
        for doc in documents
        if doc["kind"] == "Deployment"
    }


ALL_PODS = [*pods(ONE_POD).values(), *pods(TWO_HOSTS).values()]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def named(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in containers(pod) if item["name"] == name)


def parsed(module: Any, words: list[str], *name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser, *name)
    return parser.parse_args(words[1:])


@pytest.mark.parametrize("documents", [ONE_POD, TWO_HOSTS])
def test_names_are_unique_and_selectors_select(documents: list[dict[str, Any]]) -> None:
    ids = [(doc["kind"], doc["metadata"]["name"]) for doc in documents]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9-]{1,63}", name) for _, name in ids)
    labels = []
    for doc in documents:
        if doc["kind"] == "Deployment":
            label = doc["spec"]["template"]["metadata"]["labels"]
            assert doc["spec"]["selector"]["matchLabels"] == label
            # Two trainers or engines must not hold one volume during an update.
            assert doc["spec"]["strategy"] == {"type": "Recreate"}
            labels.append(label)
    for doc in documents:
        if doc["kind"] == "Service":
            assert doc["spec"]["selector"] in labels
        if doc["kind"] == "NetworkPolicy":
            assert doc["spec"]["podSelector"]["matchLabels"] in labels


@pytest.mark.parametrize("pod", ALL_PODS)
def test_mounts_and_ports_refer_to_what_is_there(pod: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    used = set()
    for item in containers(pod):
        mounts = [mount["name"] for mount in item["volumeMounts"]]
        paths = [mount["mountPath"] for mount in item["volumeMounts"]]
        assert len(set(paths)) == len(paths)
        used |= set(mounts)
        ports = {port["name"] for port in item.get("ports", [])}
        for key in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "httpGet" in item.get(key, {}):
                assert item[key]["httpGet"] == {"path": "/health", "port": "http"}
                assert "http" in ports
    assert used == volumes


@pytest.mark.parametrize("pod", ALL_PODS)
def test_pods_run_without_root_or_rights(pod: dict[str, Any]) -> None:
    user = pod["securityContext"]
    assert user["runAsNonRoot"] is True
    assert user["runAsUser"] == UID
    assert user["runAsGroup"] == user["fsGroup"] == 0  # as vLLM's images document
    assert pod["automountServiceAccountToken"] is False
    for item in containers(pod):
        rights = item["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in item["resources"]["limits"]
        # With registry and tag: another image of that name would have the models.
        assert item["image"] in (SERVE, TRAIN)


def test_one_pod_shares_pids_memory_run_directory_and_user() -> None:
    (pod,) = pods(ONE_POD).values()
    assert pod["shareProcessNamespace"] is True
    serve, trainer = named(pod, "serve"), named(pod, "train")
    assert serve["volumeMounts"] == trainer["volumeMounts"]
    paths = {m["mountPath"]: m["name"] for m in serve["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for path in ("/dev/shm", "/run/tide"):  # noqa: S108 - of the container
        assert volumes[paths[path]]["emptyDir"]["medium"] == "Memory"
    config = read_json_object(str(DEPLOY / "base" / "tide.json"))
    state_dir = parse_tide(config["tide"]).train.state_dir
    assert state_dir is not None
    assert volumes[paths[str(Path(state_dir).parent)]].keys() >= {
        "persistentVolumeClaim"
    }


@pytest.mark.parametrize("pod", ALL_PODS)
def test_trainers_probe_is_a_command_of_ours(pod: dict[str, Any]) -> None:
    for item in pod["containers"]:
        if item["image"] != TRAIN:
            continue
        probe = item["livenessProbe"]
        program, *words = probe["exec"]["command"]
        assert program == "vllm-tide"
        args = parsed(commands, words, "status")
        assert args.probe
        assert args.timeout < probe["timeoutSeconds"]


def test_two_hosts_meet_in_the_spool_and_only_there() -> None:
    made = pods(TWO_HOSTS)
    server, trainer = made["tide-serve"], made["tide-train"]
    rule = trainer["affinity"]["podAntiAffinity"]
    (rule,) = rule["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"] == {"app": "tide-serve"}
    url = parse_tide(
        read_json_object(str(DEPLOY / "tide-spool.json"))["tide"]
    ).spool.url
    args = parsed(train, ["train", *named(trainer, "train")["args"]])
    assert args.spool == url
    for pod, name in ((server, "serve"), (trainer, "train")):
        mounts = {m["mountPath"]: m["name"] for m in named(pod, name)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        # A folder below the mount: the relay refuses one that others may enter.
        claim = volumes[mounts[str(Path(str(url)).parent)]]["persistentVolumeClaim"]
        assert claim["claimName"] == "tide-spool"
    claim = next(doc for doc in TWO_HOSTS if doc["metadata"]["name"] == "tide-spool")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize(
    ("documents", "file"),
    [(ONE_POD, "base/tide.json"), (TWO_HOSTS, "tide-spool.json")],
)
def test_the_tenants_key_outlives_the_server(
    documents: list[dict[str, Any]], file: str
) -> None:
    section = read_json_object(str(DEPLOY / file))["tide"]
    folder = Path(str(parse_tide(section).train.state_dir))
    for pod in pods(documents).values():
        for one in (c for c in containers(pod) if c["name"] == "serve"):
            mounts = {Path(m["mountPath"]): m["name"] for m in one["volumeMounts"]}
            name = next(mounts[p] for p in folder.parents if p in mounts)
            volume = next(v for v in pod["volumes"] if v["name"] == name)
            assert "persistentVolumeClaim" in volume


def test_nothing_in_the_pod_may_call_out() -> None:
    (policy,) = (doc["spec"] for doc in ONE_POD if doc["kind"] == "NetworkPolicy")
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []


def kustomization(folder: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())


@pytest.mark.parametrize("folder", ["base", "cuda", "rocm", "monitoring"])
def test_a_kustomization_names_what_is_there(folder: str) -> None:
    content = kustomization(folder)
    assert content["apiVersion"] == "kustomize.config.k8s.io/v1beta1"
    assert content["kind"] == "Kustomization"
    for name in content["resources"]:
        place = (DEPLOY / folder / name).resolve()
        assert place.is_file() or (place / "kustomization.yaml").is_file()
    # kustomize reads no file outside of the folder.
    for one in content.get("configMapGenerator", []):
        assert all((DEPLOY / folder / name).is_file() for name in one["files"])


def test_the_base_makes_the_configuration_that_its_pod_mounts() -> None:
    (made,) = kustomization("base")["configMapGenerator"]
    (pod,) = pods(ONE_POD).values()
    mounted = [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v]
    assert mounted == [made["name"]]
    (file,) = made["files"]
    assert f"--speculative-config=/etc/tide/{file}" in named(pod, "serve")["args"]


@pytest.mark.parametrize(
    ("folder", "resource"), [("cuda", "nvidia.com/gpu"), ("rocm", "amd.com/gpu")]
)
def test_a_gpu_is_a_limit_of_the_server(folder: str, resource: str) -> None:
    content = kustomization(folder)
    assert content["resources"] == ["../base"]
    (entry,) = content["patches"]
    patch = yaml.safe_load(entry["patch"])
    deployment = next(doc for doc in ONE_POD if doc["kind"] == "Deployment")
    for key in ("apiVersion", "kind"):
        assert patch[key] == deployment[key]
    assert patch["metadata"]["name"] == deployment["metadata"]["name"]
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container == {"name": "serve", "resources": {"limits": {resource: "1"}}}
    images = {image["name"]: image["newTag"] for image in content["images"]}
    assert images == {
        image.partition(":")[0]: f"{TAG}-{folder}" for image in (SERVE, TRAIN)
    }


def test_server_and_trainer_are_scraped_under_one_job() -> None:
    (file,) = kustomization("monitoring")["resources"]
    monitor = yaml.safe_load((DEPLOY / "monitoring" / file).read_text())
    assert monitor["kind"] == "PodMonitor"
    (deployment,) = (doc for doc in ONE_POD if doc["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"] == {"matchLabels": labels}
    (pod,) = pods(ONE_POD).values()
    ports = {port["name"] for one in containers(pod) for port in one.get("ports", [])}
    scraped = [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]]
    assert set(scraped) == ports == {"http", "metrics"}
    config = parse_tide(read_json_object(str(DEPLOY / "base" / "tide.json"))["tide"])
    (port,) = named(pod, "train")["ports"]
    assert port["containerPort"] == config.train.metrics_port
    (policy,) = (doc["spec"] for doc in ONE_POD if doc["kind"] == "NetworkPolicy")
    allowed = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert set(scraped) <= allowed


@pytest.mark.parametrize("documents", [ONE_POD, TWO_HOSTS])
def test_caches_outlive_the_pod(documents: list[dict[str, Any]]) -> None:
    pod = next(iter(pods(documents).values()))
    mounts = {m["mountPath"]: m["name"] for m in named(pod, "serve")["volumeMounts"]}
    volume = mounts["/home/vllm/.cache"]
    claim = next(v for v in pod["volumes"] if v["name"] == volume)
    assert "persistentVolumeClaim" in claim


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "cuda", "rocm", "monitoring"])
def test_kustomize_builds_it(folder: str) -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made = {doc["kind"]: doc for doc in yaml.safe_load_all(done.stdout)}
    if folder == "monitoring":
        assert set(made) == {"PodMonitor"}
        return
    pod = made["Deployment"]["spec"]["template"]["spec"]
    (config,) = (v["configMap"] for v in pod["volumes"] if "configMap" in v)
    assert config["name"] == made["ConfigMap"]["metadata"]["name"]
    resources = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
    gpus = [name for name in named(pod, "serve")["resources"]["limits"] if "/" in name]
    assert gpus == ([resources[folder]] if folder in resources else [])
    assert "memory" in named(pod, "serve")["resources"]["limits"]
