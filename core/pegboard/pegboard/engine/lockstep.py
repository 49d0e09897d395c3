"""Engines that share out experts take every step together: all of them, while one has requests."""

from __future__ import annotations

from pegboard.data.batch import LEFT, StepOutput


class Alone:
    """An engine that has all experts: no other one waits for its steps."""

    is_running = False
    is_quiet = True

    def wake(self) -> None: ...

    def leave(self) -> None: ...

    def begin_step(self, *, has_actions: bool) -> None: ...

    def says(self, has_requests: bool) -> tuple[bool, bool, int] | None:
        return None

    def end_step(self, output: StepOutput) -> None: ...


class Lockstep(Alone):
    """Decides when this engine takes steps without requests of its own. A wave of steps begins with
    a message that all engines get. It ends when all engines have seen the same number of messages,
    none has requests to compute, and no action waits. Each engine learns that in the same step.

    is_running: the wave goes on. is_quiet: no engine had requests to compute in the last step."""

    def __init__(self) -> None:
        self.is_quiet = False
        self._has_actions = False
        self._num_seen = 0

    def wake(self) -> None:
        """A message has come that all engines get."""
        self._num_seen += 1
        self.is_running = True
        self.is_quiet = False

    def leave(self) -> None:
        """Take no more messages. All engines leave; the wave ends when all have."""
        self._num_seen = LEFT
        self.is_running = True

    def begin_step(self, *, has_actions: bool) -> None:
        """has_actions: an action waits."""
        self._has_actions = has_actions

    def says(self, has_requests: bool) -> tuple[bool, bool, int] | None:
        """Return what the next batch says to the other engines."""
        has_left = self._num_seen == LEFT
        return has_requests and not has_left, self._has_actions and not has_left, self._num_seen

    def end_step(self, output: StepOutput) -> None:
        """Note what the engines have agreed on."""
        self.is_quiet = output.is_quiet
        self.is_running = not output.is_over
