"""Random checkpoints are models in the type that they name; the table tells who is faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_checkpoints
from checkpoints import Subject, lines, name_and_type
from random_checkpoints import TYPES, write

from pegboard import LLM, SamplingParams

TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", TYPES)
def test_a_random_checkpoint_answers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(random_checkpoints.SHAPES, "qwen3", TINY)
    size = write("qwen3", kind, tmp_path)
    plain = 2 * (49152 * 128 + 2 * (128 * 32 * (2 * 4 + 2 * 2) + 3 * 128 * 256))
    layers = plain - 2 * 49152 * 128
    expected = {"bfloat16": plain, "FP8": plain - layers / 2, "AWQ": plain - layers * 0.74}[kind]
    assert size == pytest.approx(expected, rel=0.01)
    llm = LLM(str(tmp_path), kv_cache_memory_bytes=4 << 20, max_model_len=64)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_the_lines_of_a_model() -> None:
    subject = Subject("m", "Q4_1", Path("m.gguf"), "auto", 100_000_000)
    measured = [
        ("Pegboard", [200.0, 900.0, 1000.0, 4000.0], 2.0),
        ("llama.cpp", [100.0, 300.0, 400.0, 1000.0], 4.0),
    ]
    assert lines(subject, measured, gb_per_s=40) == [
        "| m | Q4_1 | 100 | Pegboard | 200 (50 %) | 900 | 1,000 | 4,000 | 2.0 |",
        "|  |  |  | llama.cpp | 100 | 300 | 400 | 1,000 | 4.0 |",
        "|  |  |  | ratio | 2.00 × | 3.00 × | 2.50 × | 4.00 × | 0.50 × |",
    ]
    assert len(lines(subject, measured[:1], gb_per_s=40)) == 1


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", ("SmolLM2-135M-Instruct", "Q4_1")),
        ("gemma-3-270m-Q4_K_M.gguf", ("gemma-3-270m", "Q4_K_M")),
        ("a-BF16.gguf", ("a", "BF16")),
        ("a-IQ4_XS.gguf", ("a", "IQ4_XS")),
        ("Qwen2.gguf", ("Qwen2", "mixed")),
    ],
)
def test_the_type_of_a_file(name: str, parts: tuple[str, str]) -> None:
    assert name_and_type(Path(name)) == parts
