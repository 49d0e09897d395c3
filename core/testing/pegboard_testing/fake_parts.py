"""The plugins of a worker in their simplest form: a model, its attention, weights and sampler. They
run on any device and do not wait for it.

`fake_worker_registry(platform)` is a registry with nothing else in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.data.batch import Logprobs
from pegboard.errors import ModelError, RequestError
from pegboard.installed import Entry
from pegboard.interfaces.attention import (
    AttentionInputs,
    AttentionLayer,
    AttentionSetup,
    AttentionSpec,
    KVCacheSpec,
    KVTensor,
    KVView,
)
from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.model_source import LocalFiles
from pegboard.interfaces.quantization import QuantizationSetup, QuantizationSpec
from pegboard.interfaces.sampler import Sampled, SamplerSetup, SamplerSpec, SampleStep
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    TensorEntry,
    TokenizerPayload,
    WantedWeight,
    WeightLoaderSpec,
    WeightPiece,
)
from pegboard.layers import (
    Activation,
    Attention,
    Build,
    Embedding,
    Head,
    LayerStack,
    Linear,
    Norm,
    QKVLinear,
    Rope,
    Rotation,
)
from pegboard.plugins.discovery import Scan
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_build import FakeQuantization

VOCAB = 61
HIDDEN = 32
HEADS = 2
HEAD_DIM = 16
LAYERS = 2


class TinyModel(nn.Module):
    """A decoder of two layers."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        self.embed_tokens = Embedding(build.at("embed"), VOCAB, HIDDEN)
        self.rope = Rope(build, 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 64)
        self.layers = LayerStack(
            build.at("layers"),
            LAYERS,
            lambda at, index: TinyLayer(at, index, self.rope),
            Norm(build.at("norm"), HIDDEN, 1e-5),
        )
        self.head = Head(build.at("head"), VOCAB, HIDDEN)

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.layers(hidden, self.rope(positions))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class TinyLayer(nn.Module):
    def __init__(self, build: Build, index: int, rope: Rope) -> None:
        super().__init__()
        self.norm = Norm(build.at("norm"), HIDDEN, 1e-5)
        self.after = Norm(build.at("after"), HIDDEN, 1e-5)
        self.qkv = QKVLinear(build, HIDDEN, HEADS, HEADS, HEAD_DIM)
        self.attention = Attention(build, index, HEADS, HEADS, HEAD_DIM, rope=rope)
        self.up = Linear(build, HIDDEN, 2 * HIDDEN, parts={"gate": HIDDEN, "up": HIDDEN})
        self.activation = Activation(build, "silu")

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.norm.add(hidden, residual)
        hidden, residual = self.after.add(self.attention(*self.qkv(hidden), rotation), residual)
        return self.activation(self.up(hidden)), residual


class FakePagedAttention:
    """Compares every token with all slots of its row's blocks and masks those that it must not see.
    Nothing is read on the host."""

    def __init__(self, options: None, setup: AttentionSetup) -> None:
        self.views: Mapping[int, KVView] = {}
        self.inputs: AttentionInputs | None = None

    @staticmethod
    def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
        shape = (layer.num_kv_heads, layer.head_dim)
        return KVCacheSpec(tensors=(KVTensor("k", shape, dtype), KVTensor("v", shape, dtype)))

    def attach(self, views: Mapping[int, KVView], block_size: int) -> None:
        self.views = views

    def plan(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs

    def bind(self, layer: AttentionLayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        view = self.views[layer.layer_index]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            inputs = self.inputs
            assert inputs is not None
            slots = inputs.slot_mapping.clamp(min=0)  # padding is written to the null block
            view["k"].flatten(0, 1).index_copy_(0, slots, k)
            view["v"].flatten(0, 1).index_copy_(0, slots, v)
            starts = inputs.query_start_loc
            lengths = inputs.seq_lens
            tokens = torch.arange(q.shape[0], device=q.device)
            rows = torch.bucketize(tokens, starts[1:], right=True).clamp(max=len(lengths) - 1)
            places = lengths[rows] - (starts[rows + 1] - tokens)
            blocks = inputs.block_table[rows].long()
            keys, values = (view[name][blocks].flatten(1, 2) for name in "kv")
            scores = torch.einsum("thd,tnhd->thn", q, keys) * layer.scale
            hidden = (
                torch.arange(keys.shape[1], device=q.device)[None, None, :] > places[:, None, None]
            )
            weights = scores.masked_fill(hidden, -1e9).softmax(-1)
            return torch.einsum("thn,tnhd->thd", weights, values).flatten(1)

        return attend


class FakeGreedySampler:
    """Takes the most likely token."""

    def __init__(self, options: None, setup: SamplerSetup) -> None: ...

    def add(self, *more: object) -> None: ...

    def remove(self, rows: object) -> None: ...

    def sample(self, logits: Tensor, step: SampleStep) -> Sampled:
        best = logits.argmax(-1, keepdim=True)
        return Sampled(best, torch.ones_like(best[:, 0]))

    def score(self, logits: Tensor, targets: Tensor, top: int) -> Logprobs:
        raise RequestError("this sampler has no prompt logprobs", parameter="prompt_logprobs")


class FakeMethod(FakeQuantization):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup.device)


class RandomLoader:
    """Delivers the same numbers for the same name every time."""

    def __init__(self, options: None, setup: object) -> None: ...

    def describe(self, files: LocalFiles) -> Checkpoint:
        raise ModelError(f"{files.root}: this loader makes its numbers up and reads no files")

    def tensors(self, checkpoint: Checkpoint, wanted: list[WantedWeight]) -> Iterator[WeightPiece]:
        for piece in wanted:
            generator = torch.Generator().manual_seed(sum(piece.name.encode()))
            data = torch.randn(piece.shape, generator=generator) * (
                1.0 if len(piece.shape) == 1 else 0.3
            )
            yield WeightPiece(piece.name, "float32", piece.shape, data)


HERE = "pegboard_testing.fake_parts"
ATTENTION = AttentionSpec(
    api="1.0",
    implementation=f"{HERE}:FakePagedAttention",
    supports={"dtype": {"float32"}, "kv_dtype": {"float32"}, "head_dim": True, "block_size": True},
    flags=frozenset({"replay"}),
)
MODEL = ModelSpec(api="1.0", implementation=f"{HERE}:TinyModel")
SAMPLER = SamplerSpec(api="1.0", implementation=f"{HERE}:FakeGreedySampler")
QUANTIZATION = QuantizationSpec(
    api="1.0", implementation=f"{HERE}:FakeMethod", supports={"dtype": {"float32"}}
)
LOADER = WeightLoaderSpec(api="1.0", implementation=f"{HERE}:RandomLoader")
PARTS = {
    ("attention", "paged"): "ATTENTION",
    ("model", "Tiny"): "MODEL",
    ("sampler", "greedy"): "SAMPLER",
    ("quantization", "none"): "QUANTIZATION",
    ("weight_loader", "random"): "LOADER",
}


def fake_worker_registry(
    platform: str, *, family: str = "fake", others: Sequence[Entry] = (), **more: str
) -> Registry:
    """Return a registry with only these plugins. platform: "module:SPEC" of its spec. family: its
    name. others: installed entries, each of which replaces the fake with the same name, and the
    fake attention. more: entry points of kernels, by name with "__" for the dot."""
    values = {part: f"{HERE}:{name}" for part, name in PARTS.items()} | {
        ("platform", family): platform
    }
    values |= {("kernel", name.replace("__", ".")): value for name, value in more.items()}
    for entry in others:
        values.pop((entry.kind, entry.name), None)
        if entry.kind == "attention":
            values.pop(("attention", "paged"), None)
    fakes = (
        Entry(kind, name, "fakes", "1.0", value, f"pegboard.{kind}.v1")
        for (kind, name), value in values.items()
    )
    return Registry(Scan(entries=(*fakes, *others)))


def tiny_checkpoint(path: Any) -> Checkpoint:
    """A checkpoint that names no tensors, so nothing is missing."""
    none: dict[str, TensorEntry] = {}
    return Checkpoint(
        format="random",
        path=path,
        config={},
        architectures=("Tiny",),
        tensors=none,
        tokenizer=TokenizerPayload("none"),
        dtype="float32",
    )
