"""Ranks that torchrun starts: each has an engine of its own, and all have the outputs of one
rank."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from layers import ROOT

from pegboard import LLM, AsyncLLM, SamplingParams
from pegboard.errors import ConfigError

EXAMPLE = ROOT / "examples/torchrun.py"
PROGRAM = """
import os, sys
from pegboard import LLM, SamplingParams
from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.errors import ConfigError, RequestError

rank = int(os.environ["RANK"])
found = []
for size in (1 << 15, (1 + rank) << 14):  # the second time, rank 0 has less memory
    llm = LLM(
        sys.argv[1],
        kv_cache_memory_bytes=size,
        tensor_parallel_size=2,
        distributed_executor_backend="external_launcher",
        block_size=16,
        enable_sleep_mode=True,
    )
    params = SamplingParams(temperature=1, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(["hello", "abc", "a" * 30] * 3, params)
    found.append([output.outputs[0].token_ids for output in outputs])
found.append(llm.llm_engine.engine.stats()["num_blocks"])
try:
    grammar = StructuredOutputsParams(regex="[a-c]{10}")
    llm.generate("hello", SamplingParams(structured_outputs=grammar))
except RequestError as error:
    found.append(str(error))
try:
    llm.sleep() if rank else llm.reset_prefix_cache() and llm.collective_rpc("memory")
except ConfigError as error:
    found.append(str(error))
with open(f"{sys.argv[2]}/{rank}", "w") as file:
    file.write(repr(found))
"""


def torchrun(temp: Path, *command: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a program on ranks. Nothing must remain in the folder for temporary files."""
    temp.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        + [f"--nproc-per-node={ranks}", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TMPDIR": str(temp)},
    )
    assert [path.name for path in temp.iterdir() if path.name.startswith("pegboard")] == []
    return ended


@pytest.mark.slow
def test_the_example_prints_the_same_on_all_ranks(checkpoint: Path, tmp_path: Path) -> None:
    ended = torchrun(tmp_path / "temp", EXAMPLE, checkpoint)
    assert ended.returncode == 0, ended.stderr
    printed = [sorted(re.findall(rf"^rank {rank}: (.+)$", ended.stdout, re.M)) for rank in (0, 1)]
    assert len(printed[0]) == 3 and printed[1] == printed[0]
    llm = LLM(str(checkpoint))
    prompts = ["The capital of France is", "A paged KV cache is"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        assert f"{output.prompt!r} -> {output.outputs[0].text!r}" in printed[0]


@pytest.mark.slow
def test_engines_decide_alike(checkpoint: Path, tmp_path: Path) -> None:
    """Also if ranks have different memory, requests wait for it, and tokens are drawn without a
    seed. What they could not decide alike is refused."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = torchrun(tmp_path / "temp", program, checkpoint, tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, second = (ast.literal_eval((tmp_path / rank).read_text()) for rank in "01")
    assert first[:4] == second[:4]
    assert len({tuple(tokens) for tokens in first[0]}) > 3
    assert "structured_outputs is not possible with the executor external_launcher" in first[3]
    assert "must make the same calls" in first[4] and "must make the same calls" in second[4]


def test_what_the_launcher_says_must_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": 1 << 20,
        "distributed_executor_backend": "external_launcher",
    }
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="needs RANK, WORLD_SIZE, .* with torchrun"):
        LLM(str(checkpoint), **settings)
    for name, value in zip(names, "01011", strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="WORLD_SIZE is 1, .* asks for 2 ranks"):
        LLM(str(checkpoint), tensor_parallel_size=2, **settings)
    with pytest.raises(ConfigError, match="target_itl_ms: not possible .* it takes a time"):
        LLM(str(checkpoint), target_itl_ms=5, **settings)
    llm = LLM(str(checkpoint), **settings)  # one rank needs no other
    greedy = SamplingParams(temperature=0, max_tokens=3)
    assert llm.generate("a", greedy)[0].outputs[0].token_ids
    for name, value in zip(names, "02021", strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="needs all ranks on one host"):
        LLM(str(checkpoint), tensor_parallel_size=2, **settings)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK='first': expected a number"):
        LLM(str(checkpoint), tensor_parallel_size=2, **settings)


def test_only_a_program_starts_them(checkpoint: Path) -> None:
    async def start() -> None:
        async with AsyncLLM(str(checkpoint), distributed_executor_backend="external_launcher"):
            pass

    with pytest.raises(ConfigError, match="which only LLM does; use the executor mp"):
        asyncio.run(start())
