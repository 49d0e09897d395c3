"""Runs vLLM's processors of DeepSeek-VL2 and DeepSeek-OCR, in an interpreter that has vLLM and
torchvision: one job as JSON on stdin, the result as JSON on stdout.

Job: {"images": [path], "vl2": attributes of the processor, "ocr": the same}.
Result: {"vl2": [[digest of each array of pixels], number of tokens] of each image, "ocr": the
same}.
Not imported by Pegboard.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Tokens:
    """A tokenizer whose texts are one token."""

    bos_token_id, eos_token_id, pad_token_id = 0, 1, 2

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [5]


def make(kind: Any, transform: Any, values: dict[str, Any]) -> Any:
    """Return a processor without its tokenizer's files."""
    processor = object.__new__(kind)
    mean, deviation = values.pop("image_mean"), values.pop("image_std")
    own = {"tokenizer": Tokens(), "image_token": "<image>", "image_token_id": 9, "ignore_id": -100}
    for name, value in {**own, **values}.items():
        setattr(processor, name, value)
    processor.image_transform = transform(mean, deviation, True)
    return processor


def main() -> None:
    stdout = sys.stdout
    sys.stdout = sys.stderr  # anything printed meanwhile is not a result
    import torch
    from PIL import Image
    from vllm.transformers_utils.processors import deepseek_ocr, deepseek_vl2

    job = json.load(sys.stdin)
    vl2 = make(deepseek_vl2.DeepseekVLV2Processor, deepseek_vl2.ImageTransform, job["vl2"])
    ocr = make(deepseek_ocr.DeepseekOCRProcessor, deepseek_ocr.ImageTransform, job["ocr"])
    result: dict[str, list[Any]] = {"vl2": [], "ocr": []}
    for path in job["images"]:
        image = Image.open(path)
        views = vl2.tokenize_with_images("a <image> b", [image])
        arrays = [torch.stack(views[1])]
        result["vl2"].append([[digest(array) for array in arrays], views[4][0]])
        views = ocr.tokenize_with_images("a <image> b", [image])
        arrays = [views[1][0], *([views[2]] if len(views[2]) else [])]
        result["ocr"].append([[digest(array) for array in arrays], views[5][0]])
    print(json.dumps(result), file=stdout)


def digest(pixels: Any) -> str:
    return hashlib.sha256(pixels.contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
