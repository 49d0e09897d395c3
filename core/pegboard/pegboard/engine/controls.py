"""The engine's side door: named actions between steps. `Engine.control(action, **arguments)` comes here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.engine.kv.cache import KVCache
from pegboard.engine.metrics.catalogue import SLEEP_STATES
from pegboard.engine.roster import Roster
from pegboard.errors import RequestError
from pegboard.interfaces.executor import Executor
from pegboard.interfaces.metrics import series

if TYPE_CHECKING:
    from pegboard.engine.engine import Engine


SLEEP_TAGS = ("weights", "kv_cache")
"""What sleeps, and may be woken one by one."""

SLEEP_STATE_KEYS = tuple(series("engine_sleep_state", state) for state in SLEEP_STATES)
"""The gauge of each level of sleep."""


class Controls:
    """One method per action; arguments are the method's. asleep: the parts of memory that are given back; nothing runs until it
    is empty."""

    def __init__(self, engine: Engine, executor: Executor, kv: KVCache, roster: Roster) -> None:
        self._engine = engine
        self._executor = executor
        self._kv = kv
        self._roster = roster
        self.asleep: set[str] = set()
        self._sleep_level = 0
        self._actions: dict[str, Callable[..., Any]] = {
            "stats": engine.stats,
            "block_usage": self.block_usage,
            "kv_events": self.kv_events,
            "reset_prefix_cache": self.reset_prefix_cache,
            "pin_lora": self.pin_lora,
            "call": self.call,
            "sleep": self.sleep,
            "wake": self.wake,
            "reload_weights": self.reload_weights,
            "profile": self.profile,
            "decisions": lambda: engine.decisions(),
        }

    def __call__(self, action: str, **arguments: Any) -> Any:
        """Run an action. RequestError for an unknown one or for arguments it does not take."""
        method = self._actions.get(action)
        if method is None:
            raise RequestError(f"unknown action {action!r}; there are {', '.join(self._actions)}", parameter="action")
        return method(**arguments)

    def block_usage(self) -> dict[str, Any]:
        """Blocks by state, and what every running request holds in each KV group."""
        pool = self._kv.pool
        tables = {r.key: [sum(1 for b in table if b) for table in self._kv.tables(r)] for r in self._roster.running}
        return {"num_blocks": pool.num_blocks, "num_free": pool.num_free, "num_cached": pool.num_cached, "requests": tables}

    def kv_events(self) -> list[dict[str, Any]]:
        """Blocks stored and removed since the last call (with limits.record_kv_events)."""
        return [msgspec.structs.asdict(event) for event in self._kv.pool.drain_events()]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks. False while requests hold blocks, unless `reset_running_requests` makes them recompute."""
        if reset_running_requests:
            self._engine.drain()
            for request in list(self._roster.running):
                self._roster.preempt(request)
        is_reset = self._kv.reset()
        if is_reset:
            self._roster.transfers.reset()
            self._roster.encoder_cache.reset()
        return is_reset

    def pin_lora(self, lora_id: int) -> None:
        """Keep an adapter in its slot."""
        self._roster.loras.pin(lora_id)

    def call(self, method: str, args: list[Any] | None = None) -> list[object]:
        """A worker method on all ranks (a collective call); results in rank order."""
        return self._executor.call(method, *(args or []))

    def sleep(self, level: int = 1) -> list[object]:
        """Give memory back. Running requests recompute after waking; the prefix cache is lost with the blocks."""
        self._forget_kv("sleep")
        results = self._executor.call("sleep", level)
        self.asleep = set(SLEEP_TAGS)
        self._sleep_level = level
        return results

    def sleep_gauges(self) -> dict[str, float]:
        """1 for the state the engine is in."""
        level = self._sleep_level if self.asleep else 0
        return {key: float(state == level) for state, key in enumerate(SLEEP_STATE_KEYS)}

    def wake(self, tags: list[str] | None = None) -> list[object]:
        """Take the memory again, all of it or by tag."""
        results = self._executor.call("wake", tags)
        self.asleep -= set(SLEEP_TAGS if tags is None else tags)
        return results

    def reload_weights(self, reference: str | None = None) -> list[object]:
        """New weights in place. What the old ones computed is forgotten."""
        self._forget_kv("reload_weights")
        return self._executor.call("reload_weights", reference)

    def profile(self, path: str | None = None) -> list[object]:
        """Start the device profiler, or stop it (None)."""
        return self._executor.call("profile", path)

    def _forget_kv(self, action: str) -> None:
        if not self.reset_prefix_cache(reset_running_requests=True):
            raise RequestError(f"{action}: KV transfers are still open; try again when they are done")
