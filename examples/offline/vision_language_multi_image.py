"""Several images in one prompt, and a limit of how many a prompt may have.

python examples/offline/vision_language_multi_image.py --model MODEL
"""

import argparse

from PIL import Image, ImageDraw

from pegboard import LLM, SamplingParams

COLORS = ["red", "blue"]


def run(llm: LLM) -> None:
    images = []
    for color in COLORS:
        image = Image.new("RGB", (64, 64), "white")
        ImageDraw.Draw(image).rectangle((16, 16, 48, 48), fill=color)
        images.append(image)
    parts = [{"type": "image_pil", "image_pil": image} for image in images]
    parts += [{"type": "text", "text": "What differs between the images?"}]
    params = SamplingParams(temperature=0, max_tokens=16)
    (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    print(f"{len(images)} images, {len(output.prompt_token_ids)} prompt tokens")
    print(repr(output.outputs[0].text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolVLM-256M-Instruct")
    with LLM(parser.parse_args().model, limit_mm_per_prompt={"image": len(COLORS)}) as llm:
        run(llm)


if __name__ == "__main__":
    main()
