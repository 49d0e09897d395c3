"""What heads learn from: the answers of a model, and its states at each token of them."""

from __future__ import annotations

import argparse
import gc
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pegboard import LLM, SamplingParams
from pegboard.config.schema import EngineConfig, Settings
from pegboard.plan.engine_plan import resolve


def prompts() -> list[str]:
    """Return all tasks of prompts.toml, in a random order that is always the same."""
    text = Path(__file__).with_name("prompts.toml").read_text("utf-8")
    tasks = [
        kind.format(topic)
        for group in tomllib.loads(text)["tasks"]
        for kind in group["kinds"]
        for topic in group["topics"]
    ]
    random.Random(0).shuffle(tasks)
    return tasks


def write_answers(given: argparse.Namespace, path: Path) -> None:
    """Let the model answer, half of the prompts greedily and half with temperature 0.7. Write a
    list of [tokens of the prompt, tokens of the answer]."""
    tasks = prompts()[: given.prompts]
    with LLM(str(path), max_model_len=512, max_num_seqs=64, kv_cache_memory_bytes=1 << 29) as llm:
        tokenizer = llm.get_tokenizer()
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": task}], add_generation_prompt=True, tokenize=False
            )
            for task in tasks
        ]
        params = [
            SamplingParams(
                temperature=0.7 * (number % 2), max_tokens=given.answer_tokens, seed=number
            )
            for number in range(len(tasks))
        ]
        outputs = llm.generate(
            [{"prompt_token_ids": tokenizer.encode(text)} for text in texts], params, use_tqdm=False
        )
    pairs = [
        [list(output.prompt_token_ids), list(output.outputs[0].token_ids)] for output in outputs
    ]
    given.answers.parent.mkdir(parents=True, exist_ok=True)
    given.answers.write_text(json.dumps(pairs), "utf-8")
    gc.collect()


def load(path: Path) -> Any:
    """Return the model of transformers, in bfloat16. A GGUF file is dequantized."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if path.is_dir():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    else:
        config, weights = read_gguf(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval().requires_grad_(False)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors that transformers has for this model."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    checkpoint = resolve(Settings(engine=EngineConfig(model=str(path))))[0].checkpoint
    stored = {tensor.data_offset: tensor for tensor in GGUFReader(path).tensors}
    weights = {}
    for name, entry in checkpoint.tensors.items():
        tensor = stored[entry.offset]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        values = values.view(entry.shape)
        if checkpoint.rope_style == "pairs" and (".q_proj." in name or ".k_proj." in name):
            # GGUF rotates channels 2i and 2i + 1, transformers i and i + head_dim / 2
            pairs = (-1, checkpoint.config["head_dim"] // 2, 2, entry.shape[1])
            values = values.view(pairs).swapaxes(1, 2).reshape(entry.shape)
        weights[name] = values.bfloat16()
    return {**checkpoint.config}, weights


class Texts:
    """The answers in batches of similar length, with the target's states.

    batches: for each, the tokens [B, L], whether a token belongs to an answer [B, L], the tapped
    states [B, L, taps, size], and the states after the final norm [B, L, size].
    """

    def __init__(self, model: Any, pairs: list[Any], taps: tuple[int, ...], size: int) -> None:
        order = sorted(range(len(pairs)), key=lambda number: sum(map(len, pairs[number])))
        self.model = model
        self.taps = taps
        self.batches = [
            self._batch([pairs[number] for number in order[first : first + size]])
            for first in range(0, len(order), size)
        ]

    @torch.inference_mode()
    def _batch(self, pairs: list[Any]) -> tuple[Tensor, ...]:
        length = max(sum(map(len, pair)) for pair in pairs)
        tokens = torch.zeros(len(pairs), length, dtype=torch.int64)
        answers = torch.zeros(len(pairs), length, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(pairs):
            stop = len(prompt) + len(answer)
            tokens[row, :stop] = torch.tensor(prompt + answer)
            answers[row, len(prompt) : stop] = True
        before_norm: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(
            lambda _, values: before_norm.append(values[0])
        )
        states = self.model.model(tokens, output_hidden_states=True).hidden_states
        hook.remove()
        last = self.model.config.num_hidden_layers
        parts = [before_norm[0] if depth == last else states[depth] for depth in self.taps]
        return tokens, answers, torch.stack(parts, 2), states[-1].clone()
