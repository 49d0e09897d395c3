"""Drafts of models together with what else an engine does: outputs are those of the same engine
without drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from draft_heads import METHODS as MADE
from draft_heads import Eagle, proposals
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_adapters_parity import SCALING, merged, random_adapter
from tiny_drafts import METHODS, NUM_DRAFTS, Drafted, id_of
from tiny_media import open_media_llm, some_prompts, write_llava
from tiny_models import Reference, nightly

from pegboard import LLM, LoRARequest, SamplingParams
from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.worker import worker

pytestmark = pytest.mark.one_rank

RANKS = (4, 1)
TOLERANCE = 1e-4
Answers = dict[str, Any]
STRUCTURES = [{"regex": "[a-f]{2,9}x"}, {"choice": ["abcdefgh", "abd", "xyz"]}]
SAMPLINGS = st.fixed_dictionaries(
    {"max_tokens": st.integers(2, 16), "temperature": st.sampled_from([0, 0, 0.8])},
    optional={
        "n": st.just(2),
        "ignore_eos": st.just(True),
        "stop": st.sampled_from([["e"], ["kl", "~"], ["bcd", "3"]]),
        "include_stop_str_in_output": st.just(True),
        "stop_token_ids": st.just([id_of("g"), id_of("9")]),
        "min_tokens": st.just(2),
        "prompt_logprobs": st.just(1),
        "logprobs": st.just(1),
        "repetition_penalty": st.just(1.2),
        "structured_outputs": st.sampled_from(STRUCTURES),
    },
)
PROMPT = st.one_of(
    st.lists(st.integers(3, 130), min_size=1, max_size=20),
    st.tuples(st.integers(60, 100), st.integers(1, 20)).map(lambda x: [*range(x[0], sum(x))]),
)
REQUEST = st.fixed_dictionaries(
    {
        "prompt": PROMPT,
        "sampling": SAMPLINGS,
        "adapter": st.sampled_from([0, 0, 1, 2]),
        "priority": st.integers(0, 2),
        "is_embedded": st.booleans(),
        "aborted_after": st.sampled_from([None, None, None, 1, 4]),
    }
)
LONG = [
    {
        "prompt": [*range(60 + number, 70)],
        "sampling": {"max_tokens": 16, "temperature": 0, "ignore_eos": True},
        "adapter": number % 3,
        "priority": number % 2,
        "is_embedded": False,
        "aborted_after": None,
    }
    for number in range(6)
]
"""They do not fit into the KV cache together."""
MIXED_ENGINE = {
    "skip_tokenizer_init": False,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 4,
    "enable_prompt_embeds": True,
    "scheduling_policy": "priority",
    "max_model_len": 48,
    "max_num_seqs": 6,
    "disable_log_stats": False,
}
"""Settings with which `answer` can run any mix of requests."""
PROMPTS = [[*range(3, 40), 70 + number] for number in range(3)] + [[*range(60, 85)], [5, 6]]
PARAMS = [
    SamplingParams(max_tokens=15, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1),
    SamplingParams(max_tokens=15, temperature=0.7, seed=3, ignore_eos=True, logprobs=1),
]


@pytest.fixture(scope="module", params=METHODS)
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return METHODS[request.param](tmp_path_factory.mktemp("drafted"))


def value(llm: LLM, name: str) -> float:
    return next(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def num_kept(llm: LLM) -> int:
    """Return how many blocks requests that have ended still have."""
    stats = llm.llm_engine.engine.stats()
    return int(stats["num_blocks"] - 1 - stats["num_free_blocks"])


def sampling_of(values: Mapping[str, Any]) -> SamplingParams:
    chosen = {"seed": 4, **values}
    if "structured_outputs" in chosen:
        structure = StructuredOutputsParams(**chosen["structured_outputs"])
        chosen |= {"structured_outputs": structure, "min_tokens": 0, "ignore_eos": False}
    if not chosen["temperature"]:
        chosen["n"] = 1
    return SamplingParams(**chosen)


def answer(llm: LLM, requests: list[dict[str, Any]], model: Any) -> Answers:
    """Return the outputs by request, without those that were aborted."""
    engine = llm.llm_engine
    engine.abort_all()  # what a failed example has left
    table = model.get_input_embeddings().weight.detach()
    for number, each in enumerate(requests):
        ids = each["prompt"]
        # an adapter may change the embedding
        embeds = each["is_embedded"] and not each["adapter"]
        prompt = {"prompt_embeds": table[ids]} if embeds else {"prompt_token_ids": ids}
        sampling = dict(each["sampling"])
        if embeds:
            sampling.pop("prompt_logprobs", None)
        adapter = each["adapter"]
        lora = LoRARequest(f"adapter{adapter}", adapter, f"/{adapter}") if adapter else None
        engine.add_request(
            str(number),
            prompt,
            sampling_of(sampling),
            lora_request=lora,
            priority=each["priority"],
        )
    outputs: Answers = {}
    step = 0
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
        gone = [str(i) for i, each in enumerate(requests) if each["aborted_after"] == step]
        engine.abort_request(gone)
    while engine.engine.has_work:
        engine.step()
    # one engine may end a request before it is aborted, and the other one not
    kept = [str(i) for i, each in enumerate(requests) if each["aborted_after"] is None]
    return {name: outputs[name] for name in kept}


def logprobs_of(positions: Any) -> list[dict[int, float]]:
    return [{key: x.logprob for key, x in (each or {}).items()} for each in positions or []]


def compare(ours: Answers, plain: Answers, tolerance: float = TOLERANCE) -> None:
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        output = ours[name]
        pairs = [(output.prompt_logprobs, expected.prompt_logprobs)]
        for one, other in zip(output.outputs, expected.outputs, strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            for attribute in ("text", "finish_reason", "stop_reason"):
                assert getattr(one, attribute) == getattr(other, attribute)
            pairs.append((one.logprobs, other.logprobs))
        for some, others in pairs:
            for mine, wanted in zip(logprobs_of(some), logprobs_of(others), strict=True):
                assert mine == pytest.approx(wanted, abs=tolerance)


def give_adapters(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Let the paths /1, /2, … of requests name adapters of this model, of the ranks `RANKS`."""
    adapters = {
        f"/{number}": random_adapter(model, rank, number) for number, rank in enumerate(RANKS, 1)
    }
    monkeypatch.setattr(
        worker, "read_files", lambda registry, base, adapter: (SCALING, adapters[adapter.lora_path])
    )


@pytest.mark.sampled(3)
def test_any_mix_of_requests(
    drafted: Drafted, open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters, structured outputs, stops, priorities, embeddings of prompts, several completions
    and aborts, with so few blocks that requests are preempted. No block is kept."""
    give_adapters(monkeypatch, drafted.model)
    engine = {
        **MIXED_ENGINE,
        "num_gpu_blocks_override": 1 + 12 * drafted.num_groups,
        "structured_outputs_config": {"backend": "xgrammar"},
    }
    with (
        open_llm(drafted.directory, **engine) as plain,
        open_llm(drafted.directory, speculative_config=drafted.config, **engine) as llm,
    ):

        @settings(max_examples=25)
        @example(LONG)
        @given(st.lists(REQUEST, min_size=1, max_size=8))
        def check(requests: list[dict[str, Any]]) -> None:
            compare(answer(llm, requests, drafted.model), answer(plain, requests, drafted.model))
            assert num_kept(llm) == num_kept(plain) == 0

        check()
        proposed = value(llm, "spec_decode_num_draft_tokens")
        assert 0 < value(llm, "spec_decode_num_accepted_tokens") < proposed
        assert value(llm, "num_preemptions") > 0


class Adapted:
    """A model with an adapter, but with the embedding and the head of the base model."""

    def __init__(self, base: Any, model: Any) -> None:
        self.forward = model
        self.lm_head = base.lm_head
        self.get_input_embeddings = base.get_input_embeddings

    def __call__(self, token_ids: Any, **options: Any) -> Any:
        return self.forward(token_ids, **options)


@pytest.mark.parametrize("is_tied", [False, True])
def test_heads_share_the_weights_of_the_base_model(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_tied: bool,
) -> None:
    """What is proposed to a request with an adapter."""
    target = write("llama", tie_word_embeddings=is_tied)
    adapter = random_adapter(target.model, 4, 1)
    monkeypatch.setattr(worker, "read_files", lambda *given: (SCALING, adapter))
    head = Eagle(Adapted(target.model, merged(target.model, adapter)))
    config = {"method": "eagle", "model": head.write(tmp_path / "head")}
    config |= {"num_speculative_tokens": NUM_DRAFTS, "adaptive_length": False}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    lora = LoRARequest("a", 1, "/a")
    with (
        open_llm(
            target.directory, enable_lora=True, max_lora_rank=4, speculative_config=config
        ) as llm,
        proposals(llm) as pairs,
    ):
        llm.generate(prompts, PARAMS[0], lora_request=lora, use_tqdm=False)
    for tokens, ids in pairs:
        assert ids == head.drafts(tokens, len(ids))
    assert sum(len(ids) for _, ids in pairs) > 150


def transfer(name: str, **extra: Any) -> dict[str, Any]:
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": config}


SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {"kv_cache_dtype": "int8", "block_size": 16},
    "bfloat16": {"dtype": "bfloat16", "block_size": 16},
    "sleep": {"enable_sleep_mode": True},
    "offload": {
        "num_gpu_blocks_override": 33,
        "max_model_len": 60,
        **transfer("OffloadingConnector", num_cpu_blocks=200),
    },
    "shared_storage": transfer("SharedStorageConnector"),
}


def generate(llm: LLM) -> Answers:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in PARAMS]
    outputs = llm.generate(prompts, PARAMS * len(PROMPTS), use_tqdm=False)
    return {str(number): output for number, output in enumerate(outputs)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", nightly(SETTINGS, "int8", "shared_storage"))
def test_settings_of_the_engine(
    drafted: Drafted, open_llm: Callable[..., LLM], tmp_path: Path, name: str
) -> None:
    """Also again, with prefixes that are cached or loaded."""
    engine = {"skip_tokenizer_init": False, "disable_log_stats": False, **SETTINGS[name]}
    if "num_gpu_blocks_override" in engine:
        engine["num_gpu_blocks_override"] *= drafted.num_groups
    if name == "shared_storage":
        engine |= transfer("SharedStorageConnector", shared_storage_path=str(tmp_path))
    plain_engine = {key: x for key, x in engine.items() if key != "kv_transfer_config"}
    with open_llm(drafted.directory, **plain_engine) as llm:
        plain = generate(llm)
    tolerance = {"bfloat16": 0.1, "int8": 1e-3}.get(name, TOLERANCE)
    for _ in range(2 if name == "shared_storage" else 1):
        with open_llm(drafted.directory, speculative_config=drafted.config, **engine) as llm:
            compare(generate(llm), plain, tolerance)
            accepted = value(llm, "spec_decode_num_accepted_tokens")
            assert 0 < accepted < value(llm, "spec_decode_num_draft_tokens")
            if name == "sleep":
                llm.sleep(level=1)
                llm.wake_up()
            else:
                llm.reset_prefix_cache()
            compare(generate(llm), plain, tolerance)
            assert num_kept(llm) == 0
            hits = llm.llm_engine.engine.stats().get("external_prefix_cache_hits_total", 0)
            assert (hits > 0) == ("kv_transfer_config" in engine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("connector", ["SharedStorageConnector", "OffloadingConnector"])
@pytest.mark.parametrize("method", ["its own KV groups", "eagle"])
def test_what_connectors_load_is_complete(
    write: Callable[..., Reference],
    open_llm: Callable[..., LLM],
    tmp_path: Path,
    method: str,
    connector: str,
) -> None:
    """The keys and values of the draft model come back too: its proposals after loaded prefixes are
    those that it would make without."""
    target = write("llama", num_hidden_layers=4)
    config, head = MADE[method](target, write, tmp_path)
    config |= {"num_speculative_tokens": NUM_DRAFTS, "adaptive_length": False}
    is_shared = connector == "SharedStorageConnector"
    extra = {"shared_storage_path": str(tmp_path / "kv")} if is_shared else {"num_cpu_blocks": 200}
    engine = transfer(connector, **extra)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for _ in range(2):
        with open_llm(target.directory, speculative_config=config, **engine) as llm:
            llm.generate(prompts, PARAMS[1], use_tqdm=False)
            llm.reset_prefix_cache()
            with proposals(llm) as pairs:
                llm.generate(prompts, PARAMS[1], use_tqdm=False)
            assert llm.llm_engine.engine.stats()["external_prefix_cache_hits_total"] > 50
        for tokens, ids in pairs[::5]:
            assert ids == head.drafts(tokens, len(ids)), len(tokens)


@pytest.mark.parametrize("engine", [{}, {"enforce_eager": True, "max_num_batched_tokens": 8}])
def test_images_with_eagle(tmp_path: Path, engine: dict[str, Any]) -> None:
    """The head reads placeholders of images, which are beyond its vocabulary or have ids of it."""
    reference = write_llava(tmp_path / "llava")
    head = Eagle(reference.model)
    config = {"method": "eagle", "model": head.write(tmp_path / "head")}
    config |= {"num_speculative_tokens": NUM_DRAFTS, "adaptive_length": False}
    prompts = some_prompts()
    params = SamplingParams(max_tokens=15, temperature=0, logprobs=1, ignore_eos=True)
    answers = []
    for more in ({}, {"speculative_config": config, "disable_log_stats": False}):
        with open_media_llm(reference.directory, **engine, **more) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                answers.append({str(i): output for i, output in enumerate(outputs)})
            if more:
                assert value(llm, "spec_decode_num_draft_tokens") > 100
    for each in answers[1:]:
        compare(each, answers[0])
