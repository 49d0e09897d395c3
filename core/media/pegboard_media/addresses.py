"""Which addresses belong to the public internet."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

PRIVATE_V4 = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",
        ),
    )
)
GLOBAL_V6 = IPv6Network("2000::/3")
SPECIAL_V6 = tuple(map(ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
"""Parts of GLOBAL_V6 that are tunnels or examples."""
HOLDS_V4 = tuple(map(IPv6Network, ("::ffff:0:0/96", "64:ff9b::/96")))
"""Addresses whose last 32 bits are an IPv4 address: mapped ones and those of NAT64 (RFC 6052)."""


def is_public(text: str) -> bool:
    """Return whether a numeric address belongs to the public internet. An IPv6 address that stands
    for an IPv4 address counts as that one. Any other text is not public."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        if any(address in network for network in HOLDS_V4):
            address = IPv4Address(int(address) & 0xFFFFFFFF)
        else:
            is_special = any(address in network for network in SPECIAL_V6)
            return address in GLOBAL_V6 and not is_special and address.is_global
    return address.is_global and not any(address in network for network in PRIVATE_V4)
