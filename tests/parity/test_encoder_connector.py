"""Engines that share the rows of images: the second one encodes nothing and answers the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_encoder_connector_shared_storage.connector import SharedStorageConnector
from pegboard_model_llava.llava import Llava
from tiny_media import (
    MediaReference,
    check_media,
    open_media_llm,
    prompt,
    some_prompts,
    write_llava,
)
from tiny_models import divide
from tiny_whisper import about, sound, write_whisper

from pegboard import SamplingParams
from pegboard.errors import ConfigError
from pegboard_testing.contract_multimodal_processor import random_image


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many items the model has encoded, call by call."""
    calls: list[int] = []
    encode = Llava.encode

    def watched(model: Any, modality: str, items: Any) -> Any:
        calls.append(len(items))
        return encode(model, modality, items)

    monkeypatch.setattr(Llava, "encode", watched)
    return calls


def sharing(folder: Path, role: str = "ec_both") -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    config = {"ec_connector": "ECExampleConnector", "ec_role": role}
    return {"ec_transfer_config": {**config, "ec_connector_extra_config": extra}}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_second_engine_encodes_nothing(
    llava: MediaReference,
    tmp_path: Path,
    encoded: list[int],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    if ranks > 1:
        divide(monkeypatch, ranks)
    check_media(llava, some_prompts(), **sharing(tmp_path, "ec_producer"))
    assert sum(encoded) == 2 and len([*tmp_path.rglob("*.safetensors")]) == 2
    encoded.clear()
    check_media(llava, some_prompts(), **sharing(tmp_path, "ec_consumer"))
    assert not encoded
    new = prompt(5, random_image(9, 9, seed=9))
    check_media(llava, [new], **sharing(tmp_path, "ec_consumer"))
    assert sum(encoded) == 1, "what is not there is encoded, by one of the ranks"


def test_other_types_and_options_have_other_rows(
    llava: MediaReference, tmp_path: Path, encoded: list[int]
) -> None:
    one = some_prompts()[0]
    params = SamplingParams(max_tokens=1)
    for settings in (
        {},
        {"dtype": "bfloat16"},
        {"mm_processor_kwargs": {"image_mean": [0.1, 0.2, 0.3]}},
    ):
        with open_media_llm(llava.directory, **sharing(tmp_path), **settings) as llm:
            llm.generate([one], params, use_tqdm=False)
    assert sum(encoded) == 3


@pytest.mark.parametrize("method", ["load", "save"])
@pytest.mark.parametrize("what", ["raise", "wrong"])
def test_a_connector_that_fails_is_switched_off(
    llava: MediaReference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    what: str,
) -> None:
    calls = []

    def fail(*given: Any) -> Any:
        calls.append(given)
        if what == "raise":
            raise ZeroDivisionError("no luck")
        return torch.zeros(3, 3)

    monkeypatch.setattr(SharedStorageConnector, method, fail)
    check_media(llava, some_prompts(), **sharing(tmp_path))
    if (method, what) != ("save", "wrong"):  # nobody reads what it returns
        assert len(calls) == 1


def test_whisper(tmp_path: Path) -> None:
    reference = write_whisper(tmp_path / "model")
    prompts = [about(sound(1.0, seed), 4, 5) for seed in (1, 2)]
    for _ in range(2):
        check_media(reference, prompts, **sharing(tmp_path / "rows"))
    assert len([*tmp_path.rglob("rows/*/*.safetensors")]) == 2


def test_models_of_text(tmp_path: Path, smollm2_gguf: Path) -> None:
    with pytest.raises(ConfigError, match="has no effect on a model that takes only text"):
        open_media_llm(smollm2_gguf, **sharing(tmp_path))
