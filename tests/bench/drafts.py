"""What speculative decoding saves on this machine: tokens per second with drafts and without, as
ratios of medians.

    python tests/bench/drafts.py [--method ngram] [--tokens 8] [--option NAME=VALUE …] [--rounds 5]

Two engines with the default model take turns in one process: one without drafts, one with. Both
answer the tasks of draft_prompts.toml: tasks whose answers repeat their prompt, and tasks whose
answers are free text. The answers must be the same. Ends with the share of a step that proposing
takes when 32 requests decode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

from step_shares import Timer

from pegboard import LLM, SamplingParams

Task = dict[str, str]
TASKS: dict[str, list[Task]] = tomllib.loads(
    Path(__file__).with_name("draft_prompts.toml").read_text("utf-8")
)
MAX_TOKENS = 128
BATCHES = (1, 8)


def answer_length(tokenizer: Any, task: Task) -> int:
    """Return the largest number of tokens of an answer. An answer that repeats a text ends where
    the text does."""
    if not task["answer"]:
        return MAX_TOKENS
    text = task["task"].partition("\n")[2]
    return len(tokenizer.encode(text)) - len(tokenizer.encode(task["answer"]))


class Answers:
    """The answers of one engine to a list of tasks, and the seconds that decoding took."""

    def __init__(self, llm: LLM, tasks: list[Task], batch: int) -> None:
        self.token_ids: list[list[int]] = []
        self.decode_s = 0.0
        for first in range(0, len(tasks), batch):
            self._answer(llm, tasks[first : first + batch])

    def _answer(self, llm: LLM, tasks: list[Task]) -> None:
        """Answer these tasks together. The time counts from the first tokens of all of them."""
        engine = llm.llm_engine
        tokenizer = llm.get_tokenizer()
        for number, task in enumerate(tasks):
            messages = [{"role": "user", "content": task["task"]}]
            prompt = (
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                + task["answer"]
            )
            params = SamplingParams(
                max_tokens=answer_length(tokenizer, task), temperature=0, stop="```"
            )
            engine.add_request(str(number), {"prompt_token_ids": tokenizer.encode(prompt)}, params)
        done: dict[str, list[int]] = {}
        started: set[str] = set()
        begin = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                started.add(output.request_id)
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
            if not begin and len(started) == len(tasks):
                begin = time.perf_counter()
        self.decode_s += time.perf_counter() - begin
        self.token_ids += [done[str(number)] for number in range(len(tasks))]


def counters(llm: LLM) -> list[float]:
    """Return the numbers of draft tokens verified and accepted so far."""
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in names}
    return [values[name] for name in names]


def compare(plain: LLM, drafts: LLM, kind: str, batch: int, rounds: int) -> None:
    times: list[tuple[float, float]] = []
    before = counters(drafts)
    for _ in range(rounds):
        one = Answers(plain, TASKS[kind], batch)
        other = Answers(drafts, TASKS[kind], batch)
        times.append((one.decode_s, other.decode_s))
        differing = sum(a != b for a, b in zip(one.token_ids, other.token_ids, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    num_tokens = sum(map(len, one.token_ids))
    verified, accepted = (now - then for now, then in zip(counters(drafts), before, strict=True))
    print(
        f"{kind}, batch {batch}: {num_tokens / statistics.median(b for _, b in times):.0f} "
        f"tokens/s with drafts, {ratio:.2f} × plain ({min(a / b for a, b in times):.2f} to "
        f"{max(a / b for a, b in times):.2f}); {differing} answers differ, "
        f"{verified / rounds:.0f} drafts a round, {accepted / max(1, verified):.0%} accepted",
        flush=True,
    )


def propose_share(llm: LLM, rows: int = 32) -> float:
    """Return the share of a step that proposing takes, as a median over the steps that decode all
    rows."""
    runner = llm.llm_engine.engine._parts.executor.worker.running
    step = Timer(llm.llm_engine, "step")
    proposing = Timer(runner.ending, "propose")
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    for number in range(rows):
        task = TASKS["free"][number % len(TASKS["free"])]["task"]
        llm.llm_engine.add_request(str(number), f"{number}. {task}", params)
    shares = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        seconds = step.take()
        part = proposing.take()
        shares.append(part / seconds)
    step.remove(), proposing.remove()
    return statistics.median(shares[8 : MAX_TOKENS // 2])


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--option", type=option, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    common: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 1 << 28,
        "disable_log_stats": False,
    }
    plain = LLM(**common)
    config = {"method": given.method, "num_speculative_tokens": given.tokens, **dict(given.option)}
    drafts = LLM(**common, speculative_config=config)
    for kind in TASKS:
        for batch in BATCHES:
            compare(plain, drafts, kind, batch, given.rounds)
    print(f"proposing, batch 32: {propose_share(drafts):.2%} of a step")


if __name__ == "__main__":
    main()
