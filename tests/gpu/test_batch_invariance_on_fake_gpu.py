"""With `batch_invariant`, engines on a fake GPU give a request the same tokens and the same bits of
its logprobs in every batch: alone or with others, in any order, with its prompt in one piece or in
chunks, and with or without a prefix from the cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_engine import engine_on_fake_gpu
from pegboard_kernel_triton import sampling
from test_default_dtype import OWN
from tiny_models import make_model

from pegboard import LLM, SamplingParams
from pegboard.errors import PegboardError
from pegboard_testing.exact_sums import OnlyExactSums

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]

TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 67,
}
GPT = {
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    **dict.fromkeys(TINY.keys() - {"head_dim", "vocab_size"}),
    "vocab_size": 67,
}
SETTINGS: dict[str, Any] = {
    "batch_invariant": True,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": 4,
    "max_num_seqs": 2,
}
COMMON = {"max_tokens": 2, "logprobs": 2, "detokenize": False, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, **COMMON)
SEEDED = SamplingParams(seed=5, top_k=40, **COMMON)
PROMPTS = [[40, 41, 42, 43, 44, 9, 8, 7], [60], [40, 41, 42, 43, 44, 11]]
"""The first and the last one share a block."""


@pytest.fixture(autouse=True)
def _fast_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "ROWS", 4)  # faster in the interpreter


def answers(llm: LLM, order: Sequence[int]) -> dict[int, Any]:
    """Return, by the number of its prompt, each answer's tokens and all of its logprobs."""
    chosen = [({"prompt_token_ids": PROMPTS[i]}, SEEDED if i % 2 else GREEDY) for i in order]
    prompts, params = (list(each) for each in zip(*chosen, strict=True))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        number: (
            list(output.outputs[0].token_ids),
            [
                {token: (item.logprob, item.rank) for token, item in row.items()}
                for row in output.outputs[0].logprobs or []
            ],
        )
        for number, output in zip(order, outputs, strict=True)
    }


def check_batches(model: Path, **settings: Any) -> None:
    settings = SETTINGS | settings
    with engine_on_fake_gpu(model, **settings) as (llm, gpu), OnlyExactSums():
        before = (gpu.host_reads, gpu.blocking_uploads)
        expected = answers(llm, [0, 1, 2])
        assert (gpu.host_reads, gpu.blocking_uploads) == before, "no step waits for the device"
        alone = answers(llm, [2])
        assert alone[2] == expected[2], "from the cache, alone"
        assert gpu.replays or "enforce_eager" in settings, "decodes are captured"
    chunks = {"max_num_batched_tokens": 5, "enable_prefix_caching": False, "enforce_eager": True}
    with engine_on_fake_gpu(model, **{**settings, **chunks}) as (llm, _), OnlyExactSums():
        assert answers(llm, [2, 1, 0]) == expected, "in chunks, not captured"


def test_dense(tmp_path: Path) -> None:
    make_model("llama", **TINY).save_pretrained(tmp_path)
    check_batches(tmp_path)


def test_layer_norms(tmp_path: Path) -> None:
    make_model("gpt2", **GPT).save_pretrained(tmp_path)
    check_batches(tmp_path)


def test_what_depends_on_the_batch_is_refused(tmp_path: Path) -> None:
    """The error names what there is, and what it lacks."""
    make_model("llama", **TINY).save_pretrained(tmp_path)
    refusal = "(?s)batch_invariant: no kernel plugin computes 'lora_add'.*unsuitable.*lacks the"
    with (
        pytest.raises(PegboardError, match=refusal),
        engine_on_fake_gpu(tmp_path, **SETTINGS, enable_lora=True, max_lora_rank=8),
    ):
        pass


REFUSED = {
    "gpt_oss": "no plugin of kind 'model'",
    "longcat_flash": "no kernel plugin computes 'zero_experts'",
    "phimoe, biases": "no kernel plugin computes 'sparse_mixer'",
}
"""Architectures of which something depends on the batch, and what the error says."""
FLEX = "llama, biases, odd head size"
"""Only `flex` has such heads."""
WIDER: dict[str, dict[str, int]] = {
    "apertus": {"intermediate_size": 64},
    "gpt2, scaled by layer": {"n_inner": 64},
    "gpt_neox, blocks in turn": {"intermediate_size": 64},
}
"""Their activations are torch's. On the CPU that simulates the GPU, the last numbers of a tensor,
if there are not a multiple of 32, are computed by other instructions, which round otherwise."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OWN.keys() - {FLEX}))
def test_every_architecture(tmp_path: Path, name: str) -> None:
    model_type, config = OWN[name]
    make_model(model_type, **{**config, **WIDER.get(name, {})}).save_pretrained(tmp_path)
    settings = {"kv_cache_memory_bytes": 2**23, "max_model_len": 32, "mamba_block_size": 4}
    settings["enforce_eager"] = True  # captures take most of the time
    refusal = REFUSED.get(name)
    if refusal is None:
        check_batches(tmp_path, **settings)
        return
    with (
        pytest.raises(PegboardError, match=refusal),
        engine_on_fake_gpu(tmp_path, **SETTINGS, **settings),
    ):
        pass


@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    make_model("qwen3_moe", **TINY, **sizes, norm_topk_prob=True).save_pretrained(tmp_path)
    check_batches(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["fp8", "rtn_int4"])
def test_packed_weights(tmp_path: Path, quantization: str) -> None:
    make_model("llama", **TINY).save_pretrained(tmp_path)
    check_batches(tmp_path, quantization=quantization)


@pytest.mark.slow
def test_packed_experts(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    make_model("qwen3_moe", **TINY, **sizes).save_pretrained(tmp_path)
    check_batches(tmp_path, quantization="fp8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}, {}),
        ({}, {"dtype": "bfloat16"}),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({}, {"logprobs_mode": "processed_logprobs"}),
    ],
    ids=str,
)
def test_other_layers(tmp_path: Path, config: dict[str, Any], settings: dict[str, Any]) -> None:
    make_model("qwen2", **TINY, **config).save_pretrained(tmp_path)
    check_batches(tmp_path, **settings)
