"""Simulates many engines behind a router.

    python tests/bench/replicas.py [--replicas N …] [--seconds S] [--write]

The schedulers, KV caches and prefix caches are real; only the time is not. A step takes as long as
such a step of the default model takes here, which is measured first. Users talk in turns: each
prompt is a system prompt that many users share, and the conversation so far. --write puts the table
on docs/scaling.md.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from machine import cpu
from page import put
from pegboard_scheduling_policy_queue.fcfs import FCFSPolicy
from tqdm import tqdm

from pegboard import LLM, SamplingParams
from pegboard.config.limits import Limits
from pegboard.data.batch import CSR, Batch, StepOutput
from pegboard.data.request import EngineRequest, RequestDelta
from pegboard.engine.boundary.balance import Balance
from pegboard.engine.engine import Engine, EngineParts
from pegboard.engine.grammar.compiler import GrammarCompiler
from pegboard.engine.grammar.grammars import Grammars
from pegboard.engine.kv.plan import plan_kv
from pegboard.engine.metrics.step import StepMetrics
from pegboard.interfaces.attention import KVCacheSpec, KVTensor
from pegboard.interfaces.scheduling_policy import SchedulingPolicySetup

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
BEGIN = "<!-- replicas: written by tests/bench/replicas.py --write -->"
END = "<!-- end of replicas -->"
ROWS = (1, 2, 4, 8, 16, 32)
CHUNKS = (16, 64, 256, 512)
MOST_TOKENS = 512
CACHE_TOKENS = 65_536
"""What the KV cache of a replica holds."""
NUM_SYSTEM_PROMPTS = 40
USERS_PER_REPLICA = 5
THINK_S = 3.0
LOAD = 0.7
"""Users begin at random in the first part of the time, so that the load grows slowly."""


@dataclass(frozen=True)
class Costs:
    """Seconds of steps, measured. decode: by number of requests, see ROWS. chunk: by number of
    prompt tokens, see CHUNKS, without those of the step itself."""

    decode: Sequence[float]
    chunk: Sequence[float]

    def seconds(self, num_rows: int, num_tokens: int) -> float:
        """Return how long a step of `num_rows` requests takes that computes `num_tokens`."""
        extra = num_tokens - num_rows
        return between(ROWS, self.decode, num_rows) + between(
            (0, *CHUNKS), (0.0, *self.chunk), extra
        )


def between(places: Sequence[int], values: Sequence[float], x: int) -> float:
    """Return the value at x, on lines through the measured ones, and beyond the last one."""
    i = min(max(1, bisect.bisect_left(places, x)), len(places) - 1)
    share = (x - places[i - 1]) / (places[i] - places[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


def measured() -> Costs:
    """Measure the default model."""
    llm = LLM(max_model_len=2048, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 29)

    def seconds(num_prompts: int, length: int, num_tokens: int) -> float:
        params = SamplingParams(
            max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": [5 + i, *range(7, 6 + length)]} for i in range(num_prompts)]
        times = []
        for _ in range(5):
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    decode = [(seconds(rows, 600, 33) - seconds(rows, 600, 1)) / 32 for rows in ROWS]
    short = seconds(1, 1, 1)
    chunk = [max(0.0, seconds(1, size, 1) - short) for size in CHUNKS]
    llm.shutdown()
    return Costs(decode, chunk)


class TimedExecutor:
    """Computes nothing: every token is 7. seconds: of the steps that were submitted last."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.seconds = 0.0

    def submit(self, batch: Batch) -> Any:
        self.seconds = self._costs.seconds(batch.num_rows, batch.num_tokens)
        rows = batch.rows[batch.samples]
        ones = np.arange(len(rows) + 1, dtype=np.int32)
        return Done(StepOutput(step=batch.step, rows=rows, token_ids=CSR(ones[1:] * 0 + 7, ones)))

    def call(self, method: str, *args: object) -> list[object]:
        return [None]

    def watch(self, on_death: object) -> None: ...


class Done:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class Replica:
    """An engine. ends: when its step ends; None = it has nothing to do."""

    def __init__(self, costs: Costs, clock: Callable[[], float]) -> None:
        limits = Limits(
            max_model_len=8192,
            vocab_size=50_000,
            max_num_seqs=32,
            max_num_batched_tokens=MOST_TOKENS,
            block_size=16,
        )
        spec = KVCacheSpec(tensors=(KVTensor("kv", (4,), "uint8"),))
        self.executor = TimedExecutor(costs)
        self.ends: float | None = None
        parts = EngineParts(
            executor=self.executor,  # type: ignore[arg-type]
            policy=FCFSPolicy(None, SchedulingPolicySetup(limits)),
            kv_plan=plan_kv({0: spec}, 4 * CACHE_TOKENS, limits),
            limits=limits,
            grammars=Grammars(GrammarCompiler({}), vocab_size=limits.vocab_size),
            metrics=StepMetrics(limits, [], clock=clock),
            clock=clock,
        )
        self.engine = Engine(parts)


@dataclass
class User:
    """Someone who asks again some time after each answer. history: tokens of the conversation."""

    history: list[int]
    asked: float = 0.0
    answered: float = 0.0
    num_tokens: int = 0


Router = Callable[[EngineRequest], int]


class Simulation:
    """choose: returns the replica of a request. feed: gets all deltas."""

    def __init__(
        self, num: int, costs: Costs, router: Callable[["Simulation"], Router], seed: int = 0
    ) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.balance = Balance(num)
        self.replicas = [Replica(costs, lambda: self.now) for _ in range(num)]
        self.route = router(self)
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = count()
        self.users: dict[str, User] = {}
        self.first_s: list[float] = []
        self.token_s: list[float] = []
        self.tokens = self.cached = self.prompt_tokens = 0

    def at(self, when: float, what: str, value: Any) -> None:
        heapq.heappush(self.events, (when, next(self.order), what, value))

    def run(self, seconds: float) -> None:
        rng = self.random
        prompts = [
            [rng.randrange(50_000) for _ in range(rng.randrange(200, 1600))]
            for _ in range(NUM_SYSTEM_PROMPTS)
        ]
        weights = [1 / (place + 1) for place in range(NUM_SYSTEM_PROMPTS)]
        for _ in range(USERS_PER_REPLICA * len(self.replicas)):
            (prompt,) = rng.choices(prompts, weights)
            self.at(rng.uniform(0, LOAD * seconds), "ask", User(list(prompt)))
        with tqdm(total=round(seconds), unit="s", delay=2.0, leave=False) as bar:
            while self.events and self.events[0][0] < seconds:
                self.now, _, what, value = heapq.heappop(self.events)
                bar.update(round(self.now) - bar.n)
                if what == "ask":
                    self._ask(value)
                else:
                    self._step(value)

    def _ask(self, user: User) -> None:
        rng = self.random
        if len(user.history) > 4000:
            del user.history[1600:]
        user.history += [rng.randrange(50_000) for _ in range(rng.randrange(20, 200))]
        user.asked = self.now
        user.num_tokens = 0
        name = f"r{next(self.order)}"
        params = SamplingParams(
            temperature=0, max_tokens=rng.randrange(20, 250), ignore_eos=True, n=1
        )
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=list(user.history),
            params=params,
            arrival_s=self.now,
        )
        self.users[name] = user
        place = self.route(request)
        replica = self.replicas[place]
        replica.engine.add(request)
        if replica.ends is None:
            self._start(replica)

    def _start(self, replica: Replica) -> None:
        """Compute the next step, whose results are there when it ends."""
        replica.executor.seconds = 0.0
        deltas = replica.engine.step() if replica.engine.has_work else []
        if not deltas and not replica.executor.seconds:
            replica.ends = None
            return
        replica.ends = self.now + replica.executor.seconds
        self.at(replica.ends, "step", (replica, deltas))

    def _step(self, value: tuple[Replica, list[RequestDelta]]) -> None:
        replica, deltas = value
        self.balance.feed(deltas)
        for delta in deltas:
            user = self.users[delta.request_id]
            if not user.num_tokens:
                user.answered = self.now
                self.first_s.append(self.now - user.asked)
                self.prompt_tokens += len(user.history)
                self.cached += delta.num_cached_tokens or 0
            user.num_tokens += len(delta.token_ids)
            self.tokens += len(delta.token_ids)
            user.history += delta.token_ids
            if delta.finish_reason is not None:
                self.token_s.append((self.now - user.answered) / (user.num_tokens - 1))
                del self.users[delta.request_id]
                self.at(self.now + self.random.expovariate(1 / THINK_S), "ask", user)
        self._start(replica)


def at_random(simulation: Simulation) -> Router:
    return lambda request: simulation.random.randrange(len(simulation.replicas))


def in_turn(simulation: Simulation) -> Router:
    numbers = count()
    return lambda request: next(numbers) % len(simulation.replicas)


def least_load(simulation: Simulation) -> Router:
    """The balance without what it knows of prefixes."""

    def route(request: EngineRequest) -> int:
        loads = simulation.balance.loads
        return simulation.balance.add(request, loads.index(min(loads)))

    return route


def by_prefix(simulation: Simulation) -> Router:
    return lambda request: simulation.balance.add(request)


ROUTERS = {
    "at random": at_random,
    "in turn": in_turn,
    "fewest completions": least_load,
    "Pegboard's balance": by_prefix,
}


def row(simulation: Simulation, num: int, name: str, seconds: float) -> str:
    first = statistics.quantiles(simulation.first_s, n=100)
    cells = (
        f"{num}",
        name,
        f"{simulation.tokens / seconds:,.0f}",
        f"{first[49]:.2f}",
        f"{first[98]:.2f}",
        f"{statistics.median(simulation.token_s) * 1000:.0f}",
        f"{simulation.cached / simulation.prompt_tokens:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def routed_per_second(num: int) -> float:
    """Return how many requests of 2,000 tokens the balance deals to replicas in a second."""
    balance = Balance(num)
    params = SamplingParams()
    requests = [
        EngineRequest(request_id=f"r{i}", prompt_token_ids=[i, *range(2000)], params=params)
        for i in range(500)
    ]
    started = time.perf_counter()
    for request in requests:
        balance.add(request)
    return len(requests) / (time.perf_counter() - started)


def report(numbers: Sequence[int], seconds: float) -> str:
    costs = measured()
    machine = cpu()
    lines = [
        f"{seconds:.0f} simulated seconds; steps of the default model were measured on 2 cores of "
        f"an {machine['cpu']} ({machine['flags']}).",
        "",
        "| replicas | router | tokens/s | first token, s: median | 99 % | s per 1,000 tokens | "
        "prompt tokens from the prefix cache |",
        "|---|---|---|---|---|---|---|",
    ]
    for num in numbers:
        for name, router in ROUTERS.items():
            simulation = Simulation(num, costs, router)
            simulation.run(seconds)
            lines.append(row(simulation, num, name, seconds))
            print(lines[-1], flush=True)
    most = max(numbers)
    lines += [
        "",
        f"For {most} replicas, the balance deals {routed_per_second(most):,.0f} prompts of 2,000 "
        "tokens per second, in one thread.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 200])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--write", action="store_true", help="put the table on docs/scaling.md")
    arguments = parser.parse_args()
    text = report(arguments.replicas, arguments.seconds)
    print(text)
    if arguments.write:
        PAGE.write_text(put(PAGE.read_text("utf-8"), text, BEGIN, END), "utf-8")


if __name__ == "__main__":
    main()
