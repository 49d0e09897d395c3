"""Ultravox, compared with transformers' encoder of Whisper and Llama, and a projector that is
written out here."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import shutil
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_ultravox.processor import UltravoxProcessor
from pegboard_model_ultravox.sizes import ENCODER as DEFAULTS
from pegboard_model_ultravox.ultravox import Ultravox
from safetensors.torch import load_file, save_file
from test_audio_parity import AUDIO, BINS, ENCODER, RATE, tone
from tiny_media import (
    MEDIA_TEXT,
    MediaParity,
    MediaReference,
    Prompt,
    built_model,
    check_media,
    check_output,
    language_model,
    make_tokenizer,
    open_media_llm,
    random_model,
)
from torch import Tensor
from torch.nn import functional

from pegboard import SamplingParams
from pegboard.config.schema import Settings
from pegboard.errors import ModelError
from pegboard.interfaces.model import ModelPart
from pegboard.plan.parts import check_place
from pegboard_media.audio import resample
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import image_setup
from pegboard_weights.hf_files import read_config

MARK = "<|audio|>"
FRAMES = 2 * ENCODER["max_source_positions"]
STACK = 4
WIDTH = ENCODER["d_model"]
INNER = 20
VARIANTS: dict[str, dict[str, Any]] = {
    "norm between": {"projector_ln_mid": True},
    "norm at the end": {"projector_act": "gelu"},
    "transformer": {"num_projector_layers": 2},
}
OTHERS = {"audio_model_id": None, "text_model_id": None, "norm_init": 0.4, "ignore_index": -100}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


class Reference(MediaReference):
    """parts: the encoder of Whisper, and the projector's tensors. layers: of the projector."""

    parts: tuple[Any, Mapping[str, Tensor], list[Any]]
    config: Mapping[str, Any]

    def encoded(self, mel: Tensor, attended: int) -> Tensor:
        """([mel bins, frames]) → [features, width], which attend to the first ones."""
        encoder = self.parts[0]
        hidden = functional.gelu(encoder.conv2(functional.gelu(encoder.conv1(mel[None])))).mT
        hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
        mask = torch.zeros(1, 1, 1, hidden.shape[1])
        mask[..., attended:] = -torch.inf
        for layer in encoder.layers:
            hidden = layer(hidden, mask)
        return encoder.layer_norm(hidden)[0]

    def projected(self, features: Tensor) -> Tensor:
        _, tensors, layers = self.parts
        stacked = functional.pad(features, (0, 0, 0, -len(features) % STACK)).view(
            -1, STACK * WIDTH
        )
        hidden = rms(stacked, tensors["ln_pre.weight"])
        if layers:
            hidden = hidden @ tensors["linear_in.weight"].T + tensors["linear_in.bias"]
            hidden = (hidden + tensors["embed_positions.weight"][: len(hidden)])[None]
            for layer in layers:
                hidden = layer(hidden, None)
            hidden = rms(hidden[0], tensors["ln_post.weight"])
            return hidden @ tensors["linear_out.weight"].T + tensors["linear_out.bias"]
        hidden = hidden @ tensors["linear_1.weight"].T
        if self.config.get("projector_act", "swiglu") == "swiglu":
            hidden = hidden[:, : INNER // 2] * functional.silu(hidden[:, INNER // 2 :])
        else:
            hidden = functional.gelu(hidden)
        if self.config.get("projector_ln_mid"):
            hidden = rms(hidden, tensors["ln_mid.weight"])
        hidden = hidden @ tensors["linear_2.weight"].T
        return hidden if "ln_post.weight" not in tensors else rms(hidden, tensors["ln_post.weight"])

    @torch.no_grad()
    def rows(self, samples: np.ndarray) -> Tensor:
        """Return the rows of an item, as the published processor and model make them."""
        extractor = transformers.WhisperFeatureExtractor(feature_size=BINS)
        made = extractor(
            np.pad(samples, (0, max(0, 320 - len(samples)))),
            sampling_rate=RATE,
            padding="longest",
            pad_to_multiple_of=160,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mel = made["input_features"][0]
        count = int(made["attention_mask"].sum())
        rows = []
        for start in range(0, count, FRAMES):
            chunk = mel[:, start : start + FRAMES]
            length = chunk.shape[1]
            if start:
                chunk = functional.pad(chunk, (0, FRAMES - length))
            features = self.encoded(chunk, (length - 1) // 2 + 1)
            num_rows = -(-length // (2 * STACK))
            if self.parts[2]:
                features = features[: num_rows * STACK]  # others attend to none of the rest
            rows.append(self.projected(features)[:num_rows])
        return torch.cat(rows)

    def logprobs(self, one: Prompt, outputs: Any) -> Tensor:
        items = iter(one.get("multi_modal_data", {}).get("audio", ()))
        embed = self.model.get_input_embeddings()
        parts = []
        with torch.no_grad():
            for word in one["prompt"].split():
                is_item = word == MARK
                parts.append(
                    self.rows(next(items)[0]) if is_item else embed(torch.tensor([int(word[1:])]))
                )
            parts.append(embed(torch.tensor([*outputs]).long()))
            logits = self.model(inputs_embeds=torch.cat(parts)[None]).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def projector_tensors(config: Mapping[str, Any], out: int) -> dict[str, Tensor]:
    swiglu = config.get("projector_act", "swiglu") == "swiglu"
    middle = INNER // 2 if swiglu else INNER
    shapes: dict[str, tuple[int, ...]] = {"ln_pre.weight": (STACK * WIDTH,)}
    if config.get("num_projector_layers"):
        shapes |= {
            "linear_in.weight": (WIDTH, STACK * WIDTH),
            "linear_in.bias": (WIDTH,),
            "embed_positions.weight": (ENCODER["max_source_positions"], WIDTH),
            "ln_post.weight": (WIDTH,),
            "linear_out.weight": (out, WIDTH),
            "linear_out.bias": (out,),
        }
    else:
        shapes |= {"linear_1.weight": (INNER, STACK * WIDTH), "linear_2.weight": (out, middle)}
        is_between = config.get("projector_ln_mid")
        shapes |= {"ln_mid.weight": (middle,)} if is_between else {"ln_post.weight": (out,)}
    return {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}


def write(folder: Path, *, text: Mapping[str, Any] | None = None, **more: Any) -> Reference:
    """Write a checkpoint with the published names."""
    whisper = random_model(transformers.AutoModel, "whisper", **ENCODER, decoder_layers=1)
    values = {**MEDIA_TEXT, **(text or {})}
    model = random_model(transformers.AutoModelForCausalLM, "llama", **values)
    config = {
        "architectures": ["UltravoxModel"],
        "model_type": "ultravox",
        "auto_map": {"AutoConfig": "ultravox_config.UltravoxConfig"},
        "text_config": {"model_type": "llama", **values},
        "audio_config": {"model_type": "whisper", **ENCODER},
        "audio_token_index": AUDIO,
        "hidden_size": INNER,
        "stack_factor": STACK,
        "vocab_size": values["vocab_size"],
        **OTHERS,
        **more,
    }
    tensors = projector_tensors(config, MEDIA_TEXT["hidden_size"])
    layers = [
        transformers.models.whisper.modeling_whisper.WhisperEncoderLayer(whisper.config).eval()
        for _ in range(config.get("num_projector_layers", 0))
    ]
    named = {f"multi_modal_projector.{name}": value for name, value in tensors.items()}
    for index, layer in enumerate(layers):
        for name, value in layer.state_dict().items():
            named[f"multi_modal_projector.layers.{index}.{name}"] = value
    for name, value in whisper.encoder.state_dict().items():
        named[f"audio_tower.{name}"] = value
    for name, value in model.state_dict().items():
        named[f"language_model.{name}"] = value
    stored = {name: value.detach().clone().contiguous() for name, value in named.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = make_tokenizer([MARK], MARK)
    tokenizer.chat_template = tokenizer.chat_template.replace("'image'", "'audio'")
    tokenizer.save_pretrained(folder)
    reference = Reference(folder, model, lambda one: {})
    reference.parts = whisper.encoder, tensors, layers
    reference.config = config
    return reference


@pytest.fixture(scope="module", params=VARIANTS)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return write(tmp_path_factory.mktemp("ultravox"), **VARIANTS[request.param])


def prompt(*parts: Any) -> Prompt:
    """Return a prompt of words and audio. parts: numbers of words, or samples."""
    texts = [f"w{part}" if isinstance(part, int) else MARK for part in parts]
    items = [(part, RATE) for part in parts if not isinstance(part, int)]
    media = {"multi_modal_data": {"audio": items}} if items else {}
    return {"prompt": " ".join(texts), **media}


def some_prompts() -> list[Prompt]:
    """Return prompts with no, one and two items, of one chunk and of several."""
    short = tone(4_000, 1)
    long = tone(40_100, 2)
    return [
        prompt(5, short, 6, 7),
        prompt(*range(8, 30)),
        prompt(long, 9, short, 10),
        prompt(11, short, long, 12, 13, 14),
        prompt(long),
    ]


def test_parts_in_other_folders(reference: Reference, tmp_path: Path) -> None:
    """The published form: the checkpoint has a projector, and names the others."""
    places = {"text": "language_model.", "audio": "audio_tower."}
    config = json.loads((reference.directory / "config.json").read_text())
    tensors = load_file(reference.directory / "model.safetensors")
    folder = tmp_path / "whole"
    shutil.copytree(reference.directory, folder)
    for part, prefix in places.items():
        there = tmp_path / part
        there.mkdir()
        stored = {name: value for name, value in tensors.items() if name.startswith(prefix)}
        tensors = {name: value for name, value in tensors.items() if name not in stored}
        begin = "model.encoder." if part == "audio" else ""
        named = {begin + name.removeprefix(prefix): value for name, value in stored.items()}
        save_file(named, there / "model.safetensors", metadata={"format": "pt"})
        kind = {"text": "LlamaForCausalLM", "audio": "WhisperForConditionalGeneration"}[part]
        inner = {**config.pop(f"{part}_config"), "architectures": [kind]}
        (there / "config.json").write_text(json.dumps(inner))
        config[f"{part}_model_id"] = str(there)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    assert all(name.startswith("multi_modal_projector.") for name in tensors)
    whole = copy(reference)
    whole.directory = folder
    check_media(whole, some_prompts())
    with pytest.raises(ModelError, match="is quantized"):
        change_config(tmp_path / "text", quantization_config={"quant_method": "fp8"})
        open_media_llm(folder)
    with pytest.raises(ModelError, match="nowhere"):
        open_media_llm(folder, hf_overrides={"text_model_id": "./nowhere"})


def test_where_a_config_may_name_a_part() -> None:
    """A config from elsewhere names repositories only."""
    whole = image_setup(Path("cache"), {}, []).checkpoint
    for reference, overrides, is_right in (
        ("org/name", None, True),
        ("/etc", None, False),
        ("~/model", None, False),
        ("pypi:package", None, False),
        ("~/model", {"text_model_id": "~/model"}, True),
    ):
        settings = Settings().with_engine("test", model="org/outer", hf_overrides=overrides)
        part = ModelPart(reference, "language_model.")
        with contextlib.nullcontext() if is_right else pytest.raises(ModelError, match="org/name"):
            check_place(settings, whole, "text_config", part)


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def own_encoder(name: str) -> str:
    """Return a tensor's name where the encoder comes from Whisper's checkpoint."""
    return name.replace("audio_tower.", "audio_tower.model.encoder.")


LAYOUTS: dict[str, Callable[[str], str]] = {"published": str, "Whisper's": own_encoder}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@given(lengths=st.lists(st.integers(1, 50_000), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
@torch.no_grad()
def test_rows(reference: Reference, layout: str, lengths: list[int]) -> None:
    """The number of tokens, and the rows of audio in up to four chunks."""
    model, used = built_model(Ultravox, reference.directory, LAYOUTS[layout])
    assert {
        LAYOUTS[layout](name) for name in load_file(reference.directory / "model.safetensors")
    } == used
    processor = UltravoxProcessor(
        None, image_setup(reference.directory, read_config(reference.directory), [MARK])
    )
    sounds = [tone(length, length) for length in lengths]
    items = [processor.process("audio", (samples, RATE), {}) for samples in sounds]
    arrays = [
        {name: torch.from_numpy(value) for name, value in item.arrays.items()} for item in items
    ]
    rows = model.encode("audio", arrays)
    for samples, item, ours in zip(sounds, items, rows, strict=True):
        expected = reference.rows(samples)
        assert len(item.token_ids) == len(expected)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts())


def test_a_chat(reference: Reference) -> None:
    """The samples of a file with another rate are resampled."""
    samples = tone(4_000, 3)
    content = io.BytesIO()
    soundfile.write(content, samples, 8_000, format="WAV", subtype="FLOAT")
    data = base64.b64encode(content.getvalue()).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": "w7 w8"},
    ]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    one = prompt(1, resample(samples, 8_000, RATE), 7, 8, 3)
    check_output(reference, one, output.outputs[0], 1e-4)


def test_rows_that_a_client_sends(reference: Reference) -> None:
    samples = tone(20_000, 4)
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    sent = {**prompt(5, samples, 6), "multi_modal_data": {"audio": reference.rows(samples)[None]}}
    with open_media_llm(reference.directory, enable_mm_embeds=True) as llm:
        (output,) = llm.generate([sent], params, use_tqdm=False)
    check_output(reference, prompt(5, samples, 6), output.outputs[0], 1e-4)


def test_a_mark_without_an_embedding(tmp_path: Path) -> None:
    """The audio token of published checkpoints comes after the vocabulary of the language model."""
    reference = write(tmp_path, text={"vocab_size": AUDIO})
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with open_media_llm(tmp_path) as llm:
        outputs = llm.generate(some_prompts(), params, use_tqdm=False)
        with pytest.raises(ValueError, match="token id 100 is out of vocabulary"):
            llm.generate("w1 <|audio|>", params, use_tqdm=False)
    for one, output in zip(some_prompts(), outputs, strict=True):
        ids = list(output.outputs[0].token_ids)
        assert ids == reference.logprobs(one, ids)[:-1].argmax(-1).tolist()


def test_only_the_first_stage_has_an_encoder(reference: Reference) -> None:
    _, used = built_model(Ultravox, reference.directory, layers=range(1, 2))
    assert not any("audio_tower" in name or "projector" in name for name in used)


def test_values_that_a_config_lacks() -> None:
    theirs = transformers.WhisperConfig()
    assert {name: getattr(theirs, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_config": None}, "text_config has model_type=None"),
        ({"audio_config": {"model_type": "wav2vec2"}}, "model_type='wav2vec2'; expected 'whisper'"),
        ({"audio_latency_block_size": 100}, "audio_latency_block_size=100"),
        ({"text_config": {"model_type": "gemma3", "text_config": {"a": 1}}}, "text only"),
        ({"projector_act": "swish"}, "unknown activation 'swish'"),
        ({"hidden_size": 21}, "hidden_size=21 with projector_act='swiglu'"),
        ({"num_projector_layers": -1}, "num_projector_layers=-1"),
        ({"stack_factor": 0}, "stack_factor=0; expected a whole number from 1 on"),
    ],
)
def test_configs_that_are_refused(values: Mapping[str, Any], message: str) -> None:
    config = {
        "text_config": {"model_type": "llama", **MEDIA_TEXT},
        "audio_config": ENCODER,
        **values,
    }
    with pytest.raises(ModelError, match=message):
        Ultravox(config, fake_build(models=language_model))
