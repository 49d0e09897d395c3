"""A page that completes a text, with Gradio (`pip install gradio`).

pegboard serve
python examples/online/gradio_webserver.py
"""

import argparse
from collections.abc import Iterator

from openai import OpenAI


def complete(prompt: str, url: str) -> Iterator[str]:
    """Yield the prompt with its completion, longer and longer."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.completions.create(
        model=client.models.list().data[0].id, prompt=prompt, max_tokens=64, stream=True
    )
    text = prompt
    for chunk in stream:
        text += chunk.choices[0].text
        yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    url = parser.parse_args().url
    import gradio

    with gradio.Blocks() as page:
        source = gradio.Textbox(label="Prompt", placeholder="San Francisco is a")
        target = gradio.Textbox(label="Completion")
        source.submit(lambda prompt: (yield from complete(prompt, url)), [source], [target])
    page.queue().launch()


if __name__ == "__main__":
    main()
