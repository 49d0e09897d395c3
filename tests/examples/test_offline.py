"""The scripts of examples/offline: with the default model, or with tiny ones."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pegboard import LLM

OFFLINE = Path(__file__).parents[2] / "examples/offline"
RunExample = Callable[..., str]

pytestmark = pytest.mark.real_model

WITH_THE_DEFAULT_MODEL = {
    "generate": [r"'The capital of France is'\n  -> ' Paris", r"\(stop\)"],
    "chat": [r"The capital of France is Paris\.", r"Name a fruit\. -> '.+'"],
    "automatic_prefix_caching": [r"Ada 3\? 412 .+, 0 of", r"Hal 2 live\? 412 .+, 400 of"],
    "chat_with_tools": [r"call: .*'city': 'Dallas'", r"answer: It is 6 degrees in Dallas"],
    "llm_engine_example": [r"request 0: ", r"request 1: ", r"request 2: ", r"unfinished: 0"],
    "llm_engine_reset_kv": [r"in use: False", r"reset: True", r"same texts: True"],
    "structured_outputs": [
        r"choice: (Positive|Negative)\n",
        r"regex: [a-z.]+@enigma\.com\n",
        r"json: \{",
        r"grammar: SELECT (name|email) FROM (users|orders)",
    ],
}
"""What the scripts print whose function `run` takes an LLM."""

WITH_TINY_MODELS = {
    "metrics": ("--model MODEL", [r"vllm:generation_tokens \(counter\) = 16\b", r"histogram"]),
    "prefix_caching": ("--model MODEL", [r"\[0, 0, 0\]", r"\[1\d\d, ", r"same texts: True"]),
    "reproducibility": ("--model MODEL", [r"(?s)(the same: True.*){3}"]),
    "rlhf": ("--model MODEL", [r"(?s)norm 1\.000: (.+?)\n.+ -1\.000: (?!\1\n).+ 1\.000: \1\n"]),
    "skip_loading_weights": (
        "--model MODEL",
        [r"random weights: (.+)\nreal weights: (?!\1\n)"],
    ),
    "rlhf_colocate": ("--model MODEL", [r"sleeps: True", r"only: False", r"same text: True"]),
    "rlhf_online_quant": (
        "--model MODEL --trained TRAINED",
        [r"model: (.+)\n.+trained: (?!\1\n).+\n.+model: \1\n"],
    ),
    "embed": ("--model VECTORS", [r"32 numbers, cosine to the first 1\.000", r"first 0\.\d"]),
    "classify": ("--model CLASSES", [r"(?s)(class \d of \[0\.\d+, 0\.\d+, 0\.\d+\].*){3}"]),
    "score": ("--model SCORES", [r"(?s)(0\.\d{4} The capital.*){2}"]),
    "reward": ("--model SCORES", [r"'4': reward -?\d"]),
    "pooling": ("--model MODEL", [r"32 numbers, length 1\.00", r"32 numbers, length 5\.\d"]),
    "token_embed": ("--model MODEL", [r"tokens, 32 numbers each, similarity 1\.000\n"]),
    "io_processor": ("--model MODEL", [r"(-?\d\.\d{3} .+\n){3}"]),
    "context_extension": ("--model MODEL", [r"2048 prompt tokens, made for 1024, up to 4096"]),
    "multilora_inference": (
        "--model MODEL ADAPTER_1 ADAPTER_2",
        [r"(?s)base model: (.+?)\nadapter-1: (?!\1\n)(.+?)\nadapter-2: (?!\1\n|\2\n)"],
    ),
    "lora_with_quantization_inference": (
        "--model MODEL --quantization rtn_int8 ADAPTER_1",
        [r"without adapter: (.+)\nwith adapter: (?!\1\n)"],
    ),
    "mlpspeculator": (
        "--model TARGET --speculator SPECULATOR",
        [r"num_accepted_tokens = [1-9]", r"the same texts: True"],
    ),
    "prompt_embed_inference": (
        "--model MODEL",
        [r"prompt_embeds: (.+)\nprompt_token_ids: \1\n"],
    ),
    "logits_processor_custom": ("--model MODEL", [r"\n\[67, 67, 67, 67\]"]),
    "logits_processor_custom_req": ("--model MODEL", [r"\n\[30, 31, 32, 33\]"]),
    "logits_processor_custom_req_init": ("--model MODEL", [r"\n\[(129|1[3-9]\d|2\d\d),"]),
    "vision_language": ("--model IMAGES", [r"prompt tokens: '"]),
    "vision_language_multi_image": ("--model IMAGES", [r"2 images, 39 prompt tokens"]),
    "audio_language": ("--model LISTENER", [r"35 prompt tokens: '"]),
    "encoder_decoder_multimodal": ("--model WHISPER", [r"'(w.+)'\n'\1'"]),
}
"""Arguments, and what is printed. Names in capitals stand for folders."""


@pytest.mark.parametrize("name", WITH_THE_DEFAULT_MODEL)
def test_with_the_default_model(name: str, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.reset_prefix_cache()
    runpy.run_path(str(OFFLINE / f"{name}.py"), run_name=name)["run"](llm)
    printed = capsys.readouterr().out
    for pattern in WITH_THE_DEFAULT_MODEL[name]:
        assert re.search(pattern, printed), f"{pattern} is not in\n{printed}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WITH_TINY_MODELS)
def test_with_a_tiny_model(name: str, tiny: dict[str, Path], run_example: RunExample) -> None:
    words, patterns = WITH_TINY_MODELS[name]
    printed = run_example(f"offline/{name}", *(tiny.get(word, word) for word in words.split()))
    for pattern in patterns:
        assert re.search(pattern, printed), f"{pattern} is not in\n{printed}"


def test_vision_language_pooling(tmp_path: Path, run_example: RunExample) -> None:
    from tiny_clip import write_clip

    printed = run_example("offline/vision_language_pooling", "--model", write_clip(tmp_path))
    assert len(re.findall(r"^a photo of .+: -?0\.\d{3}$", printed, re.M)) == 2


def test_batch_inference_jsonl(llm: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    rows = [{"id": number, "prompt": f"{number} and one are"} for number in range(70)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = runpy.run_path(str(OFFLINE / "batch_inference_jsonl.py"), run_name="example")
    script["run"](llm, source, target)
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [{**answer, "answer": None} for answer in answers] == [
        {**row, "answer": None} for row in rows
    ]
    assert all(answer["answer"] for answer in answers)


def test_sharded_states(tiny: dict[str, Path], tmp_path: Path, run_example: RunExample) -> None:
    folder = tmp_path / "shares"
    words = ("--model", tiny["MODEL"], "--output", folder)
    assert "sharded_state.json" in run_example("offline/save_sharded_state", *words)
    printed = run_example("offline/load_sharded_state", "--model", folder)
    assert re.search(r"'Hello, my name is' -> '.+'", printed)


def test_kv_load_failure_recovery(
    tiny: dict[str, Path], tmp_path: Path, run_example: RunExample
) -> None:
    words = ("--model", tiny["MODEL"], tmp_path / "blocks")
    printed = run_example("offline/kv_load_failure_recovery", *words)
    lines = re.search(r"saved: (.+)\ndamaged, recompute: (.+)\ndamaged, fail: error ''", printed)
    assert lines and lines[1] == lines[2]


@pytest.mark.slow
def test_simple_profiling(tiny: dict[str, Path], tmp_path: Path, run_example: RunExample) -> None:
    words = ("--model", tiny["MODEL"], tmp_path / "profile")
    path = Path(run_example("offline/simple_profiling", *words).splitlines()[-1])
    assert json.loads(path.read_text())["traceEvents"]


def run_alone(name: str, *words: str | Path) -> str:
    """Returns what a script prints in a process of its own."""
    command = [sys.executable, str(OFFLINE / f"{name}.py"), *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_async_llm_streaming(smollm2_gguf: Path) -> None:
    printed = run_alone("async_llm_streaming")
    assert re.search(r"^'The future of .+' -> [^']+\n'In a galaxy.+' ->.+", printed, re.S)


@pytest.mark.slow
def test_disaggregated_prefill(smollm2_gguf: Path, tmp_path: Path) -> None:
    printed = run_alone("disaggregated_prefill", tmp_path)
    assert printed.startswith("prefill: the blocks are in the folder\n")
    assert len(re.findall(r"decode: 1[12]\d of 13?\d\d? tokens loaded: '.+'", printed)) == 3


@pytest.mark.slow
def test_openai_batch(smollm2_gguf: Path, tmp_path: Path) -> None:
    printed = run_alone("openai_batch", tmp_path)
    assert re.search(r"^1 200 .+\n2 200 .+\n3 400 .+max_tokens", printed, re.M)
