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


class Holder(NamedTuple):
    """The engine of a server that has the longest prefix. length: in tokens. rank: its number, if
    the server has several engines that are known, and one of them has a prefix."""

    length: int = 0
    rank: int | None = None


class Prefixes:
    """The blocks of all engines."""

    def __init__(self) -> None:
        self._blocks: dict[Engine, _Blocks] = {}
        self._ranks: dict[Engine, int | None] = {}

    def follow(
        self, engine: Engine, events: Sequence[Sequence[Any]], rank: int | None = None
    ) -> None:
        """Take the events of one batch of the engine: [name, field, …] each, as vLLM orders the
        fields. Events of other forms are passed over. rank: the engine's number in its server."""
        self._ranks[engine] = rank
        blocks = self._blocks.setdefault(engine, _Blocks())
        for name, *fields in events:
            if name == "BlockStored" and len(fields) >= 4:
                blocks.store(_Stored.of(fields))
            elif name == "BlockRemoved" and fields:
                _, medium, group, *_ = [*fields, None, None]
                blocks.remove(fields[0], medium, group)
            elif name == "AllBlocksCleared":
                self.forget(engine)
                blocks = self._blocks.setdefault(engine, _Blocks())

    def forget(self, engine: Engine) -> None:
        """The engine has no blocks that are known."""
        self._blocks.pop(engine, None)

    def holder(self, url: str, prompt: Prompt) -> Holder:
        """Return the server's engine with the most tokens of the prompt."""
        length, best = max(
            (
                (blocks.length(prompt), engine)
                for engine, blocks in self._blocks.items()
                if engine.url == url
            ),
            default=(0, None),
        )
        if not length or best is None or len(self.ranks(url)) < 2:
            return Holder(length)
        return Holder(length, self._ranks.get(best))

    def ranks(self, url: str) -> set[int]:
        """Return the numbers of the server's engines that have published events."""
        return {
            rank for engine, rank in self._ranks.items() if engine.url == url and rank is not None
        }


@dataclass(frozen=True, slots=True)
class _Stored:
    """The fields of BlockStored that are read."""

    hashes: Sequence[Hash]
    parent: Hash | None
    token_ids: Sequence[int]
    block_size: int
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[Sequence[Any] | None] | None
    group: int | None

    @classmethod
    def of(cls, fields: Sequence[Any]) -> _Stored:
        rest = [*fields, *[None] * (9 - len(fields))]
        return cls(rest[0], rest[1], rest[2], rest[3], rest[5], rest[6], rest[7], rest[8])


class _Blocks:
    """The blocks of one engine, in its KV cache and in slower memories. Only the first KV group
    counts: the others have the same prefixes."""

    def __init__(self) -> None:
        self._keys: dict[Hash, int] = {}
        self._media: dict[Hash, set[str | None]] = {}
        self._held: Counter[int] = Counter()
        self._block_size = 0
        self._adapters: set[str] = set()

    def store(self, event: _Stored) -> None:
        if event.group:
            return
        for block_hash in event.hashes:
            if block_hash in self._keys:
                self._media[block_hash].add(event.medium)
        if not event.token_ids:  # vLLM names blocks of slower memories by their hashes only
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
                self._media[block_hash] = {event.medium}
                self._held[key] += 1

    def remove(self, hashes: Sequence[Hash], medium: str | None, group: int | None) -> None:
        """medium: of the memory that drops the blocks; None = they are nowhere."""
        if group:
            return
        for block_hash in hashes:
            media = self._media.get(block_hash, set())
            media.discard(medium)
            if media and medium is not None:
                continue
            self._media.pop(block_hash, None)
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
