"""State-space models and hybrids on the fake GPU: all steps are replayed, those with prompts in
pieces, nothing waits for the device, and the tokens are those of transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_engine import engine_on_fake_gpu, submitted_steps
from fake_gpu_parity import check_on_gpu
from test_state_parity import ARCHITECTURES
from tiny_models import VOCAB_SIZE, Reference, make_model

from pegboard import SamplingParams
from pegboard.interfaces.platform import Trait
from pegboard.worker.recordings import Recorded, Recordings

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]

KERNELS = (
    "causal_conv",
    "selective_scan",
    "chunked_scan",
    "gated_delta_rule",
    "gated_norm",
    "float_weight",
)
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_num_seqs": 2,
    "mamba_block_size": 8,
}
FEW = {"num_hidden_layers": 1}
MIXED = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
MODELS = {
    "mamba": {**FEW, "max_position_embeddings": 160},
    "mamba2": FEW,
    "jamba": {"num_hidden_layers": 3},
    "qwen3_next": MIXED,
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Reference]:
    """write(name) makes a tiny model and writes its checkpoint."""

    def make(name: str) -> Reference:
        model_type, config = ARCHITECTURES[name]
        model = make_model(model_type, **{**config, **MODELS[name]})
        model.save_pretrained(tmp_path)
        return Reference(tmp_path, model)

    return make


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "kernels",
    [KERNELS, pytest.param(KERNELS[-1:], marks=pytest.mark.slow)],
    ids=["kernels", "references"],
)
def test_models(
    write: Callable[[str], Reference],
    name: str,
    kernels: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", "pegboard")
    sizes: list[int] = []
    find = Recordings.find

    def watched(self: Recordings, trait: Trait, *given: int) -> Recorded | None:
        recorded = find(self, trait, *given)
        if trait == "forward" and recorded is not None:
            sizes.append(recorded.num_tokens)
        return recorded

    monkeypatch.setattr(Recordings, "find", watched)
    check_on_gpu(write(name), kernels, mamba_block_size=8)
    assert "eagerly" not in caplog.text
    assert {8, 16} <= {*sizes}, "steps with prompts are replayed in pieces"


def test_the_mode_without_pieces(
    write: Callable[[str], Reference], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pegboard")
    check_on_gpu(write("mamba2"), KERNELS[-1:], mamba_block_size=8, recording_mode="full")
    assert "forward run eagerly: layers with states cannot replay padded prompts" in caplog.text


@pytest.mark.parametrize("kernels", [KERNELS, ()], ids=["kernels", "references"])
def test_drafts(
    write: Callable[[str], Reference],
    kernels: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt that has all tokens gives drafts, and most of them are wrong. Kernels compute rows
    of several tokens in a recording. References do not, so steps run eagerly."""
    caplog.set_level("INFO", "pegboard")
    reference = write("mamba")
    prompt = list(range(3, VOCAB_SIZE))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    expected: list[int] = []
    while len(expected) < 8:
        expected.append(int(reference.logprobs(prompt + expected)[-1].argmax()))
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 1}
    drafts["prompt_lookup_min"] = 1
    settings = {**SETTINGS, "speculative_config": drafts}
    steps = submitted_steps(monkeypatch)
    with engine_on_fake_gpu(reference.directory, by_triton=False, kernels=kernels, **settings) as (
        llm,
        gpu,
    ):
        before = gpu.blocking_uploads
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected
        assert gpu.blocking_uploads == before, "states are kept and taken back without a wait"
    assert sum(bool(batch.num_draft_tokens.any()) for batch, _ in steps) >= 2
    assert ("cannot replay drafts" in caplog.text) == (not kernels)
