"""What speculative decoding saves on this machine: tokens per second with drafts and without, as
ratios of medians.

    python tests/bench/drafts.py [--method ngram] [--tokens 8] [--option NAME=VALUE …] [--rounds 5]
    python tests/bench/drafts.py --config '{"method": "eagle3", …}' [--config …] [--kind free]
    python tests/bench/drafts.py --batch 1 --peer-llama PYTHON

Engines with the default model take turns in one process: one without drafts, one with, or one for
each speculative_config. All answer the tasks of draft_prompts.toml: tasks whose answers repeat
their prompt, and tasks whose answers are free text. The answers must be the same. Ends with the
share of a step that proposing takes when 32 requests decode.

With --peer-llama, llama.cpp answers the same prompts in the same rounds, with as many tokens, with
its lookup decoding and without, one request at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

from lookup import Lookup
from step_shares import Timer

from pegboard import LLM, SamplingParams
from pegboard.config.schema import EngineConfig, Settings
from pegboard.plan.engine_plan import resolve

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


def prompt_ids(tokenizer: Any, task: Task) -> list[int]:
    """Return the tokens of the prompt, with the beginning of the answer."""
    messages = [{"role": "user", "content": task["task"]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(prompt + task["answer"]))


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
            prompt = prompt_ids(tokenizer, task)
            params = SamplingParams(
                max_tokens=answer_length(tokenizer, task), temperature=0, stop="```"
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
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
    """Return the numbers of drafts, of draft tokens verified, and of those accepted, so far, then
    the accepted tokens by their place in the draft."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    names = ("drafts", "draft_tokens", "accepted_tokens")
    totals = [metrics[f"vllm:spec_decode_num_{name}"].value for name in names]
    return totals + list(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values)


class Side:
    """An engine with drafts, and what it has done. config: its speculative_config."""

    def __init__(self, llm: LLM, config: dict[str, Any]) -> None:
        self.llm = llm
        self.config = config
        self.begin()

    def begin(self) -> None:
        """Forget what was measured."""
        self.before = counters(self.llm)
        self.ratios: list[float] = []
        self.rates: list[float] = []
        self.plain_rates: list[float] = []

    def add(self, plain: Answers, tasks: list[Task], batch: int) -> None:
        """Answer the tasks, which an engine without drafts has answered just before."""
        answers = Answers(self.llm, tasks, batch)
        num_tokens = sum(map(len, answers.token_ids))
        self.ratios.append(plain.decode_s / answers.decode_s)
        self.rates.append(num_tokens / answers.decode_s)
        self.plain_rates.append(sum(map(len, plain.token_ids)) / plain.decode_s)
        self.differing = sum(
            a != b for a, b in zip(plain.token_ids, answers.token_ids, strict=True)
        )

    def report(self, kind: str, batch: int) -> str:
        """Return one line on all rounds."""
        counts = (now - then for now, then in zip(counters(self.llm), self.before, strict=True))
        drafts, verified, accepted, *by_place = counts
        places = " ".join(f"{count / max(1, drafts):.2f}" for count in by_place)
        return (
            f"{kind}, batch {batch}, {json.dumps(self.config)}: "
            f"{statistics.median(self.rates):.0f} tokens/s with drafts, "
            f"{statistics.median(self.plain_rates):.0f} without, "
            f"{statistics.median(self.ratios):.2f} × plain ({min(self.ratios):.2f} to "
            f"{max(self.ratios):.2f}); {self.differing} answers differ, "
            f"{verified / len(self.ratios):.0f} draft tokens a round, "
            f"{accepted / max(1, verified):.0%} accepted, by place {places}"
        )


def compare(
    plain: LLM,
    sides: list[Side],
    tasks: list[Task],
    batch: int,
    rounds: int,
    peer: Lookup | None = None,
) -> None:
    """Let all engines answer in turns, the one without drafts first in each round."""
    prompts = [prompt_ids(plain.get_tokenizer(), task) for task in tasks]
    for side in (*sides, *([peer] if peer else [])):
        side.begin()
    for _ in range(rounds):
        answers = Answers(plain, tasks, batch)
        for side in sides:
            side.add(answers, tasks, batch)
        if peer:
            peer.add(prompts, answers.token_ids)


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--option", type=option, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--config", type=json.loads, action="append", metavar="JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kind", choices=[*TASKS], action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--tasks", type=int, help="most tasks of a kind")
    parser.add_argument("--peer-llama", metavar="PYTHON", help="with llama-cpp-python")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    peer = None
    if given.peer_llama:
        model = resolve(Settings(engine=EngineConfig()))[0].checkpoint.path
        peer = Lookup(given.peer_llama, model)
    common: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 1 << 28,
        "disable_log_stats": False,
    }
    plain = LLM(**common)
    configs = given.config or [
        {"method": given.method, "num_speculative_tokens": given.tokens, **dict(given.option)}
    ]
    sides = [Side(LLM(**common, speculative_config=config), config) for config in configs]
    for kind in given.kind or TASKS:
        for batch in given.batch or BATCHES:
            beside = peer if batch == 1 else None
            compare(plain, sides, TASKS[kind][: given.tasks], batch, given.rounds, beside)
            for side in sides:
                print(side.report(kind, batch), flush=True)
            if beside:
                print(beside.report(kind), flush=True)
    if peer:
        peer.side.stop()
    for side in sides:
        print(f"proposing, batch 32: {propose_share(side.llm):.2%} of a step")


if __name__ == "__main__":
    main()
