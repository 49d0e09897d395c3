"""A new plugin of every kind that has a template installs, is found, and passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pegboard.cli.main import main
from pegboard.errors import PegboardError
from pegboard.interfaces import KINDS
from pegboard_testing.authoring.conformance import CONTRACTS, OPTIONAL
from pegboard_testing.authoring.scaffold import kinds, write_package

PIP = (
    "-m",
    "pip",
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--no-deps",
    "--no-build-isolation",
)


def python(*words: str, folder: Path, site: Path) -> str:
    """Run Python in `folder`, with `site` on its path, and return its output."""
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
    return ended.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One new package per kind. Their names differ, so that all can be installed together."""
    directory = tmp_path_factory.mktemp("new")
    return {
        kind: write_package(kind, f"my-{kind.replace('_', '-')}", directory) for kind in kinds()
    }


@pytest.fixture(scope="module")
def site(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the new packages are installed."""
    site = tmp_path_factory.mktemp("site")
    python(*PIP, "--target", str(site), *map(str, packages.values()), folder=site, site=site)
    return site


def test_the_commands_name_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip would ask an index for a plain name."""
    monkeypatch.chdir(tmp_path)
    for where, told in (
        ([], "./pegboard-sampler-own"),
        (["--directory", f"{tmp_path}/a b"], f"'{tmp_path}/a b/pegboard-sampler-own'"),
    ):
        assert main(["plugins", "new", "sampler", "own", *where]) == 0
        assert (
            f"Install it:  pip install {told}\nTest it:     python -m pytest {told}"
            in capsys.readouterr().out
        )
    readme = Path("pegboard-sampler-own/README.md").read_text("utf-8")
    assert "pip install ." in readme and "pip install pegboard" not in readme


@pytest.mark.sampled(6)
@pytest.mark.parametrize("first", range(6))
def test_new_packages_pass_their_tests(packages: dict[str, Path], site: Path, first: int) -> None:
    """Those of every sixth kind, in one run."""
    root = next(iter(packages.values())).parent
    listed = python("-m", "pegboard", "plugins", "list", folder=root, site=site)
    assert all(folder.name in listed for folder in packages.values())
    tested = python(
        "-m",
        "pytest",
        "-q",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        *map(str, list(packages.values())[first::6]),
        folder=root,
        site=site,
    )
    assert " passed" in tested and "skipped" not in tested, tested


def test_new_packages_serve_requests(site: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("serve_new_plugins.py")
    assert "served" in python(str(script), str(tmp_path), folder=tmp_path, site=site)


def test_new_packages_are_formatted(packages: dict[str, Path]) -> None:
    settings = Path(__file__).parents[3] / "pyproject.toml"
    root = next(iter(packages.values())).parent
    # E501: these names are longer than most
    for words in (("check", "--ignore", "E501"), ("format", "--check")):
        python(
            "-m",
            "ruff",
            *words,
            "--no-cache",
            "--config",
            str(settings),
            ".",
            folder=root,
            site=root,
        )


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("tool_parsr", "mine", "tool_parser"),
        ("tool_parser", "My Parser", "expected lower-case letters"),
        ("tool_parser", "../mine", "expected lower-case letters"),
        ("tool_parser", "1st", "expected lower-case letters"),
    ],
)
def test_what_cannot_be_made_is_explained(
    kind: str, name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(PegboardError, match=message):
        write_package(kind, name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_kind_has_a_template() -> None:
    assert set(kinds()) == set(KINDS)


@pytest.mark.parametrize("kind", kinds())
def test_new_tests_derive_from_the_contract_of_the_kind(
    kind: str, packages: dict[str, Path]
) -> None:
    """`plugins test` asks for it."""
    modules = CONTRACTS.get(kind, (f"contract_{kind}",))
    if kind in OPTIONAL or not any(find_spec(f"pegboard_testing.{module}") for module in modules):
        return
    tests = "".join(file.read_text() for file in packages[kind].glob("tests/*.py"))
    assert "parser_examples" in tests or any(
        f"from pegboard_testing.{module} import" in tests for module in modules
    )


@pytest.mark.parametrize(
    ("name", "module", "architecture"),
    [
        ("PebbleForCausalLM", "pebble", "PebbleForCausalLM"),
        ("GPTPebble2MoeForCausalLM", "gptpebble2_moe", "GPTPebble2MoeForCausalLM"),
        ("pebble-moe", "pebble_moe", "PebbleMoeForCausalLM"),
    ],
)
def test_a_model_may_have_the_name_of_its_architecture(
    name: str, module: str, architecture: str, tmp_path: Path
) -> None:
    folder = write_package("model", name, tmp_path)
    entry = f'"{architecture}" = "pegboard_model_{module}.plugin:{module.upper()}"'
    assert entry in (folder / "pyproject.toml").read_text()
    assert (
        f"class {architecture.removesuffix('ForCausalLM')}Model"
        in (folder / f"pegboard_model_{module}/model.py").read_text()
    )


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plugins", "new", "command", "greet", "--directory", str(tmp_path)]
    assert main(words) == 0
    assert str(tmp_path / "pegboard-command-greet" / "pyproject.toml") in capsys.readouterr().out
    assert main(words) == 2
    assert "is already there" in capsys.readouterr().err
