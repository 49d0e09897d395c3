"""Speculative decoding with the layers of a checkpoint that predict several tokens (MTP): tokens
are those of plain decoding, and the proposals those of the formula in plain torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_deepseek.pangu import NAMES
from safetensors.torch import load_file, save_file
from test_latent_parity import sandwiched
from test_state_parity import QWEN
from tiny_models import nightly
from tiny_predictors import Form, Predictor, block_of, split_off, watch, write_predictor
from torch import Tensor

from pegboard import LLM, SamplingParams
from pegboard.errors import ConfigError, ModelError

COUNT = 3
PROMPTS = [[3, 4, 5] * 5, [*range(60, 85)], [5], [9, 8, 7, 9, 8, 7, 6, 9, 8]]
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}
Write = Callable[..., Predictor]


def deepseek(folder: Path, *, is_right: bool = False, **values: Any) -> Predictor:
    """DeepSeek-V3 with experts, whose layer has an embedding and a head of its own."""
    at = "model.layers.3"
    form = Form(embedding=f"{at}.embed_tokens", head=f"{at}.shared_head.head")
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
    chosen = {**LATENT, **EXPERTS, **groups, "first_k_dense_replace": 1, **values}
    model, layer, tensors, config = split_off(folder, "deepseek_v3", form, **chosen)
    block = block_of(model, layer)
    return write_predictor(folder, model, form, block, tensors, config, is_right=is_right)


def dense_deepseek(folder: Path, *, is_right: bool = False) -> Predictor:
    """DeepSeek-V3 without experts, whose layer shares the target's embedding and head."""
    form = Form()
    chosen = {**LATENT, "first_k_dense_replace": 4, "rope_interleave": False}
    model, layer, tensors, config = split_off(folder, "deepseek_v3", form, **chosen)
    block = block_of(model, layer)
    predictor = write_predictor(folder, model, form, block, tensors, config, is_right=is_right)
    return replace(predictor, layer=layer)


def mimo(folder: Path, *, is_right: bool = False) -> Predictor:
    """MiMo is Qwen 2 under its own name. The hidden states come first."""
    at = "model.mtp_layers.0."
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    form = Form(at, *(f"{at}{name}" for name in names), hidden_first=True)
    model, layer, tensors, config = split_off(folder, "qwen2", form)
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}
    block = block_of(model, layer)
    return write_predictor(folder, model, form, block, tensors, config, is_right=is_right)


def glm(folder: Path, *, is_right: bool = False) -> Predictor:
    """GLM-4 MoE gives its states with the next token before their norm."""
    at = "model.layers.3."
    form = Form(head=f"{at}shared_head.head", gives_normed=False, eps=1e-5)
    groups = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True}
    chosen = {**EXPERTS, **groups, "first_k_dense_replace": 1, "head_dim": 16}
    model, layer, tensors, config = split_off(folder, "glm4_moe", form, **chosen)
    block = block_of(model, layer)
    return write_predictor(folder, model, form, block, tensors, config, is_right=is_right)


def ernie(folder: Path, *, is_right: bool = False) -> Predictor:
    """ERNIE 4.5's layer has no experts, and its states are not normalized."""
    names = ("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")
    parts = (f"model.{name}.0" for name in names)
    form = Form("model.mtp_block.0.", *parts, norm=None, eps=1e-5)
    chosen = {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    }
    model, layer, tensors, config = split_off(folder, "ernie4_5_moe", form, **chosen)
    block = block_of(model, layer)
    return write_predictor(folder, model, form, block, tensors, config, is_right=is_right)


def longcat(folder: Path, *, is_right: bool = False) -> Predictor:
    """LongCat-Flash's layer is half of one of the target's. No position is masked."""
    at = "model.mtp.layers.0."
    parts = (f"{at}{name}" for name in ("enorm.m", "hnorm.m", "eh_proj"))
    embedding = "model.mtp.embed_tokens"
    form = Form(at, *parts, norm="model.mtp.norm", embedding=embedding, masks_first=False)
    chosen = {
        **LATENT,
        "num_hidden_layers": None,
        "intermediate_size": None,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 6,
        "zero_expert_num": 0 if is_right else 4,
        "moe_topk": 4,
        "routed_scaling_factor": 1.9,
        "head_dim": LATENT["qk_rope_head_dim"],
    }
    model, layer, tensors, config = split_off(folder, "longcat_flash", form, "num_layers", **chosen)
    halves: Any = layer
    first = {
        "self_attn.0.": "self_attn.",
        "mlps.0.": "transformer_layer.mlp.",
        "input_layernorm.0.": "input_layernorm.",
        "post_attention_layernorm.0.": "post_attention_layernorm.",
    }
    for name in [name for name in tensors if name.startswith(at)]:
        tensor = tensors.pop(name)
        for old, new in first.items():
            if name.startswith(f"{at}{old}"):
                tensors[name.replace(old, new)] = tensor

    def half(hidden: Tensor, **step: Any) -> Tensor:
        hidden = hidden + halves.self_attn[0](halves.input_layernorm[0](hidden), **step)[0]
        out: Tensor = hidden + halves.mlps[0](halves.post_attention_layernorm[0](hidden))
        return out

    block = block_of(model, half)
    return write_predictor(folder, model, form, block, tensors, config, is_right=is_right)


def pangu(folder: Path, *, is_right: bool = False) -> Predictor:
    """openPangu is DeepSeek-V3 without corrections, with norms of the blocks' results."""
    form = Form(eps=1e-3)
    groups = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7, "rms_norm_eps": 1e-3}
    chosen = {**LATENT, **EXPERTS, **groups, "first_k_dense_replace": 1}
    model, layer, tensors, config = split_off(folder, "deepseek_v3", form, **chosen)
    tensors = {name: x for name, x in tensors.items() if not name.endswith("correction_bias")}
    for index, each in enumerate([*model.model.layers, layer]):
        for name, buffer in each.named_buffers():
            if name.endswith("correction_bias"):
                buffer.zero_()
        norms = [type(each.input_layernorm)(32, eps=1e-3) for _ in range(2)]
        for name, norm in zip(("pre_mlp", "post_mlp"), norms, strict=True):
            norm.weight.data.normal_(1, 0.3)
            tensors[f"model.layers.{index}.{name}_layernorm.weight"] = norm.weight.data
        each.forward = partial(sandwiched, each, *norms)
    config |= {name: config.pop(standard, None) for standard, name in NAMES.items()}
    config |= {"num_dense_layers": 1, "sandwich_norm": True, "model_type": "pangu_ultra_moe"}
    config["architectures"] = ["PanguUltraMoEForCausalLM"]
    for name in ("mlp_layer_types", "n_group", "topk_group", "rope_interleave"):
        config.pop(name, None)
    block = block_of(model, layer)
    return write_predictor(folder, model, form, block, tensors, config, is_right=is_right)


def eagle(folder: Path, *, is_right: bool = False) -> Predictor:
    """A head of DeepSeek-V3's layers in a checkpoint of its own. It masks no position."""
    names = ("enorm", "hnorm", "fc", "norm", "embed_tokens")
    form = Form("layers.0.", *names, masks_first=False)
    chosen = {**LATENT, **EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    model, layer, tensors, config = split_off(folder, "deepseek_v3", form, **chosen)
    block = block_of(model, layer)
    predictor = write_predictor(folder, model, form, block, tensors, config, is_right=is_right)
    stored = load_file(folder / "model.safetensors")
    tensors = {name: x for name, x in stored.items() if name.startswith(("layers.0.", *names))}
    rest = {name: x for name, x in stored.items() if name not in tensors}
    save_file(rest, folder / "model.safetensors", {"format": "pt"})
    predictor.draft = folder / "head"
    predictor.draft.mkdir()
    save_file(tensors, predictor.draft / "model.safetensors", {"format": "pt"})
    head = {**config, "num_hidden_layers": 1, "architectures": ["EagleDeepSeekMTPModel"]}
    (predictor.draft / "config.json").write_text(json.dumps(head))
    return predictor


def qwen_next(folder: Path, *, is_right: bool = False) -> Predictor:
    """Qwen3-Next, of whose layers some have states. That of the prediction has attention."""
    at = "mtp.pre_fc_norm_"
    form = Form(
        layer="mtp.layers.0.",
        embedding_norm=f"{at}embedding",
        hidden_norm=f"{at}hidden",
        projection="mtp.fc",
        norm="mtp.norm",
        masks_first=False,
        is_centered=True,
    )
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    model, layer, tensors, config = split_off(
        folder, "qwen3_next", form, **{**QWEN, "layer_types": types, "rms_norm_eps": 1e-6}
    )
    block = block_of(model, layer)
    return write_predictor(folder, model, form, block, tensors, config, is_right=is_right)


TARGETS: dict[str, tuple[Write, str]] = {
    "deepseek": (deepseek, "deepseek_mtp"),
    "deepseek, dense": (dense_deepseek, "deepseek_mtp"),
    "mimo": (mimo, "mimo_mtp"),
    "glm": (glm, "glm4_moe_mtp"),
    "ernie": (ernie, "ernie_mtp"),
    "longcat": (longcat, "longcat_flash_mtp"),
    "pangu": (pangu, "pangu_ultra_moe_mtp"),
    "eagle": (eagle, "eagle"),
    "qwen_next": (qwen_next, "qwen3_next_mtp"),
}
ENGINES: dict[str, dict[str, Any]] = {
    "recorded": {"block_size": 16},
    "eager": {"block_size": 16, "enforce_eager": True},
    "chunked": {"block_size": 16, "max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preempted": {"block_size": 16, "num_gpu_blocks_override": 6, "max_model_len": 56},
}


def params(**values: Any) -> SamplingParams:
    chosen = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**{**chosen, **values})


SAMPLING = [params(), params(temperature=1.0, seed=1, top_p=0.9), params(), params(max_tokens=5)]


GREEDY = [params()] * len(PROMPTS)


def run(llm: LLM, sampling: list[SamplingParams] = SAMPLING) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def drafting(predictor: Predictor, method: str = "mtp", **more: Any) -> dict[str, Any]:
    config = {"method": method, "num_speculative_tokens": COUNT, "adaptive_length": False, **more}
    if predictor.draft is not None:
        config |= {"method": "eagle", "model": str(predictor.draft)}
    return {"speculative_config": config, "disable_log_stats": False}


def value(llm: LLM, name: str) -> Any:
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


@pytest.mark.sampled(3)
@pytest.mark.one_rank
@pytest.mark.parametrize("engine", nightly(ENGINES, "eager", "recorded"))
@pytest.mark.parametrize("name", TARGETS)
def test_tokens_and_proposals(
    open_llm: Callable[..., LLM], tmp_path: Path, name: str, engine: str
) -> None:
    """Also again, with cached prefixes."""
    predictor = TARGETS[name][0](tmp_path / "model")
    settings = dict(ENGINES[engine])
    if name == "qwen_next" and engine == "preempted":
        settings["num_gpu_blocks_override"] = 13
    with open_llm(predictor.directory, **settings) as llm:
        plain = run(llm)
    with open_llm(predictor.directory, **drafting(predictor), **settings) as llm:
        proposed = watch(llm)
        for _ in range(2):
            assert run(llm) == plain
        assert (value(llm, "num_preemptions") > 0) == (engine == "preempted")
    assert sum(len(each.drafts) == COUNT for each in proposed) > 50
    texts = {tuple(each.text): each.drafts for each in proposed}
    for text, drafts in texts.items():
        assert drafts == predictor.proposals(list(text), len(drafts)), len(text)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TARGETS)
def test_a_prediction_that_is_right(
    open_llm: Callable[..., LLM], tmp_path: Path, name: str
) -> None:
    """Under the older name of the method."""
    make, method = TARGETS[name]
    predictor = make(tmp_path / "model", is_right=True)
    with open_llm(predictor.directory, block_size=16) as llm:
        plain = run(llm, GREEDY)
    with open_llm(predictor.directory, **drafting(predictor, method), block_size=16) as llm:
        assert run(llm, GREEDY) == plain
        drafts, accepted = (
            value(llm, f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted")
        )
    assert drafts * 0.9 < accepted <= drafts


def test_a_quantized_checkpoint(open_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """In DeepSeek-V3's layout: float8 with scales of blocks, but the projection is plain."""
    predictor = dense_deepseek(tmp_path / "model")
    path = predictor.directory / "model.safetensors"
    stored = load_file(path)
    whole = dict(predictor.model.named_parameters())
    whole |= {f"model.layers.3.{name}": x for name, x in predictor.layer.named_parameters()}
    matrices = [name for name in stored if name.endswith("proj.weight") and "eh_proj" not in name]
    assert any(name.startswith("model.layers.3.") for name in matrices)
    for name in matrices:
        scale = stored[name].abs().amax() / 448
        codes = (stored[name] / scale).to(torch.float8_e4m3fn)
        whole[name].data.copy_(codes.float() * scale)
        stored |= {name: codes, f"{name}_scale_inv": scale.view(1, 1)}
    save_file(stored, path, {"format": "pt"})
    path = predictor.directory / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**json.loads(path.read_text()), "quantization_config": quantization}
    path.write_text(json.dumps(config))
    with open_llm(predictor.directory, **drafting(predictor), block_size=16) as llm:
        proposed = watch(llm)
        run(llm, GREEDY)
    equal = [each.drafts == predictor.proposals(each.text, len(each.drafts)) for each in proposed]
    assert sum(equal) > 0.95 * len(equal) and len(equal) > 20


@pytest.mark.parametrize("name", ["deepseek", "mimo"])
def test_checkpoints_that_do_not_fit(
    open_llm: Callable[..., LLM], tmp_path: Path, name: str
) -> None:
    predictor = TARGETS[name][0](tmp_path / "model")
    settings = drafting(predictor, "ernie_mtp")
    with pytest.raises(ConfigError, match="ernie_mtp needs a model of Ernie4_5_MoeForCausalLM"):
        open_llm(predictor.directory, **settings)
    path = predictor.directory / "model.safetensors"
    stored = load_file(path)
    projection = f"{predictor.form.projection}.weight"
    changes: list[tuple[dict[str, Tensor], str]] = [
        ({**stored, projection: torch.zeros(7, 64)}, f"{projection} has shape"),
        ({key: x for key, x in stored.items() if key != projection}, "lacks 1 tensors"),
        (
            {key: x for key, x in stored.items() if not key.startswith(predictor.form.layer)},
            f"no tensors {predictor.form.layer}",
        ),
    ]
    for tensors, words in changes:
        save_file(tensors, path, {"format": "pt"})
        with pytest.raises(ModelError, match=words):
            open_llm(predictor.directory, **drafting(predictor))
        with open_llm(predictor.directory):
            pass
    path = predictor.directory / "config.json"
    config = {**json.loads(path.read_text()), "num_nextn_predict_layers": 0}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="num_nextn_predict_layers=0"):
        open_llm(predictor.directory, **drafting(predictor))


def test_the_layers_may_be_in_another_checkpoint(
    open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """As of a conversion that has left them out."""
    predictor = mimo(tmp_path / "model", is_right=True)
    shutil.copytree(predictor.directory, tmp_path / "whole")
    path = predictor.directory / "model.safetensors"
    kept = {name: x for name, x in load_file(path).items() if "mtp_layers" not in name}
    save_file(kept, path, {"format": "pt"})
    more = drafting(predictor, model=str(tmp_path / "whole"))
    with open_llm(predictor.directory, **more, block_size=16) as llm:
        run(llm, GREEDY)
        drafts, accepted = (
            value(llm, f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted")
        )
    assert drafts * 0.9 < accepted <= drafts
