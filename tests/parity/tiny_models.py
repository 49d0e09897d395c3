"""Tiny checkpoints of transformers models with random weights, and the comparison with what
transformers computes on the CPU in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from pegboard import LLM, SamplingParams
from pegboard.interfaces.executor import ExecutorSetup
from pegboard.interfaces.weight_loader import (
    Checkpoint,
    WantedWeight,
    WeightLoaderSetup,
    WeightPiece,
)
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_collective import ThreadsExecutor

TOLERANCE = 1e-4
VOCAB_SIZE = 131
PROMPT_LENGTHS = (1, 6, 17, 40)
NUM_OUTPUT_TOKENS = 9

logging.disable_progress_bar()
logging.set_verbosity_error()

DIVIDED: dict[str, Any] = {}
"""Settings that `divide` adds."""
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}


def nightly(values: Iterable[Any], *rare: Any) -> list[Any]:
    """Return the values of a parameter, or the tuples of several ones. The rare ones are tried at
    night only."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[pytest.mark.slow] if value in rare else [],
        )
        for value in values
    ]


def make_model(model_type: str, **values: Any) -> Any:
    """A tiny transformers model. values replace the common sizes; None drops one. Every tensor is
    random, also those of norms, biases, sinks and corrections of routers, so that a missing one
    shows."""
    chosen = {
        name: value for name, value in {**COMMON, **SIZES, **values}.items() if value is not None
    }
    config = AutoConfig.for_model(model_type, **chosen)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = (
                1.5 / parameter.shape[-1] ** 0.5
                if parameter.dim() > 1
                else 1.0
                if name.endswith("sinks")
                else 0.1
            )
            parameter.add_(torch.randn(parameter.shape) * spread)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(torch.randn(buffer.shape) * 0.1)
    return model


@dataclass
class Reference:
    """A transformers model and its checkpoint on disk."""

    directory: Path
    model: Any

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[n] token ids → [n, V]: the log-softmax of the logits after each token."""
        with torch.no_grad():
            return self.model(torch.tensor([list(token_ids)])).logits[0].float().log_softmax(-1)


def random_prompts(lengths: Sequence[int] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]


def open_llm(directory: Path, **settings: Any) -> LLM:
    """Settings with small blocks, and with steps so small that prompts are computed in chunks,
    together with each other and with decodes."""
    chosen = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": 4,
        "kv_cache_memory_bytes": 4 << 20,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 3,
        "max_logprobs": -1,
        "generation_config": "vllm",
    }
    return LLM(str(directory), **{**chosen, **settings, **DIVIDED})


def only_boxes(
    tensors: Callable[[Checkpoint, Iterable[WantedWeight]], Iterator[WeightPiece]],
) -> Callable[[Checkpoint, Iterable[WantedWeight]], Iterator[WeightPiece]]:
    """Return `tensors` of a loader with NaN, or with ones in all bits, wherever a rank does not
    read."""

    def pieces(checkpoint: Checkpoint, wanted: Iterable[WantedWeight]) -> Iterator[WeightPiece]:
        weights = {weight.name: weight for weight in wanted}
        for piece in tensors(checkpoint, weights.values()):
            boxes = weights[piece.name].boxes
            if boxes and isinstance(piece.data, torch.Tensor):
                is_float = piece.data.is_floating_point()
                data = torch.full_like(piece.data, torch.nan if is_float else -1)
                for box in boxes:
                    place = tuple(slice(*span) for span in box)
                    data[place] = piece.data[place]
                piece = replace(piece, data=data)
            elif boxes:
                row_bytes = len(piece.data) // piece.shape[0]
                raw = bytearray(b"\xff" * len(piece.data))
                for rows, _ in boxes:
                    place = slice(rows[0] * row_bytes, rows[1] * row_bytes)
                    raw[place] = piece.data[place]
                piece = replace(piece, data=memoryview(raw))
            yield piece

    return pieces


def divide(
    monkeypatch: pytest.MonkeyPatch, count: int = 1, stages: int = 1, **settings: Any
) -> None:
    """Divide the models of `open_llm` among ranks that are threads of this process: into pipeline
    stages, each of them with `count` ranks. settings: more of the engine's settings. Of weights,
    each rank gets only what it says that it reads."""
    sizes = {"tensor_parallel_size": count, "pipeline_parallel_size": stages, **settings}
    for name, value in sizes.items():
        monkeypatch.setitem(DIVIDED, name, value)
    make = Registry.build

    def make_part(registry: Registry, entry: Any, setup: object) -> Any:
        if isinstance(setup, ExecutorSetup) and setup.ranks > 1:
            return ThreadsExecutor(None, setup)
        part = make(registry, entry, setup)
        if isinstance(setup, WeightLoaderSetup) and not hasattr(part, "save"):
            part.tensors = only_boxes(part.tensors)
        return part

    monkeypatch.setattr(Registry, "build", make_part)


def check_parity(
    reference: Reference,
    lengths: Sequence[int] = PROMPT_LENGTHS,
    *,
    tolerance: float = TOLERANCE,
    **settings: Any,
) -> None:
    """Compares the answers of an engine with those of transformers."""
    with open_llm(reference.directory, **settings) as llm:
        check_answers(reference, llm, lengths, tolerance=tolerance)


def check_answers(
    reference: Reference,
    llm: LLM,
    lengths: Sequence[int] = PROMPT_LENGTHS,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    """Compares the logprobs of the whole vocabulary after every token of every prompt and output,
    and every greedy choice."""
    prompts = random_prompts(lengths)
    params = SamplingParams(
        max_tokens=NUM_OUTPUT_TOKENS,
        temperature=0,
        prompt_logprobs=-1,
        logprobs=-1,
        ignore_eos=True,
        detokenize=False,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        expected = reference.logprobs([*prompt, *completion.token_ids])
        found = [*(output.prompt_logprobs or [None])[1:], *(completion.logprobs or [])]
        assert len(found) == len(prompt) - 1 + len(completion.token_ids)
        for position, row in enumerate(found):
            assert row is not None
            values = torch.tensor([row[token].logprob for token in range(VOCAB_SIZE)])
            worst = (values - expected[position]).abs().max().item()
            assert worst < tolerance, (
                f"position {position} of a prompt of {len(prompt)} tokens is off by {worst}"
            )
        greedy = expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert list(completion.token_ids) == greedy


def check_cached(reference: Reference, lengths: Sequence[int], **settings: Any) -> None:
    """Two greedy answers to each prompt, twice: the prompts share their first tokens, and the
    second time all of them are in the prefix cache. lengths: of what they have in common with the
    longest one."""
    prompts = [[*range(3, 3 + length), 50 + length] for length in lengths]
    params = SamplingParams(
        max_tokens=6, temperature=1.0, top_k=1, n=2, ignore_eos=True, detokenize=False
    )
    with open_llm(reference.directory, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
            )
            for prompt, output in zip(prompts, outputs, strict=True):
                for answer in output.outputs:
                    expected = reference.logprobs([*prompt, *answer.token_ids])
                    assert (
                        list(answer.token_ids) == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
                    )
        assert all(output.num_cached_tokens for output in outputs)
