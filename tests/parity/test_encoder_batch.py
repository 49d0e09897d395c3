"""`pegboard run-batch` with an encoder: the answers of a file are those of `LLM`."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard import LLM

TEXTS = ["w1 w2 w3", "w9", "w4 w4"]


def line(custom_id: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


LINES = [
    line("vectors", "/v1/embeddings", input=TEXTS),
    line("half", "/v1/embeddings", input=TEXTS, encoding_format="base64", embed_dtype="float16"),
    line("score", "/score", text_1=TEXTS[0], text_2=TEXTS[1:]),
    line("rerank", "/v1/rerank", query=TEXTS[0], documents=TEXTS[1:], top_n=1),
    line("bytes", "/v1/embeddings", input=TEXTS, encoding_format="bytes"),
    line("field", "/score", text_1="w1"),
]


@pytest.mark.slow  # two engines; tests/clients/test_pooling_clients.py has a fake one
def test_a_batch_of_vectors_and_scores(
    write_encoder: Callable[..., Any],
    open_encoder: Callable[..., LLM],
    tmp_path: Path,
) -> None:
    folder, *_ = write_encoder("Bert")
    with open_encoder(folder) as llm:
        vectors = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    source.write_text("\n".join(LINES))
    words = ["run-batch", str(folder), "-i", str(source), "-o", str(target), "--dtype", "float32"]
    ended = subprocess.run(
        [sys.executable, "-m", "pegboard.cli.main", *words], capture_output=True, text=True
    )
    assert ended.returncode == 0 and "6 requests, 2 of them failed" in ended.stderr, ended.stderr
    answers = {each["custom_id"]: each for each in map(json.loads, target.read_text().splitlines())}
    bodies = {name: answer["response"]["body"] for name, answer in answers.items()}
    assert list(answers) == ["vectors", "half", "score", "rerank", "bytes", "field"]
    given = [each["embedding"] for each in bodies["vectors"]["data"]]
    np.testing.assert_allclose(given, vectors, atol=1e-6)
    packed = [base64.b64decode(each["embedding"]) for each in bodies["half"]["data"]]
    for data, vector in zip(packed, vectors, strict=True):
        np.testing.assert_allclose(np.frombuffer(data, np.float16), vector, atol=1e-3)
    assert [each["score"] for each in bodies["score"]["data"]] == pytest.approx(scores, abs=1e-6)
    (best,) = bodies["rerank"]["results"]
    assert best["relevance_score"] == pytest.approx(max(scores), abs=1e-6)
    assert best["index"] == scores.index(max(scores))
    for name, words in (("bytes", "the answers of a batch are JSON"), ("field", "text_2")):
        assert answers[name]["response"]["status_code"] == 400
        assert words in answers[name]["error"]["error"]["message"]
