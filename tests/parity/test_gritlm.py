"""GritLM, which makes vectors of what follows an instruction, compared with transformers' Mistral
without a mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_converted_models import write
from test_pooling_parity import declare
from test_token_results import normalized, states_of
from tiny_models import Reference, open_llm
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from pegboard.errors import ConfigError, ModelError

LIMITS = {"max_model_len": 64, "max_num_batched_tokens": 128, "skip_tokenizer_init": False}
POOLING = {**LIMITS, "runner": "pooling"}
TEXT = "two fjords"
INSTRUCTIONS = {
    "<|user|>\nfind\n<|embed|>\n": None,
    "<|embed|>\n": None,
    "<|user|>\nfind<|embed|>\n": 1,
    "": 1,
}
"""What is before a text → how many tokens are left out; None = all of it."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in the form of Llama 2's, in which each byte is a token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    places = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(places, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(name="gritlm")
def written(tmp_path: Path) -> Reference:
    """The reference attends both ways without a window; the config says neither."""
    reference = write(tmp_path, "MistralForCausalLM", is_causal=False, vocab_size=264)
    make_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config: dict[str, Any] = {**json.loads(path.read_text()), "architectures": ["GritLM"]}
    del config["is_causal"]
    path.write_text(json.dumps({**config, "sliding_window": 5}))
    return reference


def true_vector(reference: Reference, ids: list[int], num_left_out: int) -> torch.Tensor:
    return states_of(reference, ids)[num_left_out:].mean(0)


def test_the_mean_leaves_out_instructions(gritlm: Reference) -> None:
    """All prompts are in one step."""
    encode = make_tokenizer().encode
    prompts = [before + TEXT for before in INSTRUCTIONS]
    with open_llm(gritlm.directory, **POOLING) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        (without_start,) = llm.embed([encode(prompts[0])[1:]], use_tqdm=False)
        rows = llm.encode(prompts[:1], pooling_task="token_embed", use_tqdm=False)[0].outputs.data
    for (before, left_out), output in zip(INSTRUCTIONS.items(), outputs, strict=True):
        ids = encode(before + TEXT)
        assert output.prompt_token_ids == ids
        true = true_vector(gritlm, ids, len(encode(before)) if left_out is None else left_out)
        result = torch.tensor(output.outputs.embedding)
        assert (result - normalized(true)).abs().max() < 1e-5
    ids = encode(prompts[0])
    result = torch.tensor(without_start.outputs.embedding)
    assert (result - normalized(true_vector(gritlm, ids[1:], 0))).abs().max() < 1e-5
    assert (torch.tensor(rows) - normalized(states_of(gritlm, ids))).abs().max() < 1e-5


def test_the_files_and_the_setting(gritlm: Reference) -> None:
    """With modules.json, `runner` is not needed. Other poolings are those of all tokens."""
    declare(gritlm.directory, "mean_tokens", "Pooling")
    ids = make_tokenizer().encode(f"<|embed|>\n{TEXT}")
    for config, left_out in (({}, len(ids) - len(TEXT)), ({"pooling_type": "LAST"}, len(ids) - 1)):
        with open_llm(gritlm.directory, **LIMITS, pooler_config=config) as llm:
            (output,) = llm.embed([ids], use_tqdm=False)
        true = true_vector(gritlm, ids, left_out)
        assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-5


def test_code_of_transformers(gritlm: Reference) -> None:
    ids = make_tokenizer().encode(f"<|embed|>\n{TEXT}")
    settings = {"model_impl": "transformers", "hf_overrides": {"sliding_window": None}}
    with open_llm(gritlm.directory, **POOLING, **settings) as llm:
        (output,) = llm.embed([ids], use_tqdm=False)
    true = normalized(true_vector(gritlm, ids, len(ids) - len(TEXT)))
    assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-5


def test_what_is_refused(gritlm: Reference) -> None:
    divided = {"enable_chunked_processing": True, "max_embed_len": 128}
    with pytest.raises(ConfigError, match="leaves out the instruction of a text, so texts cannot"):
        open_llm(gritlm.directory, **POOLING, pooler_config=divided)
    with pytest.raises(ModelError, match="vectors of GritLM have no window, and Transformers"):
        open_llm(gritlm.directory, **POOLING, model_impl="transformers")
    path = gritlm.directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "bos_token": None}))
    with pytest.raises(ModelError, match="the tokenizer has none; set bos_token"):
        open_llm(gritlm.directory, **POOLING)
