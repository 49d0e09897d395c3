"""Gemma 3n with images and audio: the rows of transformers, and its logits. The vision tower, which
transformers takes from timm, is compared in test_mobilenet_v5.py; here, both have ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_gemma3n import media
from pegboard_model_gemma3n.media import Gemma3nMedia
from pegboard_model_gemma3n.processor import Gemma3nProcessor
from pegboard_model_gemma3n.vision import VisionTower
from safetensors.torch import load_file, save_file
from test_gemma3n_parity import SIZES
from test_mobilenet_v5 import SMALL
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    make_tokenizer,
    open_media_llm,
    random_model,
)
from tiny_models import VOCAB_SIZE, divide
from torch import Tensor, nn
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
from transformers.models.gemma3n.processing_gemma3n import Gemma3nProcessor as TheirProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pegboard import SamplingParams
from pegboard.errors import PegboardError
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build, load_layers
from pegboard_testing.media_peers import image_setup
from pegboard_weights.hf_files import read_config

RATE = 16_000
BINS = 10
ROWS = 24
"""Of audio."""
SIDE = 96
SPECIAL = [
    "<start_of_image>",
    "<start_of_audio>",
    "<end_of_image>",
    "<image_soft_token>",
    "<unused0>",
    "<unused1>",
    "<end_of_audio>",
    "<audio_soft_token>",
]
BOI, BOA, EOI, IMAGE, _, _, EOA, AUDIO = range(100, 108)
ROLES = {"boi": 0, "boa": 1, "eoi": 2, "image": 3, "eoa": 6, "audio": 7}
WIDTH = 2048
ENCODER = {
    "model_type": "gemma3n_audio",
    "vocab_size": VOCAB_SIZE - EOA,
    "vocab_offset": EOA,
    "input_feat_size": BINS,
    "hidden_size": 24,
    "rms_norm_eps": 0.05,
    "gradient_clipping": 2.5,
    "conf_attention_chunk_size": 3,
    "conf_attention_context_left": 5,
    "conf_attention_context_right": 2,
    "conf_attention_logit_cap": 1.5,
    "conf_num_attention_heads": 3,
    "conf_num_hidden_layers": 3,
    "conf_conv_kernel_size": 4,
    "conf_reduction_factor": 16,
    "conf_residual_weight": 0.4,
    "sscp_conv_channel_size": [6, 5],
    "sscp_conv_group_norm_eps": 1e-2,
    "sscp_conv_kernel_size": [[3, 3], [5, 3]],
    "sscp_conv_stride_size": [[4, 2], [2, 3]],
}
CONFIG: dict[str, Any] = {
    "text_config": {"model_type": "gemma3n_text", **MEDIA_TEXT, **SIZES},
    "audio_config": ENCODER,
    "vision_config": {
        "hidden_size": WIDTH,
        "vocab_size": EOA - EOI,
        "vocab_offset": EOI,
        "rms_norm_eps": 0.3,
    },
    "audio_soft_tokens_per_image": ROWS,
    **{f"{name}_token_id": 100 + place for name, place in ROLES.items()},
}


class StandIn(nn.Module):
    """Our vision tower, as transformers calls that of timm."""

    def __init__(self) -> None:
        super().__init__()
        build = fake_build()
        VisionTower(build, SMALL)
        wanted = [each for layer in build.declared.layers for each in layer.declare({})]
        self.timm_model = nn.Module()
        for each in wanted:
            *path, last = each.name.split(".")
            place = self.timm_model
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            place.register_parameter(last, nn.Parameter(torch.zeros(each.shape)))

    def forward(self, pixel_values: Tensor, **options: Any) -> Any:
        build = fake_build()
        tower = VisionTower(build, SMALL)
        load_layers(build.declared.layers, self.timm_model.state_dict())
        rows = torch.stack([tower.forward(image).T for image in pixel_values])
        return SimpleNamespace(last_hidden_state=rows.unflatten(2, (16, 16)))


def make_model() -> Any:
    """Return transformers' model with the stand-in for timm's tower."""
    make = modeling_gemma3n.AutoModel.from_config

    def part_of(config: Any, **options: Any) -> Any:
        return StandIn() if config.model_type == "gemma3n_vision" else make(config, **options)

    with mock.patch.object(modeling_gemma3n.AutoModel, "from_config", part_of):
        return random_model(transformers.AutoModelForImageTextToText, "gemma3n", **CONFIG)


class TheirImages(TheirProcessor):  # type: ignore[misc]
    """Transformers' processor, which wants an image processor of tensors."""

    def check_argument_for_proper_class(self, *given: Any) -> Any:
        return None


class Prompted(MediaReference):
    """Of transformers' model, only tokens of the prompt are places of items. Its outputs may be the
    same tokens."""

    def logprobs(self, one: Prompt, outputs: Sequence[int]) -> Tensor:
        length = self.inputs(one)["input_ids"].shape[1]
        inner = self.model.model
        places = inner.get_placeholder_mask

        def of_prompt(input_ids: Tensor, **given_rows: Any) -> Any:
            rest = torch.zeros_like(input_ids[:, length:])
            return places(torch.cat([input_ids[:, :length], rest], 1), **given_rows)

        with mock.patch.object(inner, "get_placeholder_mask", of_prompt):
            return super().logprobs(one, outputs)


def encode_alone(model: Any) -> None:
    """Let transformers' model encode one item at a time: its features of several items see each
    other's padding."""
    inner = model.model
    encode = inner.get_audio_features

    def each_alone(features: Tensor, is_padding: Tensor, **options: Any) -> Any:
        pairs = zip(features, is_padding, strict=True)
        rows = [encode(mel[None, ~mask], mask[None, ~mask]).pooler_output[0] for mel, mask in pairs]
        counts = torch.tensor([len(each) for each in rows])
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(padded.shape[1]) >= counts[:, None]
        return SimpleNamespace(pooler_output=padded, audio_mel_mask=mask)

    inner.get_audio_features = each_alone


def inputs_of(processor: Any) -> Callable[[Prompt], Mapping[str, Tensor]]:
    """Return what makes the arguments of transformers' model. Each recording is processed alone."""

    def inputs(one: Prompt) -> Mapping[str, Tensor]:
        items = one.get("multi_modal_data", {})
        sounds = [samples for samples, _ in items.get("audio", [])]
        more = {"images": items["image"]} if "image" in items else {}
        if sounds:
            more["audio"] = sounds
        given_inputs = dict(processor(text=one["prompt"], return_tensors="pt", **more))
        given_inputs.pop("token_type_ids", None)
        if sounds:
            alone = [processor.feature_extractor(each, return_tensors="np") for each in sounds]
            mels = [torch.from_numpy(each["input_features"][0]) for each in alone]
            counts = torch.tensor([len(mel) for mel in mels])
            padded = nn.utils.rnn.pad_sequence(mels, batch_first=True)
            given_inputs["input_features"] = padded
            given_inputs["input_features_mask"] = torch.arange(padded.shape[1]) < counts[:, None]
        return given_inputs

    return inputs


def write(folder: Path) -> MediaReference:
    model = make_model()
    model.save_pretrained(folder)
    encode_alone(model)
    roles = {f"{name}_token": SPECIAL[place] for name, place in ROLES.items()}
    tokenizer = make_tokenizer(SPECIAL, "<image_soft_token>", roles=roles)
    processor = TheirImages(
        Gemma3nAudioFeatureExtractor(feature_size=BINS),
        SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_normalize=False),
        tokenizer,
        audio_seq_length=ROWS,
    )
    processor.save_pretrained(folder)
    return Prompted(folder, model, inputs_of(processor))


@pytest.fixture(scope="module", autouse=True)
def small_tower() -> Any:
    with mock.patch.object(media, "STAGES", SMALL):
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp("gemma3n"))


@pytest.fixture(scope="module")
def processor(reference: MediaReference) -> Gemma3nProcessor:
    config = read_config(reference.directory)
    setup = image_setup(reference.directory, config, [])
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(reference.directory)
    return Gemma3nProcessor(None, type(setup)(setup.checkpoint, tokenizer))


def tone(num_samples: int, seed: int = 0) -> np.ndarray:
    """Return noise, float32 [samples]."""
    random = np.random.default_rng(seed)
    return (random.normal(size=num_samples) * 0.1).astype(np.float32)


def prompt(*parts: Any) -> Prompt:
    """Return a prompt of words, images and audio. parts: numbers of words, images, or samples."""
    texts = []
    items: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(part, int):
            texts.append(f"w{part}")
        elif isinstance(part, np.ndarray):
            texts.append("<audio_soft_token>")
            items.setdefault("audio", []).append((part, RATE))
        else:
            texts.append("<image_soft_token>")
            items.setdefault("image", []).append(part)
    return {"prompt": " ".join(texts), **({"multi_modal_data": items} if items else {})}


def sounds() -> list[Prompt]:
    """Return prompts with no, one and two recordings of different lengths. Tokens of the
    vocabularies of images and of audio are in some."""
    short = tone(4_000, 1)
    long = tone(150_000, 2)
    words = prompt(*range(8, 30))
    words["prompt"] += " <end_of_image> w3 <end_of_audio> <unused0>"
    return [
        prompt(5, short, 6, 7),
        words,
        prompt(long, 9, short, 10),
        prompt(11, short, long, 12, 13, 14),
        prompt(long),
    ]


def mixed() -> list[Prompt]:
    """Return prompts with images and audio, in either order."""
    short = tone(9_000, 1)
    wide = random_image(40, 20, seed=1)
    tall = random_image(13, 50, seed=2)
    return [
        prompt(5, wide, 6, 7),
        prompt(*range(8, 30)),
        prompt(short, 9, tall, 10),
        prompt(11, tall, short, 12, 13, 14),
    ]


@given(
    lengths=st.lists(st.integers(513, 60_000), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None)
@torch.no_grad()
def test_rows_of_audio(
    reference: MediaReference, processor: Gemma3nProcessor, lengths: list[int], seed: int
) -> None:
    """The tokens of a prompt, the features, and the embeddings with which transformers' language
    model begins."""
    items = [tone(length, seed) for length in lengths]
    processed = [processor.process("audio", (each, RATE), {}) for each in items]
    check_rows(reference, prompt(*items), "audio", processed)


@given(sides=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=2))
@settings(max_examples=5, deadline=None)
@torch.no_grad()
def test_rows_of_images(
    reference: MediaReference, processor: Gemma3nProcessor, sides: list[tuple[int, int]]
) -> None:
    items = [random_image(*each, seed=sum(each)) for each in sides]
    processed = [processor.process("image", each, {}) for each in items]
    check_rows(reference, prompt(*items), "image", processed)


def check_rows(
    reference: MediaReference, one: Prompt, modality: str, processed: Sequence[Any]
) -> None:
    given_inputs = reference.inputs(one)
    tokens = [token for each in processed for token in each.token_ids]
    assert tokens == given_inputs["input_ids"][0].tolist()
    is_row = np.concatenate([each.is_row for each in processed])
    assert is_row.tolist() == [token == ROLES[modality] + 100 for token in tokens]
    inner = reference.model.model.language_model
    with mock.patch.object(inner, "forward", wraps=inner.forward) as called:
        reference.model(**given_inputs)
    rows = called.call_args.kwargs["inputs_embeds"][0][torch.from_numpy(is_row)]
    inputs = called.call_args.kwargs["per_layer_inputs"][0][torch.from_numpy(is_row)].flatten(1)
    model, used = built_model(Gemma3nMedia, reference.directory)
    stored = load_file(reference.directory / "model.safetensors")
    unused = {name for name in {*stored} - used if "language_model" not in name}
    assert not unused
    arrays = [
        {name: torch.from_numpy(value) for name, value in each.arrays.items()} for each in processed
    ]
    ours = torch.cat([*model.encode(modality, arrays)])
    expected = torch.cat((rows, inputs), 1)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


CASES: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 512, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 70},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_logits_with_audio(reference: MediaReference, options: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    check_media(reference, sounds(), repeats=2, **options)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_logits_with_images(reference: MediaReference, options: dict[str, Any]) -> None:
    check_media(reference, mixed(), repeats=2, num_tokens=4, **options)


def test_divided(reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2)
    check_media(reference, [*sounds()[:3], *mixed()[2:]])


def test_half_precision(reference: MediaReference) -> None:
    """It runs, and the first choice is likely in float32, too."""
    prompts = [sounds()[2], mixed()[2]]
    params = SamplingParams(max_tokens=1, temperature=0)
    with open_media_llm(reference.directory, dtype="bfloat16") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for one, output in zip(prompts, outputs, strict=True):
        (token,) = output.outputs[0].token_ids
        expected = reference.logprobs(one, [token])[0]
        assert expected.max() - expected[token] < 0.2


def test_tensors_without_a_prefix(reference: MediaReference, tmp_path: Path) -> None:
    """Some checkpoints have no "model" around the parts."""
    for file in reference.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "model.safetensors"
    tensors = {
        name.removeprefix("model.").replace("language_model.", "language_model.model."): value
        for name, value in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    check_media(Prompted(tmp_path, reference.model, reference.inputs), sounds()[:3])


def test_a_checkpoint_without_towers(reference: MediaReference, tmp_path: Path) -> None:
    """Only text is served; items are refused."""
    for file in reference.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "model.safetensors"
    parts = ("audio_tower", "vision_tower", "embed_audio", "embed_vision")
    tensors = {
        name: value
        for name, value in load_file(path).items()
        if not any(part in name for part in parts)
    }
    save_file(tensors, path, {"format": "pt"})
    params = SamplingParams(max_tokens=3, temperature=0)
    with open_media_llm(tmp_path) as llm:
        with pytest.raises(PegboardError, match="no tensors that read items of the modality audio"):
            llm.generate(sounds()[0], params, use_tqdm=False)
        llm.generate(prompt(*range(8, 30)), params, use_tqdm=False)
