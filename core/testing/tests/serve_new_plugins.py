"""Runs a model of which nearly everything is a new plugin: python serve_new_plugins.py FOLDER. The
folder gets a checkpoint.

The tokens with drafts, a KV connector, a policy and a logits processor, in one batch, are those of
each prompt alone. So are those of the new platform, attention, executor and sampler. Draws with a
seed do not depend on the batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from pegboard import LLM, SamplingParams, StructuredOutputsParams

HIDDEN = 64
INNER = 96
VOCAB = 258
LAYERS = 2
CONFIG = {
    "architectures": ["MyModelForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
}
CHOICES = ["yes", "yesterday", "never"]
PROMPTS = ["Hello there, hello there", "abc" * 10, "x"]


def write_checkpoint(folder: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCAB, HIDDEN),
        "lm_head": (VOCAB, HIDDEN),
    }
    shapes["model.norm"] = (HIDDEN,)
    for index in range(LAYERS):
        at = f"model.layers.{index}"
        shapes[f"{at}.norm"] = (HIDDEN,)
        shapes |= {f"{at}.attention.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{at}.attention.{name}_proj": (HIDDEN // 2, HIDDEN) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj"] = (HIDDEN, INNER)
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        np.save(folder / f"{name}.weight.npy", random.normal(size=shape).astype(np.float32) * 0.2)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "my_tokenizer.json").write_text("{}")


def main(folder: Path) -> None:
    write_checkpoint(folder)
    plain = {
        "tokenizer_mode": "my-tokenizer",
        "load_format": "my-weight-loader",
        "num_gpu_blocks_override": 64,
    }
    more = {
        "speculative_config": {"method": "my-draft", "num_speculative_tokens": 3},
        "kv_connectors": ["my-kv-connector"],
        "plugin_options": {"kv_connector.my-kv-connector": {"path": folder / "blocks.sqlite"}},
        "scheduling_policy": "my-scheduling-policy",
        "logits_processors": ["my-logits-processor"],
        "structured_outputs_config": {"backend": "my-structured-output"},
    }
    device = {
        "device": "my-platform",
        "attention_backend": "my-attention",
        "distributed_executor_backend": "my-executor",
        "sampler": "my-sampler",
    }
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(folder), **plain) as llm:
        expected = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in PROMPTS]
    with LLM(str(folder), **plain, **device) as llm:
        on_device = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        seeded = [
            SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=20, logprobs=2)
            for seed in range(3)
        ]
        together = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, seeded)]
        alone = [
            llm.generate([prompt], each)[0].outputs[0].token_ids
            for prompt, each in zip(PROMPTS, seeded, strict=True)
        ]
    assert on_device == expected, f"expected {expected}, found {on_device}"
    assert together == alone, f"expected {alone}, found {together}"
    with LLM(str(folder), **plain, **more) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        forbidden = found[0][0]
        banning = SamplingParams(
            temperature=0, max_tokens=1, extra_args={"my_logits_processor_ids": [forbidden]}
        )
        banned = llm.generate(PROMPTS[:1], banning)[0].outputs[0].token_ids
        choosing = SamplingParams(
            temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=CHOICES)
        )
        chosen = [output.outputs[0].text for output in llm.generate(PROMPTS, choosing)]
    assert found == expected, f"expected {expected}, found {found}"
    assert forbidden not in banned
    assert set(chosen) <= set(CHOICES), chosen
    assert (folder / "blocks.sqlite").stat().st_size > 0
    print("served")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
