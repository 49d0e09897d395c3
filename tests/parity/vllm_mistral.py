"""Runs vLLM's Mistral tokenizer, in an interpreter that has vLLM: one job as JSON on stdin, the
result as JSON on stdout.

Job: {"folder", "chats": [{"messages", "tools", "continues"}], "texts"}.
Result: {"chats": [token ids], "texts": [[token ids, text]]}.
Not imported by Pegboard.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    stdout = sys.stdout
    sys.stdout = sys.stderr  # anything printed meanwhile is not a result
    from vllm.tokenizers.mistral import MistralTokenizer

    job = json.load(sys.stdin)
    tokenizer = MistralTokenizer.from_pretrained(job["folder"])
    chats = [
        tokenizer.apply_chat_template(
            chat["messages"],
            tools=chat["tools"],
            add_generation_prompt=not chat["continues"],
            continue_final_message=chat["continues"],
        )
        for chat in job["chats"]
    ]
    texts = []
    for text in job["texts"]:
        ids = tokenizer.encode(text)
        texts.append([ids, tokenizer.decode(ids, skip_special_tokens=True)])
    print(json.dumps({"chats": chats, "texts": texts}), file=stdout)


if __name__ == "__main__":
    main()
