"""Models with videos, and with images beside them: the logits of transformers, however the prompts
are computed."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_qwen3_vl_parity as qwen3
import test_qwen_vl_parity as qwen
import torch
from PIL import Image
from tiny_media import (
    IMAGE,
    MEDIA_TEXT,
    VISION,
    MediaReference,
    Prompt,
    check_media,
    check_output,
    make_media_model,
    make_tokenizer,
    mixed_prompts,
    open_media_llm,
)
from tiny_models import divide
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from pegboard import SamplingParams
from pegboard_media.video import check_video
from pegboard_testing.films import film_of
from pegboard_testing.video_peers import random_video

VIDEO = IMAGE + 1


class Given(MediaReference):
    """The rows of items take the places of their tokens one item at a time, because transformers
    takes only videos of one length together."""

    def logprobs(self, one: Prompt, outputs: Any) -> torch.Tensor:
        given = self.inputs(one)
        ids = torch.cat([given["input_ids"], torch.tensor([list(outputs)]).long()], 1)
        with torch.no_grad():
            rows = self.model.get_input_embeddings()(ids)
            for token in (IMAGE, VIDEO):
                places = given["input_ids"][0] == token
                rows[0, : len(places)][places] = given[token]
            logits = self.model(inputs_embeds=rows).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def write_llava(folder: Path, kind: str) -> MediaReference:
    """Write LLaVA-NeXT-Video or LLaVA-OneVision, whose images and frames have `side` pixels a
    side."""
    is_next = kind == "llava_next_video"
    side = 16 if is_next else 12
    size = {"height": side, "width": side}
    grids = [[side, 2 * side], [2 * side, side]]
    tower = "clip_vision_model" if is_next else "siglip_vision_model"
    features = {} if is_next else {"vision_feature_layer": -1}
    model = make_media_model(
        kind,
        text_config={"model_type": "llama" if is_next else "qwen2", **MEDIA_TEXT},
        vision_config={
            "model_type": tower,
            **VISION,
            "image_size": side,
            **({} if is_next else {"vision_use_head": False}),
        },
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=grids,
        **features,
    )
    model.save_pretrained(folder)
    if is_next:
        frames = {"size": {"shortest_edge": side}, "crop_size": size, "do_center_crop": True}
        images: Any = LlavaNextImageProcessorPil(
            size=frames["size"], crop_size=size, image_grid_pinpoints=grids
        )
    else:
        frames = {"size": size, "do_center_crop": False}
        images = LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=grids)
    images.save_pretrained(folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(frames))
    tokenizer = make_tokenizer(["<image>", "<video>"], "<image>", "<video>")
    tokenizer.save_pretrained(folder)
    of_frames = CLIPImageProcessorPil(**frames)
    inner = model.model

    @torch.no_grad()
    def inputs(one: Prompt) -> Any:
        media = one.get("multi_modal_data", {})
        parts: dict[int, list[torch.Tensor]] = {IMAGE: [], VIDEO: []}
        for image in media.get("image", []):
            found = inner.get_image_features(**images([image], return_tensors="pt"))
            parts[IMAGE].append(torch.cat([*found.pooler_output]))
        for video in media.get("video", []):
            shown = [Image.fromarray(frame) for frame in check_video(video).frames]
            pixels = of_frames(shown, return_tensors="pt")["pixel_values"]
            parts[VIDEO].append(inner.get_video_features(pixels[None]).pooler_output[0])
        counts = {token: iter(map(len, rows)) for token, rows in parts.items()}
        ids: list[int] = []
        for token in tokenizer.encode(one["prompt"]):
            ids += [token] * (next(counts[token]) if token in counts else 1)
        empty = torch.empty(0, MEDIA_TEXT["hidden_size"])
        rows = {token: torch.cat([empty, *each]) for token, each in parts.items()}
        return {"input_ids": torch.tensor([ids]), **rows}

    return Given(folder, model, inputs)


WRITERS: dict[str, tuple[Callable[[Path], MediaReference], str, str]] = {
    "Qwen2-VL": (lambda folder: qwen.write(folder, "qwen2_vl", "older"), qwen.MARK, qwen.FILM),
    "Qwen2.5-VL": (lambda folder: qwen.write(folder, "qwen2_5_vl", "older"), qwen.MARK, qwen.FILM),
    "Qwen3-VL": (lambda folder: qwen3.write(folder, "qwen3_vl"), qwen.MARK, qwen.FILM),
    "Qwen3-VL-MoE": (lambda folder: qwen3.write(folder, "qwen3_vl_moe"), qwen.MARK, qwen.FILM),
    "LLaVA-NeXT-Video": (partial(write_llava, kind="llava_next_video"), "<image>", "<video>"),
    "LLaVA-OneVision": (partial(write_llava, kind="llava_onevision"), "<image>", "<video>"),
}
"""Family → what writes one of it, and what stands for an image and for a video."""
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
}


@pytest.fixture(scope="module", params=WRITERS)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[MediaReference, Any]:
    """Return a model, and prompts for it."""
    write, mark, film = WRITERS[request.param]
    folder = tmp_path_factory.mktemp("video")
    return write(folder), mixed_prompts(mark, film)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(family: tuple[MediaReference, Any], settings: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    check_media(*family, repeats=2, **settings)


def test_stages(family: tuple[MediaReference, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 1, 2)
    check_media(*family, num_tokens=3)


def test_two_ranks(family: tuple[MediaReference, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2)
    check_media(*family, num_tokens=3)


def test_frames_in_a_list(family: tuple[MediaReference, Any]) -> None:
    """A video may be one array or a list of frames; it then has 24 frames a second."""
    reference, prompts = family
    frames, _ = random_video(4, 20, 16, seed=5)
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory) as llm:
        for value in (frames, [*frames], [(frames, {"fps": 24})]):
            one = {**prompts[0], "multi_modal_data": {"video": value}}
            (output,) = llm.generate([one], params, use_tqdm=False)
            expected = {**one, "multi_modal_data": {"video": [(frames, 24.0)]}}
            check_output(reference, expected, output.outputs[0], 1e-4)


def film(frames: Any, rate: int) -> str:
    """Return the data: URL of a video."""
    content = base64.b64encode(film_of(frames, rate)).decode()
    return f"data:video/x-matroska;base64,{content}"


def test_a_chat_with_a_file(family: tuple[MediaReference, Any]) -> None:
    """The file has 9 frames, of which 3 are read."""
    reference, prompts = family
    frames, _ = random_video(9, 20, 16, seed=6)
    content = [
        {"type": "video_url", "video_url": {"url": film(frames, 3)}},
        {"type": "text", "text": "w7 w8"},
    ]
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=-1, ignore_eos=True)
    options = {"video": {"num_frames": 3}}
    with open_media_llm(reference.directory, media_io_kwargs=options) as llm:
        (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    metadata = {"fps": 3, "frames_indices": [0, 4, 8], "total_num_frames": 9}
    video = frames[[0, 4, 8]], metadata
    shown = prompts[-1]["prompt"]
    one = {"prompt": f"w1 {shown} w7 w8 w3", "multi_modal_data": {"video": [video]}}
    check_output(reference, one, output.outputs[0], 1e-4)
