"""Log lines of the HTTP server: where they go, and which paths get none."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pegboard.config.schema import ServerConfig
from pegboard.errors import ConfigError


def apply_log_config(path: str) -> None:
    """Configure logging from a JSON or YAML file in the form of `logging.config.dictConfig`. Raises ConfigError."""
    try:
        content = _read(Path(path).expanduser())
        logging.config.dictConfig(content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"log_config_file {path!r}: {error}; expected what logging.config.dictConfig takes") from error


def _read(path: Path) -> Any:
    text = path.read_text("utf-8")
    if path.suffix not in (".yaml", ".yml"):
        return json.loads(text)
    try:
        import yaml
    except ImportError as error:
        raise ValueError("reading YAML needs pyyaml (pip install pyyaml); JSON works without") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


class _Quiet(logging.Filter):
    """Drops access records of some paths."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        """uvicorn's access records carry (client, method, path, HTTP version, status)."""
        arguments = record.args
        if not isinstance(arguments, tuple) or len(arguments) < 3:
            return True
        return str(arguments[2]).partition("?")[0] not in self._paths


@contextlib.contextmanager
def access_log(config: ServerConfig) -> Iterator[None]:
    """uvicorn's records go where ours go, unless a configuration file says where; quiet paths are left out."""
    logger = logging.getLogger("uvicorn")
    ours = logging.getLogger("pegboard").handlers
    if ours and config.log_config_file is None:
        logger.handlers[:] = ours
        logger.propagate = False
    paths = {path.strip() for item in config.disable_access_log_for_endpoints for path in item.split(",")}
    quiet = _Quiet(frozenset(paths))
    access = logging.getLogger("uvicorn.access")
    access.addFilter(quiet)
    try:
        yield
    finally:
        access.removeFilter(quiet)
