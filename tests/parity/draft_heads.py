"""Checkpoints of draft heads with random weights, what they propose according to transformers'
modules, and what an engine proposes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import SIZES, VOCAB_SIZE, Reference
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from pegboard import LLM

DRAFT_VOCAB = 90
HEAD_CONFIG = {
    **SIZES,
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 1,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}


class Head(nn.Module):
    """A head: a layer of Llama, and what joins a token with the states before it. target: a model
    of transformers."""

    def __init__(self, target: Any, layers: int = 1) -> None:
        super().__init__()
        self.target = [target]  # not a part of the head
        self.sizes = LlamaConfig(
            **{**SIZES, "num_hidden_layers": layers}, attn_implementation="eager"
        )
        self.rotary = LlamaRotaryEmbedding(self.sizes)

    def decode(self, hidden: Tensor, layer: nn.Module) -> Tensor:
        count = hidden.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        out: Tensor = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(hidden, positions),
        )
        return out

    def start(self, states: tuple[Tensor, ...]) -> Tensor:
        """states: those of the target, the embeddings first and the normed ones last."""
        return states[-1]

    def states(self, embedded: Tensor, given: Tensor) -> Tensor:
        """[1, n, size] embeddings and states before each of them → [1, n, size]."""
        raise AssertionError("each head has its own")

    def best(self, states: Tensor) -> int:
        return int(self.target[0].lm_head(states).argmax())

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the drafts after these tokens."""
        target = self.target[0]
        hidden = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        given = self.start(hidden)
        ids = tokens[1:]
        for _ in range(count):
            states = self.states(target.get_input_embeddings()(torch.tensor([ids])), given)
            ids = [*ids, self.best(states[:, -1])]
            given = torch.cat([given, states[:, -1:]], 1)
        return ids[len(tokens) - 1 :]


def scatter(module: nn.Module) -> None:
    """Give every weight random values."""
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = 1.0 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape) * spread)


class Eagle(Head):
    """Two layers, of which the first has no norm before its attention."""

    def __init__(self, target: Any) -> None:
        super().__init__(target, 2)
        size = self.sizes.hidden_size
        self.fc = nn.Linear(2 * size, size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(self.sizes, i) for i in range(2))
        self.layers[0].input_layernorm = nn.Identity()
        scatter(self)

    def states(self, embedded: Tensor, given: Tensor) -> Tensor:
        hidden = self.fc(torch.cat([embedded, given], -1))
        for layer in self.layers:
            hidden = self.decode(hidden, layer)
        return hidden

    def write(self, folder: Path) -> str:
        tensors = {name: tensor for name, tensor in self.state_dict().items() if "rot" not in name}
        return write_head(folder, tensors, num_hidden_layers=2)


class Eagle3(Head):
    """depths: of the states that it reads. has_table: it has an embedding of its own."""

    def __init__(self, target: Any, depths: tuple[int, ...] = (2, 2, 2)) -> None:
        super().__init__(target)
        size = self.sizes.hidden_size
        self.depths = depths
        self.fc = nn.Linear(len(depths) * size, size, bias=False)
        self.midlayer = LlamaDecoderLayer(self.sizes, 0)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * size, rows, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(size, 1e-6)
        self.norm = LlamaRMSNorm(size, 1e-6)
        self.lm_head = nn.Linear(size, DRAFT_VOCAB, bias=False)
        scatter(self)
        self.ids = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB].sort().values

    def start(self, states: tuple[Tensor, ...]) -> Tensor:
        out: Tensor = self.fc(torch.cat([states[depth] for depth in self.depths], -1))
        return out

    def states(self, embedded: Tensor, given: Tensor) -> Tensor:
        layer = self.midlayer
        joined = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(given)], -1)
        positions = torch.arange(joined.shape[1])[None]
        mask = torch.full((joined.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        attended, _ = layer.self_attn(
            joined,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(joined, positions),
        )
        total = given + attended
        out: Tensor = total + layer.mlp(layer.post_attention_layernorm(total))
        return out

    def best(self, states: Tensor) -> int:
        return int(self.ids[self.lm_head(self.norm(states)).argmax()])

    def write(self, folder: Path) -> str:
        tensors = {name: tensor for name, tensor in self.state_dict().items() if "rot" not in name}
        tensors["d2t"] = self.ids - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), self.ids)
        more = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.depths)}}
        return write_head(folder, tensors, draft_vocab_size=DRAFT_VOCAB, **more)


class Smaller:
    """A second model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        ids = list(tokens)
        for _ in range(count):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(tokens) :]


def write_head(folder: Path, tensors: dict[str, Tensor], **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**HEAD_CONFIG, **config}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return str(folder)


def worker_of(llm: LLM) -> Any:
    return llm.llm_engine.engine._parts.executor.worker


@contextmanager
def proposals(llm: LLM) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Collect the tokens before each draft, and the draft."""
    proposer = worker_of(llm).running.ending.proposer
    propose = proposer.propose
    pairs: list[tuple[list[int], list[int]]] = []

    def watched(step: Any) -> Any:
        drafts = propose(step)
        for text, ids in zip(step.history, drafts.token_ids, strict=True):
            pairs.append((text.tolist(), ids.tolist()))
        return drafts

    proposer.propose = watched
    yield pairs
    del proposer.propose


Method = Callable[[Reference, Callable[..., Reference], Path], tuple[dict[str, Any], Any]]


def eagle(target: Reference, write: Callable[..., Reference], folder: Path) -> Any:
    head = Eagle(target.model)
    return {"method": "eagle", "model": head.write(folder / "eagle")}, head


def eagle3(target: Reference, write: Callable[..., Reference], folder: Path) -> Any:
    head = Eagle3(
        target.model, (1, 2, 3) if target.model.config.num_hidden_layers < 5 else (2, 2, 2)
    )
    return {"method": "eagle3", "model": head.write(folder / "eagle3")}, head


def smaller(**config: Any) -> Method:
    def make(target: Reference, write: Callable[..., Reference], folder: Path) -> Any:
        values = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, **config}
        model_type = values.pop("model_type", "llama")
        second = write(model_type, "second", **values)
        return {"method": "draft_model", "model": str(second.directory)}, Smaller(second.model)

    return make


def itself(target: Reference, write: Callable[..., Reference], folder: Path) -> Any:
    return {"method": "draft_model", "model": str(target.directory)}, Smaller(
        deepcopy(target.model)
    )


OTHER_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
METHODS: dict[str, Method] = {
    "its own KV groups": smaller(**OTHER_HEADS),
    "the KV group of the target": smaller(model_type="qwen3", head_dim=8),
    "a window": smaller(model_type="mistral", sliding_window=9, **OTHER_HEADS),
    "itself": itself,
    "eagle": eagle,
    "eagle3": eagle3,
}
