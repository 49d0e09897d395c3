"""The plugins of the pack pass the contracts of their kinds and the generic contract."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from pegboard_pack_gguf.byte_level_bpe import BYTE_ALPHABET
from pegboard_pack_gguf.loader import GGUFLoader
from pegboard_pack_gguf.options import GGUFOptions
from pegboard_pack_gguf.plugin import QUANTIZATION, WEIGHT_LOADER
from pegboard_pack_gguf.quantization import GGUFQuantization
from pegboard_pack_gguf.tokenizer import GGUFTokenizer
from torch import Tensor

from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.quantization import Part, QuantizationSetup
from pegboard.interfaces.tokenizer import TokenizerSetup
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TokenizerPayload,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract
from pegboard_testing.contract_tokenizer import TokenizerContract
from pegboard_testing.contract_weight_loader import WeightLoaderContract


@pytest.mark.parametrize("kind", ["weight_loader", "quantization", "tokenizer"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry(kind, "gguf"))


class TestLoader(WeightLoaderContract):
    spec = WEIGHT_LOADER

    @pytest.fixture(autouse=True)
    def writer(self, write_gguf: Callable[..., Path]) -> None:
        self.write_gguf = write_gguf

    def loader(self, setup: WeightLoaderSetup) -> GGUFLoader:
        return GGUFLoader(None, setup)

    def write(self, folder: Path) -> tuple[LocalFiles, Mapping[str, Tensor]]:
        files = LocalFiles(self.write_gguf(types={"blk.0.ffn_up.weight": "Q8_0"}))
        loader = self.loader(WeightLoaderSetup())
        checkpoint = loader.describe(files)
        plain = [entry for entry in checkpoint.tensors.values() if entry.stored == "float32"]
        pieces = loader.tensors(checkpoint, [WantedWeight(entry.name) for entry in plain])
        return files, {
            piece.name: torch.clone(piece.data)
            for piece in pieces
            if isinstance(piece.data, Tensor)
        }


class TestQ8(QuantizationContract):
    spec = QUANTIZATION
    config = {"quant_method": "gguf"}
    block = 32
    ggml_type = "Q8_0"

    def method(self, setup: QuantizationSetup) -> GGUFQuantization:
        return GGUFQuantization(GGUFOptions(), setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        kind: Any = gguf.GGMLQuantizationType[self.ggml_type]
        packed = gguf.quants.quantize(np.ascontiguousarray(values.numpy()), kind)
        true = (
            torch.from_numpy(gguf.quants.dequantize(packed, kind)).to(getattr(torch, dtype)).float()
        )
        return [
            WeightPiece(
                part.name, self.ggml_type, tuple(values.shape), memoryview(packed.tobytes())
            )
        ], true


class TestQ4(TestQ8):
    ggml_type = "Q4_1"


class TestQ5(TestQ8):
    ggml_type = "Q5_0"


class TestMXFP4(TestQ8):
    ggml_type = "MXFP4"


class TestTQ2(TestQ8):
    ggml_type = "TQ2_0"
    block = 256


class TestIQ3(TestQ8):
    """Random blocks, because the package does not quantize to this type. scales: where the blocks
    have scales in float16."""

    ggml_type = "IQ3_XXS"
    block = 256
    scales = (0,)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        kind: Any = gguf.GGMLQuantizationType[self.ggml_type]
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(zlib.crc32(values.numpy().tobytes()))
        blocks = random.integers(
            0, 256, (values.numel() // block_size, block_bytes), dtype=np.uint8
        )
        for at in self.scales:
            blocks[:, at : at + 2] = np.full((len(blocks), 1), 0.01, np.float16).view(np.uint8)
        true = (
            torch.from_numpy(gguf.quants.dequantize(blocks, kind))
            .view(values.shape)
            .to(getattr(torch, dtype))
            .float()
        )
        return [
            WeightPiece(
                part.name, self.ggml_type, tuple(values.shape), memoryview(blocks.tobytes())
            )
        ], true


class TestIQ4NL(TestIQ3):
    ggml_type = "IQ4_NL"
    block = 32


class TestIQ4XS(TestIQ3):
    ggml_type = "IQ4_XS"


class TestIQ2(TestIQ3):
    ggml_type = "IQ2_S"


class TestQ2K(TestIQ3):
    ggml_type = "Q2_K"
    scales = (80, 82)


class TestQ3K(TestIQ3):
    ggml_type = "Q3_K"
    scales = (108,)


class TestQ4K(TestIQ3):
    ggml_type = "Q4_K"
    scales = (0, 2)


class TestQ6K(TestIQ3):
    ggml_type = "Q6_K"
    scales = (208,)


class TestFloat(TestQ8):
    def method(self, setup: QuantizationSetup) -> GGUFQuantization:
        return GGUFQuantization(GGUFOptions(compute="float"), setup)


class TestByteLevelTokenizer(TokenizerContract):
    def tokenizer(self, chat_template: str | None = None) -> GGUFTokenizer:
        merges = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
        tokens = [
            *BYTE_ALPHABET,
            *(merge.replace(" ", "") for merge in merges),
            "<|im_start|>",
            "<|im_end|>",
        ]
        data = {
            "ggml.model": "gpt2",
            "ggml.pre": "gpt-2",
            "ggml.tokens": tokens,
            "ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
            "ggml.merges": merges,
            "ggml.bos_token_id": len(tokens) - 2,
            "ggml.eos_token_id": len(tokens) - 1,
            "ggml.add_bos_token": True,
        }
        payload = TokenizerPayload("gguf", data=data)
        checkpoint = Checkpoint(
            format="gguf",
            path=Path("m"),
            config={},
            architectures=(),
            tensors={},
            tokenizer=payload,
        )
        return GGUFTokenizer(None, TokenizerSetup(checkpoint, chat_template))
