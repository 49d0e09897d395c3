"""A model that reasons before it answers: the reasoning comes apart from the answer.

pegboard serve Qwen/Qwen3-0.6B
python examples/online/chat_completion_with_reasoning.py
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "9.11 and 9.8, which is greater?"}],
        temperature=0,
        max_tokens=64,
    )
    message = answer.choices[0].message
    print("reasoning:", message.reasoning)
    print("content:", message.content)


if __name__ == "__main__":
    main()
