"""HTTPS: loads the key and certificates of the server, and loads them again when their files
change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.errors import ConfigError
from pegboard.log import get_logger
from pegboard_server.settings import ServerConfig

log = get_logger(__name__)

REFRESH_INTERVAL_S = 1.0
"""Seconds between two checks of the files."""


def tls_arguments(config: ServerConfig) -> dict[str, Any]:
    """uvicorn's TLS arguments, empty without a certificate. Raises ConfigError naming the file that
    cannot be used."""
    if config.ssl_certfile is None:
        return {}
    _check(config)
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_ca_certs": config.ssl_ca_certs,
        "ssl_cert_reqs": config.ssl_cert_reqs,
        **({"ssl_ciphers": config.ssl_ciphers} if config.ssl_ciphers else {}),
    }


def _check(config: ServerConfig) -> None:
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(config, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name} {path!r}: there is no such file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        _load(context, config)
        if config.ssl_ciphers:
            context.set_ciphers(config.ssl_ciphers)
    except (ssl.SSLError, OSError) as error:
        names = ", ".join(f"{name} {getattr(config, name)!r}" for name in _files(config))
        raise ConfigError(
            f"HTTPS does not work with {names}: {error}; expected PEM files that belong together"
        ) from error


def _load(context: ssl.SSLContext, config: ServerConfig) -> None:
    assert config.ssl_certfile is not None
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _no_password)
    if config.ssl_ca_certs:
        context.load_verify_locations(config.ssl_ca_certs)


def _no_password() -> str:
    """Raise an error. A server must not stop to ask for a password on the terminal."""
    raise ssl.SSLError("the key is encrypted; give one without a password")


def _files(config: ServerConfig) -> Mapping[str, Path]:
    names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    return {
        name: Path(getattr(config, name)) for name in names if getattr(config, name) is not None
    }


async def keep_fresh(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Load the files into the live context whenever one of them changes. New connections use them.
    Runs until cancelled. Files that do not belong together (a key replaced before its certificate)
    are logged, and checked again after the next change."""
    before = _stamps(config)
    while True:
        await asyncio.sleep(REFRESH_INTERVAL_S)
        now = _stamps(config)
        if now == before:
            continue
        before = now
        try:
            _load(context, config)
        except (ssl.SSLError, OSError) as error:
            log.warning("the new TLS files are not used yet: %s", error)
        else:
            log.info("loaded the new TLS files")


def _stamps(config: ServerConfig) -> list[tuple[int, int]]:
    """The modification time and size of each file; zeros for a missing file."""
    stamps = []
    for path in _files(config).values():
        try:
            stat = path.stat()
            stamps.append((stat.st_mtime_ns, stat.st_size))
        except OSError:
            stamps.append((0, 0))
    return stamps
