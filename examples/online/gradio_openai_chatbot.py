"""A chat in the browser, with Gradio (`pip install gradio`).

pegboard serve
python examples/online/gradio_openai_chatbot.py
"""

import argparse
from collections.abc import Iterator

from openai import OpenAI


def answer(message: str, history: list[dict], url: str) -> Iterator[str]:
    """Yield the answer to a message, longer and longer."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[*history, {"role": "user", "content": message}],
        max_tokens=256,
        stream=True,
    )
    text = ""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    url = parser.parse_args().url
    import gradio

    chat = gradio.ChatInterface(
        lambda message, history: (yield from answer(message, history, url)), type="messages"
    )
    chat.queue().launch()


if __name__ == "__main__":
    main()
