"""What a waiting request may have to wait for besides rows, tokens and blocks."""

from __future__ import annotations

from pegboard.engine.requests import Request


class Gate:
    """A feature that requests wait for: grammars, adapters, KV connectors, the parent of a
    completion. The engine is built with the gates of the features that are on. Each method may be
    left out. must_drain: no step may be submitted before those in flight have ended."""

    must_drain = False

    def ready(self, request: Request) -> bool:
        """Whether a waiting request may run now, as far as this feature is concerned. True may take
        something for the request. Raises PegboardError if it can never run: only this request
        fails."""
        return True

    def begin(self, *, is_idle: bool) -> None:
        """Requests may be tried in order from now on. is_idle: no step is in flight, so this may
        change the workers."""

    def leave(self, request: Request) -> None:
        """Give back what the request has: it does not run now, or not any more."""

    def ended(self, request: Request) -> None:
        """The request ends, in any status."""

    def weights_changed(self) -> None:
        """Forget what was computed with the old weights."""

    def rest(self) -> None:
        """Sleep for a moment if a request waits for this feature. The engine calls this when it has
        nothing else to do."""
