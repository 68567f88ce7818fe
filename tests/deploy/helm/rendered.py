"""What Helm makes of deploy/helm/gradbus."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "gradbus"
RELEASE, NAMESPACE = "fl", "fed"
FILES = sorted((CHART / "ci").glob("*.yaml"))
SECRETS = "/run/secrets/gradbus"

Object = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=60, check=False)


def template(*options: str) -> subprocess.CompletedProcess[str]:
    return helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *options)


def text_of(file: Path, *options: str) -> str:
    """All objects, in YAML, with the values of a file."""
    done = template("-f", str(file), *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(file: Path, *options: str) -> list[Object]:
    """The same, parsed."""
    return [one for one in yaml.safe_load_all(text_of(file, *options)) if one]


def of_kind(found: list[Object], *kinds: str) -> list[Object]:
    return [one for one in found if one["kind"] in kinds]


def named(found: list[Object], kind: str, name: str) -> Object:
    (one,) = [one for one in of_kind(found, kind) if one["metadata"]["name"] == name]
    return one


def workloads(found: list[Object]) -> list[Object]:
    return of_kind(found, "Deployment", "StatefulSet", "Job")


def pod(workload: Object) -> Object:
    """The specification of its pods."""
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Object) -> Object:
    (one,) = pod(workload)["containers"]
    return dict(one)


def secret_files(workload: Object) -> dict[str, tuple[str, str]]:
    """Secret and key by the name of the file that they become in the folder of secrets."""
    (volume,) = [one for one in pod(workload)["volumes"] if one["name"] == "secrets"]
    sources = [one["secret"] for one in volume["projected"]["sources"]]
    return {item["path"]: (source["name"], item["key"]) for source in sources for item in source["items"]}


def configuration(found: list[Object], workload: Object) -> tuple[str, str]:
    """Name and text of the configuration that a workload mounts."""
    (volume,) = [one for one in pod(workload)["volumes"] if one["name"] == "configuration"]
    ((name, text),) = named(found, "ConfigMap", volume["configMap"]["name"])["data"].items()
    return name, text
