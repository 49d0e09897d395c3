"""Answer some prompts with speculative decoding, and print how many drafts were right.

    python examples/speculative_decoding.py --method ngram
    python examples/speculative_decoding.py --method eagle3 --draft-model heads/eagle3

docs/draft_heads.md says how to make such a head.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from pegboard import LLM, SamplingParams

TASKS = (
    "Why do leaves turn red in autumn?",
    "Write a Python class of a stack, then write it again with other names.",
    "Tell a story about a fox who learns to read.",
    "List ten animals, then list them in the order of the alphabet.",
    "Explain how a lock works.",
    "Write a letter to a neighbor about a lost cat.",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--method", default="ngram", help="a draft plugin")
    parser.add_argument("--model-dir", help="the model; without it, the default model")
    parser.add_argument("--draft-model", "--eagle-dir", help="the head or the smaller model")
    parser.add_argument("--num-spec-tokens", type=int, default=4)
    parser.add_argument("--prompt-lookup-min", type=int, default=2, help="ngram only")
    parser.add_argument("--prompt-lookup-max", type=int, default=4, help="ngram only")
    parser.add_argument("--fixed-length", action="store_true", help="always draft that many tokens")
    parser.add_argument("--num-prompts", type=int, default=len(TASKS))
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=1, help="requests at a time")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--print-output", action="store_true")
    return parser.parse_args()


def speculative_config(given: argparse.Namespace) -> dict[str, Any]:
    config = {
        "method": given.method,
        "num_speculative_tokens": given.num_spec_tokens,
        "adaptive_length": not given.fixed_length,
    }
    if given.draft_model:
        config["model"] = given.draft_model
    if given.method == "ngram":
        config["prompt_lookup_min"] = given.prompt_lookup_min
        config["prompt_lookup_max"] = given.prompt_lookup_max
    return config


def print_metrics(llm: LLM) -> None:
    """Print the numbers of drafts and how many of their tokens were accepted, at each place."""
    metrics = {
        metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()
    }
    num_drafts = metrics["drafts"].value
    num_tokens = metrics["draft_tokens"].value
    num_accepted = metrics["accepted_tokens"].value
    print(f"num_drafts: {num_drafts:.0f}")
    print(f"num_draft_tokens: {num_tokens:.0f}")
    print(f"num_accepted_tokens: {num_accepted:.0f}")
    print(f"acceptance rate: {num_accepted / max(1, num_tokens):.2f}")
    print(f"mean acceptance length: {1 + num_accepted / max(1, num_drafts):.2f}")
    for place, count in enumerate(metrics["accepted_tokens_per_pos"].values):
        print(f"acceptance at token {place}: {count / max(1, num_drafts):.2f}")


def main() -> None:
    given = arguments()
    more = {"model": given.model_dir} if given.model_dir else {}
    params = SamplingParams(
        temperature=given.temp, top_p=given.top_p, top_k=given.top_k, max_tokens=given.output_len
    )
    with LLM(
        **more,
        speculative_config=speculative_config(given),
        max_num_seqs=given.max_num_seqs,
        max_model_len=given.max_model_len,
        enforce_eager=given.enforce_eager,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=False,
    ) as llm:
        conversations = [
            [{"role": "user", "content": TASKS[number % len(TASKS)]}]
            for number in range(given.num_prompts)
        ]
        begin = time.perf_counter()
        outputs = llm.chat(conversations, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if given.print_output:
            for output in outputs:
                print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"total_num_output_tokens: {num_tokens}")
        print(f"tokens per second: {num_tokens / seconds:.1f}")
        print_metrics(llm)


if __name__ == "__main__":
    main()
