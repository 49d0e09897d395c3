"""IO processors in vLLM's form make prompts of any data."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pegboard_api_pooling.api import PoolingApi
from pegboard_api_pooling.plugin import POOLING
from pegboard_vllm_compat.entry_points import table
from pegboard_vllm_compat.io_adapter import VllmIOProcessor
from pegboard_vllm_compat.io_interface import IOProcessor, make_io_processor, params_of
from pegboard_vllm_compat.serve import with_plugins
from starlette.testclient import TestClient

from pegboard import PoolingParams
from pegboard.errors import ConfigError, RequestError
from pegboard.interfaces.api import ApiSetup
from pegboard.interfaces.io_processor import IOProcessorSetup
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.served_app import make_app

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def installed(vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with IO processors."""
    info = tmp_path / "distance-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: distance\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.io_processor_plugins]\ndistance = vllm_io_processor:register\n"
        "none = vllm_io_processor:refuse\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(HERE))


def test_encode(checkpoints: dict[str, str]) -> None:
    from pegboard_vllm_compat.offline import LLM

    llm = LLM(checkpoints["MODEL"], runner="pooling", io_processor_plugin="distance")
    assert llm.io_processor is not None and llm.io_processor.model == checkpoints["MODEL"]
    request = {"data": {"texts": ["Hello", "world"]}}
    (output,) = llm.encode(request, pooling_task="plugin")
    first, second = (each.outputs.data for each in llm.encode(["Hello", "world"]))
    assert output.outputs == pytest.approx(float((first - second).norm()), rel=1e-4)
    assert llm.io_processor.output_to_response(output.outputs).data["distance"] == output.outputs
    with pytest.raises(ValueError, match="two texts"):
        llm.encode({"data": {"texts": []}})
    with pytest.raises(RequestError, match="data"):
        llm.encode("Hello", pooling_task="plugin")
    llm.io_processor = None
    with pytest.raises(RequestError, match="io_processor_plugin"):
        llm.encode(request)


def test_a_route() -> None:
    """`serve --io-processor-plugin` answers data in POST /pooling. Other
    names are left to Pegboard."""
    words = with_plugins(["model", "--io-processor-plugin=distance"])
    assert words[1:4] == ["--io-processor-plugin", "vllm-distance", "--plugin"]
    assert "io_processor:vllm-distance" in Path(words[4]).read_text("utf-8")
    other = ["model", "--io-processor-plugin", "other"]
    assert with_plugins(other) == other

    class Processor(VllmIOProcessor):
        target = "distance"
        shadow = True

    def apis(setup: ApiSetup) -> Any:
        return [("pooling", PoolingApi(None, setup), POOLING)]

    client = FakeEngineClient(pools=True)
    client.processor = Processor(None, IOProcessorSetup("model", (), client.tokenizer))
    http = TestClient(make_app(apis, client), raise_server_exceptions=False)

    def post(status: int, **body: Any) -> Any:
        answer = http.post("/pooling", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    answer = post(200, data={"texts": ["a", "abc"]}, task="plugin", model="fake-model")
    # the fake makes of ids their sum, their number and 0.5
    assert answer["data"]["distance"] == pytest.approx(((98 + 99) ** 2 + 2**2) ** 0.5)
    for message, body in {
        "expected two texts": {"data": {"texts": []}},
        "'texts'": {"data": {}},
        "expected of the IO processor": {"data": {"texts": [{"image": 1}, "b"]}},
    }.items():
        assert message in post(400, **body)["error"]["message"]


def test_which_processor() -> None:
    assert "  distance = vllm_io_processor:register  (distance)" in table()
    with pytest.raises(ConfigError, match="'other' is not installed; installed: distance, none"):
        make_io_processor("other", None, None)
    with pytest.raises(ConfigError, match="cannot run here"):
        make_io_processor("none", None, None)


class Newer(IOProcessor[Any, Any]):
    """The form of newer versions of vLLM."""

    def parse_data(self, data: object) -> Any:
        return data

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        return params or PoolingParams(dimensions=3)

    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return prompt

    def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return list(model_output)


def test_the_newer_form() -> None:
    processor = Newer(SimpleNamespace())
    assert processor.parse_request({"data": [1]}) == [1]
    assert params_of(processor, None).dimensions == 3
    assert params_of(processor, [None, PoolingParams(dimensions=2)])[1].dimensions == 2

    async def outputs() -> Any:
        for place in (1, 0):
            yield place, f"output {place}"

    assert asyncio.run(processor.pre_process_async("prompt")) == "prompt"
    processed = asyncio.run(processor.post_process_async(outputs()))
    assert processor.output_to_response(processed).data == ["output 0", "output 1"]
