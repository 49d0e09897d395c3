"""Which prefixes each server has in its KV cache, as the KV events of its engines say.

A block is known here by a key: a hash of the key of the block before it, its tokens, and what else
its content depends on (adapter, cache salt). The engine's own hashes only link events: servers may
hash in different ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Hash = int | bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a request, and what else decides whether a block fits. model: the name that the
    client sent, which may be that of an adapter."""

    token_ids: Sequence[int]
    model: str | None = None
    cache_salt: str | None = None


class Engine(NamedTuple):
    """An engine of a server. endpoint: where it publishes its events."""

    url: str
    endpoint: str


class Prefixes:
    """The blocks of all engines."""

    def __init__(self) -> None:
        self._blocks: dict[Engine, _Blocks] = {}

    def follow(self, engine: Engine, events: Sequence[Sequence[Any]]) -> None:
        """Take the events of one batch of the engine: [name, field, …] each, as vLLM orders the
        fields. Events of other forms are passed over."""
        blocks = self._blocks.setdefault(engine, _Blocks())
        for name, *fields in events:
            if name == "BlockStored" and len(fields) >= 4:
                blocks.store(_Stored.of(fields))
            elif name == "BlockRemoved" and fields:
                blocks.remove(fields[0], fields[2] if len(fields) > 2 else None)
            elif name == "AllBlocksCleared":
                self.forget(engine)
                blocks = self._blocks.setdefault(engine, _Blocks())

    def forget(self, engine: Engine) -> None:
        """The engine has no blocks that are known."""
        self._blocks.pop(engine, None)

    def length(self, url: str, prompt: Prompt) -> int:
        """Return how many tokens of the prompt the server's engine with the most of them has."""
        lengths = (
            blocks.length(prompt) for engine, blocks in self._blocks.items() if engine.url == url
        )
        return max(lengths, default=0)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The fields of BlockStored that are read."""

    hashes: Sequence[Hash]
    parent: Hash | None
    token_ids: Sequence[int]
    block_size: int
    lora_name: str | None
    extra_keys: Sequence[Sequence[Any] | None] | None
    group: int | None

    @classmethod
    def of(cls, fields: Sequence[Any]) -> _Stored:
        rest = [*fields, *[None] * (9 - len(fields))]
        return cls(rest[0], rest[1], rest[2], rest[3], rest[6], rest[7], rest[8])


class _Blocks:
    """The blocks of one engine. Only the first KV group counts: the others have the same
    prefixes."""

    def __init__(self) -> None:
        self._keys: dict[Hash, int] = {}
        self._held: Counter[int] = Counter()
        self._block_size = 0
        self._adapters: set[str] = set()

    def store(self, event: _Stored) -> None:
        if event.group:
            return
        size = event.block_size
        # a parent that is not known was stored before the first event
        if event.parent is not None and event.parent not in self._keys:
            return
        self._block_size = size
        if event.lora_name is not None:
            self._adapters.add(event.lora_name)
        key = None if event.parent is None else self._keys[event.parent]
        for index, block_hash in enumerate(event.hashes):
            extra = event.extra_keys[index] if event.extra_keys else None
            tokens = event.token_ids[index * size : (index + 1) * size]
            key = _key(key, tokens, extra)
            if block_hash not in self._keys:
                self._keys[block_hash] = key
                self._held[key] += 1

    def remove(self, hashes: Sequence[Hash], group: int | None) -> None:
        if group:
            return
        for block_hash in hashes:
            key = self._keys.pop(block_hash, None)
            if key is not None:
                self._held[key] -= 1
                if not self._held[key]:
                    del self._held[key]

    def length(self, prompt: Prompt) -> int:
        num_tokens = 0
        for key in self._chain(prompt):
            if key not in self._held:
                break
            num_tokens += self._block_size
        return num_tokens

    def _chain(self, prompt: Prompt) -> Iterator[int]:
        """Yield the keys of the prompt's full blocks."""
        size = self._block_size
        adapter = [prompt.model] if prompt.model in self._adapters else []
        salt = [] if prompt.cache_salt is None else [prompt.cache_salt]
        key: int | None = None
        for start in range(0, len(prompt.token_ids) - size + 1, size) if size else ():
            extra = [*adapter, *salt] if start == 0 else adapter
            key = _key(key, prompt.token_ids[start : start + size], extra)
            yield key


def _key(parent: int | None, token_ids: Sequence[int], extra: Sequence[Any] | None) -> int:
    return hash((parent, tuple(token_ids), repr(list(extra)) if extra else None))
