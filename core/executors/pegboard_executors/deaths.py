"""The rank that has died."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pegboard.interfaces.executor import WorkerDeath


class FirstDeath:
    """death: the first one; None = all live."""

    def __init__(self) -> None:
        self.death: WorkerDeath | None = None
        self._on_death: Callable[[WorkerDeath], None] | None = None
        self._lock = threading.Lock()
        self._is_known = threading.Event()

    def tell(self, on_death: Callable[[WorkerDeath], None]) -> None:
        """Call `on_death` once, when a rank dies or if one has died."""
        with self._lock:
            death = self.death
            if death is None:
                self._on_death = on_death
        if death is not None:
            on_death(death)

    def reason(self, timeout_s: float) -> WorkerDeath | None:
        """Return the death, which is noticed within `timeout_s` seconds if there is one."""
        self._is_known.wait(timeout_s)
        return self.death

    def announce(self, death: WorkerDeath, wake: Callable[[], None]) -> None:
        """Note the death. Wake whoever waits for the ranks, and then call `on_death`."""
        with self._lock:
            self.death = death
            on_death = self._on_death
        self._is_known.set()
        wake()
        if on_death is not None:
            on_death(death)
