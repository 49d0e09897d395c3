"""A stand-in for `nixl._api` of NIXL 1.5 with the backend UCX. Its agents are in this process and
copy memory. It refuses what the real one refuses (`test_nixl.py` asks both)."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

Region = tuple[int, int]
"""Address and size."""
AGENTS: dict[bytes, nixl_agent] = {}
"""Agents that have not ended, by what their metadata says."""
_numbers = itertools.count()


class nixlNotFoundError(Exception): ...


class nixlInvalidParamError(Exception): ...


class nixlMismatchError(Exception): ...


class nixlBackendError(Exception): ...


class nixlRemoteDisconnectError(Exception): ...


class nixlNotAllowedError(Exception): ...


class Metadata(msgspec.Struct, array_like=True):
    name: str
    identity: bytes
    regions: list[Region]


class nixl_agent_config:
    def __init__(self, backends: Sequence[str] = ("UCX",)) -> None:
        self.backends = list(backends)


class Read:
    def __init__(self, target: bytes, parts: list[tuple[Region, Region]]) -> None:
        self.target = target
        self.parts = parts
        self.state = "new"


def has(regions: Sequence[Region], part: Region) -> bool:
    return any(start <= part[0] and part[0] + part[1] <= start + size for start, size in regions)


class nixl_agent:
    """hangs: reads never end."""

    hangs = False

    def __init__(self, agent_name: str, nixl_conf: nixl_agent_config) -> None:
        self.name = agent_name
        self._identity = str(next(_numbers)).encode()
        self._regions: list[Region] = []
        self._remote: dict[str, Metadata] = {}
        if "GDS" in nixl_conf.backends:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        self.backends = {name: 1 for name in nixl_conf.backends if name in self.get_plugin_list()}
        AGENTS[self._identity] = self

    def get_plugin_list(self) -> list[str]:
        return ["UCX", "GDS"]

    def register_memory(self, parts: list[tuple[int, int, int, str]], kind: str) -> list[Region]:
        """Like the real one, it takes a part that is registered already."""
        assert kind == "DRAM"
        regions = [(address, size) for address, size, _, _ in parts]
        self._regions += regions
        return regions

    def deregister_memory(self, regions: list[Region]) -> None:
        if not all(region in self._regions for region in regions):
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        self._regions = [region for region in self._regions if region not in regions]
        AGENTS.pop(self._identity)  # the transport closes so

    def get_agent_metadata(self) -> bytes:
        return msgspec.msgpack.encode(Metadata(self.name, self._identity, self._regions))

    def add_remote_agent(self, metadata: bytes) -> str:
        try:
            remote = msgspec.msgpack.decode(metadata, type=Metadata)
        except msgspec.DecodeError:
            raise nixlMismatchError("NIXL_ERR_MISMATCH") from None
        if remote.identity not in AGENTS:
            raise nixlBackendError("NIXL_ERR_BACKEND")
        self._remote[remote.name] = remote
        return remote.name

    def remove_remote_agent(self, agent: str) -> None:
        self._remote.pop(agent, None)

    def get_xfer_descs(self, parts: list[tuple[int, int, int]], kind: str) -> list[Region]:
        assert kind == "DRAM" and len(parts[0]) == 3
        return [(address, size) for address, size, _ in parts]

    def initialize_xfer(
        self, operation: str, local: list[Region], remote: list[Region], agent: str
    ) -> Read:
        assert operation == "READ"
        if len(local) != len(remote) or any(
            here[1] != there[1] for here, there in zip(local, remote, strict=True)
        ):
            raise nixlInvalidParamError("NIXL_ERR_INVALID_PARAM")
        known = self._remote.get(agent)
        if (
            known is None
            or not all(has(self._regions, part) for part in local)
            or not all(has(known.regions, part) for part in remote)
        ):
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        return Read(known.identity, list(zip(local, remote, strict=True)))

    def transfer(self, handle: Read) -> str:
        if handle.target not in AGENTS:
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        handle.state = "PROC"
        return handle.state

    def check_xfer_state(self, handle: Read) -> str:
        if handle.state == "PROC" and not self.hangs:
            for (here, size), (there, _) in handle.parts:
                ctypes.memmove(here, there, size)
            handle.state = "DONE"
        return handle.state

    def release_xfer_handle(self, handle: Any) -> None:
        if handle.state == "PROC":
            raise nixlNotAllowedError("NIXL_ERR_NOT_ALLOWED")
        handle.state = "released"
