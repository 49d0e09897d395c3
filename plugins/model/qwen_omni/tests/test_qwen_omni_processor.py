"""The processors, compared with those of transformers, on items of many sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_qwen_omni.processor import Qwen3OmniProcessor, Qwen25OmniProcessor
from PIL import Image
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerModel

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSetup, PlacedItem, Processed
from pegboard_media.audio import resample
from pegboard_models.patch_sizes import AXES
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_multimodal_processor import (
    MultiModalProcessorContract,
    random_image,
)
from pegboard_testing.media_peers import image_setup, random_audio, random_images, word_tokenizer
from pegboard_testing.video_peers import as_video, peer_frames, random_video, video_module

RATE = 16_000
PATCH = 4
MARKS = {
    "Qwen2_5Omni": [
        "<|vision_bos|>",
        "<|IMAGE|>",
        "<|vision_eos|>",
        "<|VIDEO|>",
        "<|audio_bos|>",
        "<|AUDIO|>",
        "<|audio_eos|>",
    ],
    "Qwen3OmniMoe": [
        "<|vision_start|>",
        "<|image_pad|>",
        "<|vision_end|>",
        "<|video_pad|>",
        "<|audio_start|>",
        "<|audio_pad|>",
        "<|audio_end|>",
    ],
}
PROCESSORS = {"Qwen2_5Omni": Qwen25OmniProcessor, "Qwen3OmniMoe": Qwen3OmniProcessor}
COUNTS: dict[str, Callable[[int], int]] = {
    "Qwen2_5Omni": lambda frames: (frames + 1) // 4,
    "Qwen3OmniMoe": lambda frames: 13 * (frames // 100) + -(-(frames % 100) // 8),
}
"""The rows of audio, by the number of its frames."""
PEERS = {
    "Qwen2_5Omni": (transformers.Qwen2_5OmniProcessor, Qwen2_5OmniThinkerModel),
    "Qwen3OmniMoe": (transformers.Qwen3OmniMoeProcessor, Qwen3OmniMoeThinkerModel),
}
START, IMAGE, _, VIDEO, AUDIO_START, AUDIO, _ = range(2, 9)
"""The ids of the tokens, in this order."""
LIMITS = {"min_pixels": 200, "max_pixels": 3000}
THINKER = {
    "vision_config": {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "audio_config": {"num_mel_bins": 16},
    "image_token_index": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_index": AUDIO,
}


@pytest.mark.parametrize("group", ["model", "multimodal_processor"])
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2_5OmniModel",
        *(
            f"{family}{part}ForConditionalGeneration"
            for family in MARKS
            for part in ("", "Thinker")
        ),
    ],
)
def test_entries(group: str, name: str) -> None:
    check_entry(installed_entry(group, name))


def their_images() -> Any:
    return Qwen2VLImageProcessorPil(patch_size=PATCH, **LIMITS)


@pytest.fixture(scope="module", params=MARKS)
def kind(request: Any) -> str:
    return str(request.param)


def setup_of(folder: Path, kind: str, **changes: Any) -> MultiModalProcessorSetup:
    """Write the file of the processors, and return what ours is built of."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    values = {**extractor.to_dict(), **their_images().to_dict()}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    config = {"thinker_config": {**THINKER, **changes}, "model_type": "omni"}
    return image_setup(folder, config, MARKS[kind])


@pytest.fixture(scope="module")
def ours(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Qwen25OmniProcessor:
    return PROCESSORS[kind](None, setup_of(tmp_path_factory.mktemp(kind), kind))


@pytest.mark.usefixtures("folder")
class TestContract(MultiModalProcessorContract):
    @pytest.fixture
    def folder(self, kind: str, tmp_path: Path) -> None:
        self.kind = kind
        self.path = tmp_path

    def tokenizer(self) -> Any:
        return setup_of(self.path, self.kind).tokenizer

    def processor(self) -> Qwen25OmniProcessor:
        return PROCESSORS[self.kind](None, setup_of(self.path, self.kind))

    def items(self) -> list[tuple[str, Any]]:
        random = np.random.default_rng(1)
        sounds = [random.normal(size=count).astype(np.float32) for count in (500, 9_000, 30_001)]
        sizes = ((20, 30), (7, 50), (9, 9))
        return [
            *(("image", random_image(*size)) for size in sizes),
            *(("video", as_video(random_video(2, *size))) for size in sizes),
            *(("audio", (sound, RATE)) for sound in sounds),
        ]

    def num_rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> int:
        if modality == "audio":
            return COUNTS[self.kind](arrays["input_features"].shape[1])
        return int(arrays[f"{modality}_grid_thw"].prod()) // 4

    def form_of(self, modality: str, processed: Processed) -> Mapping[str, Any] | None:
        if modality == "audio":
            return {}
        grid = processed.arrays.get("image_grid_thw")
        return None if grid is None else {"image_grid_thw": grid}


@pytest.fixture(scope="module")
def theirs(kind: str) -> Any:
    """Return transformers' processor, without one of videos, which needs torchvision."""
    tokenizer = word_tokenizer(MARKS[kind])
    names = ("vision_bos", "image", "vision_eos", "video", "audio_bos", "audio", "audio_eos")
    for name, mark in zip(names, MARKS[kind], strict=True):
        setattr(tokenizer, f"{name}_token", mark)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(mark))
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    peer = PEERS[kind][0]
    processor: Any = object.__new__(peer)
    processor.check_argument_for_proper_class = lambda *given: None
    peer.__init__(processor, their_images(), None, extractor, tokenizer)
    return processor


@given(
    random_audio(shortest=0.1, longest=2.5), st.sampled_from([RATE, 8_000, 22_050, 44_100, 48_000])
)
@settings(max_examples=40, deadline=None)
def test_audio_of_any_length(theirs: Any, ours: Any, samples: np.ndarray, rate: int) -> None:
    expected = theirs(
        text=f"a {ours.audio_text} a",
        audio=resample(samples, rate, RATE),
        return_tensors="np",
    )
    found = ours.process("audio", (samples, rate), {})
    (a,) = theirs.tokenizer.encode("a")
    tokens = [a, AUDIO_START, *found.token_ids, AUDIO_START + 2, a]
    assert tokens == expected["input_ids"][0].tolist()
    features = found.arrays["input_features"]
    is_heard = expected["feature_attention_mask"][0].astype(bool)
    assert features.dtype == np.float32 and features.flags.c_contiguous
    of_all = expected["input_features"][0][:, is_heard]
    np.testing.assert_allclose(features, of_all, rtol=0, atol=1e-4)


@given(random_images())
@settings(max_examples=40, deadline=None)
def test_images(theirs: Any, ours: Any, image: Image.Image) -> None:
    expected = theirs(text=ours.texts[0], images=[image], return_tensors="np")
    found = ours.process("image", image, {})
    np.testing.assert_array_equal(found.arrays["pixel_values"], expected["pixel_values"])
    assert [START, *found.token_ids, START + 2] == expected["input_ids"][0].tolist()


videos = st.builds(
    random_video,
    st.integers(1, 7),
    st.integers(4, 90),
    st.integers(4, 90),
    st.floats(0.1, 60),
    st.integers(0, 99),
)


@given(videos)
@settings(max_examples=30, deadline=None)
def test_videos(ours: Any, video: Any) -> None:
    """Their size is the processor's own, unless a request says another one."""
    module = video_module("qwen2_vl")
    frames = video[0]
    size = module.smart_resize(*frames.shape[1:3], factor=2 * PATCH, **LIMITS)
    pixels = torch.from_numpy(peer_frames(their_images(), frames, size))
    expected, *grid = module.Qwen2VLVideoProcessor.patchify(None, pixels[None], PATCH, 2, 2)
    found = ours.process("video", as_video(video), LIMITS)
    np.testing.assert_allclose(found.arrays["pixel_values_videos"], expected[0], atol=1e-5)
    assert found.token_ids == [VIDEO] * (grid[0] * grid[1] * grid[2] // 4)
    assert found.facts["interval"] == 2 / video[1] and found.facts["rate"] == 25


def test_the_size_of_videos(kind: str, ours: Any) -> None:
    assert ours.videos["size"] == PEERS[kind][0].videos_kwargs["size"]


parts = st.one_of(
    st.integers(1, 9),
    st.tuples(st.just("audio"), st.integers(3, 260)),
    st.tuples(st.just("image"), st.just(1), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.just("video"), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
)


@given(st.lists(parts, min_size=1, max_size=8), st.floats(0.05, 3.0))
@settings(max_examples=80, deadline=None)
def test_positions(kind: str, ours: Any, parts: Sequence[Any], seconds: float) -> None:
    """The positions of transformers, of texts and of items between the tokens around them. For
    Qwen3-Omni, transformers has positions between whole numbers, so times are in whole ones."""
    if kind == "Qwen3OmniMoe":
        seconds = max(1, round(25 * seconds)) / 25
    tokens: list[int] = []
    items: list[PlacedItem] = []
    arguments: dict[str, Any] = {"image": [], "video": [], "audio": []}
    for part in parts:
        if isinstance(part, int):
            tokens += [1] * part
            continue
        modality, *shape = part
        arguments[modality].append(shape[0] if modality == "audio" else shape)
        count = COUNTS[kind](shape[0]) if modality == "audio" else int(np.prod(shape))
        first = AUDIO_START if modality == "audio" else START
        mark = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}[modality]
        place = len(tokens) + 1
        tokens += [first, *[mark] * count, first + 2]
        facts: dict[str, Any] = {} if modality == "audio" else {"grids": [(0, tuple(shape))]}
        if modality == "video":
            facts |= {"interval": seconds, "rate": 25.0}
        items.append(PlacedItem(modality, place, place + count, facts))
    ids = torch.tensor([tokens])
    grids = {
        modality: torch.tensor([[t, 2 * h, 2 * w] for t, h, w in arguments[modality]])
        for modality in ("image", "video")
        if arguments[modality]
    }
    expected, _ = peer(PEERS[kind][1]).get_rope_index(
        ids,
        grids.get("image"),
        grids.get("video"),
        torch.ones_like(ids),
        audio_seqlens=torch.tensor(arguments["audio"]),
        second_per_grids=torch.tensor([seconds] * len(arguments["video"])),
    )
    found = ours.inputs(tokens, items)
    assert list(found) == list(AXES)
    places = torch.arange(len(tokens))
    assert torch.tensor(list(found.values())).equal(expected[:, 0].long() - places)


def peer(kind: Any) -> Any:
    """Return a model of transformers that only knows positions."""
    model = object.__new__(kind)
    torch.nn.Module.__init__(model)
    model.spatial_merge_size = 2
    model.config = SimpleNamespace(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        vision_start_token_id=START,
        audio_start_token_id=AUDIO_START,
        position_id_per_seconds=25,
        seconds_per_chunk=2,
        audio_config=SimpleNamespace(n_window=50),
    )
    return model


def test_placeholders(kind: str, ours: Any) -> None:
    tokenizer = word_tokenizer(MARKS[kind])
    for modality, token in (("image", IMAGE), ("video", VIDEO), ("audio", AUDIO)):
        found = ours.placeholder(modality)
        assert found.token_ids == (token,)
        assert tokenizer.encode(found.text)[1] == token


@given(random_audio(shortest=0.0001, longest=0.0199))
@settings(max_examples=10, deadline=None)
def test_audio_that_is_too_short(ours: Any, samples: np.ndarray) -> None:
    with pytest.raises(RequestError, match=r"frames of 0\.01 seconds; the model takes at least"):
        ours.process("audio", (samples, RATE), {})


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_audio_in_video": None}, "use_audio_in_video=None; expected true or false"),
        ({"load_audio_from_video": 1}, "load_audio_from_video=1; expected true or false"),
        ({"sharpen": 2}, "sharpen; the image processor Qwen2VLImageProcessorPil takes"),
        ({"position_id_per_seconds": 2}, "has position_id_per_seconds"),
    ],
)
def test_options_that_are_refused(
    ours: Any, modality: str, options: Mapping[str, Any], message: str
) -> None:
    values = {
        "image": Image.new("RGB", (50, 51)),
        "video": as_video(random_video(2, 50, 51)),
        "audio": (np.zeros(RATE, np.float32), RATE),
    }
    with pytest.raises(RequestError, match=message) as caught:
        ours.process(modality, values[modality], options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_options_of_other_items(ours: Any) -> None:
    """A prompt has one set of options. Those of images change no audio."""
    sound = np.ones(RATE, np.float32), RATE
    expected = ours.process("audio", sound, {})
    found = ours.process("audio", sound, {**LIMITS, "use_audio_in_video": True})
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio_token_index": "a"}, "expected the id of a token"),
        ({"audio_config": {"num_mel_bins": 128}}, "makes 16 mel bins; its audio encoder takes 128"),
        ({"audio_config": 3}, "audio_config=3; expected an object"),
        ({"position_id_per_seconds": 0}, "position_id_per_seconds=0; expected a number above 0"),
        ({"position_id_per_seconds": "a"}, "position_id_per_seconds='a'; expected a number"),
    ],
)
def test_configs_that_are_wrong(
    kind: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        PROCESSORS[kind](None, setup_of(tmp_path, kind, **changes))


def test_chunks_that_are_wrong(tmp_path: Path) -> None:
    audio = {"num_mel_bins": 16, "n_window": 10}
    with pytest.raises(ModelError, match="n_window=10; expected a number whose chunks have 13"):
        Qwen3OmniProcessor(None, setup_of(tmp_path, "Qwen3OmniMoe", audio_config=audio))


def test_long_audio(tmp_path: Path) -> None:
    """Qwen2.5-Omni cuts it, Qwen3-Omni does not."""
    sound = np.ones(3 * RATE, np.float32), RATE
    rows = [
        len(PROCESSORS[kind](None, setup_of(tmp_path, kind)).process("audio", sound, {}).token_ids)
        for kind in MARKS
    ]
    assert rows == [50, 39]


def test_the_module_is_light() -> None:
    code = (
        "import sys, pegboard_model_qwen_omni.processor; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
