"""Chameleon: the rows of transformers, and its logits with images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_chameleon.chameleon import Chameleon
from safetensors.torch import load_file
from test_adapters_over_formats import write_adapter
from tiny_media import (
    MEDIA_TEXT,
    MediaReference,
    Prompt,
    built_model,
    make_media_model,
    make_tokenizer,
    open_media_llm,
    some_prompts,
)
from tiny_models import TOLERANCE, divide
from transformers import ChameleonProcessor
from transformers.models.chameleon.image_processing_pil_chameleon import ChameleonImageProcessorPil

from pegboard import SamplingParams
from pegboard.errors import RequestError

SIZE = 16
ROWS = 16
SPECIAL = ["<image>", "<racm3:break>", "<eoss>", "<reserved08706>"]
IMAGE = 100
CODES = 20
TOKENS = [104 + (7 * code) % CODES for code in range(CODES)]
"""Of the codes."""
VQ: dict[str, Any] = {
    "embed_dim": 8,
    "num_embeddings": CODES,
    "latent_channels": 6,
    "resolution": SIZE,
    "base_channels": 32,
    "channel_multiplier": [1, 2, 2],
    "num_res_blocks": 2,
}


def named(code: int) -> str:
    """Return the name of the token of a code."""
    return "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z"


CONFIG: dict[str, Any] = {
    **MEDIA_TEXT,
    "vq_config": VQ,
    "vocabulary_map": {
        **{text: 100 + place for place, text in enumerate(SPECIAL)},
        **{named(code): token for code, token in enumerate(TOKENS)},
    },
}


class Embedded(MediaReference):
    """The model gets embeddings, because its outputs may be the token of images."""

    def logprobs(self, one: Prompt, outputs: Any) -> torch.Tensor:
        given = dict(self.inputs(one))
        prompt = given["input_ids"]
        ids = torch.cat([prompt, torch.tensor([list(outputs)]).long()], 1)
        with torch.no_grad():
            rows = self.model.get_input_embeddings()(ids)
            if "pixel_values" in given:
                seen = self.model.get_image_features(given["pixel_values"]).pooler_output
                rows[:, : prompt.shape[1]][prompt == IMAGE] = seen.flatten(0, 1)
            logits = self.model(inputs_embeds=rows).logits[0]
        return logits[-len(outputs) - 1 :].float().log_softmax(-1)


def write(folder: Path, **more: Any) -> MediaReference:
    model = make_media_model("chameleon", **{**CONFIG, **more})
    model.save_pretrained(folder)
    side = {"height": SIZE, "width": SIZE}
    images = ChameleonImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=side)
    images.save_pretrained(folder)
    tokenizer = make_tokenizer(SPECIAL, "<image>")
    tokenizer.sep_token = SPECIAL[-1]
    tokenizer.save_pretrained(folder)
    theirs = ChameleonProcessor(images, tokenizer, image_seq_length=ROWS)

    def inputs(one: Prompt) -> Mapping[str, Any]:
        given = one.get("multi_modal_data", {}).get("image")
        text = [one["prompt"]]
        ends = given is None
        return theirs(images=given, text=text, return_tensors="pt", return_for_text_completion=ends)

    return Embedded(folder, model, inputs)


VARIANTS: dict[str, dict[str, Any]] = {
    "chameleon": {},
    "swin norm": {
        "swin_norm": True,
        "attention_bias": True,
        "mlp_bias": True,
        "vq_config": {**VQ, "attn_resolutions": [8, 4]},
    },
    "no attention": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "vq_config": {**VQ, "attn_type": "none", "num_res_blocks": 1},
    },
}


@pytest.fixture(scope="module", params=VARIANTS)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MediaReference:
    return write(tmp_path_factory.mktemp("chameleon"), **VARIANTS[request.param])


def test_rows(reference: MediaReference) -> None:
    """The codes are those of transformers, and there are many of them."""
    ours, used = built_model(Chameleon, reference.directory)
    pixels = torch.randn(9, 3, SIZE, SIZE)
    with torch.no_grad():
        tokens = reference.model.get_image_tokens(pixels)
        expected = reference.model.get_image_features(pixels).pooler_output
    assert len(tokens.unique()) > 3
    rows = ours.encode("image", [{"pixel_values": each} for each in pixels])
    torch.testing.assert_close(torch.stack([*rows]), expected, atol=1e-4, rtol=1e-4)
    left = load_file(reference.directory / "model.safetensors").keys() - used
    assert all("post_quant_conv" in name for name in left)
    _, later = built_model(Chameleon, reference.directory, layers=range(1, 2))
    assert not any("vqmodel" in name for name in later)


def check(reference: MediaReference, num_tokens: int = 6, **settings: Any) -> None:
    """Compare the logprobs of all tokens that may be chosen, and every greedy choice. All prompts
    run together, twice."""
    prompts = some_prompts()
    params = SamplingParams(max_tokens=num_tokens, temperature=0, logprobs=-1, ignore_eos=True)
    with open_media_llm(reference.directory, **settings) as llm:
        runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    for one, *results in zip(prompts, *runs, strict=True):
        for result in results:
            answer = result.outputs[0]
            outputs = list(answer.token_ids)
            expected = reference.logprobs(one, outputs)
            assert outputs == expected[:-1].argmax(-1).tolist(), one["prompt"]
            for row, values in zip(answer.logprobs, expected, strict=False):
                for token in range(len(values)):
                    found = row[token].logprob
                    if token in TOKENS:
                        assert found < -1e30
                    else:
                        assert abs(found - float(values[token])) < TOLERANCE, one["prompt"]


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks inside an item": {"max_num_batched_tokens": 8},
    "whole prompts": {"max_num_batched_tokens": 256, "block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
    "adapters are on": {"enable_lora": True},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_logits(reference: MediaReference, settings: dict[str, Any]) -> None:
    """The second time, the prefixes are in the cache."""
    check(reference, **settings)


def test_divided(reference: MediaReference, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2, 2)
    check(reference, num_tokens=3)


def test_an_adapter_of_the_embedding_is_refused(tmp_path: Path) -> None:
    """Rows of images come from the embedding, and are kept for other requests."""
    reference = write(tmp_path)
    rows, width = reference.model.get_input_embeddings().weight.shape
    weights = {"model.embed_tokens": (torch.randn(4, rows), torch.randn(width, 4))}
    adapter = write_adapter(tmp_path / "adapter", weights)
    with (
        open_media_llm(tmp_path, max_loras=1) as llm,
        pytest.raises(RequestError, match=r"model\.embed_tokens"),
    ):
        llm.generate(some_prompts()[:1], lora_request=adapter, use_tqdm=False)
