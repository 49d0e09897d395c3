"""Pipeline stages change no token, also where what the last stage samples depends on more than the
logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pegboard import LLM, SamplingParams
from pegboard.data.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.real_model

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "boolean"}},
    "required": ["name", "age"],
}
MASKED = {"structured_outputs": StructuredOutputsParams(json=PERSON)}
PARAMS: list[dict[str, Any]] = [
    MASKED,
    {"presence_penalty": 0.5, "logprobs": 2},
    MASKED,
    {"temperature": 1.0, "seed": 5, "n": 2},
    MASKED,
    {"prompt_logprobs": 1},
]


def answers(path: Path, **settings: Any) -> list[Any]:
    """Return (text, logprobs) of every completion, and the logprobs of its prompt."""
    llm = LLM(str(path), max_model_len=512, kv_cache_memory_bytes=1 << 28, **settings)
    prompts = [
        [{"role": "user", "content": f"Describe person {i} as JSON."}] for i in range(len(PARAMS))
    ]
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 32, **more}) for more in PARAMS]
    try:
        outputs = llm.chat(prompts, params, use_tqdm=False)
    finally:
        llm.shutdown()
    return [
        (output.prompt_logprobs, [(each.text, each.logprobs) for each in output.outputs])
        for output in outputs
    ]


@pytest.mark.slow
def test_the_same_answers(smollm2_gguf: Path) -> None:
    """With drafts, too. The threads are as many, because their number changes how sums are
    rounded."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    alone = answers(smollm2_gguf, num_threads=1)
    assert answers(smollm2_gguf, num_threads=1, pipeline_parallel_size=2) == alone
    three = answers(
        smollm2_gguf, num_threads=1, pipeline_parallel_size=3, speculative_config=drafts
    )
    texts = [[text for text, _ in completions] for _, completions in alone]
    assert [[text for text, _ in completions] for _, completions in three] == texts
    assert all(json.loads(texts[i][0]).keys() == {"name", "age"} for i in (0, 2, 4))
