"""Images while an engine changes: new weights, sleep, emptied caches, and requests
that end early. Answers are those of transformers, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_llava.llava import Llava
from tiny_media import (
    MediaReference,
    Prompt,
    check_output,
    open_media_llm,
    prompt,
    some_prompts,
    write_llava,
)
from tiny_models import TOLERANCE, divide

from pegboard import LLM, SamplingParams
from pegboard.errors import RequestError
from pegboard_testing.contract_multimodal_processor import random_image

FIRST, SECOND = (random_image(20, 20, seed) for seed in (1, 2))
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=-1, ignore_eos=True)
STORAGE = "SharedStorageConnector"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    """Return a model of the same config. All of its weights are others."""
    folder = tmp_path_factory.mktemp("other")
    reference = write_llava(folder)
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter.mul_(1.1).add_(torch.randn(parameter.shape) * 0.05)
    reference.model.save_pretrained(folder)
    return reference


def check(llm: LLM, reference: MediaReference, prompts: Sequence[Prompt]) -> list[Any]:
    outputs = llm.generate(list(prompts), GREEDY, use_tqdm=False)
    for one, output in zip(prompts, outputs, strict=True):
        check_output(reference, one, output.outputs[0], TOLERANCE)
    return outputs


def check_nothing_is_held(llm: LLM) -> None:
    """No block and no row belongs to a request, and the worker keeps what the engine knows. It
    learns in the next step that a request has ended."""
    llm.generate([prompt(9)], GREEDY, use_tqdm=False)
    engine = llm.llm_engine.engine
    cache = engine._scheduler._encoder
    stats = engine.stats()
    assert stats["kv_cache_usage_perc"] == 0 and not stats["blocks_of"]
    assert not cache._holders
    given = engine._parts.executor.worker.running.given
    assert not given.spans
    assert given.encoded.keys() == cache._sizes.keys() | {*cache._dropped}


@pytest.mark.parametrize("more", [{}, {"max_in_flight": 2}], ids=["one step", "two in flight"])
def test_new_weights_make_new_rows(
    llava: MediaReference, other: MediaReference, more: dict[str, Any]
) -> None:
    """Neither the rows of images nor the blocks of prompts with them are those of the old
    weights."""
    prompts = some_prompts()
    with open_media_llm(llava.directory, encoder_cache_size=200, **more) as llm:
        check(llm, llava, prompts)
        for reference in (other, llava, other):
            llm.update_weights(reference.directory)
            check(llm, reference, prompts)


@pytest.mark.parametrize("ranks", [1, 2])
def test_new_weights_in_the_middle_of_an_image(
    llava: MediaReference, other: MediaReference, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """The running prompt goes on, with rows of the new weights. The next prompts with the same
    image find nothing of the old ones."""
    if ranks > 1:
        divide(monkeypatch, ranks)
    one = prompt(5, FIRST, 6)
    with open_media_llm(llava.directory, max_num_batched_tokens=8) as llm:
        engine = llm.llm_engine
        engine.add_request("a", one, GREEDY)
        assert not engine.step(), "the first step ends inside the image"
        llm.update_weights(other.directory, mode="keep")
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert len(outputs[-1].outputs[0].token_ids) == 6
        check(llm, other, [one, prompt(7, FIRST, SECOND)])


def test_stored_blocks_are_those_of_the_weights(
    llava: MediaReference, other: MediaReference, tmp_path: Path
) -> None:
    extra = {"shared_storage_path": str(tmp_path)}
    config = {"kv_connector": STORAGE, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    prompts = some_prompts()
    for _ in range(2):
        with open_media_llm(llava.directory, kv_transfer_config=config) as llm:
            for reference in (llava, other):
                llm.update_weights(reference.directory)
                check(llm, reference, prompts)
            hits = llm.llm_engine.engine.stats()["external_prefix_cache_hits_total"]
    assert hits > 0, "the second engine finds those of the first"


def test_refused_weights_change_no_row(llava: MediaReference, tmp_path: Path) -> None:
    prompts = some_prompts()
    with open_media_llm(llava.directory) as llm:
        check(llm, llava, prompts)
        with pytest.raises(RequestError, match="does not exist"):
            llm.update_weights(tmp_path / "none")
        check(llm, llava, prompts)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(llava: MediaReference, other: MediaReference, level: int) -> None:
    """The tower sleeps, too. After level 2, other weights may come."""
    prompts = some_prompts()
    with open_media_llm(llava.directory, enable_sleep_mode=True) as llm:
        check(llm, llava, prompts)
        llm.sleep(level=level)
        with pytest.raises(RequestError, match="wake_up"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.wake_up()
        check(llm, llava, prompts)
        llm.sleep(level=level)
        llm.wake_up(["weights"])
        llm.update_weights(other.directory)
        llm.wake_up()
        check(llm, other, prompts)


@pytest.mark.one_rank
def test_an_emptied_prefix_cache(llava: MediaReference) -> None:
    """The rows of images stay, so that a prompt is computed again without the tower."""
    prompts = [prompt(5, FIRST, 6, SECOND, 7)]
    with open_media_llm(llava.directory) as llm:
        check(llm, llava, prompts)
        assert check(llm, llava, prompts)[0].num_cached_tokens > 16
        assert llm.reset_prefix_cache()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Llava, "encode", lambda *given: 1 // 0)
            (again,) = check(llm, llava, prompts)
        assert again.num_cached_tokens == 0
        check_nothing_is_held(llm)


@pytest.mark.one_rank
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"max_in_flight": 2}], ids=["one step", "two in flight"])
def test_aborted_in_the_middle_of_an_image(
    llava: MediaReference, num_steps: int, more: dict[str, Any]
) -> None:
    """Another request with the same image goes on, and afterwards nothing is held."""
    settings = {"max_num_batched_tokens": 8, "encoder_cache_size": 32, "max_num_seqs": 2, **more}
    one = prompt(5, FIRST, 6, SECOND)
    with open_media_llm(llava.directory, **settings) as llm:
        engine = llm.llm_engine
        for name in ("a", "b"):
            engine.add_request(name, one, GREEDY)
        outputs = []
        for _ in range(num_steps):
            outputs += engine.step()
        engine.abort_request(["a"])
        while engine.has_unfinished_requests():
            outputs += engine.step()
        (last,) = (output for output in outputs if output.finished)
        assert last.request_id == "b"
        check_output(llava, one, last.outputs[0], TOLERANCE)
        check_nothing_is_held(llm)
        engine.add_request("c", one, GREEDY)
        engine.step()
        engine.abort_request(["c"])
        engine.step()
        check_nothing_is_held(llm)
        check(llm, llava, some_prompts())
        check_nothing_is_held(llm)
