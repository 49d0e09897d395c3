"""A model gives the same logprobs from each load format."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model

from pegboard import LLM, SamplingParams

PROMPT = {"prompt_token_ids": list(range(3, 20))}
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, detokenize=False)


def answers(folder: Path, load_format: str) -> list[dict[int, float]]:
    llm = LLM(
        str(folder),
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=4_000_000,
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


FORMATS: dict[str, Callable[[Path], None]] = {
    "pt": as_pickles,
    "npcache": as_pickles,
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
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    shutil.copytree(model[0], folder)
    FORMATS[name](folder)
    assert answers(folder, name) == model[1]
