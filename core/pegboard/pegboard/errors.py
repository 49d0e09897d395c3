"""Every exception Pegboard raises on purpose, in one tree.

    PegboardError
    ├── ConfigError             a setting is wrong, or settings contradict each other
    │   │                       (exit status 2, all others 1)
    │   ├── KVCacheTooSmall     the KV cache memory cannot hold one request of max_model_len
    │   └── UsageError          the command line itself is wrong
    ├── ModelError              the checkpoint is missing, damaged or not supported
    ├── CannotRecord            the forward cannot be recorded and runs eagerly; says why
    │   └── NoRoom              no memory is left for a recording of this size
    ├── PluginError             has `plugin`, the id "kind:name (distribution version)"
    │   ├── PluginNotFound      nothing installed provides (kind, name); says what to install
    │   │   └── UnknownPlugin   also a ConfigError: a setting or a command names it
    │   ├── PluginConflict      several distributions provide the same name
    │   ├── PluginUnsuitable    the chosen plugin cannot do what is needed; says why
    │   ├── PluginBroken        installed, but import or probe fails, or it breaks its contract
    │   └── PluginFailure       a chosen plugin raised while serving
    ├── RequestError            this request cannot be served (HTTP 400); has `parameter`
    │   ├── MalformedRequest    its body does not fit the schema
    │   ├── UnknownModel        the request names a model that is not served (HTTP 404)
    │   └── Overloaded          too many requests are queued (HTTP 503); has `retry_after_s`
    └── EngineDeadError         the engine process has died (HTTP 500, and 503 on /health)

A message says what was received, what was expected and what to do about it. Code that calls a
third-party library translates the library's exceptions with `raise … from`.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from types import UnionType
from typing import Any


class PegboardError(Exception):
    """The root of all errors that Pegboard raises on purpose."""


class ConfigError(PegboardError, ValueError):
    """A user's setting is wrong; the message names the setting."""


class KVCacheTooSmall(ConfigError):
    """The KV cache memory is too small for one request of `max_model_len` tokens. needed_bytes:
    what would be enough. fits: the largest max_model_len that fits; 0 = none."""

    needed_bytes = 0
    fits = 0


class UsageError(ConfigError):
    """The command line is wrong, for example an unknown flag or a missing value."""


class ModelError(PegboardError):
    """The checkpoint cannot be found, read or run."""


class CannotRecord(PegboardError):
    """A layer, or the code that computes it, cannot be recorded for replay."""


class NoRoom(CannotRecord):
    """The device has no memory left for a recording of this size. One of fewer rows may fit."""


class PluginError(PegboardError):
    """The common class of errors about a plugin. `plugin` is the plugin's id, or None if the error
    is not about a single plugin."""

    def __init__(self, message: str, *, plugin: str | None = None) -> None:
        super().__init__(message)
        self.plugin = plugin


class PluginNotFound(PluginError):
    """No installed plugin provides the requested (kind, name)."""


class UnknownPlugin(PluginNotFound, ConfigError):
    """A setting or a command names a plugin or a kind that is not installed."""


class PluginConflict(PluginError):
    """Several distributions register the requested name. The long form `distribution:name` selects
    one of them."""


class PluginUnsuitable(PluginError):
    """The requested plugin cannot do what is needed here. Pegboard never replaces it silently."""


class PluginBroken(PluginError):
    """The plugin is installed, but its import or its probe fails, or it does not fit its
    interface."""


class PluginFailure(PluginError):
    """A chosen plugin raised an exception, which is this error's `__cause__`."""


class RequestError(PegboardError, ValueError):
    """The request is invalid. `parameter` names the field that is wrong, if there is one."""

    status = 400

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class MalformedRequest(RequestError):
    """The body of the request does not fit its schema."""


class UnknownModel(RequestError):
    """The request names a model or adapter that is not served."""

    status = 404


class TookTooLong(RequestError):
    """What was asked was not done in the time that the request gave."""

    status = 408


class Overloaded(RequestError):
    """Too many requests are queued. The client should try again after `retry_after_s` seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(PegboardError):
    """The engine has died and cannot be used any more. The log gives the cause, and so does the
    message if the cause is known."""


def brief(value: object, most: int = 60) -> str:
    """Return a value as text of about `most` characters. Only its beginning is read: writing a
    million numbers takes seconds."""
    text = repr(_beginning(value, most, 4))
    return text if len(text) <= most else f"{text[:most]}…"


def _beginning(value: object, most: int, depth: int) -> object:
    if isinstance(value, str | bytes):
        return value[: most + 1]
    if isinstance(value, list | tuple):
        return [_beginning(item, most, depth - 1) for item in value[: most // 3]] if depth else ...
    if isinstance(value, dict):
        pairs = islice(value.items(), most // 6)
        return (
            {_beginning(key, most, 0): _beginning(item, most, depth - 1) for key, item in pairs}
            if depth
            else ...
        )
    return value


def is_failure(error: BaseException) -> bool:
    """Return True for exceptions, and for panics of Rust libraries, which do not inherit from
    Exception. Return False for interrupts, exits and cancellation."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def portable(error: BaseException) -> BaseException:
    """Return the error as another process can read it. Attributes are kept, causes are not. What
    cannot be pickled becomes a PegboardError that begins with the name of its type."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # noqa: BLE001 - any code may run while an unknown class is pickled
        pass
    return PegboardError(f"{type(error).__name__}: {error}")


@contextmanager
def blame(plugin: str | None, modules: Callable[[], Mapping[str, str]] = dict) -> Iterator[None]:
    """Attribute errors to the innermost plugin of `modules` that failed (see `culprit`), else to
    `plugin`: they become a PluginFailure. Pegboard's own errors pass unchanged. Use it around a
    step or a request, never around a layer.
    """
    try:
        yield
    except BaseException as error:
        failure = blamed(error, modules, plugin)
        if failure is None or failure is error:
            raise
        try:
            raise failure from failure.__cause__
        finally:
            del failure  # this frame is part of its traceback, so it would make a cycle


def blamed(
    error: BaseException, modules: Callable[[], Mapping[str, str]], plugin: str | None = None
) -> PluginFailure | None:
    """Return the PluginFailure for an error that came from a plugin's code or is about what a
    plugin returned. plugin: to blame if no plugin of `modules` is found. Return None for all other
    errors."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, PluginFailure):  # `expect` knows only the module
        plugin = culprit(modules(), [error.plugin or ""])
        reason = str(error)
    elif isinstance(error, PegboardError) or not is_failure(error):
        return None
    else:
        frames = [
            str(frame.f_globals.get("__name__", ""))
            for frame, _ in traceback.walk_tb(error.__traceback__)
        ]
        plugin = culprit(modules(), frames[::-1]) or plugin
    if plugin is None:
        return error if isinstance(error, PluginFailure) else None
    failure = PluginFailure(f"plugin {plugin} failed: {reason}", plugin=plugin)
    failure.__cause__ = error
    return failure


def bare(error: PegboardError) -> PegboardError:
    """Return an error without its traceback and causes, so that it can be kept. They hold the
    frames that it passed, and so the requests of that step."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def expect(value: Any, expected: type[Any] | UnionType, source: object, method: str) -> Any:
    """Return what `source.method()` returned, if it has the expected type, or the methods of an
    expected Protocol. Raises a PluginFailure that names the module of `source`; `errors.blamed`
    finds the plugin that owns the module. An object that stands before a plugin's has that one
    as `plugin_object`."""
    if getattr(expected, "_is_protocol", False):
        if all(hasattr(value, name) for name in vars(expected) if name[0] != "_"):
            return value
    elif isinstance(value, expected):
        return value
    source = getattr(source, "plugin_object", source)
    owner = source if isinstance(source, type) else type(source)
    message = f"{owner.__name__}.{method}() returned a {type(value).__name__}, expected {expected}"
    raise PluginFailure(message, plugin=owner.__module__)


def culprit(modules: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return the plugin whose code runs or failed, or None if it is not a plugin's. modules: module
    or top-level package → id of the plugin that it belongs to. names: the modules on the stack,
    innermost first. Every step runs inside an executor's frames, so an executor is the culprit only
    if no frame of Pegboard is further in."""
    in_core = False
    for name in names:
        owner = modules.get(name) or modules.get(name.partition(".")[0])
        if owner and not (in_core and owner.startswith("executor:")):
            return owner
        in_core = in_core or name.startswith("pegboard.")
    return None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None if no name is similar. Leading
    dashes of a flag are ignored. Two names are also similar if one begins with the other."""
    by_plain = {_plain(item): item for item in sorted(known, reverse=True)}
    plain = _plain(name)
    matches = get_close_matches(plain, by_plain, n=1, cutoff=0.75)
    matches += sorted(
        (item for item in by_plain if len(plain) > 2 and item.startswith(plain)), key=len
    )
    matches += [item for item in by_plain if len(item) > 2 and plain.startswith(item)]
    return by_plain[matches[0]] if matches else None


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("_", "-")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?", or "" if no known name is similar."""
    match = nearest(name, known)
    return f", did you mean {match!r}?" if match else ""
