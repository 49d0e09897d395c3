"""The Llama family built from layers alone, compared with the papers' formulas, which are written
here in plain torch. Parity with transformers is
tested in tests/parity."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from pegboard_model_llama.llama import LlamaModel, Qwen2Model, Qwen3Model
from torch import Tensor
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.interfaces.model import Model
from pegboard.layers import Build
from pegboard.ops import REFERENCES
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_model import ModelContract
from pegboard_testing.fake_build import fake_build, load_layers

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 29,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
}
CLASSES = {"qwen2": Qwen2Model, "qwen3": Qwen3Model}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 3},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 2,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 6},
}


DENSE = ["LlamaForCausalLM", "MistralForCausalLM", "GritLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
EXPERTS = [
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "Llama4ForCausalLM",
    "AriaTextForCausalLM",
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_contract(name: str) -> None:
    check_entry(installed_entry("model", name))


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of one request from its first token. All tensors are [T, heads, D]."""
    group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, 1)
    values = v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    hidden = (distance < 0) | (distance >= (window or len(q)))
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values
    ).flatten(1)


def make_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return random tensors for every name that the model may ask for."""
    random = torch.Generator().manual_seed(0)
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads = config["num_attention_heads"] * dim
    kv = config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    shapes |= dict.fromkeys(
        ("model.embed_tokens.weight", "lm_head.weight"), (config["vocab_size"], hidden)
    )
    for i in range(config["num_hidden_layers"]):
        own = {
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in own.items()}
        shapes |= {f"model.layers.{i}.{name}.bias": shape[:1] for name, shape in own.items()}
        shapes |= {
            f"model.layers.{i}.{name}.weight": (hidden,)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {
            f"model.layers.{i}.self_attn.{name}.weight": (dim,) for name in ("q_norm", "k_norm")
        }
    return {name: torch.randn(shape, generator=random) * 0.5 for name, shape in shapes.items()}


class Formulas:
    """Compute the same model with plain matrix products. Biases and head norms are used if the
    model took them from the checkpoint."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], used: set[str]) -> None:
        self.config = config
        self.tensors = {name: tensors[name] for name in used}
        self.dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(
            x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        )

    def norm(self, name: str, x: Tensor) -> Tensor:
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
            * self.tensors[f"{name}.weight"]
        )

    def turned(self, x: Tensor) -> Tensor:
        half = self.dim // 2
        angles = torch.arange(len(x))[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
        first = x[..., :half]
        second = x[..., half:]
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ],
            -1,
        )

    def window(self, index: int) -> int | None:
        is_on = self.config.get("use_sliding_window", True) and index >= self.config.get(
            "max_window_layers", 0
        )
        return self.config.get("sliding_window") if is_on else None

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.tensors["model.embed_tokens.weight"][ids]
        for index in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{index}."
            x = self.norm(f"{at}input_layernorm", hidden)
            q, k, v = (
                self.linear(f"{at}self_attn.{name}_proj", x).unflatten(1, (-1, self.dim))
                for name in "qkv"
            )
            if f"{at}self_attn.q_norm.weight" in self.tensors:
                q = self.norm(f"{at}self_attn.q_norm", q)
                k = self.norm(f"{at}self_attn.k_norm", k)
            hidden = hidden + self.linear(
                f"{at}self_attn.o_proj",
                attend(self.turned(q), self.turned(k), v, self.window(index)),
            )
            x = self.norm(f"{at}post_attention_layernorm", hidden)
            gated = functional.silu(self.linear(f"{at}mlp.gate_proj", x)) * self.linear(
                f"{at}mlp.up_proj", x
            )
            hidden = hidden + self.linear(f"{at}mlp.down_proj", gated)
        head = "lm_head.weight" if "lm_head.weight" in self.tensors else "model.embed_tokens.weight"
        return self.norm("model.norm", hidden) @ self.tensors[head].T


def built(
    config: dict[str, Any], tensors: dict[str, Tensor], **more: Any
) -> tuple[LlamaModel, set[str]]:
    """Run the model with fake attention over one complete request."""
    build = fake_build(**more)
    model = CLASSES.get(config["model_type"], LlamaModel)(config, build)
    used = load_layers(build.declared.layers, tensors, bind=False)

    def bound(window: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: attend(q, k, v, window)

    build.attention.update(
        {index: bound(layer.window) for index, layer in build.declared.attention.items()}
    )
    for layer in build.declared.layers:
        layer.bind()
    return model, used


def run(model: LlamaModel, ids: Tensor) -> Tensor:
    return model.logits(model.forward(model.embed(ids).clone(), torch.arange(len(ids))))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_follow_the_formulas(variant: str) -> None:
    config = {**CONFIG, **VARIANTS[variant]}
    tensors = make_tensors(config)
    model, used = built(config, tensors)
    ids = torch.tensor([3, 28, 0, 7, 7, 11])
    torch.testing.assert_close(
        run(model, ids), Formulas(config, tensors, used).logits(ids), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("variant", "wanted", "unwanted"),
    [
        ("llama", "lm_head.weight", "q_proj.bias"),
        ("tied", "embed_tokens.weight", "lm_head.weight"),
        ("llama with biases", "o_proj.bias", "q_norm.weight"),
        ("llama with biases", "down_proj.bias", "q_norm.weight"),
        ("qwen2", "k_proj.bias", "o_proj.bias"),
        ("qwen3", "q_norm.weight", "q_proj.bias"),
    ],
)
def test_each_relative_wants_its_own_tensors(variant: str, wanted: str, unwanted: str) -> None:
    config = {**CONFIG, **VARIANTS[variant]}
    _, used = built(config, make_tensors(config))
    assert any(name.endswith(wanted) for name in used) and not any(
        name.endswith(unwanted) for name in used
    )


def test_every_op_is_a_kernel() -> None:
    """The model computes with the ops that it was given, so a wrong kernel changes the result."""
    tensors = make_tensors(CONFIG)
    ids = torch.tensor([1, 2, 3])
    expected = run(built(CONFIG, tensors)[0], ids)
    for op in ("rms_norm", "add_rms_norm", "rope", "silu_mul"):
        original = REFERENCES[op]

        def wrong(*args: Any, original: Any = original) -> Any:
            out = original(*args)
            return (out[0] * 3, *out[1:]) if isinstance(out, tuple) else out * 3

        changed = run(built(CONFIG, tensors, kernels={**REFERENCES, op: wrong})[0], ids)
        assert not torch.allclose(changed, expected), f"the model does not take {op} from the build"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_key_value_heads": 3}, "cannot share 3"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"hidden_act": "relu2"}, "unknown activation"),
        ({"head_dim": 5}, "pairs of channels"),
    ],
)
def test_configs_that_do_not_fit_together_are_model_errors(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        LlamaModel({**CONFIG, **values}, fake_build())


KEYS = sorted(
    {
        *CONFIG,
        *{key for variant in VARIANTS.values() for key in variant},
        "layer_types",
        "hidden_act",
    }
)


@pytest.mark.parametrize("value", [[1], ["a"], {}, {"a": 1}, "text", True, 0.5, -1.5, 7], ids=repr)
def test_an_odd_value_is_a_model_error_or_makes_no_difference(value: Any) -> None:
    for key in KEYS:
        with contextlib.suppress(ModelError):
            LlamaModel({**CONFIG, "sliding_window": 3, key: value}, fake_build())


@pytest.mark.parametrize("variant", VARIANTS)
class TestModels(ModelContract):
    wrong_values: ClassVar[dict[str, Any]] = {"hidden_size": "16", "vocab_size": None}

    @pytest.fixture(autouse=True)
    def _chosen(self, variant: str) -> None:
        self.config = {**CONFIG, **VARIANTS[variant]}

    def model(self, config: Mapping[str, Any], build: Build) -> Model:
        made: Model = CLASSES.get(config.get("model_type", "llama"), LlamaModel)(config, build)
        return made

    def checkpoint(self) -> dict[str, Tensor]:
        tensors = make_tensors(dict(self.config))
        return {name: tensors[name] for name in built(dict(self.config), tensors)[1]}

    def logits(self, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        return Formulas(dict(self.config), weights, set(weights)).logits(ids)
