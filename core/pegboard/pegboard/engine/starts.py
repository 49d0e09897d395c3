"""Where the computation of a waiting request starts: after the prefix that need not be computed."""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.engine.kv.cache import PrefixHit
from pegboard.engine.kv.connectors import External
from pegboard.engine.live_requests import LiveRequests
from pegboard.engine.requests import Request


@dataclass(slots=True)
class Start:
    """Where the computation of a request starts. hit: its cached prefix; None = not looked up.
    external: the prefix that a connector adds. is_loaded: a connector has loaded its blocks between
    steps; num_computed_tokens says how many tokens."""

    hit: PrefixHit | None = None
    external: External = External()
    is_loaded: bool = False

    @property
    def num_cached(self) -> int:
        return (self.hit.num_tokens if self.hit else 0) + self.external.match.num_tokens


class Starts:
    """Finds cached prefixes, here and at KV connectors, and reserves blocks."""

    def __init__(self, live: LiveRequests) -> None:
        self._live = live
        self._kv = live.kv
        self._connectors = live.connectors

    def find(self, request: Request) -> Start | None:
        """Return the longest prefix that need not be computed: already loaded, cached here, or at a
        connector. Return None if a connector must be asked again in a later step."""
        if self._kv.holds(request):  # a connector has loaded its blocks
            return Start(is_loaded=True)
        if getattr(request.params, "skip_reading_prefix_cache", False):
            return Start()
        hit = self._kv.lookup(request)
        external = self._connectors.find(request, hit.num_tokens)
        return None if external is None else Start(hit, external)

    def begin_loading(self, request: Request, start: Start) -> bool:
        """Reserve blocks for the prefix. The request waits without a row until the connector has
        loaded them. Return False if it must wait for blocks first."""
        num_cached = start.num_cached
        if self.reserve(request, num_cached, start, num_cached):
            request.num_computed_tokens = num_cached
            self._connectors.load(request, start.external)
            return True
        # if it is alone, there will never be more free blocks than now: compute it chunk by chunk
        request.uses_connectors = not self._live.is_alone()
        return not request.uses_connectors

    def reserve(self, request: Request, num_tokens: int, start: Start, num_computed: int) -> bool:
        """Reserve blocks for a request that has none. Return False if it must wait for them."""
        while (
            self._kv.allocate(request, num_tokens, hit=start.hit, num_computed_tokens=num_computed)
            is None
        ):
            if not self._live.is_alone() or not self._live.reclaim(request):
                return False
        self._count_query(request, start)
        return True

    def _count_query(self, request: Request, start: Start) -> None:
        """Count queries and local hits, at the first admission only. External hits count with the
        first token: loads can fail."""
        if request.num_cached_tokens is not None:
            return
        request.num_cached_tokens = start.num_cached
        if start.hit is None:
            return
        hit = start.hit.num_tokens
        request.num_external_tokens = start.num_cached - hit
        self._live.count("prefix_cache_queries_total", request.num_tokens)
        self._live.count("prefix_cache_hits_total", hit)
        if self._connectors:
            rest = request.num_tokens - hit
            self._live.count("external_prefix_cache_queries_total", rest)
