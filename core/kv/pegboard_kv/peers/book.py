"""The address book: which hosts an engine exchanges blocks with. Clients name hosts in
`kv_transfer_params`, so nothing connects to a host that is not in it. It imports no torch."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from pegboard.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AddressBook:
    """Host names, addresses and networks. Raises ConfigError for a text that is none."""

    def __init__(self, peers: Sequence[str]) -> None:
        self._names: set[str] = set()
        self._networks: list[Network] = []
        for text in peers:
            try:
                self._networks.append(ipaddress.ip_network(text))
            except ValueError:
                if not text.replace("-", "").replace(".", "").isalnum():
                    raise ConfigError(
                        f"peers: {text!r} is not a host; expected something like 10.0.0.7, "
                        "10.0.0.0/24 or prefill.example"
                    ) from None
                self._names.add(text.lower())

    def has(self, host: str) -> bool:
        """Return whether blocks may be asked for at `host`, as it was written. Names are not looked
        up."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host.lower() in self._names
        return self.has_address(address)

    def may_connect(self, host: str) -> bool:
        """Return whether a connection from the address `host` is accepted. Names cannot be
        compared with it, so with a name in the book all are; the key then decides."""
        return bool(self._names) or self.has_address(ipaddress.ip_address(host))

    def has_address(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)
