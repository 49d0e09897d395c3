"""Dashboards and alerts name metrics that the server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pegboard.interfaces.metrics import PREFIX
from pegboard_server.http_metrics import HTTP_METRICS
from pegboard_testing.authoring.metrics_page import EVERYTHING

MONITORING = Path(__file__).parents[2] / "examples/deployment/monitoring"
METRIC = re.compile(r"\b(?:vllm:|pegboard_|http_)\w+")
SERIES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


def expressions() -> dict[str, str]:
    """Returns every PromQL expression, by the file and the panel or alert."""
    texts = {}
    for path in (MONITORING / "dashboards").glob("*.json"):
        board = json.loads(path.read_text("utf-8"))
        for panel in board["panels"]:
            for target in panel["targets"]:
                key = f"{path.name} {panel['title']} {target['refId']}"
                texts[key] = target["expr"]
        for variable in board["templating"]["list"]:
            texts[f"{path.name} {variable['name']}"] = variable["definition"]
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text("utf-8"))["groups"]:
        for rule in group["rules"]:
            texts[f"alerts.yml {rule['alert']}"] = rule["expr"]
    (rule,) = yaml.safe_load((MONITORING / "adapter.yaml").read_text("utf-8"))["rules"]
    texts["adapter.yaml"] = rule["seriesQuery"]
    return texts


def all_series() -> dict[str, tuple[str, ...]]:
    """Returns the labels of every time series that a server has."""
    found = {}
    for metric in (*EVERYTHING, *HTTP_METRICS):
        name = f"{PREFIX if metric.prefixed else ''}{metric.name}"
        for ending in SERIES.get(metric.type, ("",)):
            found[name + ending] = (*metric.common, *metric.labels)
    return found


@pytest.mark.parametrize("place", expressions())
def test_an_expression_reads_metrics_with_their_labels(place: str) -> None:
    """Prometheus adds `instance`, `namespace` and `pod`, and a bucket has `le`."""
    text = expressions()[place]
    known = all_series()
    names = METRIC.findall(text)
    assert set(names) <= set(known), f"{place}: {text}"
    labels = set(re.findall(r"(\w+)=~?\"", text))
    for group in re.findall(r"\bby \(([^)]*)\)", text):
        labels |= set(group.replace(" ", "").split(","))
    given = {label for name in names for label in known[name]}
    assert labels <= given | {"instance", "le", "namespace", "pod", "job"}, f"{place}: {text}"


def test_legends_name_labels_that_the_expression_keeps() -> None:
    for path in (MONITORING / "dashboards").glob("*.json"):
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            for target in panel["targets"]:
                for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                    kept = f"{target['expr']} " if "by (" in target["expr"] else "instance "
                    assert re.search(rf"\b{label}\b", kept), f"{path.name}: {panel['title']}"


def test_the_dashboards_are_those_of_their_script() -> None:
    sys.path.insert(0, str(MONITORING))
    try:
        import make_dashboards
    finally:
        sys.path.remove(str(MONITORING))
    files = make_dashboards.files()
    assert {path: path.read_text("utf-8") for path in files} == files, "run make_dashboards.py"
    assert set(files) == set((MONITORING / "dashboards").glob("*.json"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_accepts_its_files() -> None:
    for words in (("rules", "alerts.yml"), ("config", "--syntax-only", "prometheus.yml")):
        subprocess.run(["promtool", "check", *words], cwd=MONITORING, check=True)
