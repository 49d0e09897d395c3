"""Weights are replaced in a running engine: the logprobs are then those of the new model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_weight_loader_safetensors.loader import SafetensorsLoader
from safetensors.torch import load_file, save_file
from test_experts_parity import ARCHITECTURES as EXPERTS
from test_latent_parity import ARCHITECTURES as LATENT
from test_state_parity import ARCHITECTURES as STATES
from tiny_models import TOLERANCE, Reference, divide, make_model

from pegboard import LLM, SamplingParams
from pegboard.errors import ModelError, RequestError

CASES = {
    "dense": ("llama", {"tie_word_embeddings": True}),
    "experts, biases": EXPERTS["gpt_oss"],
    "latents": LATENT["deepseek_v3"],
    "a hybrid with experts": STATES["qwen3_next"],
    "fallback": ("olmo2", {}),
    "fallback, weights plus 1": ("gemma2", {"head_dim": 8}),
}
FALLBACK = {"architectures": ["UnheardOfForCausalLM"]}
PROMPTS = [list(range(3, length)) for length in (5, 30, 50)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, detokenize=False)
TWELVE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


def write_other(path: Path, model_type: str, config: dict[str, Any]) -> Reference:
    """A model of the same config, all of whose weights are others."""
    model = make_model(model_type, **config)
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1).add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(path)
    return Reference(path, model)


def check(llm: LLM, reference: Reference, prompts: list[list[int]]) -> None:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        want = reference.logprobs([*prompt, *tokens])
        for place, (token, found) in enumerate(
            zip(tokens, output.outputs[0].logprobs, strict=True)
        ):
            row = want[len(prompt) - 1 + place]
            assert abs(found[token].logprob - float(row[token])) < TOLERANCE, (len(prompt), place)
            assert float(row[token]) > float(row.max()) - 2 * TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_replaced(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path, name: str
) -> None:
    model_type, config = CASES[name]
    old = write(model_type, **config)
    new = write_other(tmp_path / "new", model_type, config)
    overrides = FALLBACK if name.startswith("fallback") else {}
    with open_llm(old.directory, block_size=16, hf_overrides=overrides) as llm:
        check(llm, old, PROMPTS)
        for reference in (new, old, new):
            llm.update_weights(reference.directory)
            check(llm, reference, PROMPTS)


def test_an_engine_that_was_started_without_weights_takes_them(
    write: Callable[..., Reference], open_llm: Callable[..., LLM]
) -> None:
    """The weight loader fits the new files, not those that the engine was started with."""
    new = write("llama")
    with open_llm(new.directory, block_size=16, load_format="dummy") as llm:
        llm.update_weights(new.directory)
        check(llm, new, PROMPTS)


def test_what_connectors_keep_is_not_found_by_other_weights(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    old = write("llama")
    new = write_other(tmp_path / "new", "llama", {})
    extra = {"shared_storage_path": str(tmp_path / "blocks")}
    transfer = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    for _ in range(2):
        with open_llm(old.directory, kv_transfer_config=transfer) as llm:
            for reference in (old, new):
                llm.update_weights(reference.directory)
                check(llm, reference, PROMPTS)
            loaded = llm.llm_engine.engine.stats()["external_prefix_cache_hits_total"]
    assert loaded > 0, "the second engine finds the blocks of the first, per weights"


def test_running_requests_go_on_with_the_new_weights(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    old = write("llama")
    new = write_other(tmp_path / "new", "llama", {})
    with open_llm(old.directory) as llm:
        engine = llm.llm_engine
        engine.add_request("a", {"prompt_token_ids": PROMPTS[1]}, TWELVE)
        before: list[int] = []
        while len(before) < 4:
            for output in engine.step():
                before = list(output.outputs[0].token_ids)
        llm.update_weights(new.directory, mode="keep")
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
    assert tokens[: len(before)] == before and len(tokens) == 12
    greedy = new.logprobs([*PROMPTS[1], *tokens])[len(PROMPTS[1]) - 1 : -1].argmax(-1).tolist()
    assert tokens[len(before) + 2 :] == greedy[len(before) + 2 :], (
        "two steps may have been in flight"
    )


def test_running_requests_end_with_the_old_weights_if_the_update_waits(
    write: Callable[..., Reference], open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """`step` returns the outputs of the steps that the update has run, but none of a request that
    was aborted."""
    old = write("llama")
    new = write_other(tmp_path / "new", "llama", {})
    with open_llm(old.directory) as llm:
        engine = llm.llm_engine
        engine.add_request("a", {"prompt_token_ids": PROMPTS[1]}, TWELVE)
        engine.step()
        llm.update_weights(new.directory, mode="wait")
        assert engine.has_unfinished_requests()
        outputs = engine.step()
        assert not engine.has_unfinished_requests()
        tokens = list(outputs[-1].outputs[0].token_ids)
        assert outputs[-1].finished and len(tokens) == 12
        check(llm, new, PROMPTS)
        engine.add_request("b", {"prompt_token_ids": PROMPTS[1]}, TWELVE)
        llm.update_weights(old.directory, mode="wait")
        engine.abort_request(["b"])
        assert not engine.has_unfinished_requests() and not engine.step()
    greedy = old.logprobs([*PROMPTS[1], *tokens])[len(PROMPTS[1]) - 1 : -1].argmax(-1).tolist()
    assert tokens == greedy


@pytest.mark.one_rank
def test_a_checkpoint_that_cannot_be_used_leaves_the_old_weights(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = write("llama")
    new = write_other(tmp_path / "new", "llama", {})
    wrong = write_other(tmp_path / "wrong", "llama", {"rope_theta": 5.0, "hidden_act": "gelu"})
    with open_llm(old.directory, enable_sleep_mode=True) as llm:

        def refuse(folder: Path, message: str) -> None:
            with pytest.raises(RequestError, match=message):
                llm.update_weights(folder)
            check(llm, old, PROMPTS)

        refuse(tmp_path / "none", "the checkpoint .* does not exist")
        refuse(wrong.directory, "is another model: hidden_act is 'gelu', the engine has 'silu'")
        file = new.directory / "model.safetensors"
        tensors = load_file(file)
        shapes = {**tensors, "model.norm.weight": torch.zeros(3)}
        for content, message in (
            (
                {name: tensor for name, tensor in tensors.items() if "norm" not in name},
                "lacks 7 tensors",
            ),
            (shapes, r"model.norm.weight has shape \[3\]"),
        ):
            save_file(content, file)
            refuse(new.directory, message)
        save_file(tensors, file)

        real = SafetensorsLoader.tensors

        def broken(self: Any, checkpoint: Any, wanted: Any) -> Any:
            """Half of the weights."""
            pieces = list(real(self, checkpoint, wanted))
            yield from pieces if checkpoint.path == old.directory else pieces[: len(pieces) // 2]

        with monkeypatch.context() as patch:
            patch.setattr(SafetensorsLoader, "tensors", broken)
            refuse(new.directory, "did not deliver")
        llm.update_weights(file)  # a file is read with the config next to it
        check(llm, new, PROMPTS)
        llm.sleep(level=2)
        llm.wake_up()
        check(llm, new, PROMPTS)


@pytest.mark.parametrize(
    ("value", "stages"), [(float("nan"), 1), (float("inf"), 1), (float("nan"), 3)]
)
def test_weights_that_are_not_finite_are_refused_and_the_old_ones_stay(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    stages: int,
) -> None:
    """Only the last pipeline stage sees the value."""
    if stages > 1:
        divide(monkeypatch, stages=stages)
    old = write("llama")
    new = write_other(tmp_path / "new", "llama", {})
    tensors = load_file(new.directory / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][3, 5] = value
    save_file(tensors, new.directory / "model.safetensors", {"format": "pt"})
    with open_llm(old.directory) as llm:
        with pytest.raises(
            (RequestError, ModelError),
            match="layers.2.mlp.down_proj.weight has values that are NaN",
        ):
            llm.update_weights(new.directory)
        check(llm, old, PROMPTS)
