"""Hidden states at depths of a model, and parts of its layers that run one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard import LLM, SamplingParams
from pegboard.data.batch import Batch, StepOutput
from pegboard.errors import ModelError
from pegboard.worker import worker as worker_module
from pegboard.worker.loaded_model import LoadedModel
from pegboard.worker.model_runner import ModelRunner
from pegboard.worker.worker import Worker

pytestmark = pytest.mark.one_rank

NUM_LAYERS = 3
GPT2 = (
    "gpt2",
    {"n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 64}
    | dict.fromkeys(["hidden_size", "num_hidden_layers", "num_attention_heads"])
    | dict.fromkeys(["intermediate_size", "num_key_value_heads", "max_position_embeddings"]),
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "dense, norms after the blocks": ("olmo2", {}),
    "dense, a scaled stream": ("granite", {"residual_multiplier": 0.25}),
    "dense, learned positions": GPT2,
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8}),
    "fallback": ("helium", {"head_dim": 8}),
    "fallback, learned positions": GPT2,
}
OVERRIDES = {
    "fallback, learned positions": {"hf_overrides": {"architectures": ["UnknownForCausalLM"]}}
}
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
PROMPTS = [{"prompt_token_ids": [3 + 7 * i % 50 for i in range(length)]} for length in (1, 9, 14)]


def true_states(reference: Any, token_ids: list[int]) -> list[Tensor]:
    """Return the hidden states before each layer, and after the last one."""
    inner = reference.model.base_model
    layers = next(
        module
        for module in inner.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == NUM_LAYERS
    )
    found: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: found.append(args[0][0].clone()))
        for layer in layers
    ]
    hooks.append(
        layers[-1].register_forward_hook(
            lambda module, args, out: found.append((out[0] if isinstance(out, tuple) else out)[0])
        )
    )
    with torch.no_grad():
        inner(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_taps(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    enforce_eager: bool,
) -> None:
    """In steps of any kind. A tap changes no token."""
    model_type, config = MODELS[name]
    reference = write(model_type, **config)
    settings: dict[str, Any] = {"enforce_eager": enforce_eager, "block_size": 16}
    settings |= OVERRIDES.get(name, {})
    with open_llm(reference.directory, **settings) as llm:
        plain = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    depths = (0, 2, NUM_LAYERS)

    def tapped(*given: Any, **more: Any) -> LoadedModel:
        return LoadedModel(*given, **{**more, "taps": depths})

    monkeypatch.setattr(worker_module, "LoadedModel", tapped)
    rows: dict[int, list[Tensor]] = {}
    run = Worker.run

    def run_and_keep(worker: Worker, batch: Batch, masks: Any = None) -> Callable[[], StepOutput]:
        wait = run(worker, batch, masks)
        stages = worker.running.stages
        for new in batch.new:
            rows[new.row] = []
        ends = batch.num_scheduled_tokens.cumsum().tolist()
        for row, start, stop in zip(batch.rows.tolist(), [0, *ends], ends, strict=False):
            rows[row].append(torch.stack([tap[start:stop].clone() for tap in stages.taps]))
        return wait

    monkeypatch.setattr(Worker, "run", run_and_keep)
    settings["enable_prefix_caching"] = False
    with open_llm(reference.directory, **settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        stages = llm.llm_engine.engine._parts.executor.worker.running.stages
        if name.startswith(("llama", "dense")) and not enforce_eager:
            assert (
                stages.recordings.find("decode", 2) is not None
                and stages.recordings.find("forward", 9) is not None
            )
    for row, (output, expected) in enumerate(zip(outputs, plain, strict=True)):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        tokens = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids]
        states = true_states(reference, tokens[:-1])
        found = torch.cat(rows[row], 1)
        for depth, state in zip(depths, found, strict=True):
            torch.testing.assert_close(state, states[depth], rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", [1, 2])
def test_two_parts_compute_what_the_whole_does(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    first: int,
) -> None:
    """The parts are the two models of a worker. Each has the KV cache of its layers, and reads only
    their weights. The second one starts from the rows that the first one returns."""
    model_type, config = MODELS[name]
    reference = write(model_type, **config)
    settings: dict[str, Any] = {"enforce_eager": True, **OVERRIDES.get(name, {})}
    with open_llm(reference.directory, **settings) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    declare = Worker.declare
    run = Worker.run
    parts = [range(first, NUM_LAYERS), range(first)]
    runners: list[ModelRunner] = []

    def part(*given: Any, **more: Any) -> LoadedModel:
        return LoadedModel(*given, **{**more, "layers": parts[0]})

    def declare_both(worker: Worker) -> None:
        declare(worker)
        end = worker.models[0].end_layer()
        checkpoint = worker.plan.checkpoint
        worker.models.append(
            LoadedModel(worker.setup, checkpoint, first_layer=end, layers=parts[1])
        )

    def run_both(worker: Worker, batch: Batch, masks: Any = None) -> Callable[[], StepOutput]:
        last, earlier = worker.models
        states = []
        forward = type(earlier.model).forward
        earlier.model.forward = lambda *given: (
            states.append(forward(earlier.model, *given)) or (states[0])
        )
        last.model.embed = lambda *ids: states[0]
        if not runners:
            runners.append(ModelRunner(replace(worker.running.parts, loaded=earlier)))
        runners[0].run(batch)()
        done = run(worker, batch, masks)()
        runners[0].state.token_ids[:] = worker.running.state.token_ids
        return lambda: done

    monkeypatch.setattr(worker_module, "LoadedModel", part)
    monkeypatch.setattr(Worker, "declare", declare_both)
    monkeypatch.setattr(Worker, "run", run_both)
    with open_llm(reference.directory, enable_prefix_caching=False, **settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        last, earlier = llm.llm_engine.engine._parts.executor.worker.models
        names = [
            {wanted.name for own in model.declared.values() for wanted in own}
            for model in (last, earlier)
        ]
        for index in range(NUM_LAYERS):
            has = [any(f".{index}." in wanted for wanted in own) for own in names]
            assert has == [index >= first, index < first]
    for output, whole in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids


@pytest.mark.parametrize("name", ["llama", "fallback"])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"taps": (4,)}, r"has 3 layers; it was asked for .* before \[4\]"),
        ({"layers": range(1, 4)}, r"has 3 layers; it was asked for range\(1, 4\)"),
        ({"layers": range(1, 1)}, r"has 3 layers; it was asked for range\(1, 1\)"),
    ],
)
def test_layers_that_a_model_does_not_have(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    asked: Any,
    message: str,
) -> None:
    model_type, config = MODELS[name]
    reference = write(model_type, **config)

    def part(*given: Any, **more: Any) -> LoadedModel:
        return LoadedModel(*given, **{**more, **asked})

    monkeypatch.setattr(worker_module, "LoadedModel", part)
    with pytest.raises(ModelError, match=message):
        open_llm(reference.directory)
