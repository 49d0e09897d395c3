"""Small functions and names that scripts import from vLLM."""

from __future__ import annotations

import gc
import logging
import uuid
from typing import Any

__version__ = "0.13.0+pegboard"
__version_tuple__ = (0, 13, 0, "pegboard")
ChatCompletionMessageParam = dict[str, Any]
AnyTokenizer = Any
TokenizerLike = Any


def random_uuid() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


def init_logger(name: str) -> logging.Logger:
    """Return the logger of this name."""
    return logging.getLogger(name)


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that nothing refers to any more. There is nothing else to clean
    up: an engine ends its ranks itself."""
    gc.collect()
