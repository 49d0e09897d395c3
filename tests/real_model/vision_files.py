"""A LLaVA whose language model is the default model. Its small tower and its projector are random:
it sees no picture, but each picture changes what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from test_greedy import transformers_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

MARK = "<image>"
IMAGE_TOKEN = 16
"""A token that the language model never uses. It gets the name of an image."""
SIDE = 28
PATCH = 14
NUM_ROWS = (SIDE // PATCH) ** 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of(file: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file of SmolLM2: bytes in pairs, with single digits."""
    fields = GGUFReader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    tokens[IMAGE_TOKEN] = MARK
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        extra_special_tokens={"image_token": MARK},
    )
    fast.chat_template = TEMPLATE
    return fast


def write_vision(file: Path, folder: Path) -> tuple[Any, LlavaProcessor]:
    """Write the model in bfloat16, and return transformers' model with the same values in float32,
    and its processor. file: the GGUF file of the language model."""
    language = transformers_model(file)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=language.config,
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    model.to_empty(device="cpu").eval()
    whole = model.model
    whole.language_model = language.model
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for part in (whole.vision_tower, whole.multi_modal_projector):
            for parameter in part.parameters():
                spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
                parameter.copy_(torch.randn(parameter.shape, generator=random) * spread)
        whole.vision_tower.embeddings.position_ids = torch.arange(NUM_ROWS + 1)[None]
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size),
        tokenizer=tokenizer_of(file),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)
    return model.float(), processor
