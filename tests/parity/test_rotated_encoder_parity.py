"""Encoders with rotated positions, compared with transformers: vectors, classes and scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_encoder_parity import states
from tiny_encoders import TEXTS, VOCAB_SIZE, write_tokenizer

from pegboard import LLM, PoolingParams
from pegboard.errors import PegboardError

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODERN = {
    **SIZES,
    "local_attention": 11,
    "global_attn_every_n_layers": 3,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2),
}
ARCHITECTURES = {
    "ModernBert": MODERN,
    "NomicBert": SIZES,
    "Gte": SIZES,
}
WITH_BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True}
# what the models' first code writes, besides its own names of tensors
NOMIC_NAMES = {
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
    "max_trained_positions": 32,
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "vocab_size": VOCAB_SIZE,
    "type_vocab_size": 2,
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
}
NEW_NAMES = {
    **SIZES,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "position_embedding_type": "rope",
    "rope_theta": 20000,
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "pack_qkv": True,
    "model_type": "new",
    "architectures": ["NewModel"],
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., tuple[Path, Any, Any]]:
    """write(architecture, head, its_layout, **config) → its folder, the model and its
    tokenizer."""

    def make(
        name: str, head: str = "Model", *, is_first_layout: bool = True, **values: Any
    ) -> tuple[Path, Any, Any]:
        torch.manual_seed(3)
        config = getattr(transformers, f"{name}Config")(**{**ARCHITECTURES[name], **values})
        model = getattr(transformers, name + head)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.2)
        folder = tmp_path / "model"
        model.save_pretrained(folder, save_original_format=is_first_layout)
        return folder, model, write_tokenizer(folder, is_roberta=False)

    return make


def check_vectors(llm: LLM, model: Any, tokenizer: Any, texts: list[str] = TEXTS) -> None:
    """All texts together, and one alone."""
    alone = llm.embed(texts[:1], use_tqdm=False)
    for text, output in zip(
        [texts[0], *texts], [*alone, *llm.embed(texts, use_tqdm=False)], strict=True
    ):
        true = states(model, tokenizer(text)["input_ids"])[0]
        assert (torch.tensor(output.outputs.embedding) - true / true.norm()).abs().max() < 1e-5


def check_classes(llm: LLM, model: Any, tokenizer: Any) -> None:
    params = PoolingParams(use_activation=False)
    outputs = llm.encode(TEXTS, params, pooling_task="classify", use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        with torch.no_grad():
            true = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
        assert (torch.from_numpy(output.outputs.data) - true).abs().max() < 1e-4


def is_recorded(llm: LLM) -> bool:
    worker = llm.llm_engine.engine._parts.executor.worker
    return worker.replay is None or worker.running.stages.recordings.find("forward", 80) is not None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vectors(name: str, write: Callable[..., Any], open_encoder: Callable[..., LLM]) -> None:
    """Prompts of mixed lengths, longer than the window of local layers, up to the longest."""
    folder, model, tokenizer = write(name)
    with open_encoder(folder) as llm:
        assert llm.llm_engine.plan.max_model_len == 64
        assert is_recorded(llm)
        check_vectors(llm, model, tokenizer)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ModernBert", WITH_BIASES | {"hidden_activation": "gelu_pytorch_tanh"}),
        ("ModernBert", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
        pytest.param("NomicBert", {"is_first_layout": False}, marks=pytest.mark.slow),
        ("Gte", {"is_first_layout": False, "type_vocab_size": 0}),
        pytest.param("Gte", {"hidden_act": "silu"}, marks=pytest.mark.slow),
    ],
)
def test_vectors_of_variants(
    name: str, values: dict[str, Any], write: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    folder, model, tokenizer = write(name, **values)
    with open_encoder(folder) as llm:
        check_vectors(llm, model, tokenizer)


def test_the_first_config_of_modernbert(
    write: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    """It has the bases of the rotation, and how often a layer is global."""
    folder, model, tokenizer = write("ModernBert")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types"):
        del config[name]
    first = {
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "global_attn_every_n_layers": 3,
        "position_embedding_type": "absolute",
    }
    path.write_text(json.dumps({**config, **first}))
    with open_encoder(folder) as llm:
        check_vectors(llm, model, tokenizer)


def test_the_first_config_of_nomic(
    write: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    folder, model, tokenizer = write("NomicBert")
    path = folder / "config.json"
    path.write_text(json.dumps(NOMIC_NAMES))
    with open_encoder(folder) as llm:
        check_vectors(llm, model, tokenizer)
    path.write_text(json.dumps({**NOMIC_NAMES, "rotary_scaling_factor": 2.0}))
    with pytest.raises(PegboardError, match="set max_model_len to at most 32"):
        open_encoder(folder)
    with open_encoder(folder, max_model_len=32) as llm:
        check_vectors(llm, model, tokenizer, ["w1 w2 w3", "w4 w5"])


class NomicExperts(torch.nn.Module):
    """Experts without gates, of which each token has the two best (Nussbaum and Duderstadt 2025).
    The weights of the chosen ones do not add up to 1."""

    def __init__(self, hidden: int, width: int, count: int) -> None:
        super().__init__()
        self.router = torch.nn.Linear(hidden, count, bias=False)
        self.w1, self.w2 = (
            torch.nn.Parameter(torch.randn(count, width, hidden) * 0.3) for _ in range(2)
        )
        self.bias = torch.nn.Parameter(torch.randn(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        every = torch.einsum("bth,efh->btef", x, self.w1)
        every = torch.einsum("btef,efh->bteh", torch.nn.functional.gelu(every), self.w2)
        picked = every.gather(2, chosen.unsqueeze(-1).expand(*chosen.shape, x.shape[-1]))
        return (picked * weights.unsqueeze(-1)).sum(2) + self.bias


def with_experts(model: Any, folder: Path) -> None:
    """Give every other layer experts and the others a block without a gate, and all linear layers
    biases. Write the tensors with the names of the model's first code."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {name: x for name, x in load_file(path).items() if "mlp" not in name}
    for index, layer in enumerate(model.layers):
        place = f"encoder.layers.{index}"
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            projection.bias = torch.nn.Parameter(torch.randn(32) * 0.3)
        qkv = [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias]
        tensors[f"{place}.attn.Wqkv.bias"] = torch.cat([bias.detach() for bias in qkv])
        tensors[f"{place}.attn.out_proj.bias"] = attention.o_proj.bias.detach()
        if index % 2:
            experts = layer.mlp = NomicExperts(32, 48, 4)
            mine = {
                "router.layer.weight": experts.router.weight,
                "experts.mlp.w1": experts.w1.flatten(0, 1),
                "experts.mlp.w2": experts.w2.flatten(0, 1),
                "experts.bias": experts.bias,
            }
        else:
            up = torch.nn.Linear(32, 48)
            down = torch.nn.Linear(48, 32)
            layer.mlp = torch.nn.Sequential(up, torch.nn.GELU(), down)
            mine = {
                f"{name}.{kind}": getattr(part, kind)
                for name, part in (("fc1", up), ("fc2", down))
                for kind in ("weight", "bias")
            }
        tensors |= {f"{place}.mlp.{name}": x.detach().contiguous() for name, x in mine.items()}
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_of_nomic(
    ranks: int, write: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    folder, model, tokenizer = write("NomicBert")
    with_experts(model, folder)
    config = {
        **NOMIC_NAMES,
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
        "activation_function": "gelu",
        "moe_every_n_layers": 2,
        "moe_top_k": 2,
        "num_experts": 4,
        "moe_normalize_expert_weights": False,
        "expert_choice_router": False,
        "num_shared_experts": 0,
        "ffn_div": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    with open_encoder(folder, tensor_parallel_size=ranks) as llm:
        assert ranks > 1 or is_recorded(llm)
        check_vectors(llm, model, tokenizer)


def test_the_first_config_of_gte(
    write: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    """The rotation is stretched as fixed NTK does: the base grows by a factor f, and all angles
    shrink by f^(2 / channels)."""
    folder, model, tokenizer = write("Gte", type_vocab_size=2)
    path = folder / "config.json"
    path.write_text(json.dumps(NEW_NAMES))
    channels = torch.arange(0, 8, 2) / 8
    model.rotary_emb.inv_freq.copy_(1 / (160000**channels * 8 ** (2 / 8)))
    with open_encoder(folder, max_model_len=64) as llm:
        check_vectors(llm, model, tokenizer)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_classes_of_modernbert(
    pooling: str, write: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    values = {"num_labels": 3, "classifier_pooling": pooling, "classifier_bias": pooling == "mean"}
    folder, model, tokenizer = write("ModernBert", "ForSequenceClassification", **values)
    with open_encoder(folder) as llm:
        check_classes(llm, model, tokenizer)


@pytest.mark.parametrize("name", ["Gte", "NomicBert"])
def test_scores(name: str, write: Callable[..., Any], open_encoder: Callable[..., LLM]) -> None:
    """A cross-encoder. The second text has another token type."""
    folder, model, tokenizer = write(
        name, "ForSequenceClassification", num_labels=1, type_vocab_size=2
    )
    pairs = [(first, second) for first in TEXTS[:2] for second in ("w20 w21", "w30 w31 w32 w33")]
    with open_encoder(folder) as llm:
        check_classes(llm, model, tokenizer)
        outputs = llm.score(*map(list, zip(*pairs, strict=True)), use_tqdm=False)
    for (first, second), output in zip(pairs, outputs, strict=True):
        encoded = tokenizer(first, second, return_token_type_ids=True, return_tensors="pt")
        with torch.no_grad():
            true = model(encoded["input_ids"], token_type_ids=encoded["token_type_ids"])
        assert abs(output.outputs.score - float(true.logits[0].sigmoid())) < 1e-5


def test_names_of_the_first_code_of_gte(
    write: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    """All tensors but those of the classes begin with `new`."""
    from safetensors.torch import load_file, save_file

    folder, model, tokenizer = write("Gte", "ForSequenceClassification", num_labels=2)
    path = folder / "model.safetensors"
    tensors = {
        f"new.{name.removeprefix('gte.')}" if name.startswith("gte.") else name: tensor.clone()
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["NewForSequenceClassification"], "model_type": "new"}
    (folder / "config.json").write_text(json.dumps(config))
    with open_encoder(folder) as llm:
        check_classes(llm, model, tokenizer)


@pytest.mark.parametrize("name", ["ModernBert", pytest.param("Gte", marks=pytest.mark.slow)])
def test_bfloat16_is_close(name: str, write: Callable[..., Any]) -> None:
    """Attention is then torch's, and not the native one."""
    folder, model, tokenizer = write(name)
    with LLM(str(folder), dtype="bfloat16") as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, output in zip(TEXTS, outputs, strict=True):
        true = states(model, tokenizer(text)["input_ids"])[0]
        assert torch.cosine_similarity(torch.tensor(output.outputs.embedding), true, dim=0) > 0.99


def test_variants_that_are_refused(
    write: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    cases: dict[str, list[tuple[dict[str, Any], str]]] = {
        "ModernBert": [
            ({"layer_types": ["full_attention"]}, "each of the 4 layers"),
            ({"hidden_activation": "mish"}, "unknown activation 'mish'"),
        ],
        "NomicBert": [
            ({"moe_every_n_layers": 2}, "experts are supported with gelu"),
            ({"activation_function": "elu"}, "activation_function is 'elu'; expected one of"),
            ({"num_shared_experts": 1}, "num_shared_experts=1; only 0 is supported"),
            ({"prenorm": True}, "prenorm=True; only False is supported"),
            ({"rotary_emb_fraction": 0.0}, "rotary_emb_fraction is 0.0"),
        ],
        "Gte": [
            ({"position_embedding_type": "absolute"}, "only 'rope' is supported"),
            ({"logn_attention_scale": True}, "logn_attention_scale=True"),
        ],
    }
    for name, refusals in cases.items():
        folder, *_ = write(name)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        for values, message in refusals:
            path.write_text(json.dumps({**config, **values}))
            with pytest.raises(PegboardError, match=message):
                open_encoder(folder)
