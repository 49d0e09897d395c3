"""Which of several engines computes a request."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from pegboard.data.request import EngineRequest, RequestDelta

SHORTEST = 64
"""Tokens of the shortest prefix that is remembered. The others are twice as long, and so on."""

MAX_PREFIXES = 1 << 14

TOKENS_PER_PLACE = 512
"""So many tokens that need not be computed again are worth one more completion that an engine has
to compute at the same time."""

MAX_PLACES = 4

NOTHING: tuple[int, set[int]] = (0, set())
"""Of a request that is not known."""


class Balance:
    """Counts the completions that each of `num_engines` engines has not ended. A request goes to an
    engine that has the fewest, or up to MAX_PLACES more if a long prefix of the prompt was sent
    there. It forgets the prefixes that were not used for the longest time. num_open: only the first
    so many get requests."""

    def __init__(self, num_engines: int) -> None:
        self.loads = [0] * num_engines
        self.num_open = num_engines
        self._open: dict[str, tuple[int, set[int]]] = {}
        self._seen: OrderedDict[bytes, set[int]] = OrderedDict()

    def add(self, request: EngineRequest, engine: int | None = None) -> int:
        """Count a request, and return its engine. engine: the one that it must go to."""
        prefixes = list(prefixes_of(request))
        if engine is None:
            engine = self._choose(prefixes)
        for _, name in prefixes:
            self._seen.setdefault(name, set()).add(engine)
            self._seen.move_to_end(name)
        while len(self._seen) > MAX_PREFIXES:
            self._seen.popitem(last=False)
        count = request.params.n
        self.loads[engine] += count
        self._open[request.request_id] = engine, set(range(count))
        return engine

    def resize(self, num_engines: int) -> None:
        """Have this many engines. Those that go have no requests."""
        new = num_engines - len(self.loads)
        self.loads = [*self.loads[:num_engines], *([0] * new)]
        self.num_open = num_engines

    def _choose(self, prefixes: list[tuple[int, bytes]]) -> int:
        loads = self.loads[: self.num_open]
        least = min(loads)
        for length, name in reversed(prefixes):
            engines = [each for each in sorted(self._seen.get(name, ())) if each < self.num_open]
            if not engines:
                continue
            best = min(engines, key=loads.__getitem__)
            if loads[best] - least <= min(length // TOKENS_PER_PLACE, MAX_PLACES):
                return best
        return loads.index(least)

    def engine_of(self, name: str) -> int | None:
        """Return the engine of a request, or of a completion by its key. None: it has ended."""
        request = self._open.get(name) or self._open.get(name.partition("_")[2])
        return request[0] if request else None

    def feed(self, deltas: Iterable[RequestDelta]) -> None:
        """Count the completions that have ended."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self._end(delta.request_id, delta.index)

    def _end(self, request_id: str, index: int) -> None:
        engine, left = self._open.get(request_id, NOTHING)
        if index not in left:
            return
        left.remove(index)
        self.loads[engine] -= 1
        if not left:
            del self._open[request_id]

    def remove(self, request_id: str) -> None:
        """Forget a request that its engine has refused."""
        engine, left = self._open.pop(request_id, NOTHING)
        self.loads[engine] -= len(left)


def prefixes_of(request: EngineRequest) -> Iterable[tuple[int, bytes]]:
    """Yield the lengths and names of a prompt's prefixes, shortest first. Prompts of other adapters
    or salts have other prefixes."""
    lora = request.lora.lora_name if request.lora is not None else ""
    digest = blake2b(f"{request.cache_salt or ''}\n{lora}".encode(), digest_size=16)
    ids = request.prompt_token_ids
    begin = 0
    end = SHORTEST
    while end <= len(ids):
        digest.update(array("q", ids[begin:end]).tobytes())
        yield end, digest.digest()
        begin = end
        end *= 2
