"""The tokenizer and the parsers that a checkpoint with Mistral's tokenizer file gets, automatically
and by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pegboard_tokenizer_hf.tokenizer import HFTokenizer
from pegboard_tokenizer_mistral.tokenizer import MistralCommonTokenizer
from tokenizers import Tokenizer, models

from pegboard import LLM, SamplingParams
from pegboard.config.sources import engine_settings
from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.errors import ModelError
from pegboard.interfaces.tokenizer import Chat
from pegboard.plan.engine_plan import make_tokenizer, resolve

CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 400,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


@pytest.fixture
def folder(tmp_path: Path, write_tekken: Callable[..., Path]) -> Path:
    """A checkpoint without weights, with both kinds of tokenizer files."""
    write_tekken(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(models.BPE({"a": 0, "</s>": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def chosen(folder: Path, **settings: Any) -> tuple[type, str | None, str | None]:
    plan, registry = resolve(engine_settings(str(folder), {"load_format": "dummy", **settings}))
    return type(make_tokenizer(registry, plan)), plan.tool_parser, plan.reasoning_parser


def test_it_is_taken_where_its_file_is(folder: Path) -> None:
    assert chosen(folder) == (MistralCommonTokenizer, "pegboard-family-mistral:mistral", None)
    (folder / "chat_template.jinja").write_text("[TOOL_CALLS] [THINK] {{ messages }}{{ tools }}")
    assert chosen(folder)[2] == "pegboard-family-mistral:mistral"
    assert chosen(folder, tokenizer_mode="hf")[0] is HFTokenizer
    (folder / "tekken.json").unlink()
    assert chosen(folder)[0] is HFTokenizer
    with pytest.raises(ModelError, match=r"neither tekken.json nor tokenizer.model.v\*"):
        chosen(folder, tokenizer_mode="mistral")


def test_other_checkpoints_get_it_by_name(folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    assert chosen(folder)[0] is HFTokenizer
    assert chosen(folder, tokenizer_mode="mistral")[0] is MistralCommonTokenizer
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="read by the tokenizer 'mistral'"):
        chosen(folder)


def test_a_recommended_tokenizer_that_is_not_there_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, registry = resolve(engine_settings(str(folder), {"load_format": "dummy"}))
    names = registry.names("tokenizer")
    monkeypatch.setattr(
        registry, "names", lambda kind: [name for name in names if name != "mistral"]
    )
    with caplog.at_level(logging.WARNING, "pegboard"):
        make_tokenizer(registry, plan)
    assert "mistral_common recommends the tokenizer 'mistral', but" in caplog.text


def test_a_chat_runs_on_its_token_ids(folder: Path) -> None:
    """`LLM` runs a chat in this process, and a grammar reads the vocabulary."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 2}))
    llm = LLM(str(folder), load_format="dummy")
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(
        max_tokens=12,
        temperature=0,
        structured_outputs=StructuredOutputsParams(choice=["größer", "日本"]),
    )
    try:
        (output,) = llm.chat(messages, params, use_tqdm=False)
        expected = llm.get_tokenizer().render(Chat(messages=messages)).token_ids
    finally:
        llm.shutdown()
    assert output.prompt_token_ids == expected and output.outputs[0].text in ("größer", "日本")
