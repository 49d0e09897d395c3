"""A prompt as embeddings over HTTP: rows of the model's input layer, as base64 of an array. Here
they are those of the prompt's own tokens, so the answers are the same.

pegboard serve FOLDER --enable-prompt-embeds
python examples/online/prompt_embeds_client.py --weights FOLDER/model.safetensors
"""

import argparse
import base64
import io
from pathlib import Path

import httpx
import numpy as np
from openai import OpenAI
from safetensors import safe_open


def rows_of(path: Path, tokens: list[int]) -> np.ndarray:
    """Return the rows of tokens in the checkpoint's embedding, float32 [n, size]."""
    with safe_open(path, "pt") as file:
        (name,) = [name for name in file.keys() if name.endswith("embed_tokens.weight")]  # noqa: SIM118
        return file.get_tensor(name)[tokens].float().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--weights", type=Path, required=True, help="a file of safetensors")
    parser.add_argument("--prompt", default="The capital of France is")
    words = parser.parse_args()
    client = OpenAI(base_url=f"{words.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    body = {"prompt": words.prompt}
    tokens = httpx.post(f"{words.url}/tokenize", json=body).raise_for_status().json()["tokens"]
    file = io.BytesIO()
    np.save(file, rows_of(words.weights, tokens))
    embeds = {"prompt_embeds": base64.b64encode(file.getvalue()).decode()}
    fields = {"model": model, "max_tokens": 8, "temperature": 0}
    of_rows = client.completions.create(prompt="", extra_body=embeds, **fields)
    of_tokens = client.completions.create(prompt=tokens, **fields)
    print(f"embeddings: {of_rows.choices[0].text!r}")
    print(f"tokens: {of_tokens.choices[0].text!r}")


if __name__ == "__main__":
    main()
