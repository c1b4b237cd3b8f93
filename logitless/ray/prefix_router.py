"""PrefixRouter: picks the replica with the fewest blocks of a prompt to compute and the fewest requests."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from logitless.ray.prefixes import PrefixIndex, Route


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Request router of Ray Serve, in each process that has a handle of the model's deployment.

    A request there counts as a few blocks to compute, and a prefix does not count at a replica with more
    requests than the least busy one plus `slack`, so that a prefix that everybody shares is computed at
    further replicas as well.
    """

    def initialize_state(self, slack: float = 4.0) -> None:
        """Serve calls it with the deployment's `request_router_kwargs`."""
        self._slack = slack
        self._index = PrefixIndex()
        self._running: dict[ReplicaID, int] = {}  # requests of this process at each replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates, the best first."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        route = self._route(pending_request)
        loads = {id: self._load(id) for id in by_id}
        return [[by_id[id]] for id in self._index.ranked(loads, route, slack=self._slack)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note where the request's prefix is."""
        self._running[replica_id] = self._running.get(replica_id, 0) + 1
        self._index.add(self._route(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._running[replica_id] = max(0, self._running.get(replica_id, 0) - 1)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the prefixes of replicas that have left."""
        super().update_replicas(replicas)
        self._keep()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._keep()

    def _keep(self) -> None:
        self._index.keep(self.curr_replicas)
        self._running = {id: n for id, n in self._running.items() if id in self.curr_replicas}

    def _load(self, id: ReplicaID) -> float:
        """Requests at a replica: those of this process, or of all as far as the replica told lately."""
        return max(self._running.get(id, 0), self.replica_queue_len_cache.get(id) or 0)

    @staticmethod
    def _route(pending: PendingRequest | None) -> Route:
        found = next((arg for arg in pending.args if isinstance(arg, Route)), None) if pending is not None else None
        return found or Route()
