"""PrefixRouter: picks the replica with the fewest blocks of a prompt to compute and the fewest requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from logitless.extras.ray.prefixes import PrefixIndex, PrefixRoute


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Request router of Ray Serve, in each process that has a handle of the model's deployment.

    A request there counts as a few blocks to compute, and a prefix does not count at a replica with more
    requests than the least busy one plus `slack`, so that a prefix that everybody shares is computed at
    further replicas as well."""

    def initialize_state(self, slack: float = 4.0) -> None:
        """Serve calls it with the deployment's `request_router_kwargs`."""
        self._slack = slack
        self._index = PrefixIndex()
        self._places: dict[str, ReplicaID] = {}  # of this process's requests: the replica that has each, or will
        self._choosing: dict[str, PendingRequest] = {}  # those that no replica has yet

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates, the best first."""
        for request in [each for each in self._choosing.values() if each.future.cancelled()]:
            self._forget(request.metadata.internal_request_id)
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        name = "" if pending_request is None else pending_request.metadata.internal_request_id
        self._places.pop(name, None)  # chosen again
        own = Counter(self._places.values())
        # requests of other processes are those of which the replica told lately
        loads = {id: max(own[id], self.replica_queue_len_cache.get(id) or 0) for id in by_id}
        ranked = self._index.ranked(loads, self._route(pending_request), slack=self._slack)
        if ranked and pending_request is not None:  # a burst is chosen for before any of it is sent
            self._places[name], self._choosing[name] = ranked[0], pending_request
        return [[by_id[id]] for id in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note where the request's prefix is."""
        name = pending_request.metadata.internal_request_id
        self._choosing.pop(name, None)
        self._places[name] = replica_id
        self._index.add(self._route(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._forget(internal_request_id)

    def _forget(self, request: str) -> None:
        self._places.pop(request, None)
        self._choosing.pop(request, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the prefixes of replicas that have left."""
        super().update_replicas(replicas)
        self._keep()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._keep()

    def _keep(self) -> None:
        self._index.keep(self.curr_replicas)

    @staticmethod
    def _route(pending: PendingRequest | None) -> PrefixRoute:
        routes = (
            next((arg for arg in pending.args if isinstance(arg, PrefixRoute)), None) if pending is not None else None
        )
        return routes or PrefixRoute()
