"""Makes of images, audio and videos what Qwen-Omni computes with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
    Video,
)
from pegboard_media.audio import resample
from pegboard_model_qwen_omni.heard_videos import Joined, Seen, by_chunks, by_time
from pegboard_model_qwen_omni.sizes import (
    AUDIO_TOKEN,
    VISION_TOKENS,
    ChunkedSizes,
    encoder_sizes,
    num_rows,
    part_of,
    rate_of,
    thinker_of,
)
from pegboard_models.given_forms import refuse_form
from pegboard_models.log_mel import LogMel
from pegboard_models.patch_processor import PatchProcessor
from pegboard_models.patch_sizes import CLIP, video_defaults
from pegboard_models.processing import FILES, token_id, token_of

SOUND_OF_VIDEOS = ("use_audio_in_video", "load_audio_from_video")
"""Options that ask for the sound of a video, by vLLM's name and by that of transformers."""


class Qwen25OmniProcessor(PatchProcessor):
    """audio_text: stands for audio in a prompt."""

    video_defaults = video_defaults(CLIP, 128 * 28 * 28, 768 * 28 * 28)
    tokens = VISION_TOKENS
    texts = ("<|vision_bos|><|IMAGE|><|vision_eos|>", "<|vision_bos|><|VIDEO|><|vision_eos|>")
    audio_text = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    gap = 0
    """How far the first token of a video with its sound is after the one before it: at the same
    position, or at the next one."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = thinker_of(setup.checkpoint.config)
        super().__init__(
            options, replace(setup, checkpoint=replace(setup.checkpoint, config=config))
        )
        # the file's limits of pixels are those of images alone
        self.videos["size"] = self.video_defaults["size"]
        self.rate = rate_of(config)
        self.audio_token = token_of(config, "audio", AUDIO_TOKEN)
        self.audio_ends = [
            token_id(setup.tokenizer, f"{text}>") for text in self.audio_text.split(">")[:3:2]
        ]
        self.seconds = seconds_of_chunk(config)
        self.mel = LogMel.of(setup.checkpoint)
        num_bins = encoder_sizes(part_of(config, "audio_config")).num_bins
        if self.mel.num_bins != num_bins:
            raise ModelError(
                f"the checkpoint's feature extractor makes {self.mel.num_bins} mel bins; its audio "
                f"encoder takes {num_bins}. Correct {FILES[0]} or the config"
            )

    def placeholder(self, modality: str) -> Placeholder:
        if modality == "audio":
            return Placeholder(self.audio_text, (self.audio_token,))
        return super().placeholder(modality)

    def process(self, modality: str, value: Any, options: Mapping[str, Any]) -> Processed:
        """Process an image, audio or a video, with its sound if the options ask for it. Raises
        RequestError."""
        is_heard = asks_for_sound(options)
        options = {name: given for name, given in options.items() if name not in SOUND_OF_VIDEOS}
        if modality == "video" and is_heard:
            return self.heard(super().process(modality, value, options), value)
        if modality != "audio":
            return super().process(modality, value, options)
        self.images.check(options)
        return self.audio(value)

    def place_formed_rows(
        self, modality: str, num_rows: int, form: Mapping[str, np.ndarray]
    ) -> Processed:
        """The rows of audio have no form."""
        if modality != "audio":
            return super().place_formed_rows(modality, num_rows, form)
        refuse_form(form, modality)
        return Processed([self.audio_token] * num_rows, {})

    def heard(self, seen: Processed, video: Video) -> Processed:
        """Return a processed video with the sound of its file, if it has any. The arrays also have
        those of audio, and order, int64 [rows]: the place of each row among those of the video and
        then those of the sound. Raises RequestError."""
        if video.sound is None:
            raise RequestError(
                "the frames of the video come without sound, which use_audio_in_video asks for; "
                "send a file"
            )
        if (samples := video.sound()) is None:
            return seen
        sound = self.audio(samples)
        ((_, shape),) = seen.facts["grids"]
        video_tokens = Seen(shape, seen.facts["interval"], self.rate)
        joined = self.joined(video_tokens, len(sound.token_ids))
        tokens = np.array([*seen.token_ids, *sound.token_ids])[joined.order]
        row = np.ones(len(tokens) + 2, bool)
        row[[0, -1]] = False
        first, last = self.audio_ends
        end = joined.last + 1
        inner = joined.positions + self.gap
        ends = np.full((3, 1), self.gap - 1), np.full((3, 1), end + self.gap)
        return Processed(
            [first, *tokens.tolist(), last],
            {**seen.arrays, **sound.arrays, "order": joined.order},
            row,
            {
                "positions": np.concatenate([ends[0], inner, ends[1]], 1),
                "next": end + 2 * self.gap,
            },
        )

    def joined(self, seen: Seen, count: int) -> Joined:
        """Return the order of the tokens of a video and its sound. count: those of the sound."""
        return by_chunks(seen, count, self.seconds)

    def audio(self, value: tuple[np.ndarray, int]) -> Processed:
        """The array is input_features, float32 [mel bins, frames]. Raises RequestError for audio
        that is too short for a row."""
        samples = resample(*value, self.mel.rate)[: self.mel.num_samples]
        count = self.mel.num_frames(samples)
        if count < 3:
            raise RequestError(
                f"the audio has {count} frames of {self.mel.hop / self.mel.rate:g} seconds; the "
                "model takes at least 3. Send a longer one"
            )
        # silence up to where no frame sees samples
        length = (count + 2 + self.mel.size // self.mel.hop) * self.mel.hop
        features = self.mel(samples, min(length, self.mel.num_samples))[:, :count]
        arrays = {"input_features": np.ascontiguousarray(features)}
        return Processed([self.audio_token] * ((count + 1) // 4), arrays)

    def video(self, value: Video, options: Mapping[str, Any]) -> Processed:
        processed = super().video(value, options)
        facts = {**processed.facts, "interval": self.frames / value.fps, "rate": self.rate}
        return replace(processed, facts=facts)


class Qwen3OmniProcessor(Qwen25OmniProcessor):
    """Audio may be of any length."""

    video_defaults = video_defaults(((0.5,) * 3, (0.5,) * 3), 128 * 32 * 32, 768 * 32 * 32)
    texts = (
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|vision_start|><|video_pad|><|vision_end|>",
    )
    audio_text = "<|audio_start|><|audio_pad|><|audio_end|>"
    gap = 1
    patch = 16

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(options, setup)
        self.frames_of_chunk = ChunkedSizes.of(thinker_of(setup.checkpoint.config)).frames

    def joined(self, seen: Seen, count: int) -> Joined:
        return by_time(seen, count)

    def audio(self, value: tuple[np.ndarray, int]) -> Processed:
        samples = resample(*value, self.mel.rate)
        count = len(samples) // self.mel.hop
        if count < 2:  # the first frame sees more samples than those of one
            raise RequestError(
                f"the audio has {count} frames of {self.mel.hop / self.mel.rate:g} seconds; the "
                "model takes at least 2. Send a longer one"
            )
        chunks, rest = divmod(count, self.frames_of_chunk)
        num_tokens = chunks * num_rows(self.frames_of_chunk) + num_rows(rest)
        return Processed([self.audio_token] * num_tokens, {"input_features": self.mel(samples)})


def asks_for_sound(options: Mapping[str, Any]) -> bool:
    """Return whether the sound of a video is read, too. Raises RequestError."""
    for name in SOUND_OF_VIDEOS:
        if type(options.get(name, False)) is not bool:
            raise RequestError(
                f"mm_processor_kwargs has {name}={options[name]!r}; expected true or false",
                parameter="mm_processor_kwargs",
            )
    return any(options.get(name) for name in SOUND_OF_VIDEOS)


def seconds_of_chunk(config: Mapping[str, Any]) -> float:
    """Return how long what is seen comes before what is heard. Raises ModelError."""
    seconds = config.get("seconds_per_chunk", 2)
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
        raise ModelError(
            f"the checkpoint's config has seconds_per_chunk={seconds!r}; expected a number above 0"
        )
    return float(seconds)
