"""Makes of images, videos and speech what MiniCPM-V and MiniCPM-o compute with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
    Video,
)
from pegboard_media.audio import resample
from pegboard_model_minicpmv.sizes import (
    LANGUAGES,
    OLDEST,
    OMNI,
    AudioSizes,
    queries_of,
    switch,
    version_of,
    vision_of,
)
from pegboard_model_minicpmv.slices import MOST, Grid, Slicer, Slices, image_values
from pegboard_models.log_mel import LogMel
from pegboard_models.processing import token_id

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Tokenizer

WRITTEN = {
    "image": "(<image>./</image>)",
    "video": "(<video>./</video>)",
    "audio": "(<audio>./</audio>)",
}
"""What stands for an item in the prompts of the models' authors."""
HAS_ID = "use_image_id"
MOST_SLICES = 64
"""The largest max_slice_nums of a request."""
FRAME_SLICES = 2
"""Of a frame of a video."""
AUDIO_START = "<|audio_start|>"
AUDIO_END = "<|audio_end|>"


class MiniCPMVProcessor:
    """An image is seen as a whole and as slices, each of which has the same number of rows. A frame
    of a video is an image with few slices."""

    known: Mapping[str, str] = LANGUAGES

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        self.tokenizer = setup.tokenizer
        self.version = version_of(config, self.known)
        self.queries = queries_of(config)
        sizes, _ = vision_of(config)
        values = image_values(setup.checkpoint, sizes.patch_size, self.queries)
        self.slicer = Slicer.of(values)
        self.most: int = values[MOST]
        self.has_id = bool(values[HAS_ID]) and self.version != OLDEST
        names = ("im_start", "im_end", "slice_start", "slice_end", "unk")
        texts: list[str] = [values[name] for name in names]
        tokens = [token_id(self.tokenizer, text) for text in texts]
        self.image = tokens[0], tokens[1]
        self.slice = tokens[2], tokens[3]
        self.token = tokens[4]
        self.id_marks: tuple[str, str] = values["im_id_start"], values["im_id_end"]
        start, end = texts[:2] if self.version == OLDEST else texts[2:4]
        self.new_line = between(self.tokenizer, end, "\n", start)
        self.marks = {
            "image": ("".join(texts[:2]), self.image),
            "video": ("".join(texts[2:4]), self.slice),
        }

    def placeholder(self, modality: str) -> Placeholder:
        """Two tokens that no prompt has beside each other otherwise."""
        return Placeholder(*self.marks[modality])

    def rewritten(self, text: str) -> str:
        """Write the authors' placeholders as tokens. Their brackets would be merged with the text
        beside them."""
        for modality, (mark, _) in self.marks.items():
            text = text.replace(WRITTEN[modality], mark)
        return text

    def heading(self, modality: str, number: int, facts: Mapping[str, Any]) -> Sequence[int]:
        """Return the tokens that say the number of an image."""
        if not facts.get(HAS_ID):
            return ()
        start, end = self.id_marks
        return self.tokenizer.encode(f"{start}{number}{end}", add_special_tokens=False)

    def process(self, modality: str, value: Any, options: Mapping[str, Any]) -> Processed:
        """The arrays are pixel_values, float32 [patches of all slices, 3, patch, patch], and
        tgt_sizes, int64 [slices, 2], the height and the width of each slice in patches. Options:
        max_slice_nums, and use_image_id for images. Raises RequestError for others."""
        has_id = self.checked(options)
        if modality == "image":
            cut = [self.slicer(value, options.get(MOST, self.most))]
            return self.placed(cut, {HAS_ID: has_id})
        return self.video(value, options.get(MOST, FRAME_SLICES))

    def checked(self, options: Mapping[str, Any]) -> bool:
        """Return whether images have numbers. Raises RequestError for wrong options."""
        names = {MOST} if self.version == OLDEST else {MOST, HAS_ID}
        if unknown := sorted(options.keys() - names):
            raise RequestError(
                f"mm_processor_kwargs has {', '.join(unknown)}; this model takes "
                f"{', '.join(sorted(names))}",
                parameter="mm_processor_kwargs",
            )
        most = options.get(MOST, 1)
        has_id = options.get(HAS_ID, self.has_id)
        if type(most) is not int or not 1 <= most <= MOST_SLICES or type(has_id) is not bool:
            raise RequestError(
                f"mm_processor_kwargs has {dict(options)}; expected a whole number from 1 to "
                f"{MOST_SLICES} for {MOST}, and true or false for {HAS_ID}",
                parameter="mm_processor_kwargs",
            )
        return has_id

    def video(self, value: Video, most: int) -> Processed:
        """Return the frames as images. most: slices of a frame."""
        from PIL import Image

        if self.version == OLDEST:
            raise RequestError(
                f"version {OLDEST} of MiniCPM-V reads no videos; send frames as images"
            )
        return self.placed([self.slicer(Image.fromarray(each), most) for each in value.frames], {})

    def placed(self, images: Sequence[Slices], facts: Mapping[str, Any]) -> Processed:
        """Return the tokens of images after each other."""
        tokens: list[int] = []
        is_row: list[bool] = []
        for image in images:
            for token, count in self.runs(image.grid):
                tokens += [token] * (count or 1)
                is_row += [count > 0] * (count or 1)
        sizes = [size for image in images for size in image.sizes]
        arrays = {
            "pixel_values": np.concatenate([image.patches for image in images]),
            "tgt_sizes": np.array(sizes, np.int64),
        }
        return Processed(tokens, arrays, np.array(is_row), facts)

    def runs(self, grid: Grid | None) -> list[tuple[int, int]]:
        """Return the tokens of an image, each with how many rows have it in a run; 0 = it is one
        token and no row."""
        rows = (self.token, self.queries)
        runs = [(self.image[0], 0), rows, (self.image[1], 0)]
        if grid is None:
            return runs
        is_oldest = self.version == OLDEST
        start, end = self.image if is_oldest else self.slice
        columns, lines = grid
        line = [(start, 0), rows, (end, 0)] * columns
        others = [*line]
        for _ in range(lines - 1):
            others += [*((token, 0) for token in self.new_line), *line]
        if is_oldest:
            return [*runs, (self.slice[0], 0), *others, (self.slice[1], 0)]
        return [*runs, *others]


class MiniCPMOProcessor(MiniCPMVProcessor):
    """Speech is heard in parts of 30 seconds. In its tokens, each second has marks."""

    known = OMNI

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(options, setup)
        config = setup.checkpoint.config
        self.switches = {name: switch(config, name, True) for name in ("init_vision", "init_audio")}
        self.sizes = AudioSizes.of(config)
        self.mel = LogMel.of(setup.checkpoint, self.sizes.encoder)
        self.audio = tuple(token_id(self.tokenizer, text) for text in (AUDIO_START, AUDIO_END))
        self.marks["audio"] = AUDIO_START + AUDIO_END, (self.audio[0], self.audio[1])

    def process(self, modality: str, value: Any, options: Mapping[str, Any]) -> Processed:
        """The arrays of speech are input_features, float32 [mel bins, frames of all parts], and
        num_frames, int64 [parts]."""
        part = "init_audio" if modality == "audio" else "init_vision"
        if not self.switches[part]:
            raise RequestError(
                f"this model takes no items of type {modality}: its config has {part}=false. "
                "Leave them out"
            )
        if modality != "audio":
            return super().process(modality, value, options)
        self.checked(options)
        samples, rate = value
        return self.speech(resample(samples, rate, self.mel.rate))

    def speech(self, samples: np.ndarray) -> Processed:
        """samples: float32 [n]. Raises RequestError if they have no row."""
        size = self.mel.num_samples
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        counts = [self.mel.num_frames(part) for part in parts]
        num_rows = sum(map(self.sizes.num_rows, counts))
        if not num_rows:
            least = (2 * self.sizes.pooled - 2) * self.mel.hop + 1
            raise RequestError(
                f"the audio has {len(samples)} samples, at {self.mel.rate} a second; the model "
                f"takes at least {least}. Send a longer one"
            )
        mels = [self.mel(part, size)[:, :count] for part, count in zip(parts, counts, strict=True)]
        start, end = self.audio
        most = max(1, self.sizes.rows_of_second)
        tokens: list[int] = []
        for first in range(0, num_rows, most):
            tokens += [start, *[self.token] * min(most, num_rows - first), end]
        arrays = {
            "input_features": np.ascontiguousarray(np.concatenate(mels, 1)),
            "num_frames": np.array(counts, np.int64),
        }
        return Processed(tokens, arrays, np.array(tokens) == self.token)


def between(tokenizer: "Tokenizer", before: str, text: str, after: str) -> list[int]:
    """Return the tokens of a text between two special tokens."""
    return tokenizer.encode(f"{before}{text}{after}", add_special_tokens=False)[1:-1]
