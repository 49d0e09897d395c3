"""What the proxy knows of the servers' KV caches is what their engines have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from hypothesis import given
from hypothesis import strategies as st
from pegboard_command_proxy.events import EventSource, Follower, follow
from pegboard_command_proxy.prefixes import Engine, Prefixes, Prompt

SIZE = 2
URL = "http://a"
ENGINE = Engine(URL, "tcp://server:5557")
NUMBERS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


class Cache:
    """The blocks of an engine: a content (tokens up to a block's end, adapter, salt) and its hash,
    which here is the number of blocks before it. Evicts leaves only, as engines do."""

    def __init__(self) -> None:
        self.hashes: dict[Any, int] = {}
        self.count = 0

    def store(self, tokens: Sequence[int], adapter: str | None, salt: str | None) -> list[Any]:
        """Return the events of a prompt."""
        parent = None
        news: list[tuple[int, int]] = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            content = (tuple(tokens[:end]), adapter, salt)
            if content not in self.hashes:
                self.count += 1
                self.hashes[content] = self.count
                news.append((end - SIZE, self.count))
            elif not news:
                parent = self.hashes[content]
        if not news:
            return []
        rest = [] if adapter is None else [adapter]
        first = rest + ([] if salt is None else [salt])
        keys = [(first if start == 0 else rest) or None for start, _ in news]
        stored = [block_hash for _, block_hash in news]
        new_tokens = list(tokens[news[0][0] : news[-1][0] + SIZE])
        return [["BlockStored", stored, parent, new_tokens, SIZE, None, "GPU", adapter, keys]]

    def evict(self, choice: int) -> list[Any]:
        leaves = [
            content
            for content in self.hashes
            if not any(
                other[1:] == content[1:] and other[0][: len(content[0])] == content[0]
                for other in self.hashes
                if other != content
            )
        ]
        if not leaves:
            return []
        return [["BlockRemoved", [self.hashes.pop(leaves[choice % len(leaves)])], "GPU"]]

    def length(self, tokens: Sequence[int], adapter: str | None, salt: str | None) -> int:
        end = 0
        while end + SIZE <= len(tokens):
            if (tuple(tokens[: end + SIZE]), adapter, salt) not in self.hashes:
                break
            end += SIZE
        return end


PROMPTS = st.tuples(NUMBERS, st.sampled_from([None, "tuned"]), st.sampled_from([None, "salt"]))


@given(st.lists(PROMPTS | st.integers(0, 9), max_size=12), st.lists(PROMPTS, max_size=4))
def test_prefixes_are_those_of_the_engine(steps: list[Any], asked: list[Any]) -> None:
    cache = Cache()
    prefixes = Prefixes()
    for step in steps:
        events = cache.evict(step) if isinstance(step, int) else cache.store(*step)
        prefixes.follow(ENGINE, events)
    stored = [step for step in steps if not isinstance(step, int)]
    for tokens, adapter, salt in [*stored, *asked]:
        prompt = Prompt(tokens, adapter or "base", salt)
        is_known = adapter is None or any(step[1] for step in stored if len(step[0]) >= SIZE)
        expected = cache.length(tokens, adapter if is_known else None, salt)
        assert prefixes.holder(URL, prompt).length == expected
        assert prefixes.holder("http://other", prompt).length == 0
    prefixes.follow(ENGINE, [["AllBlocksCleared"]])
    assert all(prefixes.holder(URL, Prompt(step[0])).length == 0 for step in stored)


def test_other_groups_and_unknown_parents_do_not_count() -> None:
    prefixes = Prefixes()
    for event in (
        ["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, None, 1],
        ["BlockStored", [2], 77, [1, 2], 2, None, "GPU", None],
        ["SomethingNew", 5],
        ["BlockStored"],
        ["BlockRemoved", [99], "GPU"],
    ):
        prefixes.follow(ENGINE, [event])
    assert prefixes.holder(URL, Prompt([1, 2, 3])).length == 0


MEDIA = st.sampled_from(["GPU", "CPU"])


@given(
    st.lists(
        st.tuples(st.sampled_from(["whole", "by its hash", "removed"]), MEDIA, st.integers(1, 3)),
        max_size=20,
    )
)
def test_blocks_of_several_memories(steps: list[tuple[str, str, int]]) -> None:
    """A block is there as long as one memory has it. vLLM names blocks of slower memories by their
    hashes only, which says nothing of blocks that are not known."""
    prefixes = Prefixes()
    media: dict[int, set[str]] = {1: set(), 2: set(), 3: set()}
    for what, medium, number in steps:
        if what == "removed":
            prefixes.follow(ENGINE, [["BlockRemoved", [number], medium]])
            media[number].discard(medium)
            continue
        is_whole = what == "whole"
        tokens = [number, number] if is_whole else []
        prefixes.follow(ENGINE, [["BlockStored", [number], None, tokens, 2, None, medium, None]])
        if is_whole or media[number]:
            media[number].add(medium)
    assert known(prefixes, 1, 2, 3) == [bool(media[number]) for number in (1, 2, 3)]
    prefixes.follow(ENGINE, [["BlockRemoved", [1, 2, 3], None]])
    assert known(prefixes, 1, 2, 3) == [False] * 3


def payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def stored(number: int) -> bytes:
    return payload(["BlockStored", [number], None, [number, number], 2, None, "GPU", None])


def known(prefixes: Prefixes, *numbers: int) -> list[bool]:
    return [prefixes.holder(URL, Prompt([number, number])).length == 2 for number in numbers]


def test_lost_batches_and_a_new_engine() -> None:
    """Without a replay address, a gap means that nothing is known."""

    async def run() -> None:
        prefixes = Prefixes()
        follower = Follower(EventSource(URL, "tcp://nowhere:1"), prefixes)
        await follower.take(5, stored(1))  # earlier ones were never seen
        await follower.take(6, stored(2))
        assert known(prefixes, 1, 2) == [True, True]
        await follower.take(8, stored(3))
        assert known(prefixes, 1, 2, 3) == [False, False, True]
        await follower.take(0, stored(4))
        assert known(prefixes, 3, 4) == [False, True]
        for broken in (b"\xc1", payload(5), payload(["BlockStored", 1, None, 3, 4])):
            await follower.take(follower.next, broken)
            assert known(prefixes, 4) == [False]
            await follower.take(follower.next, stored(4))

    asyncio.run(run())


def test_events_over_zmq_with_replay() -> None:
    """The batches before the subscription and those of a gap come from the replay address."""
    context = zmq.Context.instance()
    batches = {0: stored(1), 1: stored(2), 2: stored(3), 3: stored(4)}

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def run() -> None:
        prefixes = Prefixes()
        with context.socket(zmq.PUB) as publisher, context.socket(zmq.ROUTER) as replay:
            ports = [
                socket.bind_to_random_port("tcp://127.0.0.1") for socket in (publisher, replay)
            ]
            source = EventSource(URL, *(f"tcp://127.0.0.1:{port}" for port in ports))

            def answer(count: int) -> None:
                name, _, first = replay.recv_multipart()
                for number in range(int.from_bytes(first, "big"), count):
                    frames = [name, b"", number.to_bytes(8, "big"), batches[number]]
                    replay.send_multipart(frames)
                end = (-1).to_bytes(8, "big", signed=True)
                replay.send_multipart([name, b"", end, b""])

            task = asyncio.ensure_future(follow(source, prefixes))
            await asyncio.to_thread(answer, 2)
            await until(lambda: all(known(prefixes, 1, 2)))
            publisher.send_multipart([b"", (3).to_bytes(8, "big"), batches[3]])
            await asyncio.to_thread(answer, 3)
            await until(lambda: all(known(prefixes, 1, 2, 3, 4)))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_server_has_what_one_of_its_engines_has() -> None:
    prefixes = Prefixes()
    other = Engine(URL, "tcp://other:2")
    prefixes.follow(ENGINE, [["BlockStored", [1], None, [1, 2], 2, None, "GPU", None]])
    prefixes.follow(other, [["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None]])
    assert prefixes.holder(URL, Prompt([1, 2, 3, 4, 5])).length == 4
    prefixes.follow(other, [["AllBlocksCleared"]])
    assert prefixes.holder(URL, Prompt([1, 2, 3, 4, 5])).length == 2
