"""Public addresses: not this machine, its networks or a cloud's metadata."""

from __future__ import annotations

import ipaddress

_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")  # IANA's, partly global to older Pythons
_GLOBAL = ipaddress.ip_network("2000::/3")  # all of the internet's IPv6
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """True for an IP address of the internet, by itself or behind NAT64, 6to4 or an IPv4-mapped address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        within = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.ipv4_mapped or ip.sixtofour
        if within is not None:
            return is_public(str(within))
        if ip not in _GLOBAL:
            return False
    return ip.is_global and ip not in _PROTOCOLS and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)
