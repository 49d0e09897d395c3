"""Tiny checkpoints with random weights for the scripts, and a tokenizer with one token per byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
VOCAB_SIZE = 258
EOS_ID = 257


def write_tokenizer(folder: Path, *, pairs: bool = False) -> None:
    """Write tokenizer.json and its config. pairs: it adds special tokens, also around two texts."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    vocabulary |= {"<s>": 256, "</s>": EOS_ID}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if pairs:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B:1 </s>:1",
            special_tokens=[("<s>", 256), ("</s>", EOS_ID)],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_llama(folder: Path) -> Path:
    """Write a Llama with two layers."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        "initializer_range": 0.5,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_bert(folder: Path, num_labels: int) -> Path:
    """Write a Bert with two layers that classifies."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "num_labels": num_labels,
    }
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**sizes)).save_pretrained(folder)
    write_tokenizer(folder, pairs=True)
    return folder


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of rank 4 for the query projections of `write_llama`."""
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, 32, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(32, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
