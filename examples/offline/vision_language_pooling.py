"""Vectors of texts and images in one space, and which text is nearest to an image.

python examples/offline/vision_language_pooling.py --model MODEL
"""

import argparse

import numpy as np
from PIL import Image

from pegboard import LLM

TEXTS = ["a photo of a red wall", "a photo of a dog"]


def run(llm: LLM) -> None:
    image = {"prompt": "", "multi_modal_data": {"image": Image.new("RGB", (64, 64), "red")}}
    outputs = llm.embed([image, *TEXTS], use_tqdm=False)
    picture, *texts = (np.array(output.outputs.embedding) for output in outputs)
    for text, vector in zip(TEXTS, texts, strict=True):
        print(f"{text}: {float(picture @ vector):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="openai/clip-vit-base-patch32")
    with LLM(parser.parse_args().model, runner="pooling") as llm:
        run(llm)


if __name__ == "__main__":
    main()
