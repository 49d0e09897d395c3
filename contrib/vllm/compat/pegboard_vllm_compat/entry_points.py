"""Plugins of vLLM that are installed: which of them work here, and which do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import EntryPoint, entry_points

from pegboard import env
from pegboard.log import get_logger

log = get_logger(__name__)

GENERAL = "vllm.general_plugins"
LOGITS = "vllm.logits_processors"
STATS = "vllm.stat_logger_plugins"
IO = "vllm.io_processor_plugins"
GROUPS = {
    GENERAL: (
        "run before a script, and by serve, which uses the parsers and LoRA resolvers that they "
        "register. One that needs anything else of vLLM is left out with a warning"
    ),
    LOGITS: "used for every request of LLM, AsyncLLM and serve, as in vLLM",
    "vllm.platform_plugins": (
        "not used: they replace vLLM's workers and kernels, which Pegboard does not have. Write a "
        "plugin of the kind platform (pegboard plugins new platform NAME), and kernels for it; "
        "docs/plugins.md says how"
    ),
    IO: (
        "used by LLM(io_processor_plugin=NAME) and its method encode, and by serve "
        "--io-processor-plugin NAME, whose route POST /pooling takes their data"
    ),
    STATS: (
        "used by AsyncLLM and serve, with the fields of vLLM's statistics that Pegboard measures. "
        "The class LLM does not use them, as in vLLM"
    ),
    "vllm.endpoint_plugins": (
        "not used: they add routes to vLLM's FastAPI application. Write a plugin of the kind api "
        "(pegboard plugins new api NAME)"
    ),
}
"""Group of entry points → what happens with its plugins."""


def logits_processors() -> list[str]:
    """Return "module:Class" of each installed logits processor."""
    return [point.value for point in entry_points(group=LOGITS)]


def io_processors() -> dict[str, EntryPoint]:
    """Return name → the entry point of each installed IO processor."""
    return {point.name: point for point in entry_points(group=IO)}


def stat_loggers() -> list[str]:
    """Return "module:Class" of each installed stat logger."""
    return [point.value for point in entry_points(group=STATS)]


def general() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield "module:function" of each general plugin that VLLM_PLUGINS names, or of all, and what
    runs it: one that fails is left out with a warning."""
    names = env.vllm_variables().get("VLLM_PLUGINS")
    for point in entry_points(group=GENERAL):
        if names is None or point.name in names.split(","):
            yield point.value, partial(_run, point)


def _run(point: EntryPoint) -> None:
    try:
        point.load()()
    except Exception as error:  # noqa: BLE001
        # it is somebody else's, and the script may not need it
        log.warning("the vLLM plugin %s (%s) is left out: %s", point.name, point.value, error)


def table() -> str:
    """Return what `pegboard vllm-compat plugins` prints."""
    lines = []
    for group, meaning in GROUPS.items():
        points = sorted(entry_points(group=group), key=lambda point: point.name)
        lines.append(f"{group}: {meaning}.")
        lines += [
            f"  {point.name} = {point.value}{f'  ({point.dist.name})' if point.dist else ''}"
            for point in points
        ] or ["  none installed"]
    return "\n".join(lines)
