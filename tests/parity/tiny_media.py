"""Tiny checkpoints of transformers models that read images, with a tokenizer and a real image
processor, and the comparison with what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, TOLERANCE, VOCAB_SIZE, divide, open_llm
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from pegboard import LLM, SamplingParams
from pegboard.layers import Build
from pegboard.plugins.importing import import_object, import_spec
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build, load_layers
from pegboard_testing.video_peers import random_video
from pegboard_weights.hf_files import read_config, with_defaults

NUM_TEXT_TOKENS = 100
"""Words "w0" … of the tokenizer. The ids after them are those of special tokens."""
MEDIA_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    **{name: value for name, value in SIZES.items() if name != "max_position_embeddings"},
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] == 'user' and 'w1 ' or 'w2 ' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK {% elif part['type'] == 'video' %}FILM "
    "{% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}w3"
)
Prompt = dict[str, Any]

IMAGE = 100
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
}


def make_tokenizer(
    special: Sequence[str], mark: str, film: str = "", roles: Mapping[str, str] | None = None
) -> Any:
    """Return a tokenizer of words w0 … w99, and of special tokens from number 100 on. mark, film:
    what the chat template writes for an image and for a video. roles: attribute of the tokenizer →
    a special token."""
    vocabulary = {f"w{number}": number for number in range(NUM_TEXT_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        pad_token="w0",
        extra_special_tokens=dict(roles or {}),
    )
    fast.chat_template = TEMPLATE.replace("MARK", mark).replace("FILM", film)
    return fast


@dataclass
class MediaReference:
    """A transformers model, and its checkpoint on disk. inputs: a prompt → the arguments of the
    model."""

    directory: Path
    model: Any
    inputs: Callable[[Prompt], Mapping[str, torch.Tensor]]

    def logprobs(self, prompt: Prompt, outputs: Sequence[int]) -> torch.Tensor:
        """[n, V]: the log-softmax of the logits that choose each of n outputs, and the next one."""
        given = dict(self.inputs(prompt))
        ids = torch.cat([given["input_ids"], torch.tensor([list(outputs)], dtype=torch.long)], 1)
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            logits = self.model(**given).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def make_media_model(model_type: str, **config: Any) -> Any:
    """Return a tiny transformers model of images. Every tensor is random."""
    return random_model(AutoModelForImageTextToText, model_type, **config)


def random_model(auto: Any, model_type: str, **config: Any) -> Any:
    """Return a tiny transformers model. Every tensor is random. auto: the class that makes it."""
    torch.manual_seed(7)
    model = auto.from_config(
        AutoConfig.for_model(model_type, **config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1.0 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape) * spread)
    return model


def language_model(config: Any, build: Build) -> Any:
    """Build the language model that a config names."""
    entry = installed_entry("model", config["architectures"][0])
    return import_object(import_spec(entry).implementation)(config, build)


def built_model(
    kind: Any, folder: Path, layout: Callable[[str], str] = str, **more: Any
) -> tuple[Any, set[str]]:
    """Return our model with the checkpoint's tensors, and the names of those that it used. It has
    no attention, so it only encodes. layout: a stored name → its name in another layout."""
    stored = load_file(folder / "model.safetensors").items()
    tensors = {layout(name): tensor for name, tensor in stored}
    build = fake_build(stored=tensors.keys(), models=language_model, **more)
    model = kind(with_defaults(read_config(folder)), build)
    used = load_layers(build.declared.layers, tensors, bind=False)
    build.attention.update(dict.fromkeys(build.declared.attention, print))
    for layer in build.declared.layers:
        layer.bind()
    return model, used


def prompt(*parts: Any, mark: str = "<image>", film: str = "<video>") -> Prompt:
    """Return a prompt of words, images and videos. parts: numbers of words, images, or pairs of
    frames and their rate. mark, film: what stands for an image and for a video."""
    marks = {int: "w{}", tuple: film}
    texts = [marks.get(type(part), mark).format(part) for part in parts]
    images = [part for part in parts if not isinstance(part, int | tuple)]
    videos = [part for part in parts if isinstance(part, tuple)]
    media = {"image": images, "video": videos}
    media = {modality: items for modality, items in media.items() if items}
    data = {"multi_modal_data": media} if media else {}
    return {"prompt": " ".join(texts), **data}


def some_prompts(mark: str = "<image>") -> list[Prompt]:
    """Return prompts with no, one and two images of different sizes."""
    wide = random_image(40, 20, seed=1)
    tall = random_image(13, 50, seed=2)
    return [
        prompt(5, wide, 6, 7, mark=mark),
        prompt(*range(8, 30), mark=mark),
        prompt(tall, 9, wide, 10, mark=mark),
        prompt(11, wide, tall, 12, 13, 14, mark=mark),
        prompt(wide, mark=mark),
    ]


def mixed_prompts(mark: str = "<image>", film: str = "<video>") -> list[Prompt]:
    """Return prompts with videos of different lengths, and with images, in either order."""
    wide = random_image(40, 20, seed=1)
    long = random_video(7, 20, 16, fps=1.5, seed=2)
    short = random_video(2, 13, 30, fps=10.0, seed=3)
    marks = {"mark": mark, "film": film}
    return [
        prompt(5, long, 6, 7, **marks),
        prompt(*range(8, 30), **marks),
        prompt(short, 9, wide, 10, **marks),
        prompt(wide, 11, short, long, 12, 13, **marks),
        prompt(long, **marks),
    ]


def rows_of(llava: MediaReference, image: Any) -> torch.Tensor:
    """Return what transformers makes of an image, [1, rows, width]."""
    given = llava.inputs(prompt(1, image))
    with torch.no_grad():
        rows: torch.Tensor = llava.model.model.get_image_features(
            given["pixel_values"]
        ).pooler_output
    return rows if isinstance(rows, torch.Tensor) else torch.stack([*rows])


def open_media_llm(directory: Path, **settings: Any) -> LLM:
    return open_llm(
        directory, **{"skip_tokenizer_init": False, "kv_cache_memory_bytes": 8 << 20, **settings}
    )


def check_media(
    reference: MediaReference,
    prompts: Sequence[Prompt],
    *,
    num_tokens: int = 6,
    tolerance: float = TOLERANCE,
    repeats: int = 1,
    **settings: Any,
) -> None:
    """Compare the logprobs of the whole vocabulary for every output, and every greedy choice. All
    prompts run together, `repeats` times."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory, **settings) as llm:
        runs = [llm.generate(list(prompts), params, use_tqdm=False) for _ in range(repeats)]
    for one, *others in zip(prompts, *runs, strict=True):
        for output in others:
            check_output(reference, one, output.outputs[0], tolerance)


class MediaParity:
    """Tests of a module with a fixture `reference`. prompts: makes what they compare. part: the
    tokens of a step that ends inside items; None = the few of `open_llm`. whole: those of one that
    takes whole prompts."""

    prompts: Callable[[], Sequence[Prompt]]
    part: int | None = None
    whole = 256

    def settings(self) -> dict[str, dict[str, Any]]:
        return {
            "inside items": {"max_num_batched_tokens": self.part} if self.part else {},
            "whole prompts": {"max_num_batched_tokens": self.whole, "block_size": 16},
            "no cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 70},
        }

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("how", ["inside items", "whole prompts", "no cache"])
    def test_logits(self, reference: MediaReference, how: str) -> None:
        """Twice: the second time, the prefixes are in the cache."""
        check_media(reference, self.prompts(), repeats=2, **self.settings()[how])

    @pytest.mark.sampled(2)
    def test_divided(self, reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
        divide(monkeypatch, 2, 2)
        check_media(reference, self.prompts(), num_tokens=3)


def check_output(reference: MediaReference, one: Prompt, answer: Any, tolerance: float) -> None:
    outputs = list(answer.token_ids)
    expected = reference.logprobs(one, outputs)
    assert outputs == expected[:-1].argmax(-1).tolist(), f"{one['prompt']}"
    for position, row in enumerate(answer.logprobs):
        values = torch.tensor([row[token].logprob for token in range(VOCAB_SIZE)])
        worst = (values - expected[position]).abs().max().item()
        assert worst < tolerance, f"{one['prompt']}: output {position} is off by {worst}"


def mean_error(
    reference: MediaReference, prompts: Sequence[Prompt], outputs: Sequence[Any]
) -> float:
    """Return the mean distance of all logprobs from those of transformers, which reads the same
    tokens."""
    distances = []
    for one, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        rows = [[row[token].logprob for token in range(VOCAB_SIZE)] for row in answer.logprobs]
        expected = reference.logprobs(one, answer.token_ids)[:-1]
        distances.append((torch.tensor(rows) - expected).abs().mean())
    return torch.stack(distances).mean().item()


def save_llava(model: Any, folder: Path, *, size: int, patch: int) -> Any:
    """Write a LLaVA with its processor, and return the processor. size, patch: in pixels."""
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=make_tokenizer(["<image>"], "<image>"),
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(folder)
    return processor


def write_llava(folder: Path, **config: Any) -> MediaReference:
    """Write LLaVA with a tower of 16 patches. config: more of its config."""
    values = {
        "text_config": {"model_type": "llama", **MEDIA_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "image_token_id": IMAGE,
        **config,
    }
    model = make_media_model("llava", **values)
    processor = save_llava(model, folder, size=VISION["image_size"], patch=VISION["patch_size"])

    def inputs(one: Prompt) -> Mapping[str, torch.Tensor]:
        given = one.get("multi_modal_data", {}).get("image")
        return processor(text=one["prompt"], images=given, return_tensors="pt")

    return MediaReference(folder, model, inputs)


def add_adapter(model: Any, directory: Path, root: str, part: str = "language_model") -> Path:
    """Write a LoRA adapter of a model's language model, add what it means to the model, and return
    its folder. root: what the adapter calls the language model. part: in the names of its layers in
    transformers."""
    folder = directory / "adapter"
    folder.mkdir()
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for name, weight in model.named_parameters():
        if part in name and name.endswith(("q_proj.weight", "qkv_proj.weight", "down_proj.weight")):
            rows, columns = weight.shape
            first = torch.randn(4, columns, generator=random) * 0.3
            second = torch.randn(rows, 4, generator=random) * 0.3
            path = name.removesuffix(".weight").replace("model.language_model", root)
            tensors[f"base_model.model.{path}.lora_A.weight"] = first
            tensors[f"base_model.model.{path}.lora_B.weight"] = second
            with torch.no_grad():
                weight.add_(2.0 * second @ first)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = ["q_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
