"""Phi-4-multimodal, compared with transformers: the rows of images and of speech, and the logits of
prompts with them. Its image processor, which needs torchvision, is written out here."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_phi4mm.phi4mm import Phi4MM
from pegboard_model_phi4mm.processor import Phi4MMProcessor
from PIL import Image
from safetensors.torch import load_file, save_file
from test_audio_parity import RATE, tone
from tiny_media import (
    MEDIA_TEXT,
    MediaParity,
    MediaReference,
    Prompt,
    add_adapter,
    built_model,
    check_output,
    make_tokenizer,
    open_media_llm,
    random_model,
)
from torch import Tensor
from torch.nn import functional
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
    Phi4MultimodalFeatureExtractor,
)

from pegboard import SamplingParams
from pegboard.errors import RequestError
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.media_peers import image_setup
from pegboard_weights.hf_files import read_config

IMAGE = 100
AUDIO = 101
MARKS = ["<|endoftext10|>", "<|endoftext11|>"]
SIDE = 64
PATCH = 2
GRID = SIDE // PATCH
BINS = 80
CONFIG: dict[str, Any] = {
    **MEDIA_TEXT,
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "vision_config": {
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "crop_size": SIDE,
        "patch_size": PATCH,
        "image_token_id": IMAGE,
    },
    "audio_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_blocks": 2,
        "num_attention_heads": 2,
        "ext_pw_out_channel": 16,
        "depthwise_separable_out_channel": 16,
        "depthwise_multiplier": 2,
        "nemo_conv_channels": 6,
        "bias_max_distance": 9,
        "input_size": BINS,
        "audio_token_id": AUDIO,
    },
}


def image_arrays(image: Image.Image) -> dict[str, Tensor]:
    """Return what the published processor makes of an image of at most six crops."""
    width, height = image.size
    columns, lines = -(-width // SIDE), -(-height // SIDE)
    whole = columns * SIDE, lines * SIDE
    ratios = whole[0] / width, whole[1] / height
    if ratios[0] < ratios[1]:
        scaled = whole[0], int(height * ratios[0])
    else:
        scaled = int(width * ratios[1]), whole[1]
    canvas = Image.new("RGB", whole, (255, 255, 255))
    canvas.paste(image.resize(scaled, Image.Resampling.BILINEAR))
    mask = torch.ones(lines * GRID, columns * GRID)
    if (missing := (whole[0] - scaled[0]) // PATCH) > 0:
        mask[:, -missing:] = 0
    if (missing := (whole[1] - scaled[1]) // PATCH) > 0:
        mask[-missing:] = 0
    pixels = (torch.from_numpy(np.array(canvas)).permute(2, 0, 1) / 255 - 0.5) / 0.5
    copy = functional.interpolate(pixels[None], (SIDE, SIDE), mode="bicubic")
    crops = pixels.view(3, lines, SIDE, columns, SIDE).permute(1, 3, 0, 2, 4)
    masks = mask.view(lines, GRID, columns, GRID).transpose(1, 2).reshape(-1, GRID, GRID)
    return {
        "image_pixel_values": torch.cat([copy, crops.reshape(-1, 3, SIDE, SIDE)])[None],
        "image_sizes": torch.tensor([[whole[1], whole[0]]]),
        "image_attention_mask": torch.cat([torch.ones(1, GRID, GRID), masks])[None],
    }


class Reference(MediaReference):
    @torch.no_grad()
    def rows(self, item: Any) -> Tensor:
        """Return the rows of an image or of samples, [n, hidden]."""
        inner = self.model.model.embed_tokens_extend
        if isinstance(item, Image.Image):
            given_arrays = image_arrays(item)
            mask = given_arrays["image_attention_mask"][0, 1:, ::2, ::2]
            columns = given_arrays["image_sizes"][0, 1] // SIDE
            lines = mask[::columns, :, 0].sum()
            count = 256 + 1 + int(mask.sum()) + int(lines) + 16
            ids = torch.full((1, count), IMAGE)
            return inner.image_embed(ids, torch.zeros(1, count, 32), **given_arrays)[0]
        made = Phi4MultimodalFeatureExtractor(feature_size=BINS)(
            item, sampling_rate=RATE, return_tensors="pt"
        )
        count = int(made["audio_embed_sizes"])
        ids = torch.full((1, count), AUDIO)
        return inner.audio_embed(ids, torch.zeros(1, count, 32), **made)[0]

    def logprobs(self, one: Prompt, outputs: Any) -> Tensor:
        media = one.get("multi_modal_data", {})
        items = {
            MARKS[0]: iter(media.get("image", ())),
            MARKS[1]: iter(samples for samples, _ in media.get("audio", ())),
        }
        embed = self.model.get_input_embeddings()
        parts = []
        with torch.no_grad():
            for word in one["prompt"].split():
                if word in items:
                    parts.append(self.rows(next(items[word])))
                else:
                    parts.append(embed(torch.tensor([int(word[1:])])))
            parts.append(embed(torch.tensor([*outputs]).long()))
            logits = self.model(inputs_embeds=torch.cat(parts)[None]).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def write(folder: Path, **more: Any) -> Reference:
    model = random_model(transformers.AutoModelForCausalLM, "phi4_multimodal", **{**CONFIG, **more})
    # without norms before and after, rows would be far from those of tokens
    model.model.embed_tokens_extend.image_embed.img_projection_down.weight.data *= 0.05
    norms = model.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding
    norms.global_mean.copy_(torch.randn(BINS))
    norms.global_invstd.copy_(torch.rand(BINS) * 0.2)
    model.save_pretrained(folder)
    Phi4MultimodalFeatureExtractor(feature_size=BINS).save_pretrained(folder)
    values = {"dynamic_hd": 6, "image_processor_type": "Phi4MultimodalImageProcessor"}
    whole = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**whole, **values}))
    tokenizer = make_tokenizer(MARKS, MARKS[0])
    tokenizer.save_pretrained(folder)
    return Reference(folder, model, lambda one: {})


RENAMED = {
    r"(feed_forward_(?:in|out))\.gate_up_proj": r"\1.net.0.linear",
    r"(feed_forward_(?:in|out))\.down_proj": r"\1.net.2",
    r"(audio_embed\..*)\.([qkv])_proj": r"\1.linear_\2",
    r"(audio_embed\..*)\.o_proj": r"\1.linear_out",
    r"img_projection_up": "img_projection.0",
    r"img_projection_down": "img_projection.2",
    r"global_img_feature_extensor": "glb_GN",
    r"sub_img_feature_extensor": "sub_GN",
    r"up_proj_for_speech": "audio_projection.speech.0",
    r"down_proj_for_speech": "audio_projection.speech.2",
    r"up_proj_for_vision_speech": "audio_projection.vision.0",
    r"down_proj_for_vision_speech": "audio_projection.vision.2",
    r"^(model\.layers\..*_proj)\.weight": r"\1.base_layer.weight",
}
"""Name in files of transformers → published name."""


def publish(folder: Path) -> None:
    """Give a checkpoint the published form."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for pattern, new in RENAMED.items():
        tensors = {re.sub(pattern, new, name): value for name, value in tensors.items()}
    adapter = "model.layers.0.self_attn.qkv_proj.lora_A.speech.weight"
    save_file({**tensors, adapter: torch.ones(2, 32)}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    audio = config.pop("audio_config")
    config |= {
        "architectures": ["Phi4MMForCausalLM"],
        "model_type": "phi4mm",
        "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig"},
        "embd_layer": {"audio_embd_layer": {"compression_rate": 8}},
        "img_processor": None,
        "audio_processor": {
            "name": "cascades",
            "config": {
                "attention_dim": audio["hidden_size"],
                "attention_heads": audio["num_attention_heads"],
                "linear_units": audio["intermediate_size"],
                "num_blocks": audio["num_blocks"],
                "ext_pw_out_channel": 16,
                "depthwise_seperable_out_channel": 16,
                "depthwise_multiplier": audio["depthwise_multiplier"],
                "chunk_size": -1,
                "input_size": BINS,
                "kernel_size": audio["kernel_size"],
                "time_reduction": audio["time_reduction"],
                "nemo_conv_settings": {"conv_channels": audio["nemo_conv_channels"]},
                "relative_attention_bias_args": {"type": "t5", "t5_bias_max_distance": 9},
            },
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["transformers", "published"])
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    one = write(tmp_path_factory.mktemp("phi4mm"))
    if request.param == "published":
        publish(one.directory)
    return one


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published checkpoints all have the same tokens, which a small vocabulary lacks."""
    monkeypatch.setattr("pegboard_model_phi4mm.processor.IMAGE_TOKEN", IMAGE)
    monkeypatch.setattr("pegboard_model_phi4mm.processor.AUDIO_TOKEN", AUDIO)


pytestmark = pytest.mark.usefixtures("tokens")


def processor_of(folder: Path) -> Phi4MMProcessor:
    words = [f"w{number}" for number in range(IMAGE - 2)]
    return Phi4MMProcessor(None, image_setup(folder, read_config(folder), [*words, *MARKS]))


def rows_of(folder: Path, modality: str, items: Sequence[Any]) -> list[Tensor]:
    model, _ = built_model(Phi4MM, folder)
    processor = processor_of(folder)
    processed = [processor.process(modality, item, {}) for item in items]
    arrays = [
        {name: torch.from_numpy(value) for name, value in one.arrays.items()} for one in processed
    ]
    rows = [*model.encode(modality, arrays)]
    assert [len(one.token_ids) for one in processed] == [len(each) for each in rows]
    return rows


sides = st.tuples(st.integers(10, 2 * SIDE + 20), st.integers(10, 2 * SIDE), st.integers(0, 9))


@pytest.mark.sampled(2)
@given(sides)
@settings(max_examples=25, deadline=None)
def test_rows_of_images(reference: Reference, size: tuple[int, int, int]) -> None:
    image = random_image(*size)
    (ours,) = rows_of(reference.directory, "image", [image])
    torch.testing.assert_close(ours, reference.rows(image), atol=1e-4, rtol=1e-4)


@given(st.lists(st.integers(400, 30_000), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_rows_of_speech(reference: Reference, lengths: list[int]) -> None:
    sounds = [tone(length, length) for length in lengths]
    rows = rows_of(reference.directory, "audio", [(samples, RATE) for samples in sounds])
    for samples, ours in zip(sounds, rows, strict=True):
        torch.testing.assert_close(ours, reference.rows(samples), atol=1e-4, rtol=1e-4)


def test_rows_of_long_speech(reference: Reference) -> None:
    """Over 40 seconds, which are cut."""
    samples = tone(1_000_000, 5)
    (ours,) = rows_of(reference.directory, "audio", [(samples, RATE)])
    torch.testing.assert_close(ours, reference.rows(samples), atol=1e-4, rtol=1e-4)


def prompt(*parts: Any) -> Prompt:
    """Return a prompt. parts: numbers of words, images, or samples."""
    texts = []
    media: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(part, int):
            texts.append(f"w{part}")
        elif isinstance(part, Image.Image):
            texts.append(MARKS[0])
            media.setdefault("image", []).append(part)
        else:
            texts.append(MARKS[1])
            media.setdefault("audio", []).append((part, RATE))
    return {"prompt": " ".join(texts), **({"multi_modal_data": media} if media else {})}


WIDE = random_image(90, 20, seed=1)
TALL = random_image(13, 70, seed=2)


def some_prompts() -> list[Prompt]:
    short = tone(4_000, 1)
    long = tone(40_100, 2)
    return [
        prompt(5, TALL, 6, 7),
        prompt(*range(8, 30)),
        prompt(long, 9, short, 10),
        prompt(11, short, long, 12, 13),
        prompt(14, WIDE),
    ]


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts())
    part = 64
    whole = 2048


def test_adapters(tmp_path: Path) -> None:
    """One for each modality, and none for text, as it is published."""
    before = write(tmp_path)
    after = write(tmp_path)
    adapter = add_adapter(after.model, tmp_path, "model", "model.layers")
    publish(tmp_path)
    adapters = {"default_mm_loras": {"image": str(adapter)}, "max_loras": 1, "max_lora_rank": 8}
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    prompts = some_prompts()
    with open_media_llm(tmp_path, **adapters) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for one, output in zip(prompts, outputs, strict=True):
        reference = after if "image" in one.get("multi_modal_data", {}) else before
        check_output(reference, one, output.outputs[0], 1e-4)


def test_prompts_as_the_authors_write_them(reference: Reference) -> None:
    written = {**prompt(5, TALL, 6), "prompt": "w5 <|image_1|> w6"}
    both = {**prompt(TALL, tone(4_000)), "prompt": "<|image_1|> <|audio_1|>"}
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory) as llm:
        (output,) = llm.generate([written], params, use_tqdm=False)
        with pytest.raises(RequestError, match="images and audio"):
            llm.generate([both], params, use_tqdm=False)
    check_output(reference, prompt(5, TALL, 6), output.outputs[0], 1e-4)
