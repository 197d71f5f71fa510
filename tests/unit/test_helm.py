"""The Helm chart: what it renders is valid, the server understands it, and wrong values are refused."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from penstock_server.settings import Settings, byte_count
from support.servers import ROOT, penstock

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

CHART = ROOT / "deploy/helm/penstock"
GUIDE = (ROOT / "docs/guides/kubernetes.md").read_text()
ALERTS = yaml.safe_load((ROOT / "docker/prometheus/alerts.yml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
CUSTOM = "monitoring.coreos.com/v1"
SET_BY_THE_CHART = {"data_dir", "cache_dir", "cache_bytes", "store", "port", "drain_seconds", "tokens", "tls_cert", "tls_key"}
LEFT_OUT = {"published"}  # the address in the greeting

SMALL = {"image": "r/penstock:1", "sources": ["s3://b/corpus"], "tokensSecret": "tokens"}
FULL: dict[str, Any] = {
    "image": "r/penstock:1", "imagePullSecrets": ["registry"], "replicas": 3,
    "sources": ["s3://b/corpus", "hf://datasets/org/name@main"], "data": {"persistentVolumeClaim": {"claimName": "corpus"}},
    "store": "s3://b/store", "cache": {"size": "1500G", "persistent": True, "storageClass": "local"},
    "settings": {
        "tokenizer": "/data/tokenizer.json", "inflight_bytes": "2GB", "decoded_bytes": "1.5GB", "host": "::", "processes": 4,
        "max_connections": 1_000_000, "poll_seconds": 0.5, "log_format": "json", "insecure": False,
        "tls_client_ca": "/etc/penstock/tls/ca.crt", "trusted_proxy": "10.0.0.0/8", "assets": "/data/tokenizers",
        "follow_symlinks": True, "allow_transforms": True, "allow_sources": "s3://b/ s3://c/",
    },
    "drainSeconds": 60, "tokensSecret": "tokens", "tlsSecret": "tls", "credentialsSecret": "aws",
    "env": {"AWS_REGION": "eu-west-1"},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/a"}},
    "podLabels": {"azure.workload.identity/use": "true"}, "allowFrom": [{"podSelector": {}}],
    "resources": {"requests": {"cpu": "500m", "memory": "4Gi"}}, "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "data", "operator": "Exists"}],
    "monitoring": {"enabled": True, "tokenSecret": "metrics", "labels": {"release": "prometheus"}},
    "autoscaling": {"maxReplicas": 6, "inFlightBytes": "1G"},
    "prepare": {"workers": 8, "packSeqLens": [2048, 4096], "resources": {"limits": {"memory": "2Gi"}}},
}  # fmt: skip
OF_THE_GUIDE = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)]
CASES = {
    "small": SMALL,
    "full": FULL,
    "without tokens": SMALL | {"tokensSecret": "", "settings": {"insecure": True}},
    "part of the node's disk": SMALL | {"cache": {"persistent": False}},
    "folder of the node": SMALL | {"sources": [], "data": {"hostPath": {"path": "/mnt/corpus"}}},
    "account of the user": SMALL | {"serviceAccount": {"name": "mine"}},
    "monitoring without tokens": SMALL | {"tokensSecret": "", "settings": {"insecure": True}, "monitoring": {"enabled": True}},
    "autoscaling": SMALL | {"autoscaling": {"maxReplicas": 4}},
    "prepare": SMALL | {"store": "gs://b/store", "prepare": {"workers": 1}},
    **{f"block {number} of the guide": values for number, values in enumerate(OF_THE_GUIDE)},
}
each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())


def render(values: dict[str, Any], name: str = "penstock", namespace: str = "ml") -> dict[str, str]:
    """The texts of the templates, by their names."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name=name, namespace=namespace)
    return {path.rpartition("/")[2]: text for path, text in texts.items()}


def manifests(values: dict[str, Any], name: str = "penstock") -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of a release, by kind and name."""
    texts = [text for path, text in render(values, name).items() if path.endswith(".yaml")]
    found = [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]
    named = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in found}
    assert len(named) == len(found)
    return named


def servers(values: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifests(values)["StatefulSet", "penstock"]["spec"]
    return spec


def job(values: dict[str, Any]) -> dict[str, Any]:
    [spec] = [manifest["spec"] for (kind, _), manifest in manifests(values).items() if kind == "Job"]
    return dict(spec)


def pods(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for (kind, _), manifest in manifests(values).items():
        if kind in ("StatefulSet", "Job"):
            yield manifest["spec"]["template"]["spec"]


def environment(pod: dict[str, Any]) -> dict[str, str]:
    [container] = pod["containers"]
    return {each["name"]: each["value"] for each in container["env"]}


@each_case
def test_chart_lints(values: dict[str, Any]) -> None:
    report = helm.lint(str(CHART), values, strict=True)
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]
    assert report["errors"] == []


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@each_case
def test_manifests_are_valid(values: dict[str, Any], version: str) -> None:
    for manifest in manifests(values).values():
        if manifest["apiVersion"] != CUSTOM:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_validation_finds_an_unknown_field() -> None:
    manifest = manifests(SMALL)["StatefulSet", "penstock"]
    manifest["spec"]["template"]["spec"]["drain"] = 5
    with pytest.raises(kubernetes_validate.ValidationError, match="drain"):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": ""}, "image is empty. Build docker/Dockerfile"),
        ({"sources": []}, "There is nothing to serve. Set sources to URLs, or data to a volume"),
        ({"sources": ["/mnt/corpus"]}, "at '/sources/0': '/mnt/corpus' does not match pattern"),
        ({"sources": "s3://b/corpus"}, "at '/sources': got string, want array"),
        ({"tokensSecret": ""}, "Callers need tokens. Set tokensSecret to a secret with the key tokens.json"),
        ({"store": "/mnt/store"}, "at '/store': '/mnt/store' does not match pattern"),
        ({"cache": {"size": "100Gi"}}, "at '/cache/size': '100Gi' does not match pattern"),
        ({"replicas": 0}, "at '/replicas': minimum: got 0, want 1"),
        ({"replicaCount": 3}, "additional properties 'replicaCount' not allowed"),
        ({"settings": {"prot": 1}}, "at '/settings': additional properties 'prot' not allowed"),
        ({"settings": {"port": 9000}}, "at '/settings': additional properties 'port' not allowed"),
        ({"settings": {"log_format": "text"}}, "at '/settings/log_format': value must be one of 'human', 'json'"),
        ({"env": {"PENSTOCK_PORT": "9000"}}, "at '/env': additional properties 'PENSTOCK_PORT' not allowed"),
        ({"data": {"hostPath": {"path": "/a"}, "emptyDir": {}}}, "at '/data': maxProperties: got 2, want 1"),
        ({"monitoring": {"enabled": True}}, "Prometheus needs a token. Set monitoring.tokenSecret"),
        ({"autoscaling": {"maxReplicas": 1}}, "autoscaling.maxReplicas is less than replicas"),
        ({"prepare": {"workers": 2}}, "prepare.workers needs a store"),
    ],
)
def test_wrong_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(message)):
        render(SMALL | change)


def test_schema_has_each_value_and_each_setting() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert SCHEMA["properties"].keys() - {"global"} == defaults.keys()
    for name, values in defaults.items():
        if "properties" in SCHEMA["properties"][name] and name != "settings":
            assert SCHEMA["properties"][name]["properties"].keys() == values.keys(), name
    known = {field.name for field in fields(Settings)}
    assert SCHEMA["properties"]["settings"]["properties"].keys() == known - SET_BY_THE_CHART - LEFT_OUT
    assert FULL["settings"].keys() == SCHEMA["properties"]["settings"]["properties"].keys()


@each_case
def test_server_reads_the_environment(values: dict[str, Any]) -> None:
    known = {f"PENSTOCK_{field.name.upper()}" for field in fields(Settings)}
    for pod in pods(values):
        assert {name for name in environment(pod) if name.startswith("PENSTOCK_")} <= known
        Settings.read({}, environment(pod) | {"PENSTOCK_HOST": "0.0.0.0"}).check_guard()


def test_server_gets_all_values() -> None:
    settings = Settings.read({}, environment(servers(FULL)["template"]["spec"]))
    assert settings.data_dir == (Path("/data"), "s3://b/corpus", "hf://datasets/org/name@main")
    assert (settings.store, settings.cache_bytes, settings.drain_seconds) == ("s3://b/store", 1200 * 10**9, 60.0)
    assert (settings.tokens, settings.tls_cert, settings.tls_key) == (
        Path("/etc/penstock/tokens/tokens.json"), Path("/etc/penstock/tls/tls.crt"), Path("/etc/penstock/tls/tls.key"),
    )  # fmt: skip
    for name, value in FULL["settings"].items():
        read = getattr(settings, name)
        assert (str(read) if isinstance(read, Path) else read) == (byte_count(value) if name.endswith("_bytes") else value), (
            name
        )
    assert environment(servers(FULL)["template"]["spec"])["AWS_REGION"] == "eu-west-1"


@each_case
def test_names_in_a_pod_exist(values: dict[str, Any]) -> None:
    """Volumes of mounts, ports of probes, files of settings."""
    spec = servers(values)
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])]
    assert sorted(mounts.values()) == sorted([volume["name"] for volume in pod["volumes"]] + claims)
    [port] = container["ports"]
    services = [manifest for (kind, _), manifest in manifests(values).items() if kind == "Service"]
    assert [each["targetPort"] for service in services for each in service["spec"]["ports"]] == [port["name"]] * 2
    scheme = "HTTPS" if values.get("tlsSecret") else "HTTP"
    for probe, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"], "scheme": scheme}
    files = [text for name, text in environment(pod).items() if name.startswith("PENSTOCK_") and text.startswith("/")]
    paths = [path for text in files for path in text.splitlines() if path.startswith("/")]
    assert [path for path in paths if not path.startswith(tuple(mounts))] == []
    [dockerfile] = re.findall(r"PENSTOCK_PORT=(\d+) PENSTOCK_CACHE_DIR=(\S+)", (ROOT / "docker/Dockerfile").read_text())
    assert (str(port["containerPort"]), mounts[dockerfile[1]]) == (dockerfile[0], "cache")


def test_secrets_are_mounted_or_read() -> None:
    pod = servers(FULL)["template"]["spec"]
    secrets = {each["name"]: each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
    assert secrets == {"tokens": "tokens", "tls": "tls"}
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "aws"}}]
    assert job(FULL)["template"]["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "aws"}}]
    assert [each["name"] for each in job(FULL)["template"]["spec"]["volumes"]] == ["tmp", "data", "cache"]


@each_case
def test_pods_are_as_strict_as_compose(values: dict[str, Any]) -> None:
    for pod in pods(values):
        [container] = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, 10001, 10001)
        assert "--uid 10001" in (ROOT / "docker/Dockerfile").read_text()
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)


@pytest.mark.parametrize("drain", [0, 15, 600])
def test_pod_is_killed_after_its_drain(drain: int) -> None:
    pod = servers(SMALL | {"drainSeconds": drain})["template"]["spec"]
    assert environment(pod)["PENSTOCK_DRAIN_SECONDS"] == str(drain)
    assert pod["terminationGracePeriodSeconds"] > drain + 6


@each_case
def test_services_find_servers_alone(values: dict[str, Any]) -> None:
    """The pods of the Job have other labels."""
    found = manifests(values)
    labels = found["StatefulSet", "penstock"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        manifest["spec"].get("selector") or manifest["spec"]["podSelector"]
        for (kind, _), manifest in found.items()
        if kind in ("Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy")
    ]
    selectors = [selector.get("matchLabels", selector) for selector in selectors]
    assert all(selector.items() <= labels.items() for selector in selectors)
    for (kind, _), manifest in found.items():
        if kind == "Job":
            others = manifest["spec"]["template"]["metadata"]["labels"]
            assert not any(selector.items() <= others.items() for selector in selectors)


def test_headless_service_names_the_pods() -> None:
    found = manifests(SMALL, "corpus")
    headless, plain = found["Service", "corpus"]["spec"], found["Service", "corpus-any"]["spec"]
    assert found["StatefulSet", "corpus"]["spec"]["serviceName"] == "corpus"
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", False)
    assert "clusterIP" not in plain


def test_cache_is_a_volume_or_a_part_of_the_disk() -> None:
    [claim] = servers(FULL)["volumeClaimTemplates"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"], "storageClassName": "local", "resources": {"requests": {"storage": "1500G"}},
    }  # fmt: skip
    spec = servers(SMALL | {"cache": {"size": "5G", "persistent": False}})
    assert "volumeClaimTemplates" not in spec
    assert {"name": "cache", "emptyDir": {"sizeLimit": "5G"}} in spec["template"]["spec"]["volumes"]
    assert Settings.read({}, environment(spec["template"]["spec"])).cache_bytes == 4 * 10**9


def test_autoscaler_decides_the_replicas() -> None:
    found = manifests(FULL)
    scaler = found["HorizontalPodAutoscaler", "penstock"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 6)
    [metric] = scaler["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f"| `{name}` | gauge |" in (ROOT / "docs/reference/metrics.md").read_text()
    assert "replicas" not in found["StatefulSet", "penstock"]["spec"]
    assert manifests(SMALL)["StatefulSet", "penstock"]["spec"]["replicas"] == 2


def test_prometheus_finds_each_server_once_under_the_job_of_the_alerts() -> None:
    found = manifests(FULL)
    monitor = found["ServiceMonitor", "penstock"]
    selector = monitor["spec"]["selector"]["matchLabels"]
    services = [manifest for (kind, _), manifest in found.items() if kind == "Service"]
    [service] = [each for each in services if selector.items() <= each["metadata"]["labels"].items()]
    job_name = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert {f'job="{job_name}"'} == set(re.findall(r'job="\w+"', json.dumps(ALERTS).replace('\\"', '"')))
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"] == [
        {
            "port": "http",
            "path": "/metrics",
            "scheme": "https",
            "authorization": {"credentials": {"name": "metrics", "key": "token"}},
            "tlsConfig": {
                "ca": {"secret": {"name": "tls", "key": "ca.crt"}},
                "serverName": "penstock-0.penstock.ml.svc",
            },
        }
    ]
    assert service["spec"]["ports"][0]["name"] == "http"
    assert manifests(CASES["monitoring without tokens"])["ServiceMonitor", "penstock"]["spec"]["endpoints"] == [
        {"port": "http", "path": "/metrics", "scheme": "http"}
    ]


def test_rule_has_the_alerts_of_compose() -> None:
    rule = manifests(FULL)["PrometheusRule", "penstock"]
    assert (rule["apiVersion"], rule["spec"]) == (CUSTOM, ALERTS)


def test_job_prepares_one_share_for_each_index() -> None:
    spec = job(FULL)
    [container] = spec["template"]["spec"]["containers"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 8, 8)
    assert container["command"] == [
        "penstock", "prepare", "--index", "$(JOB_COMPLETION_INDEX)", "--of", "8", "--pack-seq-len", "2048",
        "--pack-seq-len", "4096",
    ]  # fmt: skip
    done = penstock(*[word.replace("$(JOB_COMPLETION_INDEX)", "7") for word in container["command"][1:]])
    assert "no data folder or URL is given" in done.stderr  # it understands the options
    assert container["resources"] == {"limits": {"memory": "2Gi"}}
    assert environment(spec["template"]["spec"])["PENSTOCK_STORE"] == "s3://b/store"
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailIndex"]
    assert rules[1]["onExitCodes"] == {"operator": "In", "values": [3]}


def test_job_is_another_one_when_it_changes() -> None:
    """Kubernetes changes no Job."""

    def name(**change: Any) -> str:
        values = copy.deepcopy(FULL) | change
        return next(name for kind, name in manifests(values) if kind == "Job")

    assert name() == name(replicas=5)
    assert len({name(), name(image="r/penstock:2"), name(prepare={"workers": 9}), name(sources=["s3://b/other"])}) == 4


@pytest.mark.parametrize(
    ("change", "address"),
    [
        ({"replicas": 3}, "http://penstock-{0..2}.penstock:8000"),
        ({"replicas": 1}, "http://penstock-0.penstock:8000"),
        ({"autoscaling": {"maxReplicas": 4}}, "http://penstock-{0..3}.penstock:8000"),
        ({"replicas": 3, "tlsSecret": "tls"}, "https://penstock-{0..2}.penstock.ml.svc:8000"),
    ],
)
def test_notes_have_the_line_of_the_trainers(change: dict[str, Any], address: str) -> None:
    notes = render(SMALL | change)["NOTES.txt"]
    assert f'RemoteDataset("{address}", "DATASET", ...)' in notes
    assert "They need a token of tokens" in notes


def test_guide_begins_with_the_values_of_its_commands(tmp_path: Path) -> None:
    [block] = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    build, create, secret, install = (shlex.split(line, comments=True) for line in block.splitlines())
    values = OF_THE_GUIDE[0]
    assert penstock(*create[1:], folder=tmp_path).stdout.startswith("pst_")
    [made] = tmp_path.iterdir()
    tokens = Settings.read({}, environment(servers(values)["template"]["spec"])).tokens
    assert tokens
    assert (secret[4], secret[5]) == (values["tokensSecret"], f"--from-file={made.name}")
    assert made.name == tokens.name
    assert build[build.index("--tag") + 1] == values["image"]
    assert f"AS {build[build.index('--target') + 1]}\n" in (ROOT / build[build.index("--file") + 1]).read_text()
    assert install[:2] == ["helm", "install"]
    assert ROOT / install[3] == CHART
    [line] = re.findall(r"```text\n(RemoteDataset.*)\n```", GUIDE)
    assert line in render(values, install[2])["NOTES.txt"]
