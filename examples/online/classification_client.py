"""Probabilities of classes over HTTP.

pegboard serve distilbert/distilbert-base-uncased-finetuned-sst-2-english
python examples/online/classification_client.py
"""

import argparse

import httpx

TEXTS = ["The movie was great fun.", "I want my money back."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    url = parser.parse_args().url
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "input": TEXTS}
    answer = httpx.post(f"{url}/classify", json=body, timeout=60).raise_for_status().json()
    for text, item in zip(TEXTS, answer["data"], strict=True):
        print(f"{text!r}: {item['label']} {[round(value, 4) for value in item['probs']]}")


if __name__ == "__main__":
    main()
