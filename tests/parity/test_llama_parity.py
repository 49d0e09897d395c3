"""The llama package compared with transformers: architectures, and every rule of rotary scaling."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pegboard import SamplingParams
from pegboard.errors import ModelError

ARCHITECTURES = {
    "llama": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama, biases, odd head size": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "ministral3, late queries": (
        "ministral3",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen2, windows above layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}

ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, betas": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.2,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(write: Any, check_parity: Any, name: str) -> None:
    model_type, config = ARCHITECTURES[name]
    check_parity(write(model_type, **config))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_dual_chunks(write: Any, check_parity: Any, open_llm: Any, model_type: str) -> None:
    """Within the first chunk this is plain attention, and so it is where the config is
    overridden."""
    chunks = {"chunk_size": 56, "local_size": 8, "original_max_position_embeddings": 56}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    more = experts if model_type == "qwen3_moe" else {}
    reference = write(model_type, dual_chunk_attention_config=chunks, **more)
    check_parity(reference, max_model_len=48, lengths=(6, 38))
    check_parity(reference, hf_overrides={"dual_chunk_attention_config": None})
    with pytest.raises(ModelError, match="48 tokens; max_model_len is 64. Set max_model_len to at"):
        open_llm(reference.directory)


def test_gritlm_is_a_mistral(write: Any, check_parity: Any) -> None:
    reference = write("mistral", sliding_window=9)
    path = reference.directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["GritLM"]}))
    check_parity(reference)


def test_a_prompt_whose_last_step_is_one_token(write: Any, check_parity: Any) -> None:
    """16 of its 17 tokens are computed in a step that reports nothing, although all logprobs of the
    prompt are then known."""
    check_parity(write("llama"), lengths=(17,))


@pytest.mark.parametrize("name", ROPE)
def test_rope_scaling(write: Any, check_parity: Any, name: str) -> None:
    check_parity(write("llama", rope_parameters={"rope_theta": 500.0, **ROPE[name]}))


def test_linear_scaling_beyond_the_trained_length(write: Any, check_parity: Any) -> None:
    rope = {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}
    check_parity(write("llama", rope_parameters=rope, max_position_embeddings=32), lengths=(50,))


def test_dynamic_scaling_at_full_length(write: Any, check_parity: Any) -> None:
    """transformers computes the base from the longest text of a step. Pegboard always computes it
    from the longest allowed text. They must agree on a text of that length: 2 · 32 tokens, 55 of
    them prompt and 9 output."""
    rope = {"rope_theta": 500.0, "rope_type": "dynamic", "factor": 2.0}
    check_parity(write("llama", rope_parameters=rope, max_position_embeddings=32), lengths=(55,))


@pytest.mark.parametrize("original", [32, 64])
def test_longrope(write: Any, check_parity: Any, original: int) -> None:
    """transformers uses the long divisors for texts beyond the original length. Pegboard uses them
    for models that allow longer texts."""
    rope = {
        "rope_theta": 500.0,
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 1.5, 2.0, 4.0],
        "original_max_position_embeddings": original,
    }
    check_parity(write("llama", rope_parameters=rope), lengths=(40,))


SETTINGS: dict[str, dict[str, Any]] = {
    "one token per block": {"block_size": 1},
    "prompts whole": {
        "block_size": 16,
        "max_num_batched_tokens": 128,
        "enable_chunked_prefill": False,
    },
    "one at a time": {"max_num_seqs": 1, "max_num_batched_tokens": 7},
    "memory for one and a half": {"num_gpu_blocks_override": 19, "max_model_len": 56},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_do_not_change_results(write: Any, check_parity: Any, name: str) -> None:
    check_parity(
        write("mistral", sliding_window=9, num_hidden_layers=2),
        lengths=(3, 20, 40, 33),
        **SETTINGS[name],
    )


def test_cached_prefixes_do_not_change_results(write: Any, open_llm: Any) -> None:
    reference = write("llama", num_hidden_layers=2)
    stem = list(range(3, 40))
    prompts = [
        {"prompt_token_ids": [*stem[:length], 50 + length]} for length in (37, 30, 37, 13, 37)
    ]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False)
    with open_llm(reference.directory) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                found = list(output.outputs[0].token_ids)
                expected = reference.logprobs([*prompt["prompt_token_ids"], *found])
                assert (
                    found == expected[len(prompt["prompt_token_ids"]) - 1 : -1].argmax(-1).tolist()
                )
        assert all(output.num_cached_tokens for output in outputs)


def test_shards_and_made_up_weights(write: Any, open_llm: Any, check_parity: Any) -> None:
    reference = write("qwen2")
    reference.model.save_pretrained(reference.directory, max_shard_size="20KB")
    (reference.directory / "model.safetensors").unlink(missing_ok=True)
    assert len(list(reference.directory.glob("*.safetensors"))) > 2
    check_parity(reference)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    texts = []
    for seed in (0, 0, 1):
        with open_llm(reference.directory, load_format="dummy", seed=seed) as llm:
            texts.append(
                list(
                    llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)[0]
                    .outputs[0]
                    .token_ids
                )
            )
    assert texts[0] == texts[1] != texts[2]
