"""IO processors in an engine: data in, data out, and plugins that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_converted_models import LIMITS, write
from tiny_media import make_tokenizer
from tiny_models import open_llm

from pegboard import LLM, PoolingParams
from pegboard.errors import ConfigError, PegboardError, PluginFailure, RequestError

PLUGIN = """
from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import RequestError
from pegboard.interfaces.api import Prompt


class Processor:
    plugin = "io_processor:acme"

    def __init__(self, options, setup):
        if setup.model == "broken":
            raise ZeroDivisionError("no luck")

    def prompts(self, data):
        if data == "raise":
            raise ZeroDivisionError("no luck")
        if data == "type":
            return ["text"]
        if not isinstance(data, (list, dict)):
            raise RequestError("data: expected a list", parameter="data")
        texts = data["texts"] if isinstance(data, dict) else data
        return [(Prompt(text=text), PoolingParams(task="embed")) for text in texts]

    def answer(self, data, outputs):
        if isinstance(data, dict):
            raise ZeroDivisionError("no luck")
        return {"sizes": [output.pooled().shape[0] for output in outputs]}
"""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    write(folder, "LlamaModel")
    make_tokenizer(["<image>"], "<image>").save_pretrained(folder)
    (folder / "acme.py").write_text(PLUGIN)
    with open_engine(folder) as llm:
        yield llm


def open_engine(folder: Path, **settings: Any) -> LLM:
    return open_llm(
        folder,
        **LIMITS,
        skip_tokenizer_init=False,
        io_processor_plugin="acme",
        plugin_files=[str(folder / "acme.py")],
        **settings,
    )


def test_data(llm: LLM) -> None:
    (output,) = llm.encode({"data": ["w3 w4", "w5"]}, use_tqdm=False)
    assert output.outputs.data == {"sizes": [32, 32]} and output.finished
    assert len(llm.encode(["w3"], use_tqdm=False)[0].outputs.data) == 32


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (3, RequestError, "data: expected a list"),
        ([], RequestError, "makes no prompts of the data"),
        (["w1 " * 99], RequestError, "the prompt has 99 tokens"),
        ("raise", PluginFailure, r"io_processor:acme .*ZeroDivisionError: no luck"),
        ("type", PluginFailure, "io_processor:acme"),
        ({"texts": ["w3"]}, PluginFailure, r"io_processor:acme .*ZeroDivisionError: no luck"),
    ],
)
def test_what_fails_is_named_and_the_engine_goes_on(
    data: Any, error: type[PegboardError], message: str, llm: LLM
) -> None:
    with pytest.raises(error, match=message):
        llm.encode({"data": data}, use_tqdm=False)
    assert llm.encode({"data": ["w3"]}, use_tqdm=False)[0].outputs.data == {"sizes": [32]}


def test_settings_that_do_not_fit(llm: LLM, tmp_path: Path) -> None:
    folder = llm.llm_engine.plan.checkpoint.path
    write(tmp_path, "LlamaForCausalLM")
    (tmp_path / "acme.py").write_text(PLUGIN)
    make_tokenizer(["<image>"], "<image>").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="io_processor_plugin has no effect on a model that"):
        open_engine(tmp_path)
    with pytest.raises(PegboardError, match="provides io_processor 'acme'"):
        open_llm(folder, **LIMITS, io_processor_plugin="acme")
    with (
        open_llm(folder, **LIMITS) as plain,
        pytest.raises(RequestError, match="start it with io_processor_plugin"),
    ):
        plain.encode({"data": []}, PoolingParams())
