"""Scores of pairs of texts: one query with many documents, or as many with as many.

pegboard serve cross-encoder/ms-marco-MiniLM-L-6-v2
python examples/online/cross_encoder_score.py
"""

import argparse

import httpx

QUERY = "What is the capital of Brazil?"
DOCUMENTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]
QUERIES = [QUERY, "What is the capital of France?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    url = parser.parse_args().url
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    for first in (QUERY, QUERIES):
        body = {"model": model, "text_1": first, "text_2": DOCUMENTS}
        answer = httpx.post(f"{url}/score", json=body, timeout=60).raise_for_status().json()
        for item in answer["data"]:
            print(f"{item['index']}: {item['score']:.4f}")


if __name__ == "__main__":
    main()
