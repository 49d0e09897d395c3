"""Every command in the pages works. Commands are executed if possible. For the others, the things
that they name are checked.

Every run starts the servers of the README and of docs/serving.md, and reads the command lines of
the others, which `make nightly` starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from page_server import HUB_MODEL, PATIENCE_S, Server
from pages import PROGRAMS, PROJECTS, ROOT, Command, all_commands, blocks
from pegboard_command_proxy.command import make_parser, read_servers

from pegboard.cli.main import command_setup

PEGBOARD = all_commands("pegboard")
SERVE = [command for command in PEGBOARD if command.words[1] == "serve"]
TALK = [command for command in PEGBOARD if command.words[1] in ("chat", "complete")]
OFFLINE = [
    c
    for c in PEGBOARD
    if c.words[1] in ("run-batch", "perplexity")
    or (c.words[1] == "bench" and c.words[2] != "serve")
]
LOAD = [command for command in PEGBOARD if command.words[1:3] == ("bench", "serve")]
POOLED = [
    command
    for command in LOAD
    if {"openai-embeddings", "openai-embeddings-chat", "vllm-pooling", "vllm-rerank"}
    & {*command.words}
]
PROXY = [command for command in PEGBOARD if command.words[1] == "proxy"]
OTHER = [command for command in PEGBOARD if command not in (*SERVE, *TALK, *OFFLINE, *LOAD, *PROXY)]


def runs(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **more)  # type: ignore[call-overload]


def unique(commands: list[Command]) -> list[Command]:
    """One command of each wording."""
    return list({command.words: command for command in commands}.values())


def marked(commands: list[Command]) -> list[object]:
    """Parameters for the commands. Those that take long for what they prove are marked slow."""
    shown = {each.words for each in commands if each.block.page == ROOT / "README.md"}
    long = (("plugins", "cost"), ("plugins", "lock"), ("bench", "startup"), ("perplexity",))
    long += (("check",), ("collect-env",), ("bench",))
    slow = [
        c
        for c in commands
        if c.words[1:2] in long or c.words[1:3] in long or (c in SERVE and c.words not in shown)
    ]
    return [
        pytest.param(c, id=str(c), marks=[pytest.mark.slow] if c in slow else [])
        for c in unique(commands)
    ]


def test_the_pages_have_commands_of_every_program() -> None:
    assert {command.words[0] for command in all_commands(*PROGRAMS)} >= {"pegboard", "make", "pip"}
    assert SERVE and TALK and any(command.output for command in OTHER)


@pytest.mark.parametrize("command", unique(all_commands("make")), ids=str)
def test_make(command: Command) -> None:
    """The target and everything that it needs exist. The targets are not run, because `make test`
    runs them."""
    result = runs(["make", "-n", *command.words[1:]], cwd=ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", unique(all_commands("pip")), ids=str)
def test_pip_install(command: Command) -> None:
    """The page installs a distribution of this repository, with an extra that it has, or a folder
    with a project."""
    projects = {
        (project := tomllib.loads(path.read_text("utf-8"))["project"])["name"]: project
        for path in PROJECTS
    }
    assert command.words[1] == "install"
    words = list(command.words[2:])
    if words[0] == "--extra-index-url":  # of a build: tests/composition installs from one
        assert words[1] == "file:$PWD/dist/simple"
        del words[:2]
    for word in words:
        if word.startswith("./"):
            assert (ROOT / word / "pyproject.toml").is_file(), f"{command}: {word} is no project"
            continue
        name, extra = re.fullmatch((r"([a-z0-9-]+)(?:\[(\w+)\])?"), word).groups()  # type: ignore[union-attr]
        assert name in projects, f"{command}: no distribution is called {name}"
        assert extra is None or extra in projects[name]["optional-dependencies"], (
            f"{command}: {name} has no extra {extra}"
        )


def test_python() -> None:
    """Every file or module that a page runs exists."""
    for command in unique(all_commands("python")):
        is_module = command.words[1] == "-m"
        assert find_spec(command.words[2]) if is_module else (ROOT / command.words[1]).is_file(), (
            str(command)
        )


@pytest.mark.parametrize("command", marked(OTHER))
def test_pegboard(command: Command, environment: dict[str, str], tmp_path: Path) -> None:
    """The command runs. If the page shows output, its output is the same."""
    result = runs(list(command.words), env=environment, cwd=tmp_path)
    if command.output is None:
        assert result.returncode == 0, result.stderr
    else:
        shown = "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())
        assert shown == command.output


@pytest.mark.real_model
@pytest.mark.parametrize("command", unique(TALK), ids=str)
def test_pegboard_talks_to_a_server(
    command: Command, server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    words = [*command.words, "--url", f"{server.url}/v1", "--max-tokens", "4"]
    result = runs(words, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.real_model
@pytest.mark.parametrize("command", unique([c for c in LOAD if c not in POOLED]), ids=str)
def test_pegboard_loads_a_server(
    command: Command, server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    result = runs([*command.words, "--base-url", server.url], env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Serving Benchmark Result" in result.stdout


@pytest.mark.slow
def test_pegboard_loads_a_server_that_pools(environment: dict[str, str], tmp_path: Path) -> None:
    """The server is the one that the page starts."""
    (page,) = {command.block.page for command in POOLED}
    (words,) = {command.words for command in SERVE if command.block.page == page}
    pooling = Server(words, environment, tmp_path)
    try:
        for command in unique(POOLED):
            words = (*command.words, "--base-url", pooling.url)
            result = runs(list(words), env=environment, cwd=tmp_path)
            assert result.returncode == 0, (command, result.stderr)
            assert "Mean E2EL" in result.stdout
    finally:
        status = pooling.stop()
    assert status == 0


@pytest.mark.real_model
@pytest.mark.parametrize("command", marked(OFFLINE))
def test_pegboard_without_a_server(
    command: Command, smollm2_gguf: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """The batch files have the JSON that the pages show. Files of text have any text."""
    (line,) = (block.text for block in blocks(ROOT / "docs/serving.md") if block.language == "json")
    (tmp_path / "requests.jsonl").write_text(line, "utf-8")
    (tmp_path / "text.txt").write_text("The capital of France is Paris.", "utf-8")
    words = [str(smollm2_gguf) if word == HUB_MODEL else word for word in command.words]
    small = ["--max-model-len", "512", "--kv-cache-memory-bytes", str(2**27)]
    result = runs([*words, *small], env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    if "-o" in words:
        assert '"status_code": 200' in (tmp_path / words[words.index("-o") + 1]).read_text("utf-8")


READ = """
import json, sys
from pegboard.cli.main import command_setup
from pegboard_server.serve import make_parser

parser = make_parser(command_setup("serve"))
for words in json.load(sys.stdin):
    try:
        parser.parse_settings(words, {})
    except SystemExit as end:
        assert end.code == 0, words  # --help
    except Exception as error:
        raise AssertionError(words) from error
"""


def test_every_server_is_given_flags_that_exist(environment: dict[str, str]) -> None:
    told = json.dumps([command.words[2:] for command in SERVE])
    result = runs([sys.executable, "-c", READ], env=environment, cwd=ROOT, input=told)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", unique(PROXY), ids=str)
def test_every_proxy_is_given_flags_that_exist(command: Command) -> None:
    """The servers of the pages do not exist; tests/server runs proxies."""
    arguments = make_parser(command_setup("proxy")).parse(command.words[2:])
    assert read_servers(arguments)


@pytest.mark.real_model
@pytest.mark.parametrize("command", marked(SERVE))
def test_pegboard_serve(
    command: Command,
    smollm2_gguf: Path,
    environment: dict[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """The server starts, and it stops when told to. The model in the pages is replaced by the local
    one, and a tool server by a real one. Files of the repository are found."""
    words = [
        str(smollm2_gguf) if word == HUB_MODEL or word.endswith(".gguf") else word
        for word in command.words
    ]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    if "--tool-server" in words:
        words[words.index("--tool-server") + 1] = request.getfixturevalue("tool_server")
    if any("adapters" in word for word in words):
        make_adapters(tmp_path / "adapters")
    if any(word.startswith("--help") for word in words):
        assert runs(words, env=environment, cwd=tmp_path).returncode == 0
        return
    assert Server(tuple(words), environment, tmp_path).stop() == 0


def make_adapters(folder: Path) -> None:
    """Write the adapter `poet`, which changes one layer of the model, and a table of adapters."""
    import torch
    from safetensors.torch import save_file

    name = "base_model.model.model.layers.0.self_attn.q_proj"
    (folder / "poet").mkdir(parents=True)
    (folder / "poet/adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 2}'
    )
    weights = {
        f"{name}.lora_A.weight": torch.ones(2, 576),
        f"{name}.lora_B.weight": torch.zeros(576, 2),
    }
    save_file(weights, folder / "poet/adapter_model.safetensors")
    (folder / "table.json").write_text('{"poet": "poet"}')


# --- what the README says about sets --------------------------------------------------------------


def minimal_set(*, without: str = "") -> str:
    """Returns the set that the README installs package by package, without core, as an allow
    list."""
    told = next(
        each
        for each in all_commands("pip")
        if each.block.page.name == "README.md" and "pegboard" in each.words
    )
    return ",".join(word for word in told.words[2:] if word not in ("pegboard", without))


@pytest.mark.real_model
def test_the_minimal_set_runs_a_model(
    smollm2_gguf: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    code = f"""
from pegboard import LLM, SamplingParams
llm = LLM({str(smollm2_gguf)!r}, max_model_len=256, kv_cache_memory_bytes={2**27})
print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].finish_reason)
"""  # noqa: E501
    allowed = {**environment, "PEGBOARD_PLUGINS": minimal_set()}
    result = runs([sys.executable, "-c", code], env=allowed, cwd=tmp_path)
    assert result.stdout.strip() == "length", result.stderr


@pytest.mark.real_model
def test_what_is_left_out_is_named(
    smollm2_gguf: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    words = ["pegboard", "serve", "--port", "0", str(smollm2_gguf)]
    result = runs(
        words,
        env={**environment, "PEGBOARD_PLUGINS": minimal_set(without="pegboard-pack-gguf")},
        cwd=tmp_path,
    )
    assert result.returncode == 1
    assert "pip install pegboard-pack-gguf" in result.stderr
