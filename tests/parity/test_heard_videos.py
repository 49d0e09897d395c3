"""Videos with their sound in Qwen-Omni: the order, positions and logits of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_qwen_omni.heard_videos import Seen, by_chunks, by_time
from test_qwen_omni_parity import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    IMAGE,
    LIMITS,
    MARKS,
    MODELS,
    RATE_OF_AUDIO,
    VIDEO,
    features_of,
    processing_2_5,
    processing_3,
    prompt,
    rows_of,
    tone,
    write,
)
from test_qwen_vl_parity import patched
from tiny_media import MediaReference, Prompt, check_media, open_media_llm
from tiny_models import divide
from transformers import AutoTokenizer, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pegboard import SamplingParams
from pegboard.errors import RequestError
from pegboard_media.sound import decode_sound
from pegboard_media.video import decode_video
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.films import film_of
from pegboard_testing.video_peers import random_video

POSITIONS = 5
"""Of a second, in the tiny models."""
SECONDS = 2
"""Of a chunk, and of the longest audio."""
PROCESSORS: dict[str, Any] = {
    "qwen2_5_omni": processing_2_5.Qwen2_5OmniProcessor,
    "qwen3_omni_moe": processing_3.Qwen3OmniMoeProcessor,
}
HEARD = {**LIMITS, "use_audio_in_video": True}


def their_order(
    kind: str, grid: tuple[int, int, int], interval: float, rate: float, count: int, seconds: float
) -> str:
    """Return a "v" for each token of a video and an "a" for each of its sound. grid: in patches."""
    processor = object.__new__(PROCESSORS[kind])
    processor.video_token = "v"
    processor.audio_token = "a"
    processor.audio_bos_token = processor.audio_eos_token = ""
    processor.video_processor = SimpleNamespace(merge_size=2)
    videos = {"video_grid_thw": [grid], "video_second_per_grid": [interval]}
    sounds = {"num_audio_tokens": [count]}
    more = {"position_id_per_seconds": rate, "seconds_per_chunk": seconds}
    text: str = processor.replace_video_with_audio_token(videos, 0, sounds, 0, **more)
    return text


@pytest.mark.parametrize("kind", MODELS)
@given(
    st.tuples(*[st.integers(1, 5)] * 3),
    st.floats(0.05, 9),
    st.integers(1, 30),
    st.integers(1, 90),
    st.floats(1, 5),
)
@settings(max_examples=80, deadline=None)
def test_order(
    kind: str,
    shape: tuple[int, int, int],
    interval: float,
    rate: int,
    count: int,
    seconds: float,
) -> None:
    grid = shape[0], 2 * shape[1], 2 * shape[2]
    expected = their_order(kind, grid, interval, rate, count, seconds)
    seen = Seen(shape, interval, rate)
    ours = by_chunks(seen, count, seconds) if kind == "qwen2_5_omni" else by_time(seen, count)
    num_seen = shape[0] * shape[1] * shape[2]
    assert "".join("v" if place < num_seen else "a" for place in ours.order) == expected
    assert sorted(ours.order) == [*range(num_seen + count)]


def film(seed: int, seconds: float) -> bytes:
    """Return a file with as much sound."""
    frames, _ = random_video(6, 20, 16, seed=seed)
    count = int(seconds * RATE_OF_AUDIO)
    samples = np.stack([tone(count, seed), tone(count)])
    return film_of(frames, 2, samples, RATE_OF_AUDIO)


FIRST = film(1, 1.5)
SECOND = film(2, 0.4)


def heard_prompts(kind: str) -> list[Prompt]:
    """Return prompts with videos of which one has less sound than frames and one has more."""
    image = random_image(40, 20, seed=1)
    marks = MARKS[kind]
    cases: list[tuple[list[Any], list[bytes]]] = [
        ([5, marks["video"], 6, 7], [FIRST]),
        ([image, 8, marks["video"], tone(9_000, 1), 9, marks["video"]], [SECOND, FIRST]),
        ([marks["video"]], [SECOND]),
    ]
    prompts = []
    for parts, films in cases:
        others = [part for part in parts if not isinstance(part, str)]
        one = prompt(kind, *others)
        media = {**one.get("multi_modal_data", {}), "video": films}
        texts = [part if isinstance(part, str) else prompt(kind, part)["prompt"] for part in parts]
        prompts.append(
            {"prompt": " ".join(texts), "multi_modal_data": media, "mm_processor_kwargs": HEARD}
        )
    return prompts


def reference_of(folder: Path, kind: str) -> MediaReference:
    reference = write(folder, kind)
    images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024)
    extractor = WhisperFeatureExtractor(feature_size=10, chunk_length=SECONDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def inputs(one: Prompt) -> Mapping[str, Any]:
        media = one["multi_modal_data"]
        pictures = media.get("image", [])
        arrays = dict(images(pictures, return_tensors="pt")) if pictures else {}
        videos = [decode_video(content, 32, None) for content in media["video"]]
        films = [patched(images, video.frames) for video in videos]
        arrays["pixel_values_videos"] = torch.cat([patches for patches, _ in films])
        arrays["video_grid_thw"] = torch.tensor([grid for _, grid in films])
        arrays["video_second_per_grid"] = torch.tensor([2 / video.fps for video in videos])
        alone = iter(media.get("audio", []))
        tracks = iter(zip(videos, films, media["video"], strict=True))
        grids = iter(arrays.get("image_grid_thw", []))
        sounds: list[np.ndarray] = []
        ids: list[int] = []
        for token in tokenizer.encode(one["prompt"]):
            if token == IMAGE:
                ids += [token] * (int(next(grids).prod()) // 4)
            elif token == AUDIO:
                sounds.append(next(alone)[0])
                ids += [token] * count_of(sounds[-1])
            elif token == VIDEO:
                video, (_, grid), content = next(tracks)
                samples, _ = decode_sound(content) or (np.zeros(0), 0)
                sounds.append(samples)
                count = count_of(samples)
                order = their_order(kind, tuple(grid), 2 / video.fps, POSITIONS, count, SECONDS)
                joined = [VIDEO if letter == "v" else AUDIO for letter in order]
                ids += [AUDIO_START, *joined, AUDIO_END]
            else:
                ids.append(token)
        arrays |= features_of(kind, extractor, sounds)
        return {"input_ids": torch.tensor([ids]), **arrays, "use_audio_in_video": True}

    def count_of(samples: np.ndarray) -> int:
        mask = features_of(kind, extractor, [samples])["feature_attention_mask"]
        return rows_of(kind, int(mask.sum()))

    reference.inputs = inputs
    return reference


@pytest.fixture(scope="module", params=MODELS)
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(kind: str, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return reference_of(tmp_path_factory.mktemp(kind), kind)


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 512, "block_size": 16},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(kind: str, reference: MediaReference, options: dict[str, Any]) -> None:
    check_media(reference, heard_prompts(kind), repeats=2, **options)


def test_divided(kind: str, reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2, 2)
    check_media(reference, heard_prompts(kind), num_tokens=3)


def test_a_silent_file_and_frames(kind: str, reference: MediaReference) -> None:
    """A file without sound is a video without sound. Frames alone say nothing of it."""
    frames, _ = random_video(4, 20, 16, seed=3)
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def answered(video: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
        media = {"multi_modal_data": {"video": [video]}, "mm_processor_kwargs": options}
        one = {"prompt": MARKS[kind]["video"], **media}
        (output,) = llm.generate([one], greedy, use_tqdm=False)
        return output.prompt_token_ids, output.outputs[0].token_ids

    with open_media_llm(reference.directory) as llm:
        assert answered(film_of(frames, 2), HEARD) == answered(film_of(frames, 2), LIMITS)
        with pytest.raises(RequestError, match="come without sound"):
            answered((frames, 2.0), HEARD)
        with pytest.raises(RequestError, match="expected true or false"):
            answered(FIRST, {"use_audio_in_video": 1})
