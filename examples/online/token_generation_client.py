"""Tokens in, tokens out: the client has the tokenizer, or asks the server to tokenize.

pegboard serve
python examples/online/token_generation_client.py
"""

import argparse

import httpx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    url = parser.parse_args().url

    def post(route: str, **body: object) -> dict:
        return httpx.post(url + route, json=body, timeout=60).raise_for_status().json()

    tokens = post("/tokenize", prompt="The capital of France is")["tokens"]
    sampling = {"max_tokens": 8, "temperature": 0, "logprobs": 1}
    answer = post("/inference/v1/generate", token_ids=tokens, sampling_params=sampling)
    output = answer["choices"][0]["token_ids"]
    print("prompt:", tokens)
    print("output:", output)
    text = post("/detokenize", tokens=output)["prompt"]
    plain = post("/v1/completions", prompt=tokens, max_tokens=8, temperature=0)
    print(f"text: {text!r}, the same: {text == plain['choices'][0]['text']}")


if __name__ == "__main__":
    main()
