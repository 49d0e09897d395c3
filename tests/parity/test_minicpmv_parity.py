"""MiniCPM-V and MiniCPM-o, compared with transformers' tower of Idefics 2, its encoder of Whisper
and its language models. The resampler and the projection of speech are written out here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_model_minicpmv.minicpmo import MiniCPMO
from pegboard_model_minicpmv.minicpmv import MiniCPMV
from pegboard_model_minicpmv.processor import MiniCPMOProcessor, MiniCPMVProcessor
from PIL import Image
from safetensors.torch import load_file, save_file
from test_audio_parity import BINS, ENCODER, RATE, tone
from tiny_media import (
    MEDIA_TEXT,
    MediaParity,
    MediaReference,
    Prompt,
    add_adapter,
    built_model,
    check_media,
    check_output,
    language_model,
    make_tokenizer,
    mixed_prompts,
    open_media_llm,
    random_model,
    some_prompts,
)
from tokenizers import AddedToken
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

from pegboard import LoRARequest, SamplingParams
from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Video,
)
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_testing.contract_multimodal_processor import random_image
from pegboard_testing.fake_build import fake_build
from pegboard_testing.media_peers import PeerTokenizer
from pegboard_weights.hf_files import read_config

MARK = "(<image>./</image>)"
FILM = "(<video>./</video>)"
SOUND = "(<audio>./</audio>)"
SPECIAL = ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<unk>"]
SPECIAL += ["<|audio_start|>", "<|audio_end|>", "\n"]
SIDE = 28
PATCH = 4
QUERIES = 5
WIDTH = 256
INNER = 24
VISION = {
    "hidden_size": INNER,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 6 * PATCH,
    "patch_size": PATCH,
}
HEARING = {**ENCODER, "encoder_ffn_dim": 4 * ENCODER["d_model"]}
CHUNK = 10
"""Features."""
FILE = {
    "image_processor_type": "MiniCPMVImageProcessor",
    "max_slice_nums": 4,
    "scale_resolution": SIDE,
    "patch_size": PATCH,
    "use_image_id": True,
    "image_feature_size": QUERIES,
    "feature_size": BINS,
    "chunk_length": 1,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "2.5": ("llama", {"drop_vision_last_layer": False}),
    "2.6": ("qwen2", {"version": 2.6, "drop_vision_last_layer": False}),
    "4.0": ("llama", {"version": "4.0"}),
    "4.5": ("qwen3", {"version": 4.5, "drop_vision_last_layer": False}),
}
OMNI: dict[str, tuple[str, dict[str, Any]]] = {
    "o 2.6": ("qwen2", {"drop_vision_last_layer": False, "audio_pool_step": 2}),
    "o 4.5": ("qwen3", {"version": "4.5", "audio_pool_step": 5}),
}


def positions(lines: int, columns: int) -> Tensor:
    """Return the published positions [lines · columns, width]."""
    omega = 1.0 / 10000 ** (np.arange(WIDTH // 4, dtype=np.float32) / (WIDTH / 4))

    def of(places: np.ndarray) -> np.ndarray:
        angles = np.einsum("hw,d->hwd", places, omega)
        return np.concatenate([np.sin(angles), np.cos(angles)], -1)

    grid = np.meshgrid(np.arange(columns, dtype=np.float32), np.arange(lines, dtype=np.float32))
    both = np.concatenate([of(grid[0]), of(grid[1])], -1)
    return torch.from_numpy(both.astype(np.float32)).flatten(0, 1)


class Resampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.kv_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.attn = nn.MultiheadAttention(WIDTH, WIDTH // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5 * 0.2)

    def forward(self, features: Tensor, lines: int, columns: int) -> Tensor:
        value = self.ln_kv(self.kv_proj(features))
        key = value + positions(lines, columns)
        out = self.attn(self.ln_q(self.query), key, value)[0]
        rows: Tensor = self.ln_post(out) @ self.proj
        return rows


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(HEARING["d_model"], WIDTH)
        self.linear2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: Tensor) -> Tensor:
        rows: Tensor = self.linear2(self.linear1(features).relu())
        return rows


class Reference(MediaReference):
    """parts: modules by their names in the checkpoint."""

    parts: Mapping[str, Any]
    config: Mapping[str, Any]
    processor: Any

    @property
    def is_oldest(self) -> bool:
        return "version" not in self.config and "audio_config" not in self.config

    @torch.no_grad()
    def image_rows(self, pixels: Tensor, sizes: Tensor) -> Tensor:
        rows = []
        counts = sizes.prod(1).tolist()
        for patches, (lines, columns) in zip(pixels.split(counts), sizes.tolist(), strict=True):
            shape = (1, lines * columns) if self.is_oldest else (lines, columns)
            image = patches.unflatten(0, shape).permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
            mask = torch.ones(1, *shape, dtype=torch.bool)
            tower = self.parts["vpm"]
            features = tower(image[None], patch_attention_mask=mask).last_hidden_state[0]
            rows.append(self.parts["resampler"](features, lines, columns))
        return torch.cat(rows)

    @torch.no_grad()
    def speech(self, mel: Tensor, counts: Tensor) -> Tensor:
        """Of all parts in one batch, as published."""
        encoder = self.parts["apm"]
        longest = int(counts.max())
        parts = mel.split(counts.tolist(), 1)
        batch = torch.stack([functional.pad(each, (0, longest - each.shape[1])) for each in parts])
        hidden = functional.gelu(encoder.conv2(functional.gelu(encoder.conv1(batch)))).mT
        count = hidden.shape[1]
        hidden = hidden + encoder.embed_positions.weight[:count]
        places = torch.arange(count)
        is_padding = places >= counts[:, None]
        is_seen = places < ((places // CHUNK + 1) * CHUNK)[:, None]
        hides = is_padding[:, None, None] | ~is_seen
        mask = torch.zeros(hides.shape).masked_fill(hides, -torch.inf)
        for layer in encoder.layers:
            hidden = layer(hidden, mask)
        step = self.config["audio_pool_step"]
        projected = self.parts["audio_projection_layer"](encoder.layer_norm(hidden))
        pooled = nn.AvgPool1d(step, stride=step)(projected.mT).mT
        after = (counts - 1) // 2 + 1
        num_rows = (after - step) // step + 1
        return torch.cat(
            [part[:length] for part, length in zip(pooled, num_rows.tolist(), strict=True)]
        )

    def rows(self, modality: str, arrays: Mapping[str, np.ndarray]) -> Tensor:
        given = [torch.from_numpy(value) for value in arrays.values()]
        return self.speech(*given) if modality == "audio" else self.image_rows(*given)

    def item(self, modality: str, number: int, value: Any) -> Tensor:
        """Return the embeddings of an item, with the tokens around its rows."""
        processed = self.processor.process(modality, value, {})
        heading = self.processor.heading(modality, number, processed.facts)
        embed = self.model.get_input_embeddings()
        whole = embed(torch.tensor(processed.token_ids))
        whole[torch.from_numpy(processed.is_row)] = self.rows(modality, processed.arrays)
        return torch.cat([embed(torch.tensor([*heading]).long()), whole])

    def logprobs(self, one: Prompt, outputs: Any) -> Tensor:
        media = one.get("multi_modal_data", {})
        modalities = {MARK: "image", FILM: "video", SOUND: "audio"}
        waiting = {name: enumerate(media.get(name, ())) for name in modalities.values()}
        embed = self.model.get_input_embeddings()
        parts = []
        with torch.no_grad():
            for word in one["prompt"].split():
                if modality := modalities.get(word):
                    number, value = next(waiting[modality])
                    if modality == "video":
                        value = Video(value[0], 1.0, ())
                    parts.append(self.item(modality, number, value))
                else:
                    parts.append(embed(torch.tensor([int(word[1:])])))
            parts.append(embed(torch.tensor([*outputs]).long()))
            logits = self.model(inputs_embeds=torch.cat(parts)[None]).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def randomized(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return module.eval()


def write_tokenizer(folder: Path) -> None:
    """Numbers are tokens of their own, if they are not a part of a word."""
    tokenizer = make_tokenizer(SPECIAL, MARK, FILM)
    tokenizer.add_tokens([AddedToken(digit, single_word=True) for digit in "012"])
    tokenizer.save_pretrained(folder)


def processor_of(folder: Path) -> MiniCPMVProcessor:
    config = read_config(folder)
    checkpoint = Checkpoint(
        format="safetensors",
        path=folder,
        config=config,
        architectures=tuple(config["architectures"]),
        tensors={},
        tokenizer=TokenizerPayload("hf", folder),
    )
    tokenizer: Any = PeerTokenizer(PreTrainedTokenizerFast.from_pretrained(folder))
    kind = MiniCPMOProcessor if config["architectures"] == ["MiniCPMO"] else MiniCPMVProcessor
    return kind(None, MultiModalProcessorSetup(checkpoint, tokenizer))


def write(folder: Path, variant: str = "2.6") -> Reference:
    """Write a checkpoint with the published names."""
    is_omni = variant in OMNI
    kind, values = {**VARIANTS, **OMNI}[variant]
    text = {**MEDIA_TEXT, "hidden_size": WIDTH, "max_position_embeddings": 2048, "head_dim": 64}
    model = random_model(transformers.AutoModelForCausalLM, kind, **text)
    model.save_pretrained(folder)
    config = {
        **json.loads((folder / "config.json").read_text()),
        "architectures": ["MiniCPMO" if is_omni else "MiniCPMV"],
        "model_type": "minicpmo" if is_omni else "minicpmv",
        "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMVConfig"},
        "query_num": QUERIES,
        "slice_config": {"max_slice_nums": 9, "patch_size": PATCH, "model_type": "minicpmv"},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        **values,
    }
    vision = Idefics2VisionConfig(**VISION)
    vision._attn_implementation = "eager"
    parts = {"vpm": randomized(Idefics2VisionTransformer(vision))}
    parts["resampler"] = randomized(Resampler())
    if is_omni:
        config |= {"audio_config": HEARING, "audio_chunk_length": CHUNK / 50, "init_tts": True}
        whisper = random_model(transformers.AutoModel, "whisper", **HEARING, decoder_layers=1)
        parts["apm"] = whisper.encoder
        parts["audio_projection_layer"] = randomized(Projection())
    stored = {
        f"llm.{name}": value for name, value in load_file(folder / "model.safetensors").items()
    }
    for part, module in parts.items():
        for name, value in module.state_dict().items():
            stored[f"{part}.{name}"] = value.detach().clone().contiguous()
    if config.get("drop_vision_last_layer", True):
        del parts["vpm"].encoder.layers[-1]
    if is_omni:
        stored["tts.projector.weight"] = torch.ones(2, 2)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(FILE))
    write_tokenizer(folder)
    reference = Reference(folder, model, lambda one: {})
    reference.parts = parts
    reference.config = config
    reference.processor = processor_of(folder)
    return reference


@pytest.fixture(scope="module", params=VARIANTS)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return write(tmp_path_factory.mktemp("minicpmv"), request.param)


@pytest.fixture(scope="module", params=OMNI)
def omni(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return write(tmp_path_factory.mktemp("minicpmo"), request.param)


def check_rows(kind: Any, reference: Reference, modality: str, values: list[Any]) -> None:
    model, _ = built_model(kind, reference.directory)
    items = [reference.processor.process(modality, value, {}) for value in values]
    arrays = [
        {name: torch.from_numpy(value) for name, value in item.arrays.items()} for item in items
    ]
    with torch.no_grad():
        rows = model.encode(modality, arrays)
    for item, ours in zip(items, rows, strict=True):
        assert int(item.is_row.sum()) == len(ours)
        expected = reference.rows(modality, item.arrays)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


sides = st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(0, 9))


@given(st.lists(sides, min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_rows_of_images(reference: Reference, shapes: list[tuple[int, int, int]]) -> None:
    check_rows(MiniCPMV, reference, "image", [random_image(*shape) for shape in shapes])


@given(st.lists(st.integers(1450, 60_000), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_rows_of_speech(omni: Reference, lengths: list[int]) -> None:
    """Of up to four parts."""
    check_rows(MiniCPMO, omni, "audio", [(tone(length, length), RATE) for length in lengths])


def test_speech_without_chunks(omni: Reference) -> None:
    config = {**read_config(omni.directory), "audio_chunk_length": 0}
    model = MiniCPMO(config, fake_build(models=language_model))
    assert model.seen(7, 5, torch.device("cpu")).tolist() == [[True] * 5 + [False] * 2] * 7


def test_what_is_read(reference: Reference, omni: Reference) -> None:
    """All but the layer that is dropped, and the speech output."""
    for kind, one in ((MiniCPMV, reference), (MiniCPMO, omni)):
        _, used = built_model(kind, one.directory)
        left = set(load_file(one.directory / "model.safetensors")) - used
        is_dropped = one.config.get("drop_vision_last_layer", True)
        assert all(name.startswith(("vpm.encoder.layers.2.", "tts.")) for name in left)
        assert is_dropped == any(name.startswith("vpm.") for name in left)


def test_only_the_first_stage_has_a_tower(reference: Reference) -> None:
    _, used = built_model(MiniCPMV, reference.directory, layers=range(1, 2))
    assert all(name.startswith("llm.") for name in used)


class TestParity(MediaParity):
    prompts = staticmethod(lambda: some_prompts(MARK))
    part = 16
    whole = 512


def test_videos(reference: Reference) -> None:
    prompts = mixed_prompts(MARK, FILM)
    if not reference.is_oldest:
        check_media(reference, prompts, max_num_batched_tokens=64)
        return
    with (
        pytest.raises(RequestError, match="reads no videos; send frames as images"),
        open_media_llm(reference.directory) as llm,
    ):
        llm.generate(prompts[:1], use_tqdm=False)


def mixed_prompt(*parts: Any) -> Prompt:
    """Return a prompt. parts: numbers of words, images, or samples."""
    texts = []
    media: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(part, int):
            texts.append(f"w{part}")
        elif isinstance(part, Image.Image):
            texts.append(MARK)
            media.setdefault("image", []).append(part)
        else:
            texts.append(SOUND)
            media.setdefault("audio", []).append((part, RATE))
    return {"prompt": " ".join(texts), **({"multi_modal_data": media} if media else {})}


def heard_prompts() -> list[Prompt]:
    """Return prompts with speech of one part and of several, and with images, in either order."""
    short = tone(4_000, 1)
    long = tone(40_100, 2)
    image = random_image(40, 20, seed=1)
    return [
        mixed_prompt(5, short, 6, 7),
        mixed_prompt(*range(8, 30)),
        mixed_prompt(long, 9, image, 10),
        mixed_prompt(11, image, short, long, 12, image, 13),
        mixed_prompt(long),
    ]


class TestSpeech(MediaParity):
    prompts = staticmethod(heard_prompts)
    part = 16
    whole = 512

    @pytest.fixture
    def reference(self, omni: Reference) -> Reference:
        return omni


def test_a_chat(reference: Reference) -> None:
    """A template that knows parts of messages, and one that knows only text."""
    image = random_image(40, 20, seed=1)
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "w7 w8"}]
    messages = [{"role": "user", "content": parts}]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    template = "{% for message in messages %}w1 {{ message['content'] }} w3{% endfor %}"
    with open_media_llm(reference.directory) as llm:
        (output,) = llm.chat(messages, params, use_tqdm=False)
        (other,) = llm.chat(messages, params, use_tqdm=False, chat_template=template)
    check_output(reference, mixed_prompt(1, image, 7, 8, 3), output.outputs[0], 1e-4)
    processor = reference.processor
    processed = processor.process("image", image, {})
    heading = processor.heading("image", 0, processed.facts)
    before = [1, *heading, *processed.token_ids]
    assert other.prompt_token_ids == [*before, *processor.new_line, 7, 8, 3]


def test_token_ids(reference: Reference) -> None:
    image = random_image(40, 20, seed=1)
    start, end = reference.processor.placeholder("image").token_ids
    prompt = {"prompt_token_ids": [5, start, end, 6], "multi_modal_data": {"image": image}}
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    check_output(reference, mixed_prompt(5, image, 6), output.outputs[0], 1e-4)


def test_a_tokenizer_with_code_of_its_own(tmp_path: Path) -> None:
    """The code is not needed."""
    reference = write(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    names = ["tokenization_qwen2.Qwen2Tokenizer", "tokenization_minicpmv_fast.MiniCPMVTokenizer"]
    code = {"tokenizer_class": "MiniCPMVTokenizer", "auto_map": {"AutoTokenizer": names}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **code}))
    check_media(reference, some_prompts(MARK)[:1])


def test_an_adapter(tmp_path: Path) -> None:
    reference = write(tmp_path)
    adapter = add_adapter(reference.model, tmp_path, "llm.model", "model.layers")
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=-1, ignore_eos=True)
    one = some_prompts(MARK)[0]
    with open_media_llm(tmp_path, enable_lora=True, max_lora_rank=8) as llm:
        request = LoRARequest("one", 1, str(adapter))
        (output,) = llm.generate([one], params, use_tqdm=False, lora_request=request)
    check_output(reference, one, output.outputs[0], 1e-4)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (MiniCPMV, {"version": 2.0}, "version=2.0; supported: 2.5, 2.6, 4.0, 4.5"),
        (MiniCPMO, {"version": 4.0}, "version=4.0; supported: 2.6, 4.5"),
        (MiniCPMV, {"hidden_size": 32}, "hidden_size=32; expected a multiple of 128"),
        (MiniCPMV, {"vision_config": {"model_type": "clip"}}, "tower is 'clip'"),
        (MiniCPMO, {"audio_config": {"d_model": 66}}, "encoder_ffn_dim=1536 and d_model=66"),
    ],
)
def test_configs_that_are_refused(kind: Any, values: Mapping[str, Any], message: str) -> None:
    config = {"model_type": "x", **MEDIA_TEXT, "hidden_size": WIDTH, "version": "4.5", **values}
    with pytest.raises(ModelError, match=message):
        kind({**config, "head_dim": 64}, fake_build(models=language_model))
