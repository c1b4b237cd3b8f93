"""rpc-servers of a replica: actors in its placement group that lend it their machines' devices."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from logitless.backends.host_memory import total_memory
from logitless.backends.rpc.backend import API_KEY
from logitless.backends.rpc.server import Door, lent_device, listen
from logitless.errors import Error
from logitless.extras.ray.config import RpcServers


class _Server:
    """Actor that lends a device, as `logitless rpc-server` does."""

    def __init__(self, config: RpcServers, key: str) -> None:
        open_backend, budget = lent_device(config.device, max(1, int(config.num_cpus)), total_memory())
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family)
        self._address = f"[{host}]:{sock.getsockname()[1]}" if ":" in host else f"{host}:{sock.getsockname()[1]}"
        door = Door(lambda secret: secrets.compare_digest(secret, key))
        threading.Thread(target=listen, args=(sock, open_backend, budget, door), daemon=True).start()

    def address(self) -> str:
        return self._address


class Servers:
    """The actors. They end with the process that started them."""

    def __init__(self, config: RpcServers) -> None:
        os.environ[API_KEY] = key = secrets.token_hex(16)  # only this replica may use them
        group = get_current_placement_group()
        self._actors: list[Any] = [
            ray.remote(_Server)
            .options(
                num_cpus=config.num_cpus,
                num_gpus=config.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 1 + i),
            )
            .remote(config, key)
            for i in range(config.n)
        ]

    async def addresses(self) -> list[str]:
        """Addresses where they listen. Raises Error if one has ended, or does not answer."""
        try:
            async with asyncio.timeout(_SECONDS):
                return list(await asyncio.gather(*(actor.address.remote() for actor in self._actors)))
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise Error(f"an rpc-server of this replica has ended ({type(error).__name__})") from None


_SECONDS = 60.0  # that an actor has to start, and to answer
