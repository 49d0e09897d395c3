"""The examples run unchanged, each in its own process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.real_model


def run(name: str, temp: Path, *words: str) -> str:
    """Returns the output of the example. It must succeed, print nothing unexpected and leave no
    files. words: its arguments."""
    env = {**os.environ, "TMPDIR": str(temp)}
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr and "Warning" not in ended.stderr, ended.stderr
    assert [path.name for path in temp.iterdir() if path.name.startswith("pegboard")] == []
    return ended.stdout


def test_demo(smollm2_gguf: Path, tmp_path: Path) -> None:
    """The example prints the greedy answer of the default model, then the numbers."""
    printed = run("demo.py", tmp_path)
    question = re.search(r"^> (.+)$", printed, re.M)
    assert question and len(printed.partition(question[1])[2].split()) > 20
    numbers = re.search(
        r"time to first token (\d+) ms, ([\d.]+) tokens/s \((\d+) tokens\)", printed
    )
    assert numbers and int(numbers[1]) > 0 < float(numbers[2]) and 20 < int(numbers[3]) <= 80


def test_basic(smollm2_gguf: Path, tmp_path: Path) -> None:
    printed = run("offline/basic.py", tmp_path)
    assert "'The capital of France is' -> " in printed and "Paris" in printed
    assert "'A paged KV cache is' -> " in printed and "red" in printed.lower()


def test_data_parallel(smollm2_gguf: Path, tmp_path: Path) -> None:
    printed = run("offline/data_parallel.py", tmp_path)
    assert "'The capital of France is' -> " in printed and "Paris" in printed
    assert len(printed.splitlines()) == 4


def test_fetch_default_model(smollm2_gguf: Path, tmp_path: Path) -> None:
    """The example finds the model in the cache and prints its path."""
    assert Path(run("fetch_default_model.py", tmp_path).strip()) == smollm2_gguf


@pytest.mark.slow
def test_train_and_serve(tmp_path: Path) -> None:
    """The engine answers better from round to round, because it has the trainer's weights."""
    rewards = [
        float(found)
        for found in re.findall(r"mean reward (\d\.\d+)", run("train_and_serve.py", tmp_path))
    ]
    assert len(rewards) == 8 and rewards[0] < 0.6 and rewards[-1] > rewards[0] + 0.15


@pytest.mark.slow
def test_separate_trainer(tmp_path: Path) -> None:
    """The engine answers as the trainer's model, in each round."""
    printed = run("separate_trainer.py", tmp_path)
    rounds = re.findall(r"^round \d: (\[.*\]), the trainer has (\[.*\])$", printed, re.M)
    assert len({answer for answer, _ in rounds}) == 3, "the answers change with the weights"
    assert all(answer == expected for answer, expected in rounds)


def numbers_of(printed: str) -> dict[str, float]:
    """The numbers that speculative_decoding.py has printed, by their names."""
    return {name: float(value) for name, value in re.findall(r"^(\D.*): ([\d.]+)$", printed, re.M)}


def test_speculative_decoding(smollm2_gguf: Path, tmp_path: Path) -> None:
    words = ("--method", "ngram", "--num-prompts", "2", "--output-len", "48", "--fixed-length")
    numbers = numbers_of(run("speculative_decoding.py", tmp_path, *words))
    accepted = numbers["num_accepted_tokens"]
    assert 0 < accepted < numbers["num_draft_tokens"] and numbers["tokens per second"] > 0
    assert numbers["acceptance rate"] == pytest.approx(
        accepted / numbers["num_draft_tokens"], abs=0.01
    )
    by_place = [numbers[f"acceptance at token {place}"] for place in range(4)]
    assert sum(by_place) == pytest.approx(numbers["mean acceptance length"] - 1, abs=0.03)
    assert by_place == sorted(by_place, reverse=True)


@pytest.fixture(scope="module")
def tiny_target(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights and the tokenizer of the default model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=1280,  # heads without an embedding seem incomplete if they are too small
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_train_draft_heads(tiny_target: Path, tmp_path: Path) -> None:
    """A few steps write a head of each method, and an engine drafts with it."""
    methods = ("eagle", "eagle3", "medusa")
    heads, answers = tmp_path / "heads", tmp_path / "answers.json"
    places = ("--output", str(heads), "--answers", str(answers))
    sizes = ("--prompts", "6", "--answer-tokens", "8", "--batch", "2", "--vocabulary", "4000")
    words = ("--model", str(tiny_target), "--steps", "3", "--depth", "2", "--method", *methods)
    printed = run("train_draft_heads.py", tmp_path, *words, *places, *sizes)
    assert printed.count("step ") == 6 and printed.count("right on texts that were not") == 3
    assert len(json.loads(answers.read_text("utf-8"))) == 6
    few = ("--num-prompts", "1", "--output-len", "6", "--num-spec-tokens", "2", "--fixed-length")
    for method in methods:
        head = heads / method
        assert {path.name for path in head.iterdir()} == {"config.json", "model.safetensors"}
        served = ("--model-dir", str(tiny_target), "--draft-model", str(head), "--method", method)
        numbers = numbers_of(run("speculative_decoding.py", tmp_path, *served, *few))
        assert numbers["num_draft_tokens"] > numbers["num_drafts"] > 0
