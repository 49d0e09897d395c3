"""A chat about one image, and about two. Images are sent as data URLs; addresses of images and
files work as well, if the server allows them.

pegboard serve llava-hf/llava-1.5-7b-hf
python examples/online/chat_completion_client_for_multimodal.py
"""

import argparse
import base64
import io

from openai import OpenAI
from PIL import Image


def part(color: str) -> dict:
    """Return a message's part with a square of this color."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), color).save(file, "PNG")
    content = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    for colors in (["red"], ["red", "blue"]):
        parts = [{"type": "text", "text": "Which colors are these?"}, *map(part, colors)]
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": parts}], max_tokens=16, temperature=0
        )
        tokens = answer.usage.prompt_tokens
        print(f"{colors}: {tokens} prompt tokens: {answer.choices[0].message.content!r}")


if __name__ == "__main__":
    main()
