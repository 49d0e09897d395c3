"""Whisper's published weights: real speech, through `LLM` and over HTTP, is written down as
transformers writes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
from tokenizers import Tokenizer
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from whisper_files import BASE, TINY_EN, Published, published, recording

from pegboard_media.audio import resample

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from server_process import Server, install_probe

from pegboard import LLM, SamplingParams
from pegboard.errors import PegboardError

pytestmark = pytest.mark.real_model

BECKETT = "Ever tried, ever failed. No matter, try again. Fail again. Fail better."
CITIES = "It was the best of times, it was the worst of times."


def folder_of(model: Published, factory: pytest.TempPathFactory) -> Path:
    """The tests are skipped if the weights cannot be downloaded."""
    try:
        recording("beckett.wav")
        return published(model, factory.mktemp("whisper"))
    except (PegboardError, OSError) as error:
        pytest.skip(f"the weights are not available: {error}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(TINY_EN, tmp_path_factory)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(BASE, tmp_path_factory)


def samples_of(name: str, seconds: float = 29.0) -> np.ndarray:
    samples, rate = soundfile.read(recording(name), dtype="float32")
    return resample(samples[: int(seconds * rate)], rate, 16_000)


def expected(folder: Path, samples: np.ndarray, **how: Any) -> list[int]:
    """The tokens that transformers generates, without special ones."""
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    with torch.no_grad():
        tokens = model.generate(features, do_sample=False, num_beams=1, **how)[0].tolist()
    return [token for token in tokens if token < model.config.eos_token_id]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["beckett.wav", "two_cities.wav"])
@pytest.mark.filterwarnings("ignore")
def test_the_tokens_of_transformers(tiny: Path, name: str) -> None:
    samples = samples_of(name)
    prompt = {
        "prompt": "<|startoftranscript|><|notimestamps|>",
        "multi_modal_data": {"audio": (samples, 16_000)},
    }
    params = SamplingParams(temperature=0, max_tokens=200)
    with LLM(str(tiny), dtype="float32", max_num_seqs=4) as llm:
        outputs = llm.generate([prompt] * 3, params, use_tqdm=False)
    with LLM(str(tiny), dtype="bfloat16", max_num_seqs=4) as llm:
        (half,) = llm.generate([prompt], params, use_tqdm=False)
    tokens = expected(tiny, samples)
    for output in outputs:
        assert output.outputs[0].token_ids[:-1] == tokens
        assert output.outputs[0].finish_reason == "stop"
    text = outputs[0].outputs[0].text.strip()
    assert text.startswith(CITIES if "cities" in name else BECKETT)
    assert half.outputs[0].text.strip().startswith(text[:40])


@pytest.fixture(scope="module")
def client(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    place = tmp_path_factory.mktemp("server")
    settings = ("--dtype", "float32", "--max-model-len", "448", "--max-num-seqs", "4")
    names = ("--served-model-name", "whisper-1")
    probe = install_probe(tmp_path_factory.mktemp("probe"))
    with Server(base, place, *settings, *names, probe=probe) as running:
        running.wait_until_ready()
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            yield client
    running.check_nothing_left()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_over_http(base: Path, client: openai.OpenAI) -> None:
    samples = samples_of("beckett.wav")
    answer = client.audio.transcriptions.create(model="whisper-1", file=recording("beckett.wav"))
    tokens = expected(base, samples, language="en", task="transcribe")
    chosen = client.audio.transcriptions.create(
        model="whisper-1",
        file=recording("beckett.wav"),
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert chosen.language == "english" and chosen.duration == pytest.approx(9.96, abs=0.01)
    assert chosen.segments and chosen.segments[-1].end <= chosen.duration
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    assert answer.text == tokenizer.decode(tokens).strip()
    assert chosen.text.endswith("Fail better.")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_long_recording(base: Path, client: openai.OpenAI) -> None:
    """44 seconds, in two clips."""
    file = recording("two_cities.wav")
    whole = client.audio.transcriptions.create(model="whisper-1", file=file, response_format="text")
    assert whole.startswith(CITIES) and whole.rstrip().endswith("degree of comparison only.")
    lines = client.audio.transcriptions.create(model="whisper-1", file=file, response_format="srt")
    assert lines.count(" --> ") >= 9 and "\n00:00:0" in lines and CITIES in lines
