"""Adapters of models that make vectors and classes, in PEFT's files, against models whose weights
contain them. Requests with adapters and without share steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_converted_models import LIMITS, write
from test_token_results import normalized, states_of
from tiny_encoders import TEXTS
from tiny_media import make_tokenizer
from tiny_models import Reference, open_llm, random_prompts

from pegboard import LLM, LoRARequest, PoolingParams
from pegboard.errors import RequestError

RANKS = (3, 8)
ALPHA = 6
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
LENGTHS = (20, 9, 50, 33, 1, 7)
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")


def write_adapters(
    folder: Path, model: Any, endings: Sequence[str], prefix: str = "", **config: Any
) -> list[Any]:
    """Write two random adapters, which change the modules whose names end so. Return the model, and
    its copies that contain them. prefix: what the written names lack."""
    models = [model]
    for number, rank in enumerate(RANKS, 1):
        generator = torch.Generator().manual_seed(number)
        changed = copy.deepcopy(model)
        tensors = {}
        for name, module in changed.named_modules():
            if not name.endswith(tuple(endings)):
                continue
            out, columns = module.weight.shape
            a = torch.randn(rank, columns, generator=generator) * columns**-0.5
            b = torch.randn(out, rank, generator=generator) * rank**-0.5
            module.weight.data += ALPHA / rank * b @ a
            written = f"base_model.model.{name.removeprefix(prefix)}"
            tensors[f"{written}.lora_A.weight"] = a
            tensors[f"{written}.lora_B.weight"] = b
        adapter = folder / f"adapter{number}"
        adapter.mkdir()
        save_file(tensors, adapter / "adapter_model.safetensors")
        values = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, **config}
        (adapter / "adapter_config.json").write_text(json.dumps(values))
        models.append(changed)
    return models


def requests_of(folder: Path, count: int) -> list[LoRARequest | None]:
    """Return no adapter, the first and the second one, in turns."""
    own = [LoRARequest(f"a{number}", number, str(folder / f"adapter{number}")) for number in (1, 2)]
    return [[None, *own][place % 3] for place in range(count)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("architecture", "prefix", "convert"),
    [
        pytest.param("LlamaModel", "", "auto", id="names as those of the checkpoint"),
        pytest.param("LlamaForCausalLM", "model.", "embed", id="names without the first part"),
        pytest.param("LlamaForCausalLM", "", "embed", id="whole names"),
    ],
)
def test_vectors_of_decoders(
    architecture: str, prefix: str, convert: str, eager: bool, tmp_path: Path
) -> None:
    """Of prompts and of tokens, with prompts in chunks, and from the prefix cache."""
    reference = write(tmp_path / "model", architecture)
    models = write_adapters(tmp_path, reference.model, QKVO, prefix)
    prompts = random_prompts(LENGTHS) * 2
    loras = requests_of(tmp_path, len(prompts))
    params = [PoolingParams(task=("embed", "token_embed")[place // 6]) for place in range(12)]
    settings = {**LIMITS, **LORA, "convert": convert, "enforce_eager": eager}
    with open_llm(reference.directory, **settings) as llm:
        for _ in range(2):
            outputs = llm.encode(prompts, params, lora_request=loras, use_tqdm=False)
            for place, output in enumerate(outputs):
                states = states_of(Reference(tmp_path, models[place % 3]), prompts[place])
                true = normalized(states if place >= 6 else states[-1])
                assert output.outputs.data.shape == true.shape
                assert (torch.from_numpy(output.outputs.data) - true).abs().max() < 1e-4
        assert outputs[0].num_cached_tokens


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("architecture", ["SequenceClassification", "TokenClassification"])
def test_classes_of_decoders(architecture: str, eager: bool, tmp_path: Path) -> None:
    reference = write(tmp_path / "model", f"LlamaFor{architecture}")
    models = write_adapters(tmp_path, reference.model, QKVO)
    prompts = random_prompts(LENGTHS) * 2
    loras = requests_of(tmp_path, len(prompts))
    params = [PoolingParams(task=("classify", "token_classify")[place // 6]) for place in range(12)]
    of_tokens = architecture.startswith("Token")
    params = [PoolingParams(task="token_classify")] * 12 if of_tokens else params
    with open_llm(reference.directory, **LIMITS, **LORA, enforce_eager=eager) as llm:
        outputs = llm.encode(prompts, params, lora_request=loras, use_tqdm=False)
    for place, output in enumerate(outputs):
        model = models[place % 3]
        states = states_of(Reference(tmp_path, model), prompts[place])
        with torch.no_grad():
            true = model.score(states).softmax(-1)
        true = true if params[place].task == "token_classify" else true[-1]
        assert output.outputs.data.shape == true.shape
        assert (torch.from_numpy(output.outputs.data) - true).abs().max() < 1e-4


def test_classes_that_are_logits_of_tokens(tmp_path: Path) -> None:
    """Of prompts and of tokens, whose rows are many more than those that a step samples."""
    reference = write(tmp_path / "model", "LlamaForCausalLM", num_labels=2)
    make_tokenizer(["<image>"], "<image>").save_pretrained(tmp_path / "model")
    models = write_adapters(tmp_path, reference.model, QKVO)
    overrides = {
        "architectures": ["LlamaForSequenceClassification"],
        "classifier_from_token": ["w3", "w9"],
    }
    prompts = random_prompts(LENGTHS) * 2
    params = [PoolingParams(task=("classify", "token_classify")[place // 6]) for place in range(12)]
    settings = {**LIMITS, **LORA, "hf_overrides": overrides, "skip_tokenizer_init": False}
    with open_llm(reference.directory, **settings) as llm:
        loras = requests_of(tmp_path, len(prompts))
        outputs = llm.encode(prompts, params, lora_request=loras, use_tqdm=False)
    for place, output in enumerate(outputs):
        with torch.no_grad():
            logits = models[place % 3](torch.tensor([prompts[place]])).logits[0]
        true = logits[:, [3, 9]].softmax(-1)
        true = true if params[place].task == "token_classify" else true[-1]
        assert (torch.from_numpy(output.outputs.data) - true).abs().max() < 1e-5


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_encoders(
    head: str,
    write_encoder: Callable[..., Any],
    open_encoder: Callable[..., LLM],
    tmp_path: Path,
) -> None:
    folder, model, tokenizer = write_encoder("Bert", head)
    endings = ("attention.self.query", "attention.self.value", "intermediate.dense")
    models = write_adapters(tmp_path, model, endings)
    loras = requests_of(tmp_path, 2 * len(TEXTS))
    with open_encoder(folder, **LORA) as llm:
        outputs = llm.encode(TEXTS * 2, lora_request=loras, use_tqdm=False)
    for place, (text, output) in enumerate(zip(TEXTS * 2, outputs, strict=True)):
        with torch.no_grad():
            result = models[place % 3](torch.tensor([tokenizer(text)["input_ids"]]))
        if head == "Model":
            true = normalized(result.last_hidden_state[0, 0])
        else:
            true = result.logits[0].softmax(-1)
        assert (torch.from_numpy(output.outputs.data) - true).abs().max() < 1e-5


def test_a_head_takes_no_adapter(tmp_path: Path) -> None:
    """One that changes it, or has a whole one as PEFT stores it, is refused. A head for text that
    is not used may be changed."""
    classes = write(tmp_path / "classes", "LlamaForSequenceClassification")
    text = write(tmp_path / "text", "LlamaForCausalLM")
    for name, reference, endings, config, message in (
        ("low", classes, ("v_proj", "score"), {}, "it changes score; heads for classes take no"),
        ("saved", classes, ("v_proj",), {"modules_to_save": ["score"]}, "with whole modules"),
        ("unused", text, ("v_proj", "lm_head"), {}, None),
    ):
        (tmp_path / name).mkdir()
        models = write_adapters(tmp_path / name, reference.model, endings, **config)
        lora = requests_of(tmp_path / name, 2)[1]
        convert = "auto" if reference is classes else "embed"
        with open_llm(reference.directory, **LIMITS, **LORA, convert=convert) as llm:
            if message is not None:
                with pytest.raises(RequestError, match=message):
                    llm.llm_engine.add_lora(lora)
                continue
            (output,) = llm.encode([[5, 6]], lora_request=lora, use_tqdm=False)
        true = normalized(states_of(Reference(tmp_path, models[1]), [5, 6])[-1])
        assert (torch.from_numpy(output.outputs.data) - true).abs().max() < 1e-4


def test_a_head_of_an_encoder_takes_no_adapter(
    write_encoder: Callable[..., Any], open_encoder: Callable[..., LLM], tmp_path: Path
) -> None:
    folder, model, _ = write_encoder("Bert", "ForSequenceClassification")
    write_adapters(tmp_path, model, ("attention.self.query", "classifier"))
    with (
        open_encoder(folder, **LORA) as llm,
        pytest.raises(RequestError, match="it changes classifier; heads for classes take no"),
    ):
        llm.llm_engine.add_lora(requests_of(tmp_path, 2)[1])
