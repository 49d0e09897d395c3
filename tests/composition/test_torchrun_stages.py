"""Pipeline stages in processes that a launcher has started: every engine has the results of the
last stage."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_torchrun import torchrun

from pegboard import LLM, SamplingParams

PROMPTS = ["hello", "abc", "a" * 60] * 3
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
GENERATE = """
import ast, os, sys
from pegboard import LLM, SamplingParams

rank = os.environ["RANK"]
prompts, ranks, stages = ast.literal_eval(sys.argv[3])
llm = LLM(
    sys.argv[1],
    kv_cache_memory_bytes=1 << 16,
    tensor_parallel_size=ranks,
    pipeline_parallel_size=stages,
    distributed_executor_backend="external_launcher",
    block_size=16,
    max_num_batched_tokens=32,
)
greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
drawn = SamplingParams(temperature=1, max_tokens=20, stop="e", logprobs=2)
found = []
for params in (greedy, drawn):
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    found.append([output.token_ids for output in outputs])
    found.append([[each[token].logprob for each, token in zip(output.logprobs, output.token_ids)]
                  for output in outputs])
with open(f"{sys.argv[2]}/{rank}", "w") as file:
    file.write(repr(found))
"""
DIE = """
import os, signal, sys
from pegboard import LLM, SamplingParams
from pegboard.errors import EngineDeadError

llm = LLM(
    sys.argv[1],
    kv_cache_memory_bytes=1 << 16,
    pipeline_parallel_size=2,
    distributed_executor_backend="external_launcher",
)
params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
llm.generate("hello", params)
if os.environ["RANK"] == sys.argv[2]:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    llm.generate("hello", params)
except EngineDeadError as error:
    print("dead:", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (2, 2)])
def test_all_processes_have_the_tokens_of_one(
    checkpoint: Path, tmp_path: Path, ranks: int, stages: int
) -> None:
    """Also if requests wait for memory, and prompts take several steps."""
    program = tmp_path / "program.py"
    program.write_text(GENERATE)
    count = ranks * stages
    arguments = repr((PROMPTS, ranks, stages))
    ended = torchrun(tmp_path / "temp", program, checkpoint, tmp_path, arguments, ranks=count)
    assert ended.returncode == 0, ended.stderr
    found = [ast.literal_eval((tmp_path / str(rank)).read_text()) for rank in range(count)]
    assert all(each == found[0] for each in found)
    llm = LLM(str(checkpoint), block_size=16, kv_cache_memory_bytes=1 << 20)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    assert found[0][0] == [list(output.token_ids) for output in outputs]
    for output, values in zip(outputs, found[0][1], strict=True):
        assert output.logprobs is not None
        expected = [
            each[token].logprob
            for each, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        assert values == pytest.approx(expected, abs=1e-4)
    assert len({tuple(tokens) for tokens in found[0][2]}) > 3


def test_the_end_of_the_last_stage_is_noticed(checkpoint: Path, tmp_path: Path) -> None:
    """Also if the launcher does not end the others."""
    program = tmp_path / "program.py"
    program.write_text(DIE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {name: str(value) for name, value in (place | address).items()}
        processes.append(
            subprocess.Popen(
                [sys.executable, program, checkpoint, "1"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **variables, "TMPDIR": str(tmp_path)},
            )
        )
    try:
        printed = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL]
    assert "dead: rank 1, which samples, has ended" in printed[0]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("pegboard")] == []


@pytest.mark.slow
def test_the_launcher_ends_a_stage_that_waits(checkpoint: Path, tmp_path: Path) -> None:
    """The last stage waits for the first one, which has died."""
    program = tmp_path / "program.py"
    program.write_text(DIE)
    ended = torchrun(tmp_path / "temp", program, checkpoint, "0")
    assert ended.returncode and "Signal 9" in ended.stderr
