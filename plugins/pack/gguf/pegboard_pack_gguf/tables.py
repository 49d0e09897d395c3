"""The architectures of GGUF files: one table each, of names of tensors and of the configuration.
Those with experts are in `mixtures`, those with states in `state_models`."""

from __future__ import annotations

from dataclasses import replace

from pegboard_pack_gguf.mixtures import MIXTURES
from pegboard_pack_gguf.state_models import STATE_MODELS
from pegboard_pack_gguf.table_parts import (
    ATTENTION,
    GATED,
    GRANITE_SCALES,
    LAYER,
    LAYER_NORM_EPS,
    QKV_BIAS,
    REQUIRED,
    RMS,
    TOP,
    UNPERMUTE,
    Architecture,
    Has,
    Key,
)

_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_LAYER = {**LAYER, **_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_MERGED_UP = {**LAYER, "ffn_up": "mlp.gate_up_proj"}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BLOOM_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_BLOOM_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_MPT_LAYER = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_WINDOW = {"sliding_window": Key("attention.sliding_window", "count")}
_GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}
_GPT2_NAMES |= {"n_positions": "max_position_embeddings", "n_inner": "intermediate_size"}
COPIES = {
    "gpt2": _GPT2_NAMES,
    "gpt_bigcode": _GPT2_NAMES,
    "falcon": {"num_kv_heads": "num_key_value_heads", "ffn_hidden_size": "intermediate_size"},
    "bloom": {"seq_length": "max_position_embeddings"},
    "mpt": {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
    },
}
"""Values of the config that the model calls by another name, by model type."""


LLAMA = Architecture(
    class_name="LlamaForCausalLM",
    model_type="llama",
    rope_style="pairs",
    config={**RMS, "attention_bias": QKV_BIAS, "mlp_bias": Has(("blk.0.ffn_down.bias",))},
)
QWEN2 = Architecture(class_name="Qwen2ForCausalLM", model_type="qwen2")
"""Also the language model of Qwen-VL: the positions of text are the same on all axes."""
_GEMMA_ACTIVATION = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
GEMMA2 = Architecture(
    class_name="Gemma2ForCausalLM",
    model_type="gemma2",
    layer=_GEMMA_LAYER,
    norm_offset=1.0,
    full_every=2,
    config={
        **RMS,
        **_GEMMA_ACTIVATION,
        "sliding_window": Key("attention.sliding_window", "count", REQUIRED),
        "attn_logit_softcapping": Key("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": Key("final_logit_softcapping", default=30.0),
    },
)
OLMO2 = Architecture(
    class_name="Olmo2ForCausalLM",
    model_type="olmo2",
    layer={**ATTENTION, **GATED, **_POST_NORMS},
)
OLMO3 = replace(
    OLMO2,
    class_name="Olmo3ForCausalLM",
    model_type="olmo3",
    full_every=4,
    config={**RMS, **_WINDOW},
)
GRANITE = Architecture(
    class_name="GraniteForCausalLM",
    model_type="granite",
    changes=UNPERMUTE,
    config={
        **RMS,
        "attention_bias": QKV_BIAS,
        "mlp_bias": Has(("blk.0.ffn_down.bias",)),
        **GRANITE_SCALES,
    },
)
FALCON = Architecture(
    class_name="FalconForCausalLM",
    model_type="falcon",
    top=_BLOOM_TOP,
    layers="transformer.h",
    layer=_BLOOM_LAYER,
    split={},
    changes={"attn_qkv": "by_head"},
    config={
        "layer_norm_epsilon": LAYER_NORM_EPS,
        "alibi": False,
        "parallel_attn": True,
        "bias": QKV_BIAS,
        "num_ln_in_parallel_attn": 1,
    },
)
FALCON_TWO_NORMS = replace(
    FALCON,
    layer={**_BLOOM_LAYER, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    config={**FALCON.config, "num_ln_in_parallel_attn": 2},
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "internlm2": LLAMA,
    "xverse": LLAMA,
    "mistral3": LLAMA,
    "exaone": replace(LLAMA, rope_style="halves"),
    "qwen2": QWEN2,
    "qwen2vl": QWEN2,
    "qwen3": Architecture(
        class_name="Qwen3ForCausalLM",
        model_type="qwen3",
        config={**RMS, "attention_bias": QKV_BIAS},
    ),
    "gemma": Architecture(
        class_name="GemmaForCausalLM",
        model_type="gemma",
        norm_offset=1.0,
        config={**RMS, **_GEMMA_ACTIVATION},
    ),
    "gemma2": GEMMA2,
    "gemma3": replace(
        GEMMA2,
        class_name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        full_every=6,
        config={
            **RMS,
            **_GEMMA_ACTIVATION,
            "sliding_window": Key("attention.sliding_window", "count", REQUIRED),
            "rope_theta": Key("rope.freq_base", default=1_000_000.0),
            "rope_local_base_freq": Key("rope.freq_base_swa", default=10000.0),
            "final_logit_softcapping": Key("final_logit_softcapping"),
        },
    ),
    "phi2": Architecture(
        class_name="PhiForCausalLM",
        model_type="phi",
        top={**TOP, "output_norm": "model.final_layernorm"},
        layer={
            **LAYER,
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        config={"layer_norm_eps": LAYER_NORM_EPS, "hidden_act": "gelu_new"},
        is_partly_rotary=True,
    ),
    "phi3": Architecture(
        class_name="Phi3ForCausalLM",
        model_type="phi3",
        layer={**_MERGED_UP, "attn_qkv": "self_attn.qkv_proj"},
        split={},
        config={**RMS, **_WINDOW},
    ),
    "gpt2": Architecture(
        class_name="GPT2LMHeadModel",
        model_type="gpt2",
        top=_GPT2_TOP,
        layers="transformer.h",
        layer=_GPT2_LAYER,
        split={},
        changes={
            "position_embd": "float",
            **dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), "transpose"),
        },
        config={"layer_norm_epsilon": LAYER_NORM_EPS, "activation_function": "gelu_new"},
    ),
    "starcoder": Architecture(
        class_name="GPTBigCodeForCausalLM",
        model_type="gpt_bigcode",
        top=_GPT2_TOP,
        layers="transformer.h",
        layer=_GPT2_LAYER,
        split={},
        changes={"position_embd": "float"},
        config={
            "layer_norm_epsilon": LAYER_NORM_EPS,
            "activation_function": "gelu_pytorch_tanh",
            "multi_query": True,
        },
    ),
    "starcoder2": Architecture(
        class_name="Starcoder2ForCausalLM",
        model_type="starcoder2",
        layer={**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        config={
            "norm_epsilon": LAYER_NORM_EPS,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": QKV_BIAS,
            "sliding_window": None,
        },
    ),
    "gptneox": Architecture(
        class_name="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        layers="gpt_neox.layers",
        layer={
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        split={},
        changes={"attn_qkv": "by_head"},
        config={
            "layer_norm_eps": LAYER_NORM_EPS,
            "hidden_act": "gelu",
            "attention_bias": QKV_BIAS,
            "use_parallel_residual": Key("use_parallel_residual", default=True),
        },
        is_partly_rotary=True,
    ),
    "falcon": FALCON,
    "bloom": Architecture(
        class_name="BloomForCausalLM",
        model_type="bloom",
        top=_BLOOM_TOP,
        layers="transformer.h",
        layer=_BLOOM_LAYER,
        split={},
        changes={"attn_qkv": "by_head"},
        config={"layer_norm_epsilon": LAYER_NORM_EPS},
    ),
    "mpt": Architecture(
        class_name="MptForCausalLM",
        model_type="mpt",
        top={
            "token_embd": "transformer.wte",
            "output_norm": "transformer.norm_f",
            "output": "lm_head",
        },
        layers="transformer.blocks",
        layer=_MPT_LAYER,
        split={},
        config={
            "layer_norm_epsilon": LAYER_NORM_EPS,
            "alibi_bias_max": Key("attention.max_alibi_bias", default=0.0),
            "clip_qkv": Key("attention.clamp_kqv"),
        },
    ),
    "stablelm": Architecture(
        class_name="StableLmForCausalLM",
        model_type="stablelm",
        config={
            "layer_norm_eps": LAYER_NORM_EPS,
            "use_qkv_bias": QKV_BIAS,
            "qk_layernorm": Has(("blk.0.attn_q_norm.weight",)),
        },
        is_partly_rotary=True,
    ),
    "command-r": Architecture(
        class_name="CohereForCausalLM",
        model_type="cohere",
        config={
            "layer_norm_eps": LAYER_NORM_EPS,
            "logit_scale": Key("logit_scale", default=REQUIRED),
            "use_qk_norm": Has(("blk.0.attn_q_norm.weight",)),
        },
    ),
    "cohere2": Architecture(
        class_name="Cohere2ForCausalLM",
        model_type="cohere2",
        full_every=4,
        config={
            "layer_norm_eps": LAYER_NORM_EPS,
            "logit_scale": Key("logit_scale", default=REQUIRED),
            "sliding_window": Key("attention.sliding_window", "count", REQUIRED),
        },
    ),
    "granite": GRANITE,
    "minicpm": replace(
        GRANITE,
        config={
            **GRANITE.config,
            "embedding_multiplier": Key("embedding_scale", default=12.0),
            "residual_multiplier": Key("residual_scale", default=REQUIRED),
            "logits_scaling": Key("logit_scale", default=REQUIRED),
        },
    ),
    "olmo": Architecture(
        class_name="OlmoForCausalLM",
        model_type="olmo",
        changes=UNPERMUTE,
        config={"clip_qkv": Key("attention.clamp_kqv")},
    ),
    "olmo2": OLMO2,
    "nemotron": Architecture(
        class_name="NemotronForCausalLM",
        model_type="nemotron",
        norm_offset=1.0,
        config={"norm_eps": LAYER_NORM_EPS, "hidden_act": "relu2", "attention_bias": QKV_BIAS},
        is_partly_rotary=True,
    ),
    "apertus": Architecture(
        class_name="ApertusForCausalLM",
        model_type="apertus",
        layer={**LAYER, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        config={**RMS, "hidden_act": "xielu", "attention_bias": QKV_BIAS},
    ),
    "jais2": Architecture(
        class_name="Jais2ForCausalLM",
        model_type="jais2",
        config={
            "layer_norm_eps": LAYER_NORM_EPS,
            "hidden_act": "relu2",
            "attention_bias": QKV_BIAS,
            "mlp_bias": Has(("blk.0.ffn_down.bias",)),
        },
    ),
    "orion": Architecture(
        class_name="OrionForCausalLM",
        model_type="orion",
        config={"rms_norm_eps": LAYER_NORM_EPS, "attention_bias": QKV_BIAS},
    ),
    "pangu-embedded": Architecture(
        class_name="PanguEmbeddedForCausalLM",
        model_type="PanguEmbedded",
        config={**RMS, "bias": QKV_BIAS},
    ),
    "smollm3": Architecture(
        class_name="SmolLM3ForCausalLM",
        model_type="smollm3",
        changes=UNPERMUTE,
        config={**RMS, "attention_bias": QKV_BIAS, "no_rope_layer_interval": 4},
    ),
    "glm4": Architecture(
        class_name="Glm4ForCausalLM",
        model_type="glm4",
        layer={
            **_MERGED_UP,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        config={**RMS, "attention_bias": QKV_BIAS},
        is_partly_rotary=True,
    ),
    "chatglm": Architecture(
        class_name="GlmForCausalLM",
        model_type="glm",
        layer=_MERGED_UP,
        config={**RMS, "attention_bias": QKV_BIAS},
        is_partly_rotary=True,
    ),
    "exaone4": Architecture(
        class_name="Exaone4ForCausalLM",
        model_type="exaone4",
        layer={**ATTENTION, **GATED, **_POST_NORMS},
        full_every=4,
        config={**RMS, **_WINDOW},
    ),
    "arcee": Architecture(
        class_name="ArceeForCausalLM",
        model_type="arcee",
        changes=UNPERMUTE,
        config={
            **RMS,
            "hidden_act": "relu2",
            "attention_bias": QKV_BIAS,
            "mlp_bias": Has(("blk.0.ffn_down.bias",)),
        },
    ),
    "ernie4_5": Architecture(
        class_name="Ernie4_5ForCausalLM",
        model_type="ernie4_5",
        config={**RMS, "use_bias": Has(("blk.0.attn_output.bias",))},
    ),
    "seed_oss": Architecture(
        class_name="SeedOssForCausalLM",
        model_type="seed_oss",
        layer={**LAYER, "post_attention_norm": "post_attention_layernorm"},
        config={
            **RMS,
            "attention_bias": QKV_BIAS,
            "attention_out_bias": Has(("blk.0.attn_output.bias",)),
        },
    ),
    "hunyuan-dense": Architecture(
        class_name="HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        layer={
            **LAYER,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        config={**RMS, "attention_bias": QKV_BIAS},
    ),
    "bitnet": Architecture(
        class_name="BitNetForCausalLM",
        model_type="bitnet",
        layer={
            **LAYER,
            "attn_sub_norm": "self_attn.attn_sub_norm",
            "ffn_sub_norm": "mlp.ffn_sub_norm",
        },
        config={**RMS, "hidden_act": "relu2"},
    ),
    **MIXTURES,
    **STATE_MODELS,
}
