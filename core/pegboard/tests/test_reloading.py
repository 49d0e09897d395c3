"""The code of parsers and logits processors is read again when it changes (`plugins.reload`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard import LLM, SamplingParams
from pegboard.config.schema import PluginConfig
from pegboard.errors import ConfigError, PluginBroken, RequestError
from pegboard.interfaces.logits_processor import AddedRow
from pegboard.plugins.registry import Registry
from pegboard.plugins.reloading import ReloadedProcessor
from pegboard_testing.fake_distributions import FakeDistributions, spec_source
from pegboard_testing.tiny_engine import CONFIG, PROMPTS

PROCESSOR = """
class Forces:
    plugin = "logits_processor:forces"
    spec_fields = {"arguments": ("on",), "validate": f"{__name__}:validate"}
    argmax_invariant = False

    def __init__(self, options, setup):
        pass

    def update(self, added, removed):
        pass

    def apply(self, logits, rows, depth, drafts):
        logits[:, TOKEN] = 1e4
        return logits


def validate(params):
    return None if (params.extra_args or {}).get("on") == TOKEN else "not TOKEN"
"""
PARSER = """
class Parser:
    def __init__(self, options, setup):
        self.version = VERSION

    def feed(self, text, token_ids):
        return []

    def finish(self):
        return []

    def constraint(self, tools, choice):
        return None

    def reasoning_end(self):
        return ()

    def call_id(self, index, name):
        return ""
"""
seconds = count(2_000_000_000)


def save(path: Path, text: str) -> None:
    """Write a file whose time is always a new one, of the same second as the bytecode's."""
    path.write_text(text, "utf-8")
    time = next(seconds)
    os.utime(path, ns=(time, time))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    return str(tmp_path)


def test_a_logits_processor(model: str, tmp_path: Path) -> None:
    """With its validation of requests. While the file has a mistake, requests fail."""
    file = tmp_path / "forces.py"
    save(file, PROCESSOR.replace("TOKEN", "5"))
    given: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": 64,
        "logits_processors": ["forces"],
        "plugin_files": [str(file)],
    }
    with LLM(model, plugins_reload=True, **given) as llm:

        def tokens(on: int) -> list[int]:
            params = SamplingParams(
                temperature=0,
                max_tokens=3,
                ignore_eos=True,
                detokenize=False,
                extra_args={"on": on},
            )
            prompt: Any = {"prompt_token_ids": PROMPTS[0]}
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            return list(output.outputs[0].token_ids)

        assert tokens(5) == [5] * 3
        save(file, PROCESSOR.replace("TOKEN", "7"))
        with pytest.raises(RequestError, match="not 7"):
            tokens(5)
        assert tokens(7) == [7] * 3
        save(file, "class Forces\n")
        with pytest.raises(PluginBroken, match="expected ':'"):
            tokens(7)
        save(file, PROCESSOR.replace("TOKEN", "9"))
        assert tokens(9) == [9] * 3


def test_a_parser_of_a_package(
    fake_distributions: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object that parses an answer keeps its code; the next answer has the new one."""
    source = spec_source("tool_parser", implementation="reloaded_parser:Parser")
    points = {"tool_parser": {"one": "reloaded_spec:SPEC"}}
    fake_distributions.add("acme", points, {"reloaded_spec": source})
    file = fake_distributions.root / "reloaded_parser.py"
    save(file, PARSER.replace("VERSION", "1"))
    registry = Registry(fake_distributions.scan(), PluginConfig(reload=True))
    (entry,) = registry.entries("tool_parser")
    old = registry.build(entry, None)
    assert registry.build(entry, None).__class__ is old.__class__, "nothing has changed"
    save(file, PARSER.replace("VERSION", "2"))
    assert (registry.build(entry, None).version, old.version) == (2, 1)
    unfit = PARSER.replace("feed", "feeds").replace("VERSION", "2")
    for mistake, told in (("1 +", "invalid syntax"), (unfit, "has no feed")):
        save(file, mistake)
        for _ in range(2):
            with pytest.raises(PluginBroken, match=told):
                registry.build(entry, None)
    save(file, PARSER.replace("VERSION", "3"))
    assert registry.build(entry, None).version == 3
    save(file, PARSER.replace("VERSION", "4"))
    assert Registry(fake_distributions.scan()).build(entry, None).version == 3, "not asked for"


def test_a_processor_is_not_replaced_under_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    class Counter:
        argmax_invariant = True

        def __init__(self) -> None:
            self.rows: list[int] = []

        def update(self, added: list[AddedRow], removed: np.ndarray) -> None:
            self.rows += [each.row for each in added]

    changes = iter([False, True, False, True, False])
    makes: list[Callable[[], Any]] = [Counter, Counter]

    def make() -> Any:
        if not makes:
            raise PluginBroken("does not import")
        return makes.pop()()

    processor: Any = ReloadedProcessor("logits_processor:x (y 1)", lambda: next(changes), make)
    none = np.zeros(0, np.int64)
    row: Any = AddedRow(3, None, none, none)  # type: ignore[arg-type]
    first = processor.plugin_object
    processor.update([row], none)
    processor.update([row._replace(row=4)], none)
    assert processor.plugin_object is first and first.rows == [3, 4]
    processor.update([row], np.array([3, 4]))
    second = processor.plugin_object
    assert second is not first and second.rows == [3]
    processor.update([], np.array([3]))
    assert processor.plugin_object is second and "stays as it was: does not import" in caplog.text


def test_a_lock_forbids_it(fake_distributions: FakeDistributions) -> None:
    with pytest.raises(ConfigError, match="plugins.lock forbids it"):
        Registry.discover(PluginConfig(reload=True, lock="lock.json"))
