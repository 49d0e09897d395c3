"""An engine on a tiny model, for the end-to-end tests of plugins:

    def test_an_engine_gives_the_tokens_of_the_default(tmp_path: Path) -> None:
        plain = tokens(tmp_path)
        assert tokens(tmp_path, attention_backend="mine") == plain

The model is a Llama with two layers and random weights, the same in every engine. It needs no files
except a config, so an engine starts within a second. It takes token ids, and has no tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
"""The model's config.json."""
DEFAULTS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64,
}
"""The settings of the engine."""
PROMPTS = [[1, 2, 3, 4] * 6, [7, 5, 9] * 10, [11]]
"""Token ids. Two prompts repeat themselves, so drafts and cached prefixes have something to do."""
MAX_TOKENS = 16


def vectors(folder: Path, **settings: Any) -> list[list[float]]:
    """Return the vector of each of PROMPTS. folder, settings: as of `tokens`."""
    from pegboard import LLM

    (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    with LLM(str(folder), **{**DEFAULTS, "runner": "pooling", **settings}) as llm:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
        return [list(output.outputs.embedding) for output in outputs]


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    """Return the MAX_TOKENS greedy token ids that follow each of PROMPTS. folder: an empty one, or
    that of an earlier call; the config is written there. settings: fields that `LLM` takes, over
    DEFAULTS. `load_format="auto"` reads the weights that the folder has."""
    from pegboard import LLM, SamplingParams

    (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    with LLM(str(folder), **{**DEFAULTS, **settings}) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]
