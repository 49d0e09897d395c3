"""A small LLaVA beside transformers, in turns in one process, on the same random weights: requests
with an image each, and how soon a second question about an image is answered.

    python tests/bench/media.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from tiny_media import IMAGE, MEDIA_TEXT, Prompt, make_media_model, prompt, save_llava

from pegboard import LLM, SamplingParams
from pegboard_testing.contract_multimodal_processor import random_image

NUM_REQUESTS = 8
NUM_TOKENS = 32
NUM_RUNS = 5
TEXT = {
    **MEDIA_TEXT,
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
}
"""The shape of SmolLM2-135M, apart from its vocabulary."""
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 224,
    "patch_size": 14,
}
SEEDS = count()
"""Every image is a new one, unless it is asked about twice."""


def new_image() -> Any:
    return random_image(300, 300, seed=next(SEEDS))


def question(image: Any, first: int = 5, last: int = 20) -> Prompt:
    """Return an image with 10 words before it and 20 after it."""
    return prompt(*range(first, first + 10), image, *range(last, last + 20))


def seconds_of_transformers(model: Any, processor: Any) -> float:
    prompts = [question(new_image()) for _ in range(NUM_REQUESTS)]
    texts = [one["prompt"] for one in prompts]
    images = [one["multi_modal_data"]["image"][0] for one in prompts]
    started = time.perf_counter()
    given = processor(text=texts, images=images, return_tensors="pt", padding=True)
    with torch.no_grad():
        model.generate(
            **given, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
        )
    return time.perf_counter() - started


def seconds(llm: LLM, prompts: list[Prompt], num_tokens: int) -> float:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {"text_config": TEXT, "vision_config": VISION, "image_token_id": IMAGE}
        model = make_media_model("llava", **config)
        model.set_attn_implementation("sdpa")
        processor = save_llava(model, folder, size=224, patch=14)
        torch.set_num_threads(2)
        settings = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": NUM_REQUESTS}
        with LLM(str(folder), num_threads=2, **settings) as llm:
            theirs = []
            ours = []
            for _ in range(NUM_RUNS):
                theirs.append(seconds_of_transformers(model, processor))
                prompts = [question(new_image()) for _ in range(NUM_REQUESTS)]
                ours.append(seconds(llm, prompts, NUM_TOKENS))
            ratio = statistics.median(theirs) / statistics.median(ours)
            print(f"{NUM_REQUESTS} requests: {ratio:.1f} times as fast as transformers")
            images = [new_image() for _ in range(NUM_RUNS)]
            asked = {
                "first question": [question(image) for image in images],
                "second question": [question(image, last=41) for image in images],
                "after another text": [question(image, first=15, last=41) for image in images],
            }
            for name, prompts in asked.items():
                each = [seconds(llm, [one], 1) for one in prompts]
                print(f"{name}: {1000 * statistics.median(each):.0f} ms to the first token")


if __name__ == "__main__":
    main()
