"""Encoders, compared with transformers: vectors, classes and scores of pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from test_pooling_parity import declare
from tiny_encoders import ARCHITECTURES, TEXTS, VOCAB_SIZE

from pegboard import LLM, PoolingParams, SamplingParams
from pegboard.errors import ConfigError, ModelError, PegboardError, RequestError
from pegboard.interfaces.api import Prompt


def states(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden: torch.Tensor = model(torch.tensor([token_ids])).last_hidden_state[0]
    return hidden


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("pooling", ["CLS", "MEAN", "LAST"])
def test_vectors(
    name: str, pooling: str, write_encoder: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    """Prompts of mixed lengths, more of them than fit in a step, up to the longest."""
    folder, model, tokenizer = write_encoder(name)
    with open_encoder(folder, pooler_config={"pooling_type": pooling}) as llm:
        outputs = llm.embed(TEXTS * 2, use_tqdm=False)
        assert llm.llm_engine.plan.max_model_len == 64
        assert llm.llm_engine.engine.stats()["kv_cache_usage_perc"] == 0
    for text, output in zip(TEXTS * 2, outputs, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert output.prompt_token_ids == ids
        hidden = states(model, ids)
        true = {"CLS": hidden[0], "MEAN": hidden.mean(0), "LAST": hidden[-1]}[pooling]
        assert (torch.tensor(output.outputs.embedding) - true / true.norm()).abs().max() < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_classes(
    name: str, write_encoder: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    for values, activation in (
        ({"num_labels": 3}, lambda x: x.softmax(-1)),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 2, "problem_type": "regression"}, lambda x: x),
    ):
        folder, model, tokenizer = write_encoder(name, "ForSequenceClassification", **values)
        with open_encoder(folder) as llm:
            outputs = llm.classify(TEXTS, use_tqdm=False)
            raw = llm.encode(
                TEXTS, PoolingParams(use_activation=False), pooling_task="classify", use_tqdm=False
            )
            with pytest.raises(
                RequestError,
                match="this model classifies texts and has no vectors; it cannot embed",
            ):
                llm.embed("w1", use_tqdm=False)
        for text, output, plain in zip(TEXTS, outputs, raw, strict=True):
            with torch.no_grad():
                true = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
            assert output.outputs.num_classes == len(true)
            assert (torch.tensor(output.outputs.probs) - activation(true)).abs().max() < 1e-5
            assert (torch.from_numpy(plain.outputs.data) - true).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["Bert", "Roberta", "XLMRoberta"])
def test_scores_of_pairs(
    name: str, write_encoder: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    """A cross-encoder. The second text of Bert has another token type. The longer text is truncated
    first."""
    folder, model, tokenizer = write_encoder(name, "ForSequenceClassification", num_labels=1)
    pairs = [
        (first, second)
        for first in TEXTS
        for second in ("w20 w21", "w30 w31 w32 w33 w34 w35 w36 w37")
    ]
    with open_encoder(folder) as llm:
        worker = llm.llm_engine.engine._parts.executor.worker
        declared = worker.models[0].build.declared.inputs
        assert declared == (["token_types"] if model.config.type_vocab_size > 1 else [])
        recordings = worker.running.stages.recordings
        assert worker.replay is None or recordings.find("forward", 80) is not None
        for limit in (None, 9, -1):
            params = PoolingParams(truncate_prompt_tokens=limit)
            own = [pair for pair in pairs if limit is not None or len(pair[0].split()) < 40]
            outputs = llm.score(
                [a for a, _ in own], [b for _, b in own], pooling_params=params, use_tqdm=False
            )
            for (first, second), output in zip(own, outputs, strict=True):
                encoded = tokenizer(
                    first,
                    second,
                    truncation=limit is not None,
                    max_length=64 if limit == -1 else limit,
                    return_token_type_ids=True,
                )
                types = (
                    {"token_type_ids": torch.tensor([encoded["token_type_ids"]])}
                    if name == "Bert"
                    else {}
                )
                with torch.no_grad():
                    true = model(torch.tensor([encoded["input_ids"]]), **types).logits[0].sigmoid()
                assert abs(output.outputs.score - float(true)) < 1e-5
                assert len(output.prompt_token_ids or ()) == len(encoded["input_ids"])
        assert len(llm.score("w1", ["w2", "w3", "w4"], use_tqdm=False)) == 3
        for first, second, message in (
            (["w1", "w2"], ["w3"], "2 texts are scored with 1"),
            ("w1", [], "there are no texts to score"),
            (TEXTS[2], TEXTS[2], "the prompt has 1"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.score(first, second, use_tqdm=False)


def test_distances_of_mpnet() -> None:
    """Every distance has the bucket that transformers computes, also beyond the last one that has
    a bias of its own."""
    from pegboard_model_encoder.distance import REACH, buckets_of

    distances = torch.arange(-600, 601)
    theirs = transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket
    assert torch.equal(buckets_of(distances), theirs(distances))
    assert torch.equal(buckets_of(distances.clamp(-REACH, REACH)), theirs(distances))


def test_a_checkpoint_with_a_language_head(
    write_encoder: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    """Its tensors begin with the model's name, and its head is not read. An attention backend that
    has no bias by distance is refused."""
    folder, model, tokenizer = write_encoder("MPNet", "ForMaskedLM")
    with open_encoder(folder) as llm:
        (output,) = llm.embed(TEXTS[2], use_tqdm=False)
    true = states(model.mpnet, tokenizer(TEXTS[2])["input_ids"])[0]
    assert (torch.tensor(output.outputs.embedding) - true / true.norm()).abs().max() < 1e-5
    with pytest.raises(PegboardError, match="distance_bias=True is not declared"):
        open_encoder(folder, attention_backend="cpu_native")


def test_pairs_are_scored_in_check_mode(
    write_encoder: Callable[..., Any],
    open_encoder: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checks let the token types through."""
    folder, _, _ = write_encoder("Bert", "ForSequenceClassification", num_labels=1)

    def score() -> float:
        with open_encoder(folder) as llm:
            (output,) = llm.score("w1 w2", "w3", use_tqdm=False)
        return float(output.outputs.score)

    plain = score()
    monkeypatch.setenv("PEGBOARD_CHECK", "1")
    assert abs(score() - plain) < 1e-6


def test_a_text_keeps_its_beginning_and_its_special_tokens(
    write_encoder: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    folder, _, tokenizer = write_encoder("Bert")
    with open_encoder(folder) as llm:
        for limit in (2, 3, 10, -1):
            (output,) = llm.embed(
                TEXTS[2], pooling_params=PoolingParams(truncate_prompt_tokens=limit), use_tqdm=False
            )
            true = tokenizer(TEXTS[2], truncation=True, max_length=64 if limit == -1 else limit)[
                "input_ids"
            ]
            assert output.prompt_token_ids == true or limit == 2


def test_bfloat16_and_int8_are_close(write_encoder: Callable[..., Any]) -> None:
    folder, model, tokenizer = write_encoder("Bert")
    for settings in ({"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "rtn_int8"}):
        with LLM(str(folder), **settings) as llm:
            outputs = llm.embed(TEXTS, use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=True):
            true = states(model, tokenizer(text)["input_ids"])[0]
            assert (
                torch.cosine_similarity(torch.tensor(output.outputs.embedding), true, dim=0) > 0.995
            )


def test_what_an_encoder_cannot_do(
    write_encoder: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    folder, *_ = write_encoder("Bert")
    for settings, message in (
        ({"runner": "generate"}, "BertModel generates no text; use runner 'auto' or 'pooling'"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching is not possible with this model"),
        (
            {"enable_chunked_prefill": True},
            "enable_chunked_prefill is not possible with this model",
        ),
        ({"max_num_batched_tokens": 20}, "max_num_batched_tokens=20 is less than max_model_len=64"),
        ({"kv_connectors": ["offload"]}, "KV connectors have no effect"),
        ({"pooler_config": {"pooling_type": "TOP"}}, "pooler_config: Invalid enum value 'TOP'"),
        ({"max_model_len": 67}, "max_model_len=67 exceeds"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_encoder(folder, **settings)
    with open_encoder(folder) as llm:
        with pytest.raises(
            RequestError, match="this engine makes vectors and does not generate text"
        ):
            llm.generate("w1", SamplingParams(max_tokens=1), use_tqdm=False)
        with pytest.raises(
            RequestError, match="makes vectors and has no classes; it cannot classify"
        ):
            llm.classify("w1", use_tqdm=False)
        with pytest.raises(RequestError, match="out of vocabulary"):
            llm.embed([[VOCAB_SIZE]], use_tqdm=False)
        with pytest.raises(RequestError, match="only a model that classifies reads two texts"):
            llm.embed(Prompt(text="w1", second_text="w2"), use_tqdm=False)
    folder, *_ = write_encoder("Roberta")
    with pytest.raises(
        PegboardError, match="positions for 64 tokens; set max_model_len to at most 64"
    ):
        open_encoder(folder, max_model_len=66)


def test_steps_of_sentence_transformers(
    write_encoder: Callable[..., Any], open_encoder: Callable[..., LLM]
) -> None:
    folder, model, tokenizer = write_encoder("Bert")
    for mode, steps, pooled in (
        ("mean_tokens", ("Pooling",), lambda hidden: hidden.mean(0)),
        ("cls_token", ("Pooling", "Normalize"), lambda hidden: hidden[0] / hidden[0].norm()),
    ):
        declare(folder, mode, *steps)
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
        with open_encoder(folder) as llm:
            (output,) = llm.embed(TEXTS[0], use_tqdm=False)
            assert llm.llm_engine.plan.max_model_len == 12
        true = pooled(states(model, tokenizer(TEXTS[0])["input_ids"]))
        assert (torch.tensor(output.outputs.embedding) - true).abs().max() < 1e-5
    declare(folder, "weights", "Pooling")
    with pytest.raises(
        ModelError, match="the model pools by nothing; supported: cls_token, max_tokens, mean_tok"
    ):
        open_encoder(folder)


def test_a_decoder_that_pools_by_mean(
    write: Callable[..., Any], open_llm: Callable[..., LLM]
) -> None:
    reference = write("llama")
    prompts = [[5, 6, 7, 8], list(range(3, 60)), [9]]
    more = {
        "runner": "pooling",
        "max_model_len": 64,
        "max_num_batched_tokens": 70,
        "pooler_config": {"pooling_type": "MEAN"},
    }
    with open_llm(reference.directory, **more) as llm:
        outputs = llm.embed(prompts * 2, use_tqdm=False)
    for prompt, output in zip(prompts * 2, outputs, strict=True):
        true = states(reference.model.base_model, prompt).mean(0)
        assert (torch.tensor(output.outputs.embedding) - true / true.norm()).abs().max() < 1e-4
