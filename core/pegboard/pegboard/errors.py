"""Every exception Pegboard raises on purpose, in one tree.

    PegboardError
    ├── ConfigError             a setting of the user is wrong or settings contradict each other
    │   ├── KVCacheTooSmall     the KV cache memory cannot hold one request of max_model_len
    │   └── UsageError          the command line itself is wrong (exit status 2)
    ├── ModelError              the checkpoint is missing, damaged or not supported
    ├── CannotRecord            the forward cannot be recorded and runs eagerly; the message says why
    ├── PluginError             carries `plugin`, the id "kind:name (distribution version)"
    │   ├── PluginNotFound      nothing installed provides (kind, name); says what to install
    │   ├── PluginConflict      one name, several distributions
    │   ├── PluginUnsuitable    an explicit choice cannot do what is needed here; says why
    │   ├── PluginBroken        installed, but it fails to import, probe or keep its contract
    │   └── PluginFailure       a chosen plugin raised while serving
    ├── RequestError            this request cannot be served (HTTP 400); carries `parameter`
    │   ├── MalformedRequest    its body does not fit the schema
    │   ├── UnknownModel        the request names a model that is not served (HTTP 404)
    │   └── Overloaded          too much is queued (HTTP 503); carries `retry_after_s`
    └── EngineDeadError         the engine process has died (HTTP 500 on requests, 503 on /health)

Messages say what came, what was expected and what to do about it. Exceptions of third-party libraries are translated
where we call the library, with `raise … from`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class PegboardError(Exception):
    """Root of all deliberate errors."""


class ConfigError(PegboardError, ValueError):
    """A user's setting is wrong; the message names the setting."""


class KVCacheTooSmall(ConfigError):
    """The memory given to the KV cache does not hold one request of `max_model_len` tokens."""


class UsageError(ConfigError):
    """The command line itself is wrong: an unknown flag, a missing value. The program ends with status 2."""


class ModelError(PegboardError):
    """The checkpoint cannot be found, read or run."""


class CannotRecord(PegboardError):
    """A layer, or what computes it, cannot be recorded for replay."""


class PluginError(PegboardError):
    """Base of errors that concern one plugin; `plugin` is its id or None when no single one is meant."""

    def __init__(self, message: str, *, plugin: str | None = None) -> None:
        super().__init__(message)
        self.plugin = plugin


class PluginNotFound(PluginError):
    """Nothing installed provides the wanted (kind, name)."""


class PluginConflict(PluginError):
    """Several distributions register the wanted name; the long form `distribution:name` chooses."""


class PluginUnsuitable(PluginError):
    """The plugin that was asked for cannot serve this need; never replaced silently."""


class PluginBroken(PluginError):
    """The plugin is installed but does not import, probe or fit its interface."""


class PluginFailure(PluginError):
    """A chosen plugin raised; the original exception is the cause."""


class RequestError(PegboardError, ValueError):
    """The request is invalid. `parameter` names the field at fault, if one is."""

    status = 400

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class MalformedRequest(RequestError):
    """The body of the request does not fit its schema."""


class UnknownModel(RequestError):
    """The request names a model or adapter that is not served."""

    status = 404


class Overloaded(RequestError):
    """Too much work is queued; try again after `retry_after_s` seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(PegboardError):
    """The engine stopped for good; the cause is in the log and, where known, in the message."""


@contextmanager
def blame(plugin: str) -> Iterator[None]:
    """Attribute errors to `plugin`: Pegboard's own errors pass, any other becomes `PluginFailure`.

    Used around a step or a request, never around a layer.
    """
    try:
        yield
    except PegboardError:
        raise
    except Exception as error:  # the boundary to third-party code: anything can come out of it
        raise PluginFailure(f"plugin {plugin} failed: {type(error).__name__}: {error}", plugin=plugin) from error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`; None when nothing is near."""
    by_lower = {item.lower(): item for item in sorted(known)}
    found = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ ", did you mean 'x'?" or ""."""
    match = nearest(name, known)
    return f", did you mean {match!r}?" if match else ""
