"""Plugins that are not installed: files that `--plugin` names, and logits processors that are
classes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pegboard import LLM, AsyncLLM, SamplingParams
from pegboard.cli.flags import FlagParser
from pegboard.config.schema import PluginConfig
from pegboard.config.sources import engine_settings
from pegboard.errors import (
    ConfigError,
    PegboardError,
    PluginBroken,
    PluginConflict,
    PluginFailure,
    RequestError,
)
from pegboard.interfaces.logits_processor import LogitsProcessorSpec
from pegboard.plugins.importing import import_object
from pegboard.plugins.registry import Registry
from pegboard_testing.tiny_engine import CONFIG, PROMPTS

EXAMPLE = Path(__file__).parents[3] / "examples" / "target_token.py"
META = "class Meta(type):\n"
PLUGIN = "\nclass A(metaclass=Meta):\n    plugin = 'sampler:x'\n"


class Highest:
    """Gives every request the token with the highest id."""

    argmax_invariant = False
    host_tokens = True

    def __init__(self, options: None, setup: Any) -> None:
        self.taken = 0

    def update(self, added: Sequence[Any], removed: Any) -> None: ...

    def apply(
        self, logits: Tensor, rows: Tensor, depth: Tensor, drafts: Callable[[], list[list[int]]]
    ) -> Tensor:
        logits[:, :-1] = -torch.inf
        return logits

    def extend(self, rows: Any, token_ids: Any) -> None:
        self.taken += len(rows)


class Theirs:
    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: object) -> None: ...


class Lacking:
    host_tokens = True

    def update(self) -> None: ...


class Misspelled(Highest):
    spec_fields: ClassVar[dict[str, Any]] = {"argument": ()}


HERE = f"{__name__}:"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    return str(tmp_path)


@pytest.fixture
def file() -> str:
    return str(EXAMPLE)


OWN: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64,
}
PLAIN = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)


def asking(token: object) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=5,
        ignore_eos=True,
        detokenize=False,
        extra_args={"target_token": token},
    )


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [
        list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)
    ]


def test_a_file_and_a_class_change_logits(model: str, file: str) -> None:
    with LLM(model, **OWN) as llm:
        plain = tokens(llm, [PLAIN] * 3)
    with LLM(model, plugin_files=[file], logits_processors=["target_token"], **OWN) as llm:
        assert tokens(llm, [PLAIN, asking(9), PLAIN]) == [plain[0], [9] * 5, plain[2]]
        with pytest.raises(
            RequestError, match="target_token: target_token must be a token id, got 'x'"
        ):
            tokens(llm, [PLAIN, asking("x"), PLAIN])
        with pytest.raises(
            RequestError, match="no logits processor .* reads 'other'; known: target_token"
        ):
            tokens(llm, [SamplingParams(extra_args={"other": 1}, detokenize=False)] * 3)
    for given in (Highest, HERE + "Highest"):
        with LLM(model, logits_processors=[given], **OWN) as llm:
            assert tokens(llm, [PLAIN] * 3) == [[255] * 5] * 3


def test_the_engine_process_reads_the_file_too(model: str, file: str) -> None:
    async def last() -> list[int]:
        llm = AsyncLLM(model, plugin_files=[file], logits_processors=["target_token"], **OWN)
        try:
            return [
                list(each.outputs[0].token_ids)
                async for each in llm.generate({"prompt_token_ids": [5]}, asking(7), "1")
            ][-1]
        finally:
            llm.shutdown()

    assert asyncio.run(last())[-1] == 7


def test_specs_come_from_the_class(file: str) -> None:
    registry = Registry.discover(PluginConfig(files=[file]), [HERE + "Highest"])
    forced = registry.find("logits_processor", "target_token")
    highest = registry.find("logits_processor", HERE + "Highest")
    assert forced.id == "logits_processor:target_token (target-token-py uninstalled)"
    for each in (registry, Registry.from_lock(registry.lock())):
        spec = each.spec(forced)
        assert (
            isinstance(spec, LogitsProcessorSpec)
            and spec.arguments == ("target_token",)
            and not spec.flags
        )
        assert each.spec(highest).flags == {"host_tokens"}
        assert each.load(highest) is Highest and each.load(forced).__name__ == "TargetToken"
    owner = import_object(file).__name__
    assert registry.modules()[owner] == forced.id


def test_flags_name_files(file: str, tmp_path: Path) -> None:
    parser = FlagParser(prog="test")
    parser.add_settings("engine", "plugins")
    settings, _ = parser.parse_settings(
        ["--plugin", file, "--logits-processors", "target_token", HERE + "Highest"]
    )
    for given in (file, Path(file), [Path(file)]):
        assert engine_settings("model", {"plugin_files": given}).plugins.files == [file]
    denied = engine_settings("model", {"plugins_deny": ["metrics:log"]}).plugins
    assert denied.deny == ["metrics:log"] and not engine_settings("model", {}).plugins.deny
    assert settings.plugins.files == [file] and settings.engine.logits_processors == [
        "target_token",
        HERE + "Highest",
    ]


def test_an_enabled_kind_acts_when_its_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sink.py"
    path.write_text('class Sink:\n    plugin = "metrics:sink"\n')
    registry = Registry.discover(PluginConfig(files=[str(path)]))
    assert "sink" in [entry.name for entry in registry.enabled("metrics")]
    registry = Registry.discover(PluginConfig(files=[str(path)], disable=["metrics:sink"]))
    assert "sink" not in [entry.name for entry in registry.enabled("metrics")]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("x = 1", ConfigError, "declares no plugin, expected a class with plugin ="),
        (
            "class A:\n    plugin = 'tool_parser'",
            ConfigError,
            "class A has plugin = 'tool_parser', expected",
        ),
        (
            "class A:\n    plugin = 'tool_parse:x'",
            ConfigError,
            "unknown kind 'tool_parse'.*tool_parser",
        ),
        (
            "class A:\n    plugin = 'command:x'",
            ConfigError,
            "a command, which must be installed: pegboard plugins new command",
        ),
        ("import no_such_module", PluginBroken, "no_such_module"),
        ("raise ValueError('why')", PluginBroken, "ValueError: why"),
        (
            META + "    def __getattribute__(cls, name): 1 / 0" + PLUGIN,
            PluginFailure,
            "plugin:wrong .* failed: ZeroDivisionError",
        ),
    ],
)
def test_wrong_files_are_explained(
    tmp_path: Path, text: str, error: type[PegboardError], message: str
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(error, match=message):
        Registry.discover(PluginConfig(files=[str(path)]))


def test_a_class_that_fails_when_its_spec_is_made(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(META + "    def __getattr__(cls, name): 1 / 0" + PLUGIN)
    registry = Registry.discover(PluginConfig(files=[str(path)]))
    with pytest.raises(PluginFailure, match="sampler:x .* failed: ZeroDivisionError"):
        registry.spec(registry.find("sampler", "x"))


def test_wrong_names_are_explained(file: str, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.py", tmp_path):
        with pytest.raises(ConfigError, match="expected an existing Python file"):
            Registry.discover(PluginConfig(files=[str(path)]))
    with pytest.raises(
        ConfigError,
        match="--plugin: logits_processor:target_token .* may not be used: not in plugins.allow",
    ):
        Registry.discover(PluginConfig(files=[file], allow=["pegboard-logits-processor-ban"]))
    other = tmp_path / "other.py"
    other.write_text(EXAMPLE.read_text("utf-8"), "utf-8")
    with pytest.raises(
        PluginConflict, match="'other-py:target_token' or 'target-token-py:target_token'"
    ):
        Registry.discover(PluginConfig(files=[file, str(other)])).find(
            "logits_processor", "target_token"
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Theirs", "has the methods of vLLM's logits processors .* see docs/vllm.md"),
        (
            "Lacking",
            (
                "has no apply, extend, argmax_invariant, which "
                "pegboard.interfaces.logits_processor.LogitsProcessor needs"
            ),
        ),
        ("Misspelled", "unknown field 'argument' in spec_fields.*arguments"),
        ("PLAIN", "is a SamplingParams, expected a class"),
        ("Nobody", "has no attribute 'Nobody'"),
    ],
)
def test_wrong_classes_are_refused_before_the_model_is_read(
    model: str, name: str, message: str
) -> None:
    with pytest.raises(PluginBroken, match=message):
        LLM(model, logits_processors=[HERE + name], **OWN)


def test_a_class_inside_a_function_is_refused() -> None:
    class Local(Highest): ...

    with pytest.raises(
        ConfigError, match="is inside a function; define the class at the top level"
    ):
        engine_settings("model", {"logits_processors": [Local]})
