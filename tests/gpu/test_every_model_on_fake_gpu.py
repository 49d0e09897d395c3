"""Every architecture of the parity tests on a fake GPU, with Triton's attention. Those that
generate give transformers' tokens, or, with media, the CPU's, and no step of text waits for the
device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_engine import engine_on_fake_gpu
from fake_gpu_parity import check_on_gpu
from media_families import FAMILIES, ITEMS, processor_of
from test_default_dtype import OWN
from test_dense_parity import halve_biases
from test_fallback_parity import ARCHITECTURES as FALLBACK
from test_media_dtypes import OTHERS, SMALL
from test_rotated_encoder_parity import ARCHITECTURES as ROTATED
from test_whisper_parity import some_prompts
from tiny_encoders import ARCHITECTURES as ENCODERS
from tiny_encoders import VOCAB_SIZE, write_tokenizer
from tiny_media import open_media_llm
from tiny_models import Reference, make_model
from tiny_whisper import write_whisper

from pegboard import LLM, SamplingParams
from pegboard_weights.hf_files import read_config, with_defaults

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
    pytest.mark.slow,
]

STATES = ("causal_conv", "selective_scan", "chunked_scan", "gated_delta_rule", "gated_norm")
KERNELS = ("attention", "float_weight", *STATES)
SETTINGS: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**23}
FLEX = "llama, biases, odd head size"
"""Only `flex` has such heads, and torch's flex_attention knows its devices by name."""
GREEDY = SamplingParams(max_tokens=3, temperature=0, logprobs=5, ignore_eos=True)
LARGE: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 2}


@pytest.mark.parametrize("name", sorted(OWN.keys() - {FLEX}))
def test_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model_type, config = OWN[name]
    model = make_model(model_type, **config)
    model.save_pretrained(tmp_path)
    halve_biases(config, monkeypatch)
    check_on_gpu(Reference(tmp_path, model), KERNELS, mamba_block_size=8, **SETTINGS)


@pytest.mark.parametrize("name", FALLBACK)
def test_modules_of_transformers(tmp_path: Path, name: str) -> None:
    model_type, config = FALLBACK[name]
    model = make_model(model_type, **config)
    model.save_pretrained(tmp_path)
    unknown = {"architectures": ["UnheardOfForCausalLM"]}
    check_on_gpu(Reference(tmp_path, model), KERNELS, hf_overrides=unknown, **SETTINGS)


def answers(llm: LLM, prompts: list[Any]) -> tuple[list[list[int]], torch.Tensor]:
    """Return the tokens of the answers, and the logprobs of all: [values]."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    values = [
        item.logprob
        for output in outputs
        for row in output.logprobs or []
        for item in sorted(row.values(), key=lambda item: item.rank or 0)
    ]
    return [list(output.token_ids) for output in outputs], torch.tensor(values)


def check_with_media(folder: Path, prompts: list[Any]) -> None:
    """The GPU's answers are the CPU's."""
    with open_media_llm(folder, dtype="float32", **LARGE) as llm:
        tokens, logprobs = answers(llm, prompts)
    settings = {"dtype": "float32", **LARGE, "kv_cache_memory_bytes": 2**25}
    with engine_on_fake_gpu(folder, False, KERNELS, max_model_len=-1, **settings) as (llm, gpu):
        gpu.total_bytes = 2**33
        replays = gpu.replays
        on_gpu, theirs = answers(llm, prompts)
        assert gpu.replays - replays >= 2 * len(prompts)
    assert on_gpu == tokens
    torch.testing.assert_close(theirs, logprobs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - OTHERS))
def test_media(tmp_path: Path, name: str) -> None:
    FAMILIES[name](tmp_path)
    processor, modalities = processor_of(tmp_path, with_defaults(read_config(tmp_path)))
    options = {"mm_processor_kwargs": SMALL} if "omni" in name else {}
    prompts = [
        {
            **options,
            "prompt": f"w5 {processor.placeholder(modality).text} w6",
            "multi_modal_data": {modality: [ITEMS[modality]]},
        }
        for modality in modalities
    ]
    check_with_media(tmp_path, prompts)


def test_whisper(tmp_path: Path) -> None:
    write_whisper(tmp_path)
    check_with_media(tmp_path, some_prompts())


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
@pytest.mark.parametrize("name", [*ENCODERS, *ROTATED])
def test_encoders(tmp_path: Path, name: str, head: str) -> None:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(
        **{"vocab_size": VOCAB_SIZE, "max_position_embeddings": 66, **(ENCODERS | ROTATED)[name]}
    )
    getattr(transformers, name + head)(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, is_roberta="oberta" in name)
    texts = ["w1 w2 w3", "w9", "w7 w8 w9 w10 w11 w12 w13"]
    settings: Any = {"dtype": "float32", "max_num_batched_tokens": 80, "max_num_seqs": 3}

    def results(llm: LLM) -> torch.Tensor:
        ask: Callable[..., Any] = llm.embed if head == "Model" else llm.classify
        outputs = [output.outputs for output in ask(texts, use_tqdm=False)]
        attribute = "embedding" if head == "Model" else "probs"
        return torch.tensor([getattr(output, attribute) for output in outputs])

    with LLM(str(tmp_path), **settings) as llm:
        expected = results(llm)
    with engine_on_fake_gpu(tmp_path, False, KERNELS, **settings) as (llm, _):
        torch.testing.assert_close(results(llm), expected, rtol=1e-4, atol=1e-5)
