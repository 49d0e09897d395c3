"""A model gives the same logprobs from each load format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from mistral_format import write_mistral
from safetensors.torch import load_file
from tiny_models import TOLERANCE, make_model

from pegboard import LLM, SamplingParams

PROMPT = {"prompt_token_ids": list(range(3, 20))}
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, detokenize=False)


def answers(folder: Path | str, load_format: str, **settings: Any) -> list[dict[int, float]]:
    llm = LLM(
        str(folder),
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=4_000_000,
        **settings,
    )
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    return [
        {token: value.logprob for token, value in place.items()}
        for place in output.outputs[0].logprobs
    ]


def as_pickles(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()


def as_mistral(folder: Path) -> None:
    """Write the model in Mistral's own format, whose Q and K have their rows in pairs."""
    weights = load_file(folder / "model.safetensors")
    write_mistral(folder, weights, json.loads((folder / "config.json").read_text()))
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()


def as_tensorizer(folder: Path) -> None:
    from tensorizer import TensorSerializer

    weights = folder / "model.safetensors"
    serializer = TensorSerializer(str(folder / "model.tensors"))
    serializer.write_state_dict(load_file(weights))
    serializer.close()
    weights.unlink()


FORMATS: dict[str, Callable[[Path], None]] = {
    "pt": as_pickles,
    "npcache": as_pickles,
    "mistral": as_mistral,
    "fastsafetensors": lambda folder: None,
    "runai_streamer": lambda folder: None,
    "tensorizer": as_tensorizer,
}
LIBRARIES = {
    "fastsafetensors": "fastsafetensors",
    "runai_streamer": "runai_model_streamer",
    "tensorizer": "tensorizer",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[int, float]]]:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    return folder, answers(folder, "auto")


@pytest.mark.parametrize("name", FORMATS)
def test_a_load_format_gives_the_same_logprobs(
    name: str,
    model: tuple[Path, list[dict[int, float]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    shutil.copytree(model[0], folder)
    FORMATS[name](folder)
    for place, expected in zip(answers(folder, name), model[1], strict=True):
        assert place == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("load_format", ["auto", "pt"])
def test_pickled_weights_from_the_hub(
    load_format: str,
    model: tuple[Path, list[dict[int, float]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repository that has nothing else."""
    repository = tmp_path / "repository"
    shutil.copytree(model[0], repository)
    as_pickles(repository)

    def download(name: str, *, allow_patterns: list[str], **more: Any) -> str:
        folder = tmp_path / "snapshot"
        folder.mkdir(exist_ok=True)
        for path in repository.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, folder)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for place, expected in zip(answers("org/name", load_format), model[1], strict=True):
        assert place == pytest.approx(expected, abs=TOLERANCE)


def test_bitsandbytes_quantizes_while_it_loads(
    model: tuple[Path, list[dict[int, float]]],
) -> None:
    folder = model[0]
    assert answers(folder, "bitsandbytes") == answers(folder, "auto", quantization="bitsandbytes")
