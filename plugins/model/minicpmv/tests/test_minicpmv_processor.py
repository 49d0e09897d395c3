"""The processors of MiniCPM-V and MiniCPM-o: slices compared with transformers' processor of a
newer version where they are the same and with the published rules, and features of speech with
transformers' extractor."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_minicpmv import sizes as own_sizes
from pegboard_model_minicpmv.processor import MiniCPMOProcessor, MiniCPMVProcessor
from pegboard_model_minicpmv.sizes import VISION, AudioSizes, heads_of, vision_of
from pegboard_model_minicpmv.slices import Slicer
from PIL import Image
from transformers import SiglipVisionConfig, WhisperConfig, WhisperFeatureExtractor
from transformers.image_transforms import normalize
from transformers.image_utils import ChannelDimension
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import Video
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import ImageContract, image_setup, random_audio, random_images

RATE = 16_000
SIDE = 40
PATCH = 4
QUERIES = 5
MARKS = ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"]
SOUND = ["<|audio_start|>", "<|audio_end|>"]
SPECIAL = [*MARKS, *SOUND, "\n", *"01"]
START, END, SLICE, SLICE_END, ID, ID_END, HEAR, HEARD, LINE, ZERO, ONE = range(2, 2 + len(SPECIAL))
UNK = 0
CONFIG: dict[str, Any] = {
    "version": 2.6,
    "hidden_size": 256,
    "query_num": QUERIES,
    "vision_config": {"model_type": "siglip_vision_model", "patch_size": PATCH},
}
OLDEST = {**CONFIG, "version": None}
OMNI = {
    **CONFIG,
    "audio_config": {"max_source_positions": 100},
    "vision_config": {"model_type": "siglip", "patch_size": PATCH},
}
FILE: dict[str, Any] = {
    "image_processor_type": "MiniCPMVImageProcessor",
    "auto_map": {"AutoImageProcessor": "image_processing_minicpmv.MiniCPMVImageProcessor"},
    "max_slice_nums": 9,
    "scale_resolution": SIDE,
    "patch_size": PATCH,
    "use_image_id": True,
    "image_feature_size": QUERIES,
    "slice_mode": True,
    "norm_mean": [0.5, 0.4, 0.3],
    "norm_std": [0.5, 0.6, 0.7],
    "version": 2.6,
}


@pytest.mark.parametrize("name", ["MiniCPMV", "MiniCPMO"])
@pytest.mark.parametrize("kind", ["model", "multimodal_processor"])
def test_entries(kind: str, name: str) -> None:
    check_entry(installed_entry(kind, name))


def make(folder: Path, config: Mapping[str, Any] = CONFIG, **values: Any) -> MiniCPMVProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps({**FILE, **values}))
    return MiniCPMVProcessor(None, image_setup(folder, config, SPECIAL))


def make_omni(folder: Path, config: Mapping[str, Any] = OMNI, **values: Any) -> MiniCPMOProcessor:
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**FILE, "chunk_length": 2, **values})
    )
    return MiniCPMOProcessor(None, image_setup(folder, config, SPECIAL))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> MiniCPMVProcessor:
    return make(tmp_path_factory.mktemp("minicpmv"))


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> MiniCPMVProcessor:
    return make(tmp_path_factory.mktemp("oldest"), OLDEST)


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> MiniCPMOProcessor:
    return make_omni(tmp_path_factory.mktemp("omni"))


def video(count: int = 2) -> Video:
    frames = np.stack([np.asarray(random_image(60, 50, seed)) for seed in range(count)])
    return Video(frames, 1.0, tuple(map(float, range(count))))


class Contract(ImageContract):
    config = CONFIG
    special = SPECIAL

    def items(self) -> list[tuple[str, Any]]:
        return [*super().items(), ("video", video())]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int | None:
        return QUERIES * len(arrays["tgt_sizes"]) if "tgt_sizes" in arrays else None


class TestContract(Contract):
    make = staticmethod(make)


class TestOmniContract(Contract):
    make = staticmethod(make_omni)

    def items(self) -> list[tuple[str, Any]]:
        sound = np.random.default_rng(1).normal(size=40_000).astype(np.float32), RATE
        return [*super().items(), ("audio", sound)]


del Contract


def published_grid(width: int, height: int, most: int) -> tuple[int, int] | None:
    """Return the slices beside and below each other."""
    count = min(math.ceil(width * height / (SIDE * SIDE)), most)
    if count <= 1:
        return None
    best = (1, 1)
    least = math.inf
    for number in (count - 1, count, count + 1):
        if number == 1 or number > most:
            continue
        for columns in range(1, number + 1):
            if number % columns:
                continue
            grid = columns, number // columns
            error = abs(math.log(width / height) - math.log(grid[0] / grid[1]))
            if error < least:
                best, least = grid, error
    return best


def published_sizes(image: Any, grid: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Return the (width, height) of the whole image, and of all slices together."""

    def near(length: float, unit: int) -> int:
        return max(round(length / unit) * unit, unit)

    def square(width: float, height: float) -> tuple[int, int]:
        tall = int(SIDE / math.sqrt(width / height))
        return near(int(tall * (width / height)), PATCH), near(tall, PATCH)

    whole = square(*image.size)
    if grid is None:
        return [whole]
    columns, lines = grid
    slice_size = square(near(image.width, columns) / columns, near(image.height, lines) / lines)
    return [whole, (slice_size[0] * columns, slice_size[1] * lines)]


def published(image: Any, most: int) -> tuple[list[np.ndarray], tuple[int, int] | None]:
    """Return the pixels of each slice, float32 [3, height, width], and the grid."""
    grid = published_grid(*image.size, most)
    sizes = published_sizes(image, grid)
    parts = [image.resize(sizes[0], Image.Resampling.BICUBIC)]
    if grid is not None:
        large = image.resize(sizes[1], Image.Resampling.BICUBIC)
        size = sizes[1][0] // grid[0], sizes[1][1] // grid[1]
        parts += [
            large.crop((left, top, left + size[0], top + size[1]))
            for top in range(0, large.height, size[1])
            for left in range(0, large.width, size[0])
        ]
    pixels = [
        normalize(
            np.array(part).astype(np.float32) / 255,
            np.array(FILE["norm_mean"]),
            np.array(FILE["norm_std"]),
            input_data_format=ChannelDimension.LAST,
        ).transpose(2, 0, 1)
        for part in parts
    ]
    return pixels, grid


def patches_of(pixels: np.ndarray) -> np.ndarray:
    """Return [patches, 3, patch, patch]."""
    lines, columns = (side // PATCH for side in pixels.shape[1:])
    cut = pixels.reshape(3, lines, PATCH, columns, PATCH).transpose(1, 3, 0, 2, 4)
    return cut.reshape(-1, 3, PATCH, PATCH)


@given(random_images(), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_images(ours: MiniCPMVProcessor, image: Any, most: int) -> None:
    """To the bit."""
    processed = ours.process("image", image, {"max_slice_nums": most})
    pixels, grid = published(image, most)
    expected = np.concatenate([patches_of(each) for each in pixels])
    np.testing.assert_array_equal(processed.arrays["pixel_values"], expected)
    assert processed.arrays["pixel_values"].dtype == np.float32
    sizes = [[each.shape[1] // PATCH, each.shape[2] // PATCH] for each in pixels]
    assert processed.arrays["tgt_sizes"].tolist() == sizes
    rows = [UNK] * QUERIES
    tokens = [START, *rows, END]
    for line in range(grid[1] if grid else 0):
        tokens += [LINE] * (line > 0) + [SLICE, *rows, SLICE_END] * grid[0]
    assert processed.token_ids == tokens
    assert processed.is_row.tolist() == [token == UNK for token in tokens]


@given(random_images(), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_grids_of_a_newer_version(image: Any, most: int) -> None:
    """In transformers. If two grids are as good, it takes that with more lines, and we that which
    comes first."""
    theirs = MiniCPMV4_6ImageProcessorPil().get_sliced_grid((image.height, image.width), most, SIDE)
    found = Slicer(SIDE, PATCH, [0.5] * 3, [0.5] * 3).grid(*image.size, most)
    if theirs is None or found is None:
        assert theirs is found
        return
    ratio = math.log(image.width / image.height)
    errors = [abs(ratio - math.log(beside / below)) for beside, below in (theirs[::-1], found)]
    assert errors[0] == pytest.approx(errors[1], abs=1e-12)


def test_tokens_of_the_oldest_version(oldest: MiniCPMVProcessor) -> None:
    processed = oldest.process("image", random_image(80, 80), {})
    image = [START, *[UNK] * QUERIES, END]
    line = [*image, *image]
    assert processed.token_ids == [*image, SLICE, *line, LINE, *line, SLICE_END]
    assert oldest.heading("image", 0, processed.facts) == ()
    assert oldest.process("image", random_image(9, 9), {}).token_ids == image


def test_numbers(ours: MiniCPMVProcessor, tmp_path: Path) -> None:
    image = random_image(9, 9)
    facts = ours.process("image", image, {}).facts
    assert [ours.heading("image", number, facts) for number in (0, 1)] == [
        [ID, ZERO, ID_END],
        [ID, ONE, ID_END],
    ]
    without = ours.process("image", image, {"use_image_id": False}).facts
    assert ours.heading("image", 0, without) == ()
    assert ours.heading("video", 0, ours.process("video", video(), {}).facts) == ()
    silent = make(tmp_path, use_image_id=False)
    assert silent.heading("image", 0, silent.process("image", image, {}).facts) == ()
    asked = silent.process("image", image, {"use_image_id": True})
    assert silent.heading("image", 0, asked.facts) == [ID, ZERO, ID_END]


@pytest.mark.parametrize(("options", "most"), [({}, 2), ({"max_slice_nums": 1}, 1)])
def test_videos(ours: MiniCPMVProcessor, options: dict[str, Any], most: int) -> None:
    """Frames are images."""
    item = video(3)
    processed = ours.process("video", item, options)
    images = [
        ours.process("image", Image.fromarray(frame), {"max_slice_nums": most})
        for frame in item.frames
    ]
    assert processed.token_ids == [token for image in images for token in image.token_ids]
    for name, array in processed.arrays.items():
        expected = np.concatenate([image.arrays[name] for image in images])
        np.testing.assert_array_equal(array, expected)


def test_placeholders(omni: MiniCPMOProcessor) -> None:
    written = "a (<image>./</image>)\n(<video>./</video>)(<audio>./</audio>)"
    rewritten = "a <image></image>\n<slice></slice><|audio_start|><|audio_end|>"
    assert omni.rewritten(written) == rewritten
    tokens = {name: omni.placeholder(name).token_ids for name in ("image", "video", "audio")}
    assert tokens == {"image": (START, END), "video": (SLICE, SLICE_END), "audio": (HEAR, HEARD)}


@given(random_audio(0.03, 5.0))
@settings(max_examples=25, deadline=None)
def test_speech(omni: MiniCPMOProcessor, samples: np.ndarray) -> None:
    """Parts have two seconds here."""
    processed = omni.process("audio", (samples, RATE), {})
    parts = [samples[start : start + 2 * RATE] for start in range(0, len(samples), 2 * RATE)]
    extractor = WhisperFeatureExtractor(chunk_length=2)
    made = extractor(
        parts,
        sampling_rate=RATE,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="np",
    )
    counts = made["attention_mask"].sum(1)
    expected = [mel[:, :count] for mel, count in zip(made["input_features"], counts, strict=True)]
    np.testing.assert_allclose(
        processed.arrays["input_features"], np.concatenate(expected, 1), atol=1e-4
    )
    assert processed.arrays["num_frames"].tolist() == counts.tolist()
    num_rows = int((((counts - 1) // 2 + 1 - 2) // 2 + 1).sum())
    whole, rest = divmod(num_rows, 25)
    tokens = [HEAR, *[UNK] * 25, HEARD] * whole
    tokens += [HEAR, *[UNK] * rest, HEARD] * (rest > 0)
    assert processed.token_ids == tokens
    assert processed.is_row.tolist() == [token == UNK for token in tokens]


def test_values_that_files_lack(tmp_path: Path) -> None:
    values = {"version": "4.0", "hidden_size": 256}
    ours = MiniCPMVProcessor(None, image_setup(tmp_path, values, SPECIAL))
    slicer = ours.slicer
    assert (ours.most, ours.queries, ours.has_id) == (9, 64, False)
    assert (slicer.side, slicer.patch, slicer.mean) == (448, 14, [0.5] * 3)
    assert vision_of({})[1] == VISION["num_hidden_layers"] - 1
    assert vision_of({"drop_vision_last_layer": False})[1] == VISION["num_hidden_layers"]
    theirs = SiglipVisionConfig()
    found, _ = vision_of({"vision_config": {}})
    assert (found.hidden_size, found.patch_size) == (theirs.hidden_size, theirs.patch_size)
    whisper = WhisperConfig()
    assert {name: getattr(whisper, name) for name in own_sizes.WHISPER} == own_sizes.WHISPER
    assert AudioSizes.of({}).pooled == 2
    newer = AudioSizes.of({"version": "4.5", "audio_chunk_length": 0})
    assert (newer.pooled, newer.chunk, newer.rows_of_second) == (5, None, 10)


@pytest.mark.parametrize(
    ("modality", "item", "options", "message"),
    [
        ("image", random_image(9, 9), {"sharpen": 2}, "sharpen; this model takes max_slice_nums"),
        ("image", random_image(9, 9), {"max_slice_nums": 0}, "a whole number from 1 to 64 for max"),
        ("image", random_image(9, 9), {"max_slice_nums": True}, "a whole number from 1 to 64"),
        ("video", video(), {"use_image_id": 1}, "true or false for use_image_id"),
        ("image", random_image(1, 201), {}, "1 × 201 pixels; its longer side may be at most 200"),
        ("audio", (np.zeros(320, np.float32), RATE), {}, "320 samples.*takes at least 321"),
        ("audio", (np.zeros(0, np.float32), RATE), {}, "has 0 samples"),
        ("audio", (np.zeros(999, np.float32), RATE), {"a": 1}, "mm_processor_kwargs has a"),
    ],
)
def test_what_requests_may_not_ask(
    omni: MiniCPMOProcessor, modality: str, item: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        omni.process(modality, item, options)


def test_the_shortest_audio(omni: MiniCPMOProcessor) -> None:
    processed = omni.process("audio", (np.ones(321, np.float32), RATE), {})
    assert processed.token_ids == [HEAR, UNK, HEARD]


def test_what_the_oldest_version_does_not_take(oldest: MiniCPMVProcessor) -> None:
    with pytest.raises(RequestError, match="use_image_id; this model takes max_slice_nums"):
        oldest.process("image", random_image(9, 9), {"use_image_id": True})
    with pytest.raises(RequestError, match="2.5 of MiniCPM-V reads no videos; send frames"):
        oldest.process("video", video(), {})


def test_parts_that_a_model_lacks(tmp_path: Path) -> None:
    ours = make_omni(tmp_path, {**OMNI, "init_audio": False, "init_vision": False})
    with pytest.raises(RequestError, match="no items of type audio: its config has init_audio"):
        ours.process("audio", (np.ones(999, np.float32), RATE), {})
    with pytest.raises(RequestError, match="no items of type image: its config has init_vision"):
        ours.process("image", random_image(9, 9), {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_size": 16}, "patch_size=16; expected the 4 of vision_config"),
        ({"image_feature_size": 64}, "image_feature_size=64; expected the query_num=5"),
        ({"slice_mode": False}, "slice_mode=False; expected true, because"),
        ({"use_image_id": 1}, "use_image_id=1; expected true or false"),
        ({"max_slice_nums": 0}, "max_slice_nums=0; expected a whole number from 1 on"),
        ({"scale_resolution": "a"}, "scale_resolution='a'; expected a whole number"),
        ({"norm_mean": [0.5]}, r"norm_mean=\[0.5\]; expected three numbers"),
        ({"norm_std": [1, 1, 0]}, r"norm_std=\[1, 1, 0\]; expected three numbers that"),
        ({"im_start": "<picture>"}, "no special token '<picture>'"),
        ({"unk": 3}, "unk=3; expected the text of a token"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, **values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"version": 3}, "version=3; supported: 2.5, 2.6, 4.0, 4.5"),
        ({"version": "2.6.1"}, "version='2.6.1'; supported"),
        ({"version": None, "hidden_size": 2304, "query_num": 64}, "version='2.0'; supported"),
        ({"query_num": 0}, "query_num=0; expected a whole number"),
        ({"vision_config": {"model_type": "clip"}}, "tower is 'clip'; supported: siglip"),
        ({"drop_vision_last_layer": 1}, "drop_vision_last_layer=1; expected true or false"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make(tmp_path, {**CONFIG, **config})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"version": "4.0"}, "version='4.0'; supported: 2.6, 4.5"),
        ({"audio_config": {"encoder_ffn_dim": 40}}, "encoder_ffn_dim=40 and d_model=384"),
        ({"audio_config": {"num_mel_bins": 128}}, "makes 80 mel bins and 200 frames"),
        ({"audio_pool_step": 0}, "audio_pool_step=0; expected a whole number"),
        (
            {"audio_chunk_length": 0.001},
            "audio_chunk_length=0.001; expected seconds, at least",
        ),
        ({"init_audio": None}, "init_audio=None; expected true or false"),
    ],
)
def test_omni_configs_that_are_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    audio = {"audio_config": {**OMNI["audio_config"], **config.get("audio_config", {})}}
    with pytest.raises(ModelError, match=message):
        make_omni(tmp_path, {**OMNI, **config, **audio})


@pytest.mark.parametrize("width", [100, 258, 1000, 1154])
def test_widths_that_heads_do_not_divide(width: int) -> None:
    with pytest.raises(ModelError, match=f"hidden_size={width}; expected a multiple of 128"):
        heads_of(width)


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_minicpmv.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
