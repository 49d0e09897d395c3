"""Models with latent attention (MLA), compared with transformers: by both backends, and in every
type of the cache."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest
import torch
from pegboard_model_deepseek.pangu import NAMES
from safetensors.torch import load_file, save_file

from pegboard import SamplingParams
from pegboard.errors import PegboardError

LATENT = {
    "kv_lora_rank": 16,
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
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.5, 2.0, 4.0],
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2, as V2-Lite": (
        "deepseek_v2",
        {**LATENT, **EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1}
        | {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v2, groups": (
        "deepseek_v2",
        {
            **LATENT,
            **EXPERTS,
            **GROUPS,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "attention_bias": True,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**LATENT, **EXPERTS, **GROUPS, "q_lora_rank": 24, "first_k_dense_replace": 1}
        | {"rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3, as Kimi K2": (
        "deepseek_v3",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": 24,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.8,
        }
        | {"first_k_dense_replace": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
    ),
    "deepseek_v3, halves, dense": (
        "deepseek_v3",
        {**LATENT, "rope_interleave": False, "first_k_dense_replace": 3},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {
            **LATENT,
            **EXPERTS,
            **GROUPS,
            "q_lora_rank": 24,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        }
        | {"index_n_heads": 12, "index_head_dim": 16, "index_topk": 7}
        | {"rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}},
    ),
    "minicpm3": (
        "minicpm3",
        {**LATENT, "q_lora_rank": 24, "dim_model_base": 16, "rope_parameters": LONGROPE},
    ),
    "minicpm3, plain": (
        "minicpm3",
        {
            **LATENT,
            "q_lora_rank": None,
            "tie_word_embeddings": False,
            "dim_model_base": 32,
            "v_head_dim": 8,
        },
    ),
    "longcat_flash": (
        "longcat_flash",
        {
            **LATENT,
            "q_lora_rank": 24,
            "num_layers": 2,
            "num_hidden_layers": None,
            "intermediate_size": None,
        }
        | {
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 6,
            "zero_expert_num": 4,
            "moe_topk": 4,
        }
        | {"routed_scaling_factor": 1.9, "head_dim": LATENT["qk_rope_head_dim"]},
    ),
}
KIMI = {
    **LATENT,
    # queries, keys and results are normalized: this keeps what is near zero from magnifying errors
    "rms_norm_eps": 0.1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}
BACKENDS = ("cpu_paged", "cpu_mla")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(write: Any, check_parity: Any, name: str, backend: str) -> None:
    model_type, config = ARCHITECTURES[name]
    check_parity(write(model_type, **config), attention_backend=backend, block_size=16)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded(write: Any, check_recorded: Any, name: str) -> None:
    model_type, config = ARCHITECTURES[name]
    check_recorded(write(model_type, **config))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "longcat_flash"])
def test_preemption_and_whole_prompts(
    write: Any, check_parity: Any, name: str, backend: str
) -> None:
    model_type, config = ARCHITECTURES[name]
    reference = write(model_type, **config)
    own = {"attention_backend": backend, "block_size": 16}
    check_parity(
        reference, lengths=(3, 20, 40, 33), num_gpu_blocks_override=6, max_model_len=56, **own
    )
    check_parity(
        reference, lengths=(50, 50), max_num_batched_tokens=160, enable_chunked_prefill=False, **own
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["deepseek_v2, as V2-Lite", "deepseek_v32", "longcat_flash"])
def test_cached_prefixes_and_two_answers(
    write: Any, check_cached: Any, name: str, backend: str
) -> None:
    model_type, config = ARCHITECTURES[name]
    reference = write(model_type, **config)
    check_cached(reference, (37, 30, 17), attention_backend=backend, block_size=16)


def kimi_of(write: Any, **values: Any) -> Any:
    """Write Kimi Linear under the names of the published checkpoints. Transformers reads them, but
    writes some others."""
    reference = write("kimi_linear", **{**KIMI, **values})
    path = reference.directory / "model.safetensors"
    dense = re.compile(r"block_sparse_moe\.(\w+_proj)")
    save_file(
        {dense.sub(r"mlp.\1", name): tensor for name, tensor in load_file(path).items()}, path
    )
    path = reference.directory / "config.json"
    config = json.loads(path.read_text())
    kinds = config.pop("layer_types")
    blocks = config.pop("mlp_layer_types")
    own = {
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
    }
    own["short_conv_kernel_size"] = config.pop("linear_conv_kernel_dim")
    for name, kind in (
        ("kda_layers", "linear_attention"),
        ("full_attn_layers", "full_attention"),
    ):
        own[name] = [index + 1 for index in range(len(kinds)) if kinds[index] == kind]
    config |= {
        "linear_attn_config": own,
        "first_k_dense_replace": blocks.count("dense"),
        "mla_use_nope": True,
    }
    path.write_text(json.dumps(config))
    return reference


@pytest.fixture
def write_kimi(write: Any) -> Any:
    return partial(kimi_of, write)


@pytest.mark.parametrize(
    "values",
    [{}, {"q_lora_rank": 24, "mlp_layer_types": ["sparse"] * 3, "n_group": 1, "topk_group": 1}],
)
def test_kimi_linear(
    write_kimi: Any, check_parity: Any, check_recorded: Any, values: dict[str, Any]
) -> None:
    reference = write_kimi(**values)
    check_parity(reference, mamba_block_size=8)
    check_recorded(reference)


def test_kimi_linear_with_few_blocks_and_cached_prefixes(
    write_kimi: Any, check_parity: Any, check_cached: Any
) -> None:
    reference = write_kimi()
    check_parity(
        reference,
        lengths=(3, 20, 40, 33),
        num_gpu_blocks_override=12,
        max_model_len=56,
        mamba_block_size=8,
    )
    check_cached(reference, (56, 52, 48), mamba_block_size=8)


def pangu_of(write: Any, sandwich: bool) -> Any:
    """Transformers does not have this architecture. The reference is its DeepSeek-V3 without
    corrections, with the norms of the published definition."""
    groups = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7, "rms_norm_eps": 1e-3}
    reference = write(
        "deepseek_v3", **LATENT, **EXPERTS, **groups, q_lora_rank=24, first_k_dense_replace=1
    )
    path = reference.directory / "model.safetensors"
    tensors = {
        name: tensor
        for name, tensor in load_file(path).items()
        if not name.endswith("correction_bias")
    }
    for name, buffer in reference.model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.zero_()
    if sandwich:
        for index, layer in enumerate(reference.model.model.layers):
            norms = [type(layer.input_layernorm)(32, eps=1e-3) for _ in range(2)]
            for name, norm in zip(("pre_mlp", "post_mlp"), norms, strict=True):
                norm.weight.data.normal_(1, 0.3)
                tensors[f"model.layers.{index}.{name}_layernorm.weight"] = norm.weight.data
            layer.forward = partial(sandwiched, layer, *norms)
    save_file(tensors, path)
    path = reference.directory / "config.json"
    config = json.loads(path.read_text())
    config |= {own: config.pop(name, None) for name, own in NAMES.items()} | {
        "num_dense_layers": 1,
        "sandwich_norm": sandwich,
    }
    for name in ("mlp_layer_types", "n_group", "topk_group", "rope_interleave"):
        config.pop(name, None)
    path.write_text(
        json.dumps(
            {
                **config,
                "model_type": "pangu_ultra_moe",
                "architectures": ["PanguUltraMoEForCausalLM"],
            }
        )
    )
    return reference


@pytest.mark.parametrize("sandwich", [True, False])
def test_pangu_ultra_moe(write: Any, check_recorded: Any, sandwich: bool) -> None:
    check_recorded(pangu_of(write, sandwich))


def sandwiched(
    layer: Any, before: Any, after: Any, hidden: torch.Tensor, **step: Any
) -> torch.Tensor:
    """Run a layer of transformers' DeepSeek-V3 with a norm of each block's result."""
    hidden = hidden + layer.post_attention_layernorm(
        layer.self_attn(layer.input_layernorm(hidden), **step)[0]
    )
    found: torch.Tensor = hidden + after(layer.mlp(before(hidden)))
    return found


def logprobs(llm: Any, prompts: list[list[int]]) -> torch.Tensor:
    """Return the logprobs after every token of the prompts and of one more token: [positions of all
    prompts, V]."""
    params = SamplingParams(
        max_tokens=2,
        temperature=0,
        prompt_logprobs=-1,
        logprobs=-1,
        ignore_eos=True,
        detokenize=False,
    )
    rows: list[Any] = []
    for output in llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    ):
        rows += [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])[:1]]
    return torch.tensor([[row[token].logprob for token in sorted(row)] for row in rows])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kv_cache_dtype", "limit"), [("bfloat16", 0.02), ("float16", 0.003), ("fp8_ds_mla", 0.1)]
)
def test_types_of_the_cache_stay_close(
    write: Any, open_llm: Any, backend: str, kv_cache_dtype: str, limit: float
) -> None:
    model_type, config = ARCHITECTURES["minicpm3, plain"]
    reference = write(model_type, **config)
    prompts = [[7, 30, 101, 12, 5], list(range(3, 50))]
    expected = torch.cat([reference.logprobs(prompt) for prompt in prompts])
    with open_llm(
        reference.directory, attention_backend=backend, block_size=16, kv_cache_dtype=kv_cache_dtype
    ) as llm:
        found = logprobs(llm, prompts)
    off = ((found - expected).std() / expected.std()).item()
    assert limit / 50 < off < limit


def test_types_that_do_not_exist_are_refused_by_name(write: Any, open_llm: Any) -> None:
    model_type, config = ARCHITECTURES["minicpm3, plain"]
    latent = write(model_type, **config)
    with pytest.raises(
        PegboardError,
        match="latent 'float8_e4m3fn' not in {bfloat16, float16, float32, fp8_ds_mla}",
    ):
        open_llm(latent.directory, kv_cache_dtype="fp8")


def test_models_without_latents_do_not_take_their_layout(write: Any, open_llm: Any) -> None:
    with pytest.raises(PegboardError, match="kv_dtype 'fp8_ds_mla' not in"):
        open_llm(write("llama").directory, kv_cache_dtype="fp8_ds_mla")


def test_a_quantized_up_projection_is_dequantized(write: Any, open_llm: Any, tmp_path: Any) -> None:
    model_type, config = ARCHITECTURES["minicpm3, plain"]
    reference = write(
        model_type,
        **{
            **config,
            "hidden_size": 64,
            "kv_lora_rank": 32,
            "intermediate_size": 64,
            "dim_model_base": 64,
        },
    )
    prompts = [[7, 30, 101, 12, 5], list(range(3, 50))]
    expected = torch.cat([reference.logprobs(prompt) for prompt in prompts])
    for method, limit in (("rtn", 0.15), ("fp8", 0.4)):
        with open_llm(reference.directory, quantization=method, download_dir=str(tmp_path)) as llm:
            found = logprobs(llm, prompts)
        off = ((found - expected).std() / expected.std()).item()
        assert limit / 20 < off < limit, method
