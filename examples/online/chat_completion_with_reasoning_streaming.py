"""Reasoning as a stream. Its deltas have the field `reasoning`, and those of the answer `content`.

pegboard serve Qwen/Qwen3-0.6B
python examples/online/chat_completion_with_reasoning_streaming.py
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "9.11 and 9.8, which is greater?"}],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    part = None
    for chunk in stream:
        delta = chunk.choices[0].delta
        for name in ("reasoning", "content"):
            if text := getattr(delta, name, None):
                if name != part:
                    print(f"\n{name}: ", end="")
                    part = name
                print(text, end="|", flush=True)
    print()


if __name__ == "__main__":
    main()
