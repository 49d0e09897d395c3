"""A question about an image. The chat template writes the model's own mark of an image, so no
prompt format is needed.

python examples/offline/vision_language.py --model MODEL
"""

import argparse

from PIL import Image, ImageDraw

from pegboard import LLM, SamplingParams


def picture() -> Image.Image:
    """Return a red circle on white."""
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).ellipse((16, 16, 48, 48), fill="red")
    return image


def run(llm: LLM) -> None:
    parts = [
        {"type": "image_pil", "image_pil": picture()},
        {"type": "text", "text": "What is the color of the circle?"},
    ]
    params = SamplingParams(temperature=0, max_tokens=16)
    (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    print(f"{len(output.prompt_token_ids)} prompt tokens: {output.outputs[0].text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llava-hf/llava-1.5-7b-hf")
    with LLM(parser.parse_args().model) as llm:
        run(llm)


if __name__ == "__main__":
    main()
