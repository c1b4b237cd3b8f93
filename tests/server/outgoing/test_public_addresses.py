"""Public and non-public IP addresses."""

from __future__ import annotations

import pytest

from logitless.training.graders.public import is_public


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "169.254.169.254",
        ),
        *(
            "100.64.0.1",
            "192.0.0.8",
            "198.18.0.1",
            "203.0.113.9",
            "224.0.0.1",
            "239.1.1.1",
            "240.0.0.1",
            "255.255.255.255",
        ),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1", "fec0::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "::7f00:1"),
    ],
)
def test_addresses_of_this_machine_and_its_networks(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"],
)
def test_addresses_of_the_internet(address: str) -> None:
    assert is_public(address)
