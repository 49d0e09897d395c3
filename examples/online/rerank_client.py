"""Documents in the order in which they answer a query: the routes of Jina and Cohere.

pegboard serve cross-encoder/ms-marco-MiniLM-L-6-v2
python examples/online/rerank_client.py
"""

import argparse

import httpx

QUERY = "What is the capital of France?"
DOCUMENTS = [
    "The capital of Brazil is Brasilia.",
    "The capital of France is Paris.",
    "Horses and cows are both animals.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    url = parser.parse_args().url
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    for route in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = httpx.post(url + route, json=body, timeout=60).raise_for_status().json()
        print(route)
        for result in answer["results"]:
            print(f"  {result['relevance_score']:.4f} {result['document']['text']}")


if __name__ == "__main__":
    main()
