"""Images together with what else an engine does: LLaVA, and Qwen2.5-VL, whose positions have
several axes, compared with transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_qwen_vl_parity import FILM, LAYOUTS, MARK
from test_qwen_vl_parity import write as write_qwen
from tiny_media import (
    IMAGE,
    MediaReference,
    Prompt,
    check_output,
    mean_error,
    mixed_prompts,
    open_media_llm,
    prompt,
    some_prompts,
    write_llava,
)
from tiny_models import DIVIDED, TOLERANCE

from pegboard import LLM, BeamSearchParams, SamplingParams
from pegboard.data.output import Logprob
from pegboard.front.beam_search import BeamSearch
from pegboard_media import Reader
from pegboard_testing.contract_multimodal_processor import random_image

FIRST, SECOND = (random_image(20, 20, seed) for seed in (1, 2))
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=-1, ignore_eos=True)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
KV_ERROR = 0.05
"""The largest mean error of logprobs that an int8 cache may cause."""


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write_qwen(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl", LAYOUTS[1])


@pytest.fixture(params=["llava", "qwen"])
def model(request: pytest.FixtureRequest) -> tuple[MediaReference, list[Prompt]]:
    """Return one of both, and prompts for it."""
    reference = request.getfixturevalue(request.param)
    is_llava = request.param == "llava"
    return reference, some_prompts() if is_llava else mixed_prompts(MARK, FILM)


def answers(llm: LLM, prompts: Sequence[Prompt], params: Any = GREEDY) -> list[Any]:
    return llm.generate(list(prompts), params, use_tqdm=False)


def check(reference: MediaReference, prompts: Sequence[Prompt], outputs: Sequence[Any]) -> None:
    for one, output in zip(prompts, outputs, strict=True):
        check_output(reference, one, output.outputs[0], TOLERANCE)


def test_int8_kv(model: tuple[MediaReference, list[Prompt]]) -> None:
    """The second time, the prefixes with images come from the cache."""
    reference, prompts = model
    settings: dict[str, Any] = {"kv_cache_dtype": "int8", "block_size": 16}
    with open_media_llm(reference.directory, **settings) as llm:
        for _ in range(2):
            error = mean_error(reference, prompts, outputs := answers(llm, prompts))
            assert TOLERANCE < error < KV_ERROR
    assert any(output.num_cached_tokens for output in outputs)


def repeating(**marks: str) -> list[Prompt]:
    """Return prompts with images whose words repeat, so that drafts are proposed."""
    words = [13, 14, 15] * 4
    return [
        prompt(*words, FIRST, *words, **marks),
        prompt(FIRST, *words, SECOND, 9, FIRST, **marks),
        prompt(*range(60, 85), **marks),
    ]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("name", ["llava", "qwen"])
def test_drafts(request: pytest.FixtureRequest, name: str, method: str) -> None:
    reference = request.getfixturevalue(name)
    prompts = repeating(**({} if name == "llava" else {"mark": MARK}))
    drafts = {"method": method, "num_speculative_tokens": 3, "adaptive_length": False}
    if method == "ngram":
        drafts |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    settings = {"speculative_config": drafts, "disable_log_stats": False}
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory, **settings) as llm:
        for _ in range(2):
            check(reference, prompts, answers(llm, prompts, params))
        (accepted,) = (each for each in llm.get_metrics() if each.name == ACCEPTED)
    assert accepted.value > 0


@pytest.mark.parametrize("num_seqs", [2, 3])
def test_preempted_between_two_images(
    model: tuple[MediaReference, list[Prompt]], num_seqs: int
) -> None:
    """There is room for one of the prompts and a half."""
    reference, prompts = model
    mark = "<image>" if "<image>" in prompts[0]["prompt"] else MARK
    many = [
        prompt(number, random_image(20, 20, number), 5, random_image(24, 16, number), mark=mark)
        for number in range(4)
    ]
    longest = max(reference.inputs(one)["input_ids"].shape[1] for one in many) + 12
    settings = {
        "num_gpu_blocks_override": longest // 4 * 3 // 2,
        "max_model_len": longest,
        "max_num_seqs": num_seqs,
        "disable_log_stats": False,
    }
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory, **settings) as llm:
        check(reference, many, answers(llm, many, params))
        assert DIVIDED or llm.llm_engine.engine.stats()["num_preemptions_total"] > 0


def transfer(name: str, folder: Path) -> dict[str, Any]:
    extra = {
        "SharedStorageConnector": {"shared_storage_path": str(folder)},
        "OffloadingConnector": {"num_cpu_blocks": 100},
    }
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra[name]}
    return {"kv_transfer_config": config}


def external_hits(llm: LLM) -> int:
    return int(llm.llm_engine.engine.stats()["external_prefix_cache_hits_total"])


def test_another_engine_loads_the_prompt_of_an_image(llava: MediaReference, tmp_path: Path) -> None:
    """But not that of another image of the same size."""
    known = prompt(5, FIRST, 6, 7)
    other = prompt(5, SECOND, 6, 7)
    settings = transfer("SharedStorageConnector", tmp_path)
    with open_media_llm(llava.directory, **settings) as llm:
        check(llava, [known], answers(llm, [known]))
    with open_media_llm(llava.directory, **settings) as llm:
        check(llava, [other], answers(llm, [other]))
        assert external_hits(llm) == 0, "the first block has a row of the image"
        check(llava, [known], answers(llm, [known]))
        assert external_hits(llm) == (1 + 16 + 2 - 1) // 4 * 4


def test_blocks_of_images_come_back_from_memory(llava: MediaReference, tmp_path: Path) -> None:
    prompts = [prompt(5, random_image(20, 20, number), 6, 7) for number in range(6)]
    settings = {"num_gpu_blocks_override": 14, "max_num_seqs": 2, "max_model_len": 40}
    with open_media_llm(
        llava.directory, **settings, **transfer("OffloadingConnector", tmp_path)
    ) as llm:
        check(llava, prompts, answers(llm, prompts))
        assert external_hits(llm) == 0, "no image is another one"
        check(llava, prompts, answers(llm, prompts))
        assert external_hits(llm) > 0


def test_several_sampled_answers(llava: MediaReference) -> None:
    """With a seed, they are those of the same prompt computed alone, and share its prefix."""
    one = prompt(5, FIRST, 6, SECOND)
    params = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=4, ignore_eos=True)
    with open_media_llm(llava.directory) as llm:
        (together,), (cached,) = (answers(llm, [one], params) for _ in range(2))
    with open_media_llm(llava.directory, enable_prefix_caching=False) as llm:
        (alone,) = answers(llm, [one], params)
    tokens = [[list(each.token_ids) for each in one.outputs] for one in (together, cached, alone)]
    assert tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 3
    assert tokens[0][0] != tokens[0][1] and cached.num_cached_tokens > 0


def test_beams(model: tuple[MediaReference, list[Prompt]]) -> None:
    """The same as a search over the logprobs of transformers."""
    reference, prompts = model
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    with open_media_llm(reference.directory) as llm:
        results = llm.beam_search(list(prompts), params)
    for one, result in zip(prompts, results, strict=True):
        count = len(reference.inputs(one)["input_ids"][0])
        search = BeamSearch([0] * count, params, (), 10**6)
        while search.beams:
            rows = [reference.logprobs(one, beam.tokens[count:])[-1] for beam in search.beams]
            search.extend([best_of(row, 2 * params.beam_width) for row in rows])
        for beam, expected in zip(result.sequences, search.best(), strict=True):
            assert beam.tokens[count:] == expected.tokens[count:]
            assert abs(beam.cum_logprob - expected.cum_logprob) < 4 * TOLERANCE


def test_beams_fetch_an_item_once(llava: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    read = Reader.read

    def counted(self: Reader, source: Any) -> Any:
        reads.append(source)
        return read(self, source)

    monkeypatch.setattr(Reader, "read", counted)
    with open_media_llm(llava.directory) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
        llm.beam_search([some_prompts()[2]], params)
    assert len(reads) == 2


def best_of(row: torch.Tensor, count: int) -> dict[int, Logprob]:
    values, tokens = row.topk(count)
    return {
        token: Logprob(value) for token, value in zip(tokens.tolist(), values.tolist(), strict=True)
    }


def test_a_draft_of_the_placeholder_is_a_token(llava: MediaReference) -> None:
    """An answer may be the token of images. It is embedded as such, and no row is missing."""
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logit_bias={IMAGE: 100.0})
    one = prompt(5, FIRST, 6)
    with open_media_llm(llava.directory) as llm:
        (output,) = answers(llm, [one], params)
    assert list(output.outputs[0].token_ids) == [IMAGE] * 5


def test_vectors_with_a_cached_prefix(llava: MediaReference) -> None:
    """A vector is the same when its prompt's first tokens, with the image, come from the cache."""
    settings: Mapping[str, Any] = {"runner": "pooling", "pooler_config": {"pooling_type": "LAST"}}
    prompts = some_prompts()
    with open_media_llm(llava.directory, max_num_batched_tokens=64, **settings) as llm:
        once, again = (llm.embed(prompts, use_tqdm=False) for _ in range(2))
    for one, first, second in zip(prompts, once, again, strict=True):
        with torch.no_grad():
            state = llava.model.model(**dict(llava.inputs(one))).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(state, dim=0)
        for output in (first, second):
            vector = torch.tensor(output.outputs.embedding)
            torch.testing.assert_close(vector, expected, rtol=0, atol=1e-4)
