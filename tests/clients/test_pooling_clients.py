"""Clients of models that pool: `pegboard bench serve`, `pegboard run-batch`, and the libraries that
people use, each of which sends bodies in its own way. The engine is a fake one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from pegboard_api_openai.api import OpenAIApi
from pegboard_api_openai.plugin import OPENAI
from pegboard_api_pooling.api import PoolingApi
from pegboard_api_pooling.plugin import POOLING
from pegboard_command_bench.command import Bench
from pegboard_command_run_batch.command import answer_all

from pegboard.cli.main import command_setup
from pegboard.errors import UsageError
from pegboard.interfaces.api import ApiSetup
from pegboard_testing.fake_client import BOS, ByteTokenizer, FakeEngineClient
from pegboard_testing.served_app import make_app, serving

MODEL = "fake-model"
HI = list(b"hi")


@dataclass
class Served:
    engine: FakeEngineClient
    address: str

    def texts(self) -> list[Any]:
        """The prompts that came, and forget them."""
        prompts = [prompt.text or list(prompt.token_ids) for prompt, *_ in self.engine.requests]
        self.engine.requests.clear()
        return prompts


def apis(setup: ApiSetup) -> Any:
    return [
        ("openai", OpenAIApi(None, setup), OPENAI),
        ("pooling", PoolingApi(None, setup), POOLING),
    ]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Served, Served]]:
    """A server whose model makes vectors, and one that reads pairs."""
    with ExitStack() as stack:
        engines = FakeEngineClient(pools=True), FakeEngineClient(pools=True, labels=("fits",))
        first, second = (
            Served(engine, stack.enter_context(serving(apis, engine))) for engine in engines
        )
        yield first, second


@pytest.fixture
def embedder(servers: tuple[Served, Served]) -> Served:
    servers[0].engine.requests.clear()
    return servers[0]


@pytest.fixture
def ranker(servers: tuple[Served, Served]) -> Served:
    servers[1].engine.requests.clear()
    return servers[1]


def vector(ids: list[int]) -> list[float]:
    return [sum(ids), len(ids), 0.5]


# --- bench ----------------------------------------------------------------------------------------


def bench(served: Served, folder: Path, *words: str) -> dict[str, Any]:
    """The saved result of `bench serve`."""
    setup = replace(command_setup("bench"), tokenizer=lambda reference: ByteTokenizer())
    flags = ("--save-result", "--save-detailed", "--result-dir", str(folder), "--disable-tqdm")
    file = ("--base-url", served.address, "--result-filename", "result.json")
    assert Bench(None, setup).run(["serve", *words, *flags, *file]) == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


RANDOM = ("--random-input-len", "8", "--num-prompts", "6")


@pytest.mark.parametrize(
    ("words", "num_requests", "num_texts"),
    [
        (["--backend", "openai-embeddings"], 6, 1),
        (["--backend", "openai-embeddings", "--random-batch-size", "4"], 2, 4),
        (["--backend", "openai-embeddings-chat", "--goodput", "e2el:60000"], 6, 1),
        (["--backend", "vllm-pooling", "--endpoint", "/v1/embeddings"], 6, 1),
    ],
)
def test_bench_of_vectors(
    embedder: Served,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    num_requests: int,
    num_texts: int,
) -> None:
    """There is nothing about tokens of the output, in the result as in the table."""
    result = bench(embedder, tmp_path, *words, *RANDOM)
    prompts = embedder.texts()
    assert (result["completed"], result["failed"]) == (num_requests, 0)
    assert len(prompts) == 6 + num_texts  # one request is sent before the run
    assert result["total_input_tokens"] == sum(result["input_lens"]) >= 6 * 8
    assert result["total_token_throughput"] * result["duration"] == pytest.approx(
        result["total_input_tokens"]
    )
    assert 0 < result["median_e2el_ms"] <= result["p99_e2el_ms"]
    shown = capsys.readouterr().out
    assert "Mean E2EL (ms):" in shown and "Request throughput (req/s):" in shown
    assert "TTFT" not in shown and "generated" not in shown
    assert not {"ttfts", "output_lens", "mean_ttft_ms", "output_throughput"} & set(result)


@pytest.mark.parametrize("size", [1, 3])
def test_bench_of_ranks(ranker: Served, tmp_path: Path, size: int) -> None:
    """A pair of the query and a document has the length that was asked for."""
    words = ("--backend", "vllm-rerank", "--dataset-name", "random-rerank", "--num-prompts", "6")
    lengths = ("--random-input-len", "40", "--random-batch-size", str(size))
    result = bench(ranker, tmp_path, *words, *lengths)
    pairs = [(prompt.text, prompt.second_text) for prompt, *_ in ranker.engine.requests]
    assert (result["completed"], result["failed"]) == (6 // size, 0)
    assert len({query for query, _ in pairs}) == 1
    assert len({document for _, document in pairs}) == 6 and len(pairs) == 6 + size
    assert result["total_input_tokens"] == pytest.approx(6 * 40, rel=0.3)


def test_bench_of_ranks_by_vectors(embedder: Served, tmp_path: Path) -> None:
    """The query is one of the texts of each request."""
    words = ("--backend", "openai-embeddings", "--dataset-name", "random-rerank", "--no-reranker")
    result = bench(embedder, tmp_path, *words, *RANDOM, "--random-batch-size", "3")
    prompts = embedder.texts()[3:]  # without the request before the run
    assert result["completed"] == 3
    assert sum(prompt == prompts[0] for prompt in prompts) == 3 and len(prompts) == 3 + 5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--backend", "vllm-rerank"], "takes --dataset-name random-rerank"),
        (["--dataset-name", "random-rerank"], "takes --dataset-name random-rerank"),
        (["--random-batch-size", "2"], "one text per request"),
        (["--backend", "openai-embeddings-chat", "--random-batch-size", "2"], "one text"),
        (["--backend", "openai-embeddings", "--temperature", "0"], "--temperature is about text"),
        (["--backend", "openai-embeddings", "--ignore-eos"], "--ignore-eos is about text"),
        (["--backend", "vllm-pooling", "--percentile-metrics", "ttft"], "ttft needs tokens"),
        (["--backend", "vllm-pooling", "--goodput", "tpot:1"], "tpot needs tokens"),
    ],
)
def test_bench_refuses_what_does_not_fit(words: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Bench(None, command_setup("bench")).run(["serve", *words])


# --- run-batch ------------------------------------------------------------------------------------

LINES = [
    ("/v1/embeddings", {"input": ["hi", "a"]}),
    ("/score", {"text_1": "hi", "text_2": "hi"}),
    ("/v1/rerank", {"query": "hi", "documents": ["a", "hi"], "top_n": 1}),
    ("/v1/embeddings", {"input": "hi", "encoding_format": "bytes"}),
    ("/score", {"text_1": "hi"}),
]


def test_a_batch(tmp_path: Path) -> None:
    source = tmp_path / "in"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(LINES)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    target = StringIO()
    app = make_app(apis, FakeEngineClient(pools=True))
    counts = asyncio.run(answer_all(app, source, target, {}, show_progress=False))
    answers = [json.loads(line) for line in target.getvalue().splitlines()]
    assert counts == (5, 2)
    vectors, scores, ranks = (each["response"]["body"] for each in answers[:3])
    assert [each["embedding"] for each in vectors["data"]] == [
        vector([BOS, *HI]),
        vector([BOS, 97]),
    ]
    assert scores["data"][0]["score"] == pytest.approx(1)
    assert [each["index"] for each in ranks["results"]] == [1]
    for answer, words in zip(
        answers[3:], ("the answers of a batch are JSON", "text_2"), strict=True
    ):
        assert answer["response"]["status_code"] == 400
        assert words in answer["error"]["error"]["message"]


# --- libraries ------------------------------------------------------------------------------------
# They are large, so they are not in requirements-dev.txt.


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """A client that closes its connections; those of the libraries do not."""
    with httpx.Client() as client:
        yield client


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checks_length", [False, True])
def test_langchain(embedder: Served, http: httpx.Client, checks_length: bool) -> None:
    """It cuts texts into token ids itself, unless it is told not to. Without a network it has no
    tokenizer, so this gives it one."""
    library = pytest.importorskip("langchain_openai")
    embeddings = library.OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{embedder.address}/v1",
        api_key="x",
        http_client=http,
        check_embedding_ctx_length=checks_length,
    )
    if checks_length:
        base = pytest.importorskip("langchain_openai.embeddings.base")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base.tiktoken, "encoding_for_model", lambda name: Bytes())
            patch.setattr(base.tiktoken, "get_encoding", lambda name: Bytes())
            vectors = embeddings.embed_documents(["hi", "a"])
        assert embedder.texts() == [HI, [97]]
        # it divides the vector of several parts by its length, and does not change that of one
        assert vectors == [vector(HI), vector([97])]
        return
    assert embeddings.embed_documents(["hi", "a"]) == [vector([BOS, *HI]), vector([BOS, 97])]
    assert embeddings.embed_query("hi") == vector([BOS, *HI])


class Bytes:
    """An encoding as tiktoken's. A token is a byte."""

    def encode(self, text: str, **more: Any) -> list[int]:
        return list(text.encode())

    encode_ordinary = encode

    def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


@pytest.mark.filterwarnings("ignore")
def test_llama_index(embedder: Served, http: httpx.Client) -> None:
    library = pytest.importorskip("llama_index.embeddings.openai_like")
    model = library.OpenAILikeEmbedding(
        model_name=MODEL, api_base=f"{embedder.address}/v1", api_key="x", http_client=http
    )
    assert model.get_text_embedding_batch(["hi", "a"]) == [vector([BOS, *HI]), vector([BOS, 97])]
    assert model.get_query_embedding("hi") == vector([BOS, *HI])


@pytest.mark.filterwarnings("ignore")
def test_cohere(ranker: Served) -> None:
    """Its second API and its first one, with texts and with objects."""
    library = pytest.importorskip("cohere")
    texts = ["ho", "a", "hum"]
    with library.ClientV2("x", base_url=ranker.address) as client:
        answer = client.rerank(model=MODEL, query="hi", documents=texts, top_n=2)
    scores = [each.relevance_score for each in answer.results]
    assert scores == sorted(scores, reverse=True) and len({e.index for e in answer.results}) == 2
    assert answer.id.startswith("rerank-")
    objects: Any = [{"text": text} for text in texts]
    for with_texts in (True, False):
        with library.Client("x", base_url=ranker.address) as client:
            ranks = client.rerank(
                model=MODEL, query="hi", documents=objects, return_documents=with_texts
            ).results
        assert len(ranks) == 3
        for each in ranks:
            assert (each.document and each.document.text) == (
                texts[each.index] if with_texts else None
            )
