"""Engines that share the rows of images: the second one encodes nothing and answers the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_qwen3_vl_parity
import torch
from pegboard_encoder_connector_shared_storage.connector import SharedStorageConnector
from pegboard_model_llava.llava import Llava
from test_qwen3_vl_parity import FILM, MARK
from tiny_media import (
    MediaReference,
    check_media,
    mixed_prompts,
    open_media_llm,
    prompt,
    some_prompts,
    write_llava,
)
from tiny_models import divide
from tiny_whisper import about, sound, write_whisper

from pegboard import SamplingParams
from pegboard.errors import ConfigError
from pegboard.worker.model_loader import fill_layers, wanted_of
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


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_an_engine_that_only_encodes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one layer of the language model, and makes the same rows."""
    names: list[str] = []

    def watched(declared: Any, *more: Any, **options: Any) -> None:
        names.extend(wanted_of(declared))
        fill_layers(declared, *more, **options)

    monkeypatch.setattr("pegboard.worker.loaded_model.fill_layers", watched)
    folder = tmp_path / "model"
    folder.mkdir()
    is_llava = kind == "llava"
    reference = write_llava(folder) if is_llava else test_qwen3_vl_parity.write(folder, kind)
    prompts = some_prompts() if is_llava else mixed_prompts(MARK, FILM)
    rows = tmp_path / "rows"
    settings = {**sharing(rows, "ec_producer"), "mm_encoder_only": True}
    params = SamplingParams(max_tokens=1)
    with open_media_llm(folder, **settings) as llm:
        llm.generate(prompts, params, use_tqdm=False)
    count = len([*rows.rglob("*.safetensors")])
    assert count >= 2
    layers = [name for name in names if "language_model" in name and ".layers." in name]
    assert layers and all(".layers.0." in name for name in layers)
    check_media(reference, prompts, **sharing(rows, "ec_both"))
    assert len([*rows.rglob("*.safetensors")]) == count


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"mm_encoder_only": True}, "encoder_connector"),
        ({"mm_encoder_only": True, "max_loras": 1}, "max_loras is not possible"),
        (
            {"mm_encoder_only": True, "spec_method": "ngram", "spec_tokens": 2},
            "spec_method is not possible",
        ),
    ],
)
def test_what_an_engine_that_only_encodes_cannot_do(
    llava: MediaReference, tmp_path: Path, more: dict[str, Any], told: str
) -> None:
    connector = {} if told == "encoder_connector" else sharing(tmp_path)
    with pytest.raises(ConfigError, match=told):
        open_media_llm(llava.directory, **connector, **more)


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
