"""Models that read images and have no package of their own, run with transformers' modules and
compared with transformers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_media import (
    IMAGE,
    MEDIA_TEXT,
    VISION,
    MediaReference,
    Prompt,
    check_media,
    make_media_model,
    make_tokenizer,
    open_media_llm,
    some_prompts,
    write_llava,
)
from tiny_models import divide
from transformers import (
    AyaVisionProcessor,
    DeepseekVLHybridProcessor,
    DeepseekVLProcessor,
    GotOcr2Processor,
    Idefics2Processor,
    JanusProcessor,
    LightOnOcrProcessor,
    LlavaProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import (
    DeepseekVLImageProcessorPil,
)
from transformers.models.deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid import (
    DeepseekVLHybridImageProcessorPil,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.utils import is_torchvision_available

from pegboard.errors import RequestError

TEXT = {"model_type": "llama", **MEDIA_TEXT}
SIGLIP = {"model_type": "siglip_vision_model", **VISION}
SIDE = VISION["image_size"]
PATCHES = (SIDE // VISION["patch_size"]) ** 2

SAM = {
    **{name: value for name, value in VISION.items() if name != "intermediate_size"},
    "image_size": 64,
    "mlp_dim": 40,
    "output_channels": 24,
    "window_size": 3,
    "global_attn_indexes": [1],
}


@dataclass
class Family:
    """config: of the model. special: tokens from number 100 on; the first one is that of rows.
    processor: (tokenizer) → transformers' processor. options: of each call of it."""

    model_type: str
    config: dict[str, Any]
    processor: Callable[[Any], Any]
    special: list[str] = field(default_factory=lambda: ["<image>"])
    mark: str = "<image>"
    options: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "VipLLaVA": Family(
        "vipllava",
        {
            "text_config": TEXT,
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "vision_feature_layers": [-1, -2, 1],
            "image_token_index": IMAGE,
        },
        lambda tokenizer: LlavaProcessor(
            image_processor=CLIPImageProcessorPil(
                size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
            ),
            tokenizer=tokenizer,
            patch_size=VISION["patch_size"],
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
    "Aya Vision": Family(
        "aya_vision",
        {
            "text_config": {"model_type": "cohere2", **MEDIA_TEXT, "logit_scale": 1.0},
            "vision_config": SIGLIP,
            "downsample_factor": 2,
            "alignment_intermediate_size": 32,
            "image_token_id": IMAGE,
        },
        lambda tokenizer: AyaVisionProcessor(
            image_processor=GotOcr2ImageProcessorPil(
                size={"height": SIDE, "width": SIDE}, crop_to_patches=True, max_patches=3
            ),
            tokenizer=tokenizer,
            patch_size=VISION["patch_size"],
            img_size=SIDE,
            downsample_factor=2,
        ),
        ["<|IMG_PATCH|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL"]
        + [f"TILE_{number}" for number in range(1, 5)],
    ),
    "GOT-OCR 2": Family(
        "got_ocr2",
        {
            "text_config": {"model_type": "qwen2", **MEDIA_TEXT, "max_position_embeddings": 768},
            "vision_config": SAM,
            "image_token_index": IMAGE,
        },
        lambda tokenizer: GotOcr2Processor(
            image_processor=GotOcr2ImageProcessorPil(size={"height": 64, "width": 64}),
            tokenizer=tokenizer,
        ),
        ["<imgpad>"],
        "<imgpad>",
        {"num_image_tokens": 16},
    ),
    "Idefics 2": Family(
        "idefics2",
        {
            "text_config": {"model_type": "mistral", **MEDIA_TEXT},
            "vision_config": VISION,
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 5,
                "resampler_depth": 2,
                "resampler_n_heads": 4,
                "num_key_value_heads": 2,
                "resampler_head_dim": 8,
            },
            "image_token_id": IMAGE,
        },
        lambda tokenizer: Idefics2Processor(
            image_processor=Idefics2ImageProcessorPil(
                size={"shortest_edge": 8, "longest_edge": SIDE}, do_image_splitting=False
            ),
            tokenizer=tokenizer,
            image_seq_len=5,
        ),
        ["<image>", "<fake_token_around_image>", "<end_of_utterance>"],
    ),
    "DeepSeek-VL": Family(
        "deepseek_vl",
        {"text_config": TEXT, "vision_config": SIGLIP, "image_token_id": IMAGE},
        lambda tokenizer: DeepseekVLProcessor(
            image_processor=DeepseekVLImageProcessorPil(size={"height": SIDE, "width": SIDE}),
            tokenizer=tokenizer,
            num_image_tokens=PATCHES,
        ),
    ),
    "DeepSeek-VL, two towers": Family(
        "deepseek_vl_hybrid",
        {
            "text_config": TEXT,
            "vision_config": SIGLIP,
            "high_res_vision_config": {**SAM, "model_type": "sam_vision_model"},
            "image_token_id": IMAGE,
        },
        lambda tokenizer: DeepseekVLHybridProcessor(
            image_processor=DeepseekVLHybridImageProcessorPil(
                size={"height": SIDE, "width": SIDE}, high_res_size={"height": 64, "width": 64}
            ),
            tokenizer=tokenizer,
            num_image_tokens=PATCHES,
        ),
    ),
    "Janus": Family(
        "janus",
        {
            "text_config": TEXT,
            "vision_config": {
                "model_type": "janus_vision_model",
                **{n: v for n, v in VISION.items() if n != "intermediate_size"},
                "mlp_ratio": 2.0,
                "num_image_tokens": PATCHES,
                "projection_dim": 32,
            },
            "vq_config": {
                "embed_dim": 4,
                "num_embeddings": 16,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "num_patches": 4,
                "projection_dim": 32,
                "image_token_embed_dim": 32,
                "latent_channels": 32,
            },
            "image_token_id": IMAGE,
        },
        lambda tokenizer: JanusProcessor(
            image_processor=JanusImageProcessorPil(size={"height": SIDE, "width": SIDE}),
            tokenizer=tokenizer,
            num_image_tokens=PATCHES,
        ),
        ["<image>", "<begin_of_image>", "<end_of_image>"],
    ),
    "LightOnOCR": Family(
        "lighton_ocr",
        {
            "text_config": {"model_type": "qwen3", **MEDIA_TEXT, "head_dim": 8},
            "vision_config": {
                "model_type": "pixtral",
                **VISION,
                "head_dim": 8,
                "image_size": 32,
            },
            "spatial_merge_size": 2,
            "image_token_id": IMAGE,
        },
        lambda tokenizer: LightOnOcrProcessor(
            image_processor=PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=8),
            tokenizer=tokenizer,
            patch_size=4,
            spatial_merge_size=2,
        ),
        ["<image>", "<break>", "<end>"],
    ),
}
if is_torchvision_available():  # their image processors need it
    from transformers import Cohere2VisionImageProcessor, Cohere2VisionProcessor

    FAMILIES["Command A Vision"] = Family(
        "cohere2_vision",
        {
            "text_config": {"model_type": "cohere2", **MEDIA_TEXT, "logit_scale": 1.0},
            "vision_config": SIGLIP,
            "alignment_intermediate_size": 40,
            "image_token_id": IMAGE,
        },
        lambda tokenizer: Cohere2VisionProcessor(
            image_processor=Cohere2VisionImageProcessor(
                size={"height": SIDE, "width": SIDE}, patch_size=2, max_patches=3
            ),
            tokenizer=tokenizer,
        ),
        ["<image>", "<begin_of_image>", "<end_of_image>", "<break>"],
    )
ROLES = {
    "image_token": "<image>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
    "image_break_token": "<break>",
    "image_end_token": "<end>",
    "image_boundary_token": "<fake_token_around_image>",
    "img_line_break_token": "<break>",
}
"""Names of special tokens that processors read from the tokenizer."""


def write(family: Family, folder: Path) -> MediaReference:
    model = make_media_model(family.model_type, **family.config)
    model.save_pretrained(folder)
    roles = {name: text for name, text in ROLES.items() if text in family.special}
    tokenizer = make_tokenizer(family.special, family.mark, roles=roles)
    processor = family.processor(tokenizer)
    processor.save_pretrained(folder)

    def inputs(one: Prompt) -> Mapping[str, Any]:
        images = one.get("multi_modal_data", {}).get("image")
        if images is None:
            return {"input_ids": torch.tensor([tokenizer.encode(one["prompt"])])}
        return dict(
            processor(text=one["prompt"], images=images, return_tensors="pt", **family.options)
        )

    return MediaReference(folder, model, inputs)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def reference(family: Family, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(family, tmp_path_factory.mktemp(family.model_type))


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {},
    "whole prompts": {"max_num_batched_tokens": 1024, "block_size": 16},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(family: Family, reference: MediaReference, settings: dict[str, Any]) -> None:
    """Twice: the second time, the prefixes are in the cache."""
    prompts = some_prompts(family.mark)
    check_media(reference, prompts, repeats=2, mm_processor_kwargs=family.options, **settings)


@pytest.mark.sampled(2)
def test_divided(
    family: Family, reference: MediaReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide(monkeypatch, 2, 2)
    prompts = some_prompts(family.mark)
    check_media(reference, prompts, num_tokens=3, mm_processor_kwargs=family.options)


@pytest.mark.parametrize(
    "name", ["TransformersMultiModalForCausalLM", "TransformersMultiModalMoEForCausalLM"]
)
def test_by_name(tmp_path: Path, name: str) -> None:
    """A model that has its own package can be run with transformers' modules, too."""
    text = {"model_type": "llama"}
    if "MoE" in name:
        text = {"model_type": "mixtral", "num_local_experts": 4}
    reference = write_llava(tmp_path, text_config={**MEDIA_TEXT, **text})
    check_media(reference, some_prompts(), hf_overrides={"architectures": [name]})


def test_only_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a model whose tower nothing takes, with a warning."""
    config = {
        "text_config": {"model_type": "mistral", **MEDIA_TEXT},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "image_token_index": IMAGE,
    }
    reference = write_llava(tmp_path, **config)
    overrides = {"architectures": ["UnknownForConditionalGeneration"]}
    refused = pytest.raises(RequestError, match="takes text only")
    with open_media_llm(reference.directory, hf_overrides=overrides) as llm, refused:
        llm.generate(some_prompts()[:1], use_tqdm=False)
    assert "only text is served: the plugin of UnknownForConditionalGeneration" in caplog.text
