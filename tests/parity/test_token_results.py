"""Results of tokens, and vectors of prompts that are computed in several steps, compared with
transformers' hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_converted_models import LABELS, LIMITS, write
from test_pooling_parity import declare
from tiny_media import make_tokenizer
from tiny_models import DIVIDED, Reference, open_llm, random_prompts

from pegboard import LLM, PoolingParams
from pegboard.errors import RequestError

Pooled = Callable[[torch.Tensor], torch.Tensor]
WAYS: dict[str, Pooled] = {
    "CLS": lambda states: states[0],
    "MEAN": lambda states: states.mean(0),
    "MEAN_SQRT": lambda states: states.sum(0) / len(states) ** 0.5,
    "MAX": lambda states: states.amax(0),
    "LAST": lambda states: states[-1],
}


def states_of(reference: Reference, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        states: torch.Tensor = reference.model.base_model(torch.tensor([prompt])).last_hidden_state
    return states[0]


def normalized(states: torch.Tensor) -> torch.Tensor:
    return states / states.norm(dim=-1, keepdim=True)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return write(tmp_path_factory.mktemp("decoder"), "LlamaModel")


@pytest.mark.parametrize("way", WAYS)
def test_tasks_share_steps(way: str, decoder: Reference) -> None:
    """Prompts are computed in chunks, and some lose their blocks. The second time, the prefix cache
    has them, which only vectors of last tokens may read."""
    rests = random_prompts((20, 9, 50, 33, 1, 7))
    prompts = [
        [*range(3, 3 + shared), *rest]
        for shared, rest in zip((30, 40, 0, 30, 0, 20), rests, strict=True)
    ]
    params = [
        PoolingParams(task="token_embed" if place % 2 else "embed", use_activation=place < 4)
        for place in range(len(prompts))
    ]
    settings = {"pooler_config": {"pooling_type": way}, "num_gpu_blocks_override": 24}
    with open_llm(decoder.directory, **LIMITS, **settings, max_num_partial_prefills=3) as llm:
        for _ in range(2):
            outputs = llm.encode(prompts, params, use_tqdm=False)
            for prompt, one, output in zip(prompts, params, outputs, strict=True):
                states = states_of(decoder, prompt)
                true = states if one.task == "token_embed" else WAYS[way](states)
                true = normalized(true) if one.use_activation else true
                assert output.outputs.data.shape == true.shape
                assert (torch.from_numpy(output.outputs.data) - true).abs().max() < 1e-4
        assert llm.llm_engine.engine.stats()["num_preemptions_total"] or DIVIDED
        assert bool(outputs[0].num_cached_tokens) == (way == "LAST")
        assert not outputs[1].num_cached_tokens


def test_a_model_that_makes_a_vector_of_each_token(tmp_path: Path) -> None:
    """As ColBERT: a linear layer after the transformer, and no pooling. Scores are sums of the best
    products."""
    reference = write(tmp_path, "LlamaModel")
    make_tokenizer(["<image>"], "<image>").save_pretrained(tmp_path)
    declare(tmp_path, "", "Dense")
    (tmp_path / "1_Dense").mkdir()
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    config = {"activation_function": "torch.nn.modules.linear.Identity"}
    (tmp_path / "1_Dense" / "config.json").write_text(json.dumps(config))
    texts = ["w3 w4 w5", "w7 w8 w9 w10 w11", "w3"]
    rows = [
        states_of(reference, [int(word[1:]) for word in text.split()]) @ weight.T for text in texts
    ]
    with open_llm(tmp_path, **LIMITS, skip_tokenizer_init=False) as llm:
        outputs = llm.encode(texts, use_tqdm=False)
        scores = llm.score(texts[0], texts[1:], use_tqdm=False)
        with pytest.raises(RequestError, match="makes vectors and has no classes"):
            llm.reward(texts)
        with pytest.raises(RequestError, match="it cannot embed"):
            llm.embed(texts)
    for output, true in zip(outputs, rows, strict=True):
        assert (torch.from_numpy(output.outputs.data) - true).abs().max() < 1e-4
    for score, other in zip(scores, rows[1:], strict=True):
        assert abs(score.outputs.score - float((rows[0] @ other.T).amax(1).sum())) < 1e-3


@pytest.mark.parametrize("architecture", ["LlamaForTokenClassification"])
def test_classes_of_tokens(architecture: str, tmp_path: Path) -> None:
    reference = write(tmp_path, architecture)
    prompts = random_prompts((5, 33))
    with open_llm(tmp_path, **LIMITS) as llm:
        outputs = llm.encode(prompts, use_tqdm=False)
        rewards = llm.reward(prompts, pooling_params=PoolingParams(use_activation=False))
        assert llm.llm_engine.plan.pooling.labels == tuple(f"LABEL_{i}" for i in range(LABELS))
    for prompt, output, plain in zip(prompts, outputs, rewards, strict=True):
        with torch.no_grad():
            true = reference.model(torch.tensor([prompt])).logits[0]
        assert (torch.from_numpy(plain.outputs.data) - true).abs().max() < 1e-4
        assert (torch.from_numpy(output.outputs.data) - true.softmax(-1)).abs().max() < 1e-5


def test_rewards_of_steps(tmp_path: Path) -> None:
    """A process reward model has a head of two layers, and rewards tokens that end a step."""
    reference = write(tmp_path, "Qwen2ForTokenClassification", num_labels=2)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("score.weight", "score.bias"):
        tensors.pop(name, None)
    generator = torch.Generator().manual_seed(1)
    for name, shape in (("score.0.weight", (32, 32)), ("score.2.weight", (2, 32))):
        tensors[name] = torch.randn(shape, generator=generator) * 0.3
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    overrides = {"architectures": ["Qwen2ForProcessRewardModel"]}
    prompt = [5, 9, 3, *range(20, 40), 9, 4, 9]
    states = reference.model.model(torch.tensor([prompt])).last_hidden_state[0]
    values = ((states @ tensors["score.0.weight"].T).relu() @ tensors["score.2.weight"].T).detach()
    true = values.softmax(-1)
    settings = {**LIMITS, "hf_overrides": overrides}
    with open_llm(tmp_path, **settings, pooler_config={"step_tag_id": 9}) as llm:
        for params, rows in (
            (PoolingParams(), true[[1, 23, 25]]),
            (PoolingParams(returned_token_ids=(1,), use_activation=False), values[[1, 23, 25], 1:]),
            (PoolingParams(step_tag_id=3), true[[2]]),
            (PoolingParams(step_tag_id=77), true[:0]),
        ):
            (output,) = llm.reward([prompt], pooling_params=params, use_tqdm=False)
            assert output.outputs.data.shape == rows.shape
            if len(rows):
                assert (torch.from_numpy(output.outputs.data) - rows).abs().max() < 1e-5
        for params, message in (
            (PoolingParams(returned_token_ids=(2,)), "this model has 2 classes"),
            (PoolingParams(step_tag_id=3, task="classify"), "step_tag_id is for models that pool"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.encode([prompt], params, use_tqdm=False)


def test_probabilities_of_tokens_at_each_step(tmp_path: Path) -> None:
    """As Math-Shepherd: the classes are logits of two tokens, where a step ends."""
    reference = write(tmp_path, "LlamaForCausalLM")
    prompt = [5, 9, *range(20, 300 // 6), 9]
    with torch.no_grad():
        logits = reference.model(torch.tensor([prompt])).logits[0]
    config = {"pooling_type": "STEP", "step_tag_id": 9, "returned_token_ids": [30, 12]}
    with open_llm(tmp_path, **LIMITS, convert="classify", pooler_config=config) as llm:
        (output,) = llm.encode([prompt], use_tqdm=False)
    true = logits[[1, len(prompt) - 1]][:, [30, 12]].softmax(-1)
    assert (torch.from_numpy(output.outputs.data) - true).abs().max() < 1e-5


def test_what_requests_are_refused(decoder: Reference) -> None:
    def ask(llm: LLM, **params: Any) -> None:
        llm.encode([[5, 6]], PoolingParams(**params), use_tqdm=False)

    with open_llm(decoder.directory, **LIMITS) as llm:
        for params, message in (
            ({"step_tag_id": 3, "task": "token_embed"}, "step_tag_id is for models that pool"),
            ({"task": "token_classify"}, "makes vectors and has no classes"),
            ({"step_tag_id": -1}, "step_tag_id must be an integer of at least 0"),
            ({"returned_token_ids": [-1]}, "returned_token_ids must be a list of token ids"),
            ({"task": "plugin"}, "task must be one of embed, classify, token_embed"),
        ):
            with pytest.raises(RequestError, match=message):
                ask(llm, **params)


def test_prompts_of_sentence_transformers(tmp_path: Path) -> None:
    reference = write(tmp_path, "LlamaModel")
    make_tokenizer(["<image>"], "<image>").save_pretrained(tmp_path)
    named = {"prompts": {"query": "w7 w8 ", "none": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(named))
    with open_llm(tmp_path, **LIMITS, skip_tokenizer_init=False) as llm:
        for prompt_name, ids in ((None, [7, 8, 5]), ("query", [7, 8, 5]), ("none", [5]), ("", [5])):
            params = PoolingParams(prompt_name=prompt_name)
            (output,) = llm.embed("w5", pooling_params=params, use_tqdm=False)
            assert output.prompt_token_ids == ids
            true = normalized(states_of(reference, ids)[-1])
            assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-5
        assert llm.embed([[5]], use_tqdm=False)[0].prompt_token_ids == [5]
        for prompt, prompt_name, message in (
            ("w5", "other", "not one of this model's prompts: query, none"),
            ([5], "query", "prompt_name is for texts"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.embed([prompt], pooling_params=PoolingParams(prompt_name=prompt_name))
