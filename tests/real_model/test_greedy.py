"""The default model gives transformers' greedy tokens in float32, and the same tokens however the
work is divided.

Equality of tokens needs weights and activations in float32; `test_quality.py` measures the effect
of computing with the stored integers.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import LLM, SamplingParams

pytestmark = pytest.mark.real_model

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "Write a haiku about the sea.",
    "How do I boil an egg?",
    "What is 12 times 12?",
    "Explain photosynthesis to a child.",
    "Who wrote Romeo and Juliet?",
    "List the planets of the solar system.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a Python function that adds two numbers.",
    "What is the boiling point of water in Fahrenheit?",
    "Tell me a short joke.",
    "Summarize the story of Cinderella in one sentence.",
    "What does HTTP stand for?",
    "Is a tomato a fruit or a vegetable?",
    "Schreibe einen Satz auf Deutsch.",
    "How many days are there in a leap year?",
    "What is a prime number?",
    "Recommend a book about space. 🚀",
]
GREEDY = SamplingParams(temperature=0, max_tokens=32)
EXACT: dict[str, Any] = {
    "dtype": "float32",
    "plugin_options": {"quantization.gguf": {"compute": "float"}},
}


def conversations() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in QUESTIONS]


def transformers_model(path: Path) -> Any:
    """transformers' Llama with the file's weights, read by the `gguf` package. The file holds the
    rows of Q and K interleaved for rotary pairs, but transformers needs halves. So the rows of each
    head are put back in that order."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = 9
    kv_heads = 3
    size = 576
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=size,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    names = {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights = {}
    for tensor in GGUFReader(path).tensors:
        *block, kind, _ = tensor.name.split(".")
        data = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if kind in ("attn_q", "attn_k"):
            count = heads if kind == "attn_q" else kv_heads
            data = data.view(count, size // heads // 2, 2, size).swapaxes(1, 2).reshape(data.shape)
        prefix = f"layers.{block[1]}." if block else ""
        weights[f"model.{prefix}{names[kind]}.weight"] = data
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    engine = LLM(str(smollm2_gguf), max_model_len=1024, kv_cache_memory_bytes=1 << 29, **EXACT)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> list[Any]:
    return llm.chat(conversations(), GREEDY, use_tqdm=False)


def test_same_tokens_as_transformers(smollm2_gguf: Path, outputs: list[Any]) -> None:
    """Every output token is the most likely one under transformers, given the prompt and the tokens
    before it. By induction, this is transformers' own greedy output."""
    reference = transformers_model(smollm2_gguf)
    for output in outputs:
        prompt = output.prompt_token_ids
        answer = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == answer, output.prompt


def test_one_by_one_as_together(llm: LLM, outputs: list[Any]) -> None:
    """A request has the same output alone as in the batch. Alone, it also reads the prefix cache
    that the batch has filled."""
    for conversation, together in zip(conversations()[:6], outputs, strict=False):
        alone = llm.chat(conversation, GREEDY, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == together.outputs[0].token_ids
        assert alone.num_cached_tokens > 0 or len(alone.prompt_token_ids) <= 32


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 40, "block_size": 16, "max_model_len": 256},
        {
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
            "block_size": 8,
            "max_in_flight": 2,
            "enable_prefix_caching": False,
        },
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 64},
        pytest.param(
            {"pipeline_parallel_size": 2, "max_num_batched_tokens": 64},
            marks=pytest.mark.slow,  # test_stages.py covers it
        ),
    ],
    ids=[
        "preempted",
        "short chunks, small blocks, two steps in flight, no cache",
        "two ranks",
        "two stages",
    ],
)
def test_same_tokens_however_cut(
    smollm2_gguf: Path, outputs: list[Any], settings: dict[str, Any]
) -> None:
    base: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 29, **EXACT}
    llm = LLM(str(smollm2_gguf), **{**base, **settings})
    try:
        again = llm.chat(conversations()[:10], GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in again] == [
            o.outputs[0].token_ids for o in outputs[:10]
        ]
    finally:
        llm.shutdown()


def test_an_llm_nobody_refers_to_is_stopped(smollm2_gguf: Path) -> None:
    """A step is in flight. Its thread must end before the interpreter does."""

    def step_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "pegboard-steps"}

    before = step_threads()
    llm = LLM(str(smollm2_gguf), max_model_len=256, kv_cache_memory_bytes=1 << 27, max_in_flight=2)
    llm.generate(["One, two,", "A paged KV cache"], GREEDY, use_tqdm=False)
    engine = weakref.ref(llm.llm_engine.engine)
    assert step_threads() - before, "steps in flight run in a thread"
    del llm
    gc.collect()
    assert engine() is None
    assert not step_threads() - before


def test_attention_backends_and_block_sizes_agree(llm: LLM, smollm2_gguf: Path) -> None:
    """With 8-bit activations they would differ by tenths of a nat, because these amplify
    differences of rounding."""
    prompt = ["The capital of France is"]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=5)
    with LLM(
        str(smollm2_gguf), max_model_len=256, kv_cache_memory_bytes=1 << 27, block_size=1, **EXACT
    ) as other:
        found = [one.generate(prompt, params, use_tqdm=False)[0].outputs[0] for one in (llm, other)]
    first, second = found
    assert (
        first.token_ids == second.token_ids
        and first.logprobs is not None
        and second.logprobs is not None
    )
    for left, right in zip(first.logprobs, second.logprobs, strict=True):
        shared = left.keys() & right.keys()
        assert len(shared) >= 4 and all(
            abs(left[token].logprob - right[token].logprob) < 1e-3 for token in shared
        )
