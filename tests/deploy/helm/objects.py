"""deploy/helm/gradbus: its objects fit the schemas of Kubernetes and each other, and gradbus reads their settings."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendered import (
    CHART,
    FILES,
    NAMESPACE,
    RELEASE,
    ROOT,
    SECRETS,
    Object,
    configuration,
    container,
    helm,
    named,
    objects,
    of_kind,
    pod,
    secret_files,
    template,
    text_of,
    workloads,
)

from gradbus.commands.files import ClientFile, ControllerFile, WorkerFile, load
from gradbus.commands.relay.settings import RelayFile
from gradbus.runtime.config.settings import load_settings

KINDS: dict[str, Any] = {"controller": ControllerFile, "client": ClientFile, "worker": WorkerFile}

OF_PODS = {
    "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001,
    "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
OF_CONTAINERS = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
}  # fmt: skip

WRONG = [
    ("federated", "image.repository=", "image.repository is empty: set it to your image of gradbus"),
    ("ranks", "relay.enabled=false", "rank has nothing to dial: set relay.enabled or"),
    ("ranks", "ranks.minWorld=4", "ranks.minWorld is 4, more than ranks.world, 3"),
    ("everything", "ranks.job=glyphs", 'ranks.job and job are both "glyphs"'),
    ("federated", "controller.settings.bus.job=x", "controller.settings.bus.job is filled in"),
    ("federated", "clients.settings.client.state_dir=x", "clients.settings.client.state_dir is"),
    ("ranks", "ranks.settings.parallel.elastic.min_world=2", "set ranks.minWorld"),
    ("relay", "relay.settings.relay.tls_clients=false", "relay.settings.relay.tls_clients is filled in"),
    ("relay", "relay.service.port=99999", "'/relay/service/port': maximum: got 99,999, want 65,535"),
    ("relay", "relay.servce.port=1", "'/relay': additional properties 'servce' not allowed"),
    ("ranks", "ranks.world=1", "'/ranks/world': minimum: got 1, want 2"),
    ("ranks", "ranks.world=two", "'/ranks/world': got string, want integer"),
    ("federated", "connect={tcp/fed.example.org:443}", "'/connect/0': 'tcp/fed.example.org:443' does"),
    ("federated", "clients.members[0].name=Site_1", "'/clients/members/0/name': 'Site_1' does"),
    ("federated", "controller.storage.size=ten", "'/controller/storage/size': 'ten' does not match"),
]  # fmt: skip

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@every_file
def test_the_chart_is_linted_and_its_objects_fit_the_schemas_of_kubernetes(file: Path, tmp_path: Path) -> None:
    done = helm("lint", "--strict", str(CHART), "--namespace", NAMESPACE, "-f", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(text_of(file))
    checked = subprocess.run(
        ["kubernetes-validate", "--strict", str(rendered)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@every_file
def test_gradbus_reads_each_configuration_and_finds_each_file_that_it_names(file: Path, tmp_path: Path) -> None:
    found = objects(file)
    assert len(workloads(found)) >= 2
    for workload in workloads(found):
        name, text = configuration(found, workload)
        path = tmp_path / name
        path.write_text(text)
        words = container(workload)["args"]
        assert words[1] == f"/etc/gradbus/{name}"
        if words[0] == "relay":
            load_settings(RelayFile, path)
        else:
            load(KINDS[words[0]], path)
        files = set(re.findall(rf'"{SECRETS}/([^"]+)"', text))
        assert files == set(secret_files(workload)), workload["metadata"]["name"]


@every_file
def test_a_pod_has_no_rights_and_writes_only_to_its_volumes(file: Path) -> None:
    for workload in workloads(objects(file)):
        spec, one = pod(workload), container(workload)
        assert spec["securityContext"] == OF_PODS
        assert one["securityContext"] == OF_CONTAINERS
        assert spec["automountServiceAccountToken"] is False
        assert {"memory"} <= set(one["resources"]["limits"])
        assert set(one["resources"]["requests"]) == {"cpu", "memory"}
        (secrets,) = [volume["projected"] for volume in spec["volumes"] if volume["name"] == "secrets"]
        assert secrets["defaultMode"] == 0o400
        claims = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", [])}
        assert {volume["name"] for volume in spec["volumes"]} | claims == {
            mount["name"] for mount in one["volumeMounts"]
        }


@every_file
def test_members_dial_the_service_of_the_pod_that_listens_and_the_policies_let_them(file: Path) -> None:
    found = objects(file)
    (service,) = of_kind(found, "Service")
    (listener,) = [one for one in workloads(found) if labels(one).items() >= service["spec"]["selector"].items()]
    (port,) = service["spec"]["ports"]
    (opened,) = [one for one in container(listener)["ports"] if one["name"] == port["targetPort"]]
    _, text = configuration(found, listener)
    listens = json.loads(text).get("relay") or json.loads(text)["bus"]
    assert listens["listen"] == [f"tls/0.0.0.0:{opened['containerPort']}"]
    host = f"{service['metadata']['name']}.{NAMESPACE}.svc"
    for workload in workloads(found):
        if workload is not listener:
            assert json.loads(configuration(found, workload)[1])["bus"]["connect"] == [f"tls/{host}:{port['port']}"]
    policies = of_kind(found, "NetworkPolicy")
    admits = [one for one in policies if selects(one, listener) and "ingress" in one["spec"]]
    ports = [rule["ports"] for one in admits for rule in one["spec"]["ingress"]]
    assert [{"port": opened["containerPort"], "protocol": "TCP"}] in ports
    (members,) = [one for one in policies if "egress" in one["spec"]]
    for workload in workloads(found):
        assert selects(members, workload)
    targets = [
        rule
        for rule in members["spec"]["egress"]
        if any(labels(listener).items() >= to["podSelector"]["matchLabels"].items() for to in rule.get("to", []))
    ]
    assert [rule["ports"] for rule in targets] == [[{"port": opened["containerPort"], "protocol": "TCP"}]]


@every_file
def test_a_probe_goes_to_a_port_that_the_configuration_opens(file: Path) -> None:
    found = objects(file)
    for workload in workloads(found):
        one = container(workload)
        probes = [values["httpGet"] for key, values in one.items() if key.endswith("Probe")]
        ports = {port["name"]: port["containerPort"] for port in one.get("ports", [])}
        settings = json.loads(configuration(found, workload)[1])
        page = settings.get("http") or settings.get("metrics")
        assert bool(probes) == (workload["kind"] != "Job")
        for probe in probes:
            assert page == {"host": "0.0.0.0", "port": ports[probe["port"]]}


@every_file
def test_a_budget_of_disruptions_covers_pods_and_leaves_enough_ranks(file: Path) -> None:
    found = objects(file)
    for budget in of_kind(found, "PodDisruptionBudget"):
        covered = [one for one in workloads(found) if selects(budget, one)]
        assert covered
        for workload in covered:
            if workload["kind"] == "Job":
                least = json.loads(configuration(found, workload)[1])["parallel"]["elastic"]["min_world"]
                world = workload["spec"]["parallelism"]
                assert max(least, world // 2 + 1) == budget["spec"]["minAvailable"] <= world


def test_members_that_dial_elsewhere_have_no_listener_in_the_release() -> None:
    found = objects(
        CHART / "ci" / "federated.yaml", "--set", "controller.enabled=false", *dials("tls/fed.example.org:443")
    )
    assert of_kind(found, "Service", "StatefulSet") == []
    text = named(found, "ConfigMap", f"{RELEASE}-clients")["data"]["client.json"]
    assert json.loads(text)["bus"]["connect"] == ["tls/fed.example.org:443"]
    (policy,) = of_kind(found, "NetworkPolicy")
    assert {"ports": [{"port": 443, "protocol": "TCP"}]} in policy["spec"]["egress"]


def test_gradbus_reads_what_the_examples_of_the_page_render(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        values = tmp_path / "values.yaml"
        values.write_text(example)
        found = objects(values)
        for workload in workloads(found):
            name, text = configuration(found, workload)
            (tmp_path / name).write_text(text)
            if name != "relay.json":
                load(KINDS[name.removesuffix(".json")], tmp_path / name)


def test_the_chart_has_the_version_of_gradbus() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert [chart["version"], chart["appVersion"]] == [version, version]
    assert [values["image"]["tag"], values["relay"]["image"]["tag"]] == [version, version]


@pytest.mark.parametrize(("file", "value", "sentence"), WRONG)
def test_a_wrong_value_is_refused_with_a_sentence_that_names_it(file: str, value: str, sentence: str) -> None:
    done = template("-f", str(CHART / "ci" / f"{file}.yaml"), "--set", value)
    assert done.returncode != 0
    assert sentence in done.stderr


def dials(endpoint: str) -> tuple[str, str]:
    return "--set", f"connect={{{endpoint}}}"


def labels(workload: Object) -> dict[str, str]:
    """Return the labels of its pods."""
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def selects(chosen: Object, workload: Object) -> bool:
    """Whether a policy or a budget is about the pods of a workload."""
    selector = chosen["spec"].get("podSelector") or chosen["spec"]["selector"]
    return labels(workload).items() >= selector["matchLabels"].items()
