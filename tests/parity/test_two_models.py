"""Two models in one worker, in one pool of KV blocks: each computes what it computes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import LLM, SamplingParams
from pegboard.config.schema import EngineConfig, Settings
from pegboard.data.batch import Batch, StepOutput
from pegboard.engine import build
from pegboard.plan.engine_plan import resolve
from pegboard.worker.worker import Worker

pytestmark = pytest.mark.one_rank

SMALLER = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
OTHER_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SECOND = {
    "its own KV groups": ("llama", SMALLER | OTHER_HEADS, 2),
    "the KV group of the target": ("qwen3", SMALLER | {"head_dim": 8}, 1),
    "a window": ("mistral", SMALLER | OTHER_HEADS | {"sliding_window": 16}, 2),
}
"""Type and config of the second model, and how many different things their layers store."""
PROMPTS = [[3 + (7 * index) % 50 for index in range(length)] for length in (5, 17, 33)]
NUM_TOKENS = 9
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


class Second:
    """The second model of every worker. It runs each batch before the target does, and continues
    each prompt with its own tokens. tokens: by row, since the row's request started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        config = EngineConfig(model=str(path), dtype="float32", skip_tokenizer_init=True)
        checkpoint = resolve(Settings(config))[0].checkpoint
        self.tokens: dict[int, list[int]] = {}
        self.answers: dict[tuple[int, ...], list[int]] = {}
        make = build._worker_plan
        run = Worker.run

        def with_second(*given: Any) -> Any:
            plan = make(*given)
            return replace(plan, checkpoints=(*plan.checkpoints, checkpoint))

        def run_both(worker: Worker, batch: Batch, masks: Any = None) -> Callable[[], StepOutput]:
            self.note(batch, worker.runners[1].run(batch)())
            return run(worker, batch, masks)

        monkeypatch.setattr(build, "_worker_plan", with_second)
        monkeypatch.setattr(Worker, "run", run_both)

    def note(self, batch: Batch, output: StepOutput) -> None:
        for new in batch.new:
            self.tokens[new.row] = self.answers[tuple(new.token_ids.tolist())] = []
        for index, row in enumerate(output.rows.tolist()):
            self.tokens[row] += output.token_ids.row(index).tolist()


def worker_of(llm: LLM) -> Any:
    return llm.llm_engine.engine._parts.executor.worker


def greedy(reference: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(reference.logprobs(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(params=SECOND)
def both(
    request: pytest.FixtureRequest,
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[LLM, Any, Any, Second]]:
    target = write("llama", "target")
    model_type, config, num_specs = SECOND[request.param]
    second = write(model_type, "second", **config)
    running = Second(monkeypatch, second.directory)
    # the second model computes only the target's prompts, so nothing may be found in the cache
    settings: dict[str, Any] = {"enable_prefix_caching": False, "block_size": 16}
    with open_llm(target.directory, enable_sleep_mode=True, **settings) as llm:
        specs = {group.spec for group in worker_of(llm).running.parts.plan.groups}
        assert len(specs) == num_specs
        yield llm, target, second, running


def check(llm: LLM, target: Any, second: Any, running: Second) -> None:
    running.answers.clear()
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], PARAMS, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == greedy(target, prompt)
        assert running.answers[tuple(prompt)] == greedy(second, prompt)


def test_each_answers_as_it_does_alone_before_and_after_it_sleeps(both: Any) -> None:
    llm, _, _, running = both
    worker = worker_of(llm)
    if worker.replay is not None:
        for runner in worker.runners:
            assert runner.stages.find("decode", 2) and runner.stages.find("forward", 9)
    check(*both)
    for level in (1, 2):
        weights = [layer.holders() for model in worker.models for layer in model.layers]
        before = [tensor.clone() for held in weights for each in held for tensor in each.tensors()]
        llm.sleep(level=level)
        llm.wake_up()
        after = [tensor for held in weights for each in held for tensor in each.tensors()]
        assert all(map(torch.equal, before, after))
        check(*both)


def test_new_weights_are_those_of_the_target(both: Any, tmp_path: Path) -> None:
    llm, target, second, running = both
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    target.model.save_pretrained(tmp_path / "new")
    llm.update_weights(str(tmp_path / "new"))
    check(llm, target, second, running)
