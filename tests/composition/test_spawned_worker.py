"""A worker can be made in a process that another one has spawned, as an executor of several ranks
does."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pegboard_executor_local.in_process import InProcessExecutor

from pegboard import LLM, SamplingParams
from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.interfaces.executor import ExecutorSetup

LOAD = (
    "import pickle, sys; from pegboard.interfaces.executor import Place; "
    "ready = pickle.load(sys.stdin.buffer)(Place()).load(); print(ready.rank, "
    "sorted(ready.kv_specs))"
)


def test_another_process_makes_the_worker(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setups: list[ExecutorSetup] = []
    build = InProcessExecutor.__init__

    def keep(self: InProcessExecutor, options: None, setup: ExecutorSetup) -> None:
        setups.append(setup)
        build(self, options, setup)

    monkeypatch.setattr(InProcessExecutor, "__init__", keep)
    LLM(str(checkpoint), kv_cache_memory_bytes=1 << 20)
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD], input=pickle.dumps(setups[0].make_worker), capture_output=True
    )
    assert loaded.stdout.split() == [b"0", b"[0,", b"1]"], loaded.stderr.decode()


def test_a_worker_in_another_process_gives_the_same_tokens(checkpoint: Path) -> None:
    """Also with a step ahead, and with masks, which the engine makes from the results of earlier
    steps."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(
            temperature=0.0,
            max_tokens=20,
            structured_outputs=StructuredOutputsParams(regex="[a-c]{10}"),
        ),
    ]
    answers = []
    for backend, max_in_flight in (("uni", 1), ("mp", 1), ("mp", 2)):
        llm = LLM(
            str(checkpoint),
            kv_cache_memory_bytes=1 << 20,
            distributed_executor_backend=backend,
            max_in_flight=max_in_flight,
        )
        outputs = llm.generate(["hello", "abc"], params)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[1] == answers[0] and answers[2] == answers[0]
