"""Completions: several answers, the echo of the prompt with logprobs, and a stream.

pegboard serve
python examples/online/completion_client.py
"""

import argparse

from openai import OpenAI

PROMPT = "A robot may not injure a human being"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    fields = {"model": model, "prompt": PROMPT, "max_tokens": 12}
    answer = client.completions.create(**fields, n=2, temperature=0.8, seed=1)
    for choice in answer.choices:
        print(f"{choice.index}: {choice.text!r}")
    answer = client.completions.create(**fields, echo=True, logprobs=2, temperature=0)
    choice = answer.choices[0]
    print(f"echo: {choice.text!r}")
    for token, logprob in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True):
        print(f"  {token!r}: {logprob}")
    for chunk in client.completions.create(**fields, stream=True, temperature=0):
        print(chunk.choices[0].text, end="|", flush=True)
    print()


if __name__ == "__main__":
    main()
