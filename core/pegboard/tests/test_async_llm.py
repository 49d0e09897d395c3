"""AsyncLLM with a real engine process that runs no model: streams, aborts, failures, deaths, and
clean-up."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pegboard.data.request import PositionLogprobs, RequestDelta
from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.engine.boundary import client
from pegboard.engine.boundary.client import EngineProcess
from pegboard.errors import ConfigError, EngineDeadError, ModelError, PegboardError, RequestError
from pegboard.front.async_llm import AsyncLLM
from pegboard.front.output_stream import OutputStream
from pegboard.installed import Entry
from pegboard.interfaces.api import Prompt, RequestOptions
from pegboard.interfaces.metrics import Metric, Sample
from pegboard.interfaces.tokenizer import Chat, Rendered
from pegboard.plugins.discovery import Scan
from pegboard.plugins.registry import Registry
from pegboard_chat.chats import ChatRequest, Chats
from pegboard_chat.parsing import fold
from pegboard_testing.echo_engine import BUILDER, REFUSED_PRIORITY, echo_plan
from pegboard_testing.fake_client import ByteTokenizer

DELTA = RequestOutputKind.DELTA
ENDLESS = SamplingParams(max_tokens=None, output_kind=DELTA, ignore_eos=True)


def open_client(**engine) -> AsyncLLM:
    plan = echo_plan(**engine)
    process = EngineProcess(BUILDER)
    process.start(plan)
    return AsyncLLM.of_plan(plan, None, process, tokenizer=ByteTokenizer())


def with_client(body: Callable, **engine) -> None:
    """Run `body(client)` on a new event loop. The engine process is gone afterwards."""

    async def main() -> None:
        client = open_client(**engine)
        async with client:
            await asyncio.wait_for(body(client), 60)

    asyncio.run(main())


async def collect(stream) -> list:
    return [output async for output in stream]


def test_events_of_a_running_engine_are_read_by_the_plans_parsers():
    """The echo engine repeats the prompt. A whole answer, a streamed answer and a slowly read one
    give the same message."""
    text = '<think>hm é</think>So <call add>{"x": "ü"}</call>.'
    entries = [
        Entry(
            kind,
            "fake",
            "acme",
            "1.0",
            f"pegboard_testing.fake_parsers:{name}",
            f"pegboard.{kind}.v1",
        )
        for kind, name in (("reasoning_parser", "REASONING"), ("tool_parser", "TOOLS"))
    ]
    registry = Registry(Scan(entries=tuple(entries)))

    class PlainTokenizer(ByteTokenizer):
        """A chat renders to the text of its message."""

        def render(self, chat: Chat) -> Rendered:
            return Rendered(self.encode(chat.messages[0]["content"], add_special_tokens=False))

    async def read(
        client: AsyncLLM, kind: RequestOutputKind, choice: str, pause_s: float = 0.0
    ) -> tuple:
        chat = Chat(
            messages=[{"role": "user", "content": text}],
            tools=[{"type": "function", "function": {"name": "add"}}],
        )
        params = SamplingParams(max_tokens=len(text.encode()), output_kind=kind)
        options = RequestOptions(request_id=f"{kind}-{choice}-{pause_s}")
        events = []
        async for output in await Chats(client).answer(
            ChatRequest(chat=chat, tool_choice=choice), params, options
        ):
            events += output.events[0]
            await asyncio.sleep(pause_s)
        message = fold(events)
        return (
            message.content,
            message.reasoning,
            [(call.name, call.arguments) for call in message.tool_calls],
        )

    async def body() -> None:
        process = EngineProcess(BUILDER)
        plan = replace(echo_plan(), tool_parser="acme:fake", reasoning_parser="acme:fake")
        process.start(plan)
        async with AsyncLLM.of_plan(plan, registry, process, tokenizer=PlainTokenizer()) as client:
            parsers = client.parsers()
            assert parsers.tool.name == parsers.reasoning.name == "fake"
            for choice, content in (("auto", "So ."), ("none", text.partition("</think>")[2])):
                calls = [("add", '{"x": "ü"}')] if choice == "auto" else []
                for kind, pause_s in (
                    (RequestOutputKind.FINAL_ONLY, 0.0),
                    (DELTA, 0.0),
                    (DELTA, 0.004),
                ):
                    assert await read(client, kind, choice, pause_s) == (content, "hm é", calls)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_the_folder_of_killed_processes_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(client.zmq, "IPC_PATH_MAX_LEN", 1000)
    left, open_to_others, users = (
        tmp_path / name for name in ("pegboard-engine-1", "pegboard-engine-2", "pegboard-mine")
    )
    for folder, mode in ((left, 0o700), (open_to_others, 0o755), (users, 0o700)):
        folder.mkdir(mode)
        (folder / "engine").write_bytes(b"x")
    (tmp_path / "pegboard-engine-3").symlink_to(users)
    first, lock = client._new_folder()
    assert (
        not left.exists() and (open_to_others / "engine").exists() and (users / "engine").exists()
    )
    second, other = client._new_folder()
    assert first.exists() and second != first, "a folder in use stays"
    assert lock is not None and other is not None
    os.close(lock)  # as if its process were killed
    third, last = client._new_folder()
    assert not first.exists() and second.exists()
    os.close(other), os.close(last)


def test_without_locks_there_is_a_folder_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(client.fcntl, "flock", refuse)
    folder, lock = client._new_folder()
    assert [*tmp_path.iterdir()] == [folder] and lock is None


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), FileNotFoundError("No usable folder")],
)
def test_a_full_disk_is_explained(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def refuse(**where: object) -> str:
        raise error

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match="No .*; free some space there, or set TMPDIR"):
        client.EngineProcess()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def test_requests_run_and_the_rest_is_answered():
    async def body(client: AsyncLLM) -> None:
        await check_many_streams(client)
        await check_call_forms(client)
        await check_refusals(client)
        await check_aborts(client)
        await check_control(client)

    with_client(body)


async def check_many_streams(client: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=20, output_kind=DELTA, stop=["9"])
    prompts = [f"prompt {number}." for number in range(12)]

    async def text_of(index: int) -> str:
        stream = client.generate(
            Prompt(text=prompts[index], add_special_tokens=False),
            params,
            RequestOptions(request_id=f"m{index}"),
        )
        return "".join([output.outputs[0].text async for output in stream])

    texts = await asyncio.gather(*(text_of(index) for index in range(12)))
    assert texts == [(prompt * 20)[:20].partition("9")[0] for prompt in prompts]


async def check_call_forms(client: AsyncLLM) -> None:
    final = (await collect(client.generate([97, 98], SamplingParams(max_tokens=3), "vllm-style")))[
        -1
    ]
    assert (final.request_id, final.outputs[0].text, final.outputs[0].finish_reason) == (
        "vllm-style",
        "aba",
        "length",
    )
    assert final.num_cached_tokens == 0 and final.metrics.num_generation_tokens == 3
    final = (
        await collect(
            client.generate(
                {"prompt": "xy"}, sampling_params=SamplingParams(n=2, max_tokens=3), request_id="n"
            )
        )
    )[-1]
    # <s> is a special token and not shown
    assert [completion.text for completion in final.outputs] == ["xy"] * 2
    final = (await collect(client.generate("x" * 5000, SamplingParams(truncate_prompt_tokens=-1))))[
        -1
    ]
    assert len(final.prompt_token_ids) == 4095 and final.finished
    assert client.models()[0].name == "echo" and client.health().is_alive and client.is_running


async def check_refusals(client: AsyncLLM) -> None:
    for prompt, params, words in [
        ([], SamplingParams(), "empty"),
        ([1] * 4096, SamplingParams(), "max_model_len"),
        ([999], SamplingParams(), "out of vocabulary"),
        ("a", SamplingParams(logprobs=50), "max_logprobs|max-logprobs"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, SamplingParams(), "text only"),
    ]:
        with pytest.raises(RequestError, match=words):
            await collect(client.generate(prompt, params))
    with pytest.raises(RequestError, match="refused on purpose") as caught:
        await collect(client.generate("a", SamplingParams(), priority=REFUSED_PRIORITY))
    assert caught.value.parameter == "priority"


async def check_aborts(client: AsyncLLM) -> None:
    async with aclosing(client.generate("a", ENDLESS, "closed")) as stream:
        await anext(stream)
        with pytest.raises(RequestError, match="in use"):
            await collect(client.generate("a", ENDLESS, "closed"))
    task = asyncio.create_task(collect(client.generate("a", ENDLESS, "cancelled")))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    task = asyncio.create_task(collect(client.generate("a", ENDLESS, "told")))
    await asyncio.sleep(0.05)
    await client.abort("told")
    assert (await task)[-1].outputs[0].finish_reason == "abort"
    options = [RequestOptions(request_id=f"mine-{index}", response_id="mine") for index in range(2)]
    tasks = [asyncio.create_task(collect(client.generate("a", ENDLESS, each))) for each in options]
    await asyncio.sleep(0.05)
    await client.control("abort", request_ids=["unknown", "mine"])
    assert [(await each)[-1].outputs[0].finish_reason for each in tasks] == ["abort"] * 2
    await collect(client.generate("ab", SamplingParams(stop=["b"], max_tokens=50), "stopped"))
    assert await client.collective_rpc("aborted") == [
        "m9",
        "closed",
        "cancelled",
        "told",
        "mine-0",
        "mine-1",
        "stopped",
    ]


async def check_control(client: AsyncLLM) -> None:
    assert await client.collective_rpc("echo", kwargs={"a": [1, {"b": None}]}) == [
        {"a": [1, {"b": None}]}
    ]
    assert await client.reset_prefix_cache() is True
    with pytest.raises(RequestError, match="unknown action"):
        await client.control("nonsense")


def test_a_slow_consumer_gets_fewer_larger_outputs():
    async def body(client: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=300, output_kind=DELTA)
        sizes = []
        async for output in client.generate([97], params):
            sizes.append(len(output.outputs[0].token_ids))
            for _ in range(8):  # the engine runs a step between two replies
                await client.collective_rpc("echo")
        assert sum(sizes) == 300
        assert len(sizes) < 300

    with_client(body)


def test_a_failing_step_ends_everything():
    async def body(client: AsyncLLM) -> None:
        stream = client.generate("a", ENDLESS)
        await anext(stream)
        await client.collective_rpc("fail")
        with pytest.raises(EngineDeadError, match="failed on purpose"):
            await collect(stream)
        assert not client.health().is_alive and client.errored
        with pytest.raises(EngineDeadError):
            await collect(client.generate("a", SamplingParams()))
        with pytest.raises(EngineDeadError):
            await client.collective_rpc("echo")

    with_client(body)


@pytest.mark.parametrize(
    ("number", "is_crash"),
    [(signal.SIGKILL, False), (signal.SIGSEGV, True), (signal.SIGABRT, True)],
)
def test_a_killed_engine_ends_everything(number, is_crash):
    """After a crash of native code, the message says how to find the plugin."""

    async def body(client: AsyncLLM) -> None:
        streams = [client.generate("a", ENDLESS) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        os.kill(client._connection._engine.pid, number)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=number.name):
                await collect(stream)
        assert number.name in client.health().reason
        assert ("PEGBOARD_CHECK=1" in client.health().reason) == is_crash

    with_client(body)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [("broken", ModelError, "broken on purpose"), ("bug", PegboardError, "ZeroDivisionError")],
)
def test_errors_at_start_are_raised_here(name, error, words):
    async def body() -> None:
        client = open_client(served_model_name=[name])
        with pytest.raises(error, match=words):
            async with client:
                pass
        assert not is_running(client._connection._engine.pid)
        assert not client._connection._engine.folder.exists()

    asyncio.run(body())


def test_shutdown_leaves_nothing_and_may_be_repeated():
    async def body() -> None:
        client = open_client()
        await client.start()
        stream = client.generate("a", ENDLESS)
        await anext(stream)
        pid = client._connection._engine.pid
        folder = client._connection._engine.folder
        assert folder.stat().st_mode & 0o777 == 0o700
        client.shutdown()
        client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(stream)
        assert not is_running(pid) and not folder.exists()

    asyncio.run(body())


PROGRAM = """
import asyncio, sys
from pegboard.front.async_llm import AsyncLLM
from pegboard.engine.boundary.client import EngineProcess
from pegboard.data.sampling_params import SamplingParams
from pegboard_testing.echo_engine import BUILDER, echo_plan
from pegboard_testing.fake_client import ByteTokenizer

async def main():
    plan = echo_plan()
    engine = EngineProcess(BUILDER)
    engine.start(plan)
    async with AsyncLLM.of_plan(plan, None, engine, tokenizer=ByteTokenizer()) as client:
        print(engine.pid, engine.folder, flush=True)
        async for _ in client.generate("a", SamplingParams(max_tokens=None, ignore_eos=True)):
            pass

asyncio.run(main())  # without a guard: the engine process does not run this file again
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_parent_ends(tmp_path, number):
    """After SIGKILL the engine notices that its parent is gone. SIGINT goes to the whole process
    group, as Ctrl-C does, and the parent stops the engine."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("max_tokens=None", "max_tokens=4000"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    with program:
        pid, _, folder = program.stdout.readline().partition(" ")
        assert is_running(int(pid))
        if number == signal.SIGINT:
            os.killpg(program.pid, number)
        else:
            program.kill()
        program.communicate(timeout=30)
    wait_until(lambda: not is_running(int(pid)), "the engine process is gone")
    wait_until(lambda: not Path(folder.strip()).exists(), "its socket folder is gone")


class CountingSink:
    """Adds up tokens. fails_after: the number of samples after which it fails."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.metrics: list[str] = []
        self.tokens = 0.0
        self.num_samples = 0
        self.is_closed = False
        self._fails_after = fails_after

    def declare(self, metrics) -> None:
        self.metrics += [metric.name for metric in metrics]

    def publish(self, sample) -> None:
        self.num_samples += 1
        if self.num_samples == self._fails_after:
            raise OSError("disk full")
        self.tokens += sample.counters.get("generation_tokens_total", 0)

    def close(self) -> None:
        self.is_closed = True


def test_samples_reach_the_sinks_of_this_process_and_a_failing_one_harms_nobody(monkeypatch):
    good = CountingSink()
    bad = CountingSink(fails_after=2)
    monkeypatch.setattr(
        "pegboard.plan.sinks.build_sinks", lambda *chosen: {"good": good, "bad": bad}
    )

    async def main() -> None:
        plan = echo_plan()
        process = EngineProcess(BUILDER)
        process.start(plan, wants_samples=True)
        own = [Metric("http_requests_total", "counter", "")]
        client = AsyncLLM.of_plan(plan, None, process, tokenizer=ByteTokenizer(), metrics=own)
        async with client:
            outputs = await asyncio.wait_for(
                collect(client.generate("ab", SamplingParams(max_tokens=1000))), 60
            )
            assert outputs[-1].outputs[0].finish_reason == "length"
            client.publish(Sample(1.0, counters={"http_requests_total": 1}))
            assert (
                good.metrics == ["http_requests_total", "generation_tokens_total"]
                and good.num_samples > 2
            )
            assert 0 < good.tokens <= 1000 and bad.num_samples == 2
        assert good.is_closed and not bad.is_closed

    asyncio.run(main())


@pytest.mark.parametrize("number", [3, 500])
def test_logprobs_of_a_long_prompt_are_converted_in_a_thread(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = OutputStream.feed
    add_late = OutputStream.add_late
    threads = []

    def feed_more(stream: OutputStream, delta: RequestDelta) -> bool:
        if not threads and not stream.late:
            positions = [PositionLogprobs([2], [-2.0], 1)] * number
            delta.prompt_logprobs = msgspec.Raw(msgspec.msgpack.encode(positions))
        return feed(stream, delta)

    monkeypatch.setattr(OutputStream, "feed", feed_more)

    def add_noted(stream: OutputStream) -> None:
        threads.append(threading.current_thread())
        add_late(stream)

    monkeypatch.setattr(OutputStream, "add_late", add_noted)

    async def body(client: AsyncLLM) -> None:
        params = SamplingParams(
            max_tokens=2, prompt_logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY
        )
        (output,) = await collect(client.generate("ab", params))
        assert len(output.prompt_logprobs) == 1 + number

    with_client(body)
    assert [thread is threading.main_thread() for thread in threads] == [number == 3]
