"""Quantized checkpoints that vLLM runs on a CPU give the same tokens there. Opt-in:
PEGBOARD_PEER_VLLM names a Python with vLLM.

vLLM computes these formats in bfloat16. The float8 and FP4 formats, and GPTQ in act order, have no
CPU kernels there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored_layouts
import torch
from stored_layouts import CASES, GROUP, as_w8a8, of_groups, quantize, stream
from torch import Tensor

from pegboard import LLM, SamplingParams

PEER = os.environ.get("PEGBOARD_PEER_VLLM", "")
pytestmark = pytest.mark.skipif(not PEER, reason="PEGBOARD_PEER_VLLM names no Python with vLLM")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MAX_TOKENS = 6
LIMIT = 0.1
"""Of the standard deviation of the errors, relative to that of the logprobs. Here products round
activations to 8 bits, and vLLM rounds everything to bfloat16. Found: 0.04 to 0.05, and 0.08 for
int-quantized, where both round activations to 8 bits."""
MARGIN = 0.2
"""Two tokens whose logprobs differ by less may be confused by bfloat16."""


def as_symmetric_gptq(weight: Tensor, bits: int, order: bool) -> tuple[dict[str, Tensor], Tensor]:
    groups = weight.view(weight.shape[0], -1, GROUP)
    scales = (groups.abs().amax(2) / 7).half()
    codes = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7)
    values = (codes * scales.float().unsqueeze(2)).view(weight.shape)
    zeros = torch.full(scales.shape, 7).numpy()  # the format stores the zero point less one
    tensors = {
        "qweight": stream((codes + 8).view(weight.shape).long().numpy().T, 4),
        "qzeros": stream(zeros, 4).T.contiguous(),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }
    return tensors, values


SYMMETRIC = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
W8A8 = of_groups("int-quantized", "channel", num_bits=8, symmetric=True, dynamic=False)
W8A8["config_groups"]["group_0"]["input_activations"] = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "dynamic": True,
    "symmetric": True,
}
OURS = {"awq": CASES["awq"], "pack-quantized": CASES["pack-quantized"]}
OURS |= {
    "gptq": (SYMMETRIC, as_symmetric_gptq, 4, False),
    "int-quantized": (W8A8, as_w8a8, 8, False),
}


def vllm(job: dict[str, Any]) -> dict[str, Any]:
    script = Path(__file__).with_name("vllm_generate.py")
    done = subprocess.run(
        [PEER, str(script)], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("case", OURS)
def test_tokens_of_vllm(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    case: str,
) -> None:
    monkeypatch.setitem(stored_layouts.CASES, case, OURS[case])
    reference = write("llama", **SIZES)
    quantize(reference, case)
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, 131, (length,), generator=generator).tolist() for length in (5, 40, 100)
    ]
    theirs = vllm(
        {
            "model": str(reference.directory),
            "prompts": prompts,
            "max_tokens": MAX_TOKENS,
            "dtype": "bfloat16",
        }
    )
    params = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0, prompt_logprobs=0, ignore_eos=True, detokenize=False
    )
    with open_llm(reference.directory, download_dir=str(tmp_path / "cache")) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
    for prompt, output, answer, logprobs in zip(
        prompts, outputs, theirs["answers"], theirs["logprobs"], strict=True
    ):
        rows = (output.prompt_logprobs or [])[1:]
        own = torch.tensor(
            [
                row[token].logprob
                for token, row in zip(prompt[1:], rows, strict=True)
                if row is not None
            ]
        )
        expected = torch.tensor(logprobs)
        assert (own - expected).std() < LIMIT * expected.std()
        found = list(output.outputs[0].token_ids)
        first = next(
            (index for index, (a, b) in enumerate(zip(found, answer, strict=True)) if a != b), None
        )
        if first is not None:
            best = reference.logprobs([*prompt, *found[:first]])[-1].topk(2).values
            assert best[0] - best[1] < MARGIN, f"token {first}: {found}, vLLM has {answer}"
