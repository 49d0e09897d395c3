"""A release as its users meet it: pip installs from the index, an older installation is upgraded
whole or in part, and a plugin is taken away."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import distributions
from pathlib import Path

import httpx
import pytest
from layers import ROOT, Layers
from linked_environment import LinkedEnvironment
from page_server import PATIENCE_S, Server
from test_sets import GENERATE, MINIMAL, extra

from pegboard import __version__
from pegboard.errors import ConfigError
from pegboard_testing.authoring import release

NEXT = "0.1.1"
"""The version of the second build, with which the first is upgraded. The distributions of this
repository accept each other from 0.1 on."""


def clean_environment() -> dict[str, str]:
    return {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}


def run(*command: str | Path, fails: bool = False) -> str:
    words = [str(word) for word in command]
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=150, env=clean_environment()
    )
    assert (result.returncode != 0) == fails, result.stdout + result.stderr
    return result.stdout + result.stderr


# --- the files ------------------------------------------------------------------------------------


def test_every_wheel_is_whole(wheels: dict[str, Path]) -> None:
    """It has the licence, types, one version, and the metadata that an index shows."""
    assert len(wheels) == len(release.sources(ROOT))
    for name, path in wheels.items():
        with zipfile.ZipFile(path) as wheel:
            files = wheel.namelist()
            (info,) = (file for file in files if file.endswith("/METADATA"))
            metadata = message_from_bytes(wheel.read(info))
            module = name.replace("-", "_")
            licence = info.replace("METADATA", "licenses/LICENSE")
            assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
            assert f"{module}/py.typed" in files, name
        assert (metadata["Name"], metadata["Version"]) == (name, __version__)
        own, *of_libraries = metadata["License-Expression"].split(" AND ")
        assert own == "Apache-2.0"
        has_libraries = any("/vendor/" in file and "LICENSE" in file for file in files)
        assert bool(of_libraries) == has_libraries, f"{name}: files of others have a licence"
        assert metadata["Requires-Python"] == ">=3.11"
        assert metadata["Summary"] and metadata["Keywords"] and metadata.get_payload(), name
        assert metadata["Description-Content-Type"] == "text/markdown"


def test_every_sdist_builds_the_same_wheel(built: Path, wheels: dict[str, Path]) -> None:
    """Every file of the wheel's package is in the sdist, with what the build needs."""
    for path in wheels.values():
        stem = "-".join(path.name.split("-")[:2])
        with tarfile.open(built / f"{stem}.tar.gz") as sdist, zipfile.ZipFile(path) as wheel:
            inner = {name.partition("/")[2] for name in sdist.getnames()}
            own = {name for name in wheel.namelist() if ".dist-info/" not in name}
            assert own | {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= inner, stem


def test_checksums_and_notes(built: Path) -> None:
    lines = (built / "SHA256SUMS").read_text("utf-8").splitlines()
    files = sorted([*built.glob("*.whl"), *built.glob("*.tar.gz")])
    expected = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in files]
    assert lines == expected
    assert (built / "NOTES.md").read_text("utf-8").startswith(f"## {__version__}, ")


def test_two_builds_have_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    sums = []
    for name in ("one", "two"):
        release.build(repository_of_two(tmp_path / f"{name}-sources"), tmp_path / name)
        sums.append((tmp_path / name / "SHA256SUMS").read_text("utf-8"))
    assert sums[0] == sums[1]


# --- versions -------------------------------------------------------------------------------------


def repository_of_two(folder: Path) -> Path:
    """Copy two distributions of the repository, its licence and its changelog."""
    for name in ("core/pegboard", "plugins/sampler/torch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("tests", "__py*"))
    for name in ("LICENSE", "CHANGELOG.md"):
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def test_a_new_version_is_written_everywhere(tmp_path: Path) -> None:
    repository = repository_of_two(tmp_path)
    release.set_version(repository, "0.2.0rc1", "2030-01-02")
    assert {source.version for source in release.sources(repository)} == {"0.2.0rc1"}
    core = (repository / "core/pegboard/pegboard/__init__.py").read_text("utf-8")
    assert '__version__ = "0.2.0rc1"' in core
    changes = (repository / "CHANGELOG.md").read_text("utf-8")
    assert "## 0.2.0rc1, 2030-01-02\n" in changes and "unreleased" not in changes[:2000]
    with pytest.raises(ConfigError, match="expected a section such as"):
        release.set_version(repository, "0.3.0", "2030-01-03")


def test_what_cannot_be_released_is_refused(tmp_path: Path) -> None:
    repository = repository_of_two(tmp_path / "sources")
    with pytest.raises(ConfigError, match="expected a version such as"):
        release.build(repository, tmp_path / "out", "next")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/other.txt").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        release.build(repository, tmp_path / "full")
    project = repository / "plugins/sampler/torch/pyproject.toml"
    project.write_text(project.read_text("utf-8").replace('version = "0', 'version = "9'), "utf-8")
    with pytest.raises(ConfigError, match="a release has one version"):
        release.build(repository, tmp_path / "out")


# --- an installation ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def next_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next")
    release.build(ROOT, folder, NEXT)
    return folder


class Environment(LinkedEnvironment):
    """A virtual environment that has the third-party packages which the set needs, and nothing of
    Pegboard's. pip asks the index for Pegboard's packages only."""

    def install(self, index: Path, *words: str) -> None:
        run(*self.pip("install", "-q", "--index-url", f"file://{index}/simple", *words))

    def versions(self) -> dict[str, str]:
        found = distributions(path=[str(self.site)])
        return dict(sorted((each.name, each.version) for each in found))

    def generates(self, model: Path) -> bool:
        code = "import sys\n" + GENERATE.format(model=str(model))
        return '"tokens"' in run(self.bin / "python", "-I", "-c", code)


@pytest.fixture(scope="module")
def environment(layers: Layers, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    third_party = layers.of(extra(layers, "cpu")).path[1]
    return Environment(tmp_path_factory.mktemp("environment") / "venv", third_party)


@pytest.mark.real_model
def test_pip_installs_what_serves(
    environment: Environment, built: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """The set that the README lists package by package serves the default model."""
    told = (ROOT / "README.md").read_text("utf-8").partition("    pip install pegboard \\\n")[2]
    small = told.partition("\n\n")[0].replace("\\", " ").split()
    environment.install(built, "pegboard", *small)
    assert set(environment.versions()) >= {"pegboard", *small, *MINIMAL.values()}
    assert set(environment.versions().values()) == {__version__}
    command = (str(environment.bin / "pegboard"), "serve", str(smollm2_gguf))
    server = Server(command, clean_environment(), tmp_path)
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert server.stop() == 0
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_parts_of_two_builds_work_together(
    environment: Environment, built: Path, next_build: Path, checkpoint: Path
) -> None:
    """Of the next build, two plugins run with the older core, as in an outsider's tests, and then
    the newer core with older plugins, because pip upgrades only what it must."""
    environment.install(built, "pegboard[cpu]")
    assert "pegboard-kernel-cpu" in environment.versions()
    two = ("pegboard-attention-cpu", "pegboard-sampler-torch")
    environment.install(next_build, "--upgrade", *two)
    older = environment.versions()
    assert [name for name, version in older.items() if version == NEXT] == sorted(two)
    assert environment.generates(checkpoint)
    environment.install(next_build, "--upgrade", "pegboard")
    newer = environment.versions()
    assert newer == older | {"pegboard": NEXT}
    assert environment.generates(checkpoint)
    environment.install(next_build, "--upgrade", *newer)
    assert set(environment.versions().values()) == {NEXT}
    assert environment.generates(checkpoint)
    run(*environment.pip("check"))


@pytest.mark.real_model
def test_an_uninstalled_plugin_is_named(
    environment: Environment, built: Path, smollm2_gguf: Path
) -> None:
    """The errors of the features that it had say what to install, and so does `plugins add`."""
    environment.install(built, "pegboard[cpu]")
    names = ("pegboard-pack-gguf", "pegboard-api-openai")
    run(*environment.pip("uninstall", "-q", "-y", *names))
    command = environment.bin / "pegboard"
    told = run(command, "check", smollm2_gguf, fails=True)
    assert "pip install pegboard-pack-gguf" in told
    told = run(command, "serve", "--plugins-enable", "api:openai", fails=True)
    assert "pip install pegboard-api-openai" in told
    shown = run(command, "plugins", "add", "gguf", "api:openai")
    assert shown == "pip install pegboard-pack-gguf pegboard-api-openai\n"
