"""A chat, whole and as a stream, with the official client.

pegboard serve
python examples/online/chat_completion_client.py
"""

import argparse

from openai import OpenAI

MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "And which country is it in?"},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    fields = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    answer = client.chat.completions.create(**fields)
    print(answer.choices[0].message.content)
    stream = client.chat.completions.create(**fields, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="|", flush=True)
    print()


if __name__ == "__main__":
    main()
