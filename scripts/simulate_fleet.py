"""`scripts/simulate-fleet`: routers of a fleet compared on made traffic, in virtual time.

Traffic: conversations begin in bursts; each has one of some system prompts, a few of which are frequent, and goes on
after a pause, with all that was said before. A prompt is a list of blocks, as the prefix index sees it.

A replica has slots, a queue, and a KV cache of blocks, of which the least recently used go first. It computes one
prompt after another, without the blocks that it has, beside the streams. The times are those of `logitless bench`.

Ours is the index and the rule of `logitless.extras.ray` itself. Ray's is PrefixCacheAffinityRouter as its guide
describes it: with a balanced load the replica with the longest match, if that is a tenth of the prompt, else the one
that has seen least; otherwise the less busy one of two.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil

from logitless.extras.ray.config import Autoscaling
from logitless.extras.ray.prefixes import PrefixIndex, PrefixRoute
from logitless.training.reporting.plot import plot

BLOCK = 32  # tokens: 128 bytes of text
BALANCED = 10  # requests: Ray's imbalanced_threshold
MATCHED = 0.1  # Ray's match_rate_threshold
LIMIT = 2  # times its slots: requests that a replica takes (ModelConfig.limit); others wait in the router
LOOK_BACK = 30.0  # seconds over which Serve averages the requests at replicas


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a replica."""

    prefill: float = 326.0  # 1B Q8_0 on two cores (README)
    decode: tuple[tuple[int, float], ...] = ((1, 21.0), (4, 108.0), (8, 207.0), (16, 257.0))  # of all streams
    start: float = 10.0  # seconds until a new replica answers

    def step(self, n: int) -> float:
        """Seconds of a decode step of n streams."""
        below = max((pair for pair in self.decode if pair[0] <= n), default=self.decode[0])
        above = min((pair for pair in self.decode if pair[0] >= n), default=self.decode[-1])
        if above[0] == below[0]:
            return n / above[1]
        share = (n - below[0]) / (above[0] - below[0])
        return n / (below[1] + share * (above[1] - below[1]))


@dataclass(frozen=True)
class Traffic:
    """Conversations of a fleet."""

    rate: float = 0.04  # conversations that begin, per second and replica
    systems: int = 50  # system prompts of the fleet
    turns: float = 5.0  # of a conversation, in the mean
    pause: float = 20.0  # seconds between an answer and the next turn
    burst: float = 4.0  # times as many in a tenth of the time

    def conversations(self, seed: int, n_replicas: int, seconds: float) -> Iterator[tuple[float, Conversation]]:
        """(time, conversation) of all that begin within `seconds`: the same for every router."""
        rng = random.Random(seed)
        weights = [1 / (i + 1) for i in range(self.systems)]
        sizes = [max(4, round(rng.lognormvariate(3.2, 0.6))) for _ in range(self.systems)]
        calm = self.rate * n_replicas / (0.9 + 0.1 * self.burst)
        time, id = 0.0, count()
        while True:
            bursts = int(time / 30) % 10 == 0  # half a minute of five
            time += rng.expovariate(calm * (self.burst if bursts else 1))
            if time >= seconds:
                return
            system = rng.choices(range(self.systems), weights)[0]
            turns = 1 + min(20, int(rng.expovariate(1 / (self.turns - 1)))) if self.turns > 1 else 1
            blocks = [b"s%d/%d" % (system, i) for i in range(sizes[system])]
            yield time, Conversation(next(id), turns, blocks, random.Random(rng.random()))


@dataclass
class Conversation:
    """Conversation with its text so far."""

    id: int
    turns: int
    blocks: list[bytes]
    rng: random.Random

    def say(self, n_tokens: int) -> None:
        n = len(self.blocks)
        self.blocks += [b"c%d/%d" % (self.id, n + i) for i in range(ceil(n_tokens / BLOCK))]


@dataclass
class Request:
    """One turn of a conversation."""

    talk: Conversation
    route: PrefixRoute
    arrived: float
    n_answer: int


class Replica:
    """Replica with slots, a queue and a KV cache."""

    def __init__(self, id: int, n_slots: int, n_blocks: int) -> None:
        self.id, self.n_slots, self.n_blocks = id, n_slots, n_blocks
        self.queue: deque[Request] = deque()
        self.n_running = 0
        self.busy_until = 0.0  # with prompts
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.leaves = False

    @property
    def load(self) -> int:
        return self.n_running + len(self.queue)

    def cached(self, blocks: Sequence[bytes]) -> int:
        """Blocks of a prompt's beginning that it has; they count as used."""
        n = next((i for i, block in enumerate(blocks) if block not in self.cache), len(blocks))
        for block in reversed(blocks[:n]):
            self.cache.move_to_end(block)
        return n

    def remember(self, blocks: Sequence[bytes]) -> None:
        for block in reversed(blocks):  # the deepest goes first
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.n_blocks:
            self.cache.popitem(last=False)


class Router:
    """Choice of a replica."""

    def __init__(self, rng: random.Random, slack: float) -> None:
        self._rng, self._slack = rng, slack

    def pick(self, loads: Mapping[int, float], route: PrefixRoute) -> int:
        """One of the replicas that have room, by the requests at each."""
        raise NotImplementedError

    def keep(self, replicas: Mapping[int, Replica]) -> None:
        """These replicas are left."""


class RoundRobin(Router):
    _last = -1

    def pick(self, loads: Mapping[int, float], route: PrefixRoute) -> int:
        self._last = min((id for id in loads if id > self._last), default=min(loads))
        return self._last


class LeastQueue(Router):
    def pick(self, loads: Mapping[int, float], route: PrefixRoute) -> int:
        least = min(loads.values())
        return self._rng.choice([id for id, load in loads.items() if load == least])


class Ours(Router):
    def __init__(self, rng: random.Random, slack: float) -> None:
        super().__init__(rng, slack)
        self._index = PrefixIndex()

    def pick(self, loads: Mapping[int, float], route: PrefixRoute) -> int:
        best = self._index.ranked(loads, route, slack=self._slack)[0]
        self._index.add(route, best)
        return best

    def keep(self, replicas: Mapping[int, Replica]) -> None:
        self._index.keep(replicas)


class Rays(Router):
    def __init__(self, rng: random.Random, slack: float) -> None:
        super().__init__(rng, slack)
        self._index = PrefixIndex()
        self._seen: dict[int, int] = {}  # blocks by replica

    def pick(self, loads: Mapping[int, float], route: PrefixRoute) -> int:
        if max(loads.values()) - min(loads.values()) < BALANCED:
            levels = [self._index._homes.get(block) for block in route.blocks]
            n = next((i for i, homes in enumerate(levels) if not homes), len(levels))
            alike = [id for id in (levels[n - 1] if n else None) or () if id in loads]
            if alike and n >= MATCHED * len(levels):
                best = self._two(alike, loads)
            else:
                least = min(self._seen.get(id, 0) for id in loads)
                best = self._two([id for id in loads if self._seen.get(id, 0) == least], loads)
        else:
            best = self._two(list(loads), loads)
        self._index.add(route, best)
        self._seen[best] = self._seen.get(best, 0) + len(route.blocks)
        return best

    def _two(self, ids: list[int], loads: Mapping[int, float]) -> int:
        return min(self._rng.sample(ids, min(2, len(ids))), key=loads.__getitem__)

    def keep(self, replicas: Mapping[int, Replica]) -> None:
        self._index.keep(replicas)


ROUTERS: dict[str, type[Router]] = {
    "round robin": RoundRobin,
    "shortest queue": LeastQueue,
    "Ray's prefix router": Rays,
    "ours": Ours,
}


@dataclass
class Result:
    """Outcome of one run."""

    n_requests: int = 0
    n_prompt: int = 0  # tokens
    n_cached: int = 0
    n_reusable: int = 0  # tokens of prompts that some replica had computed
    n_generated: int = 0  # within the fleet's seconds, as replica_seconds
    replica_seconds: float = 0.0
    most_replicas: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token

    def told(self) -> dict[str, float]:
        first = sorted(self.first)
        return {
            "requests": self.n_requests,
            "cache_hit_rate": round(self.n_cached / max(1, self.n_reusable), 4),
            "cached_of_prompt": round(self.n_cached / max(1, self.n_prompt), 4),
            "first_token_p50_s": round(first[len(first) // 2], 3),
            "first_token_p99_s": round(first[int(len(first) * 0.99)], 3),
            "replica_s_per_1k_tokens": round(1000 * self.replica_seconds / max(1, self.n_generated), 2),
            "replicas_most": self.most_replicas,
        }


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Fleet to simulate. `scales`: the number of replicas follows the queue, as Serve does it."""

    replicas: int
    n_slots: int = 8
    n_blocks: int = 1024  # of a replica's KV cache
    speed: Speed = Speed()
    traffic: Traffic = Traffic()
    seconds: float = 600.0
    scales: Autoscaling | None = None
    seed: int = 0

    def run(self, kind: type[Router]) -> Result:
        """All requests that begin within `seconds`, to their ends."""
        return _Run(self, kind).result


class _Run:
    def __init__(self, fleet: Fleet, kind: type[Router]) -> None:
        self._fleet = fleet
        self._router = kind(random.Random(fleet.seed), float(fleet.n_slots))
        self.result = Result()
        self._ids, self._events_ids = count(), count()
        self._replicas: dict[int, Replica] = {}
        self._leaving: list[Replica] = []
        self._loads: dict[int, float] = {}  # of replicas with room
        self._pending: deque[Request] = deque()  # no replica has room
        self._computed: set[bytes] = set()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._n_starting = 0
        self._n_open, self._history, self._wanted_since = 0, deque[tuple[float, int]](), (0, 0.0)
        for _ in range(fleet.scales.min if fleet.scales else fleet.replicas):
            self._add(0.0)
        for time, talk in fleet.traffic.conversations(fleet.seed, fleet.replicas, fleet.seconds):
            self._at(time, lambda now, talk=talk: self._ask(now, talk))
        if fleet.scales is not None:
            self._at(1.0, self._scale)
        self._go()

    def _at(self, time: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._events_ids), call))

    def _go(self) -> None:
        before = 0.0
        while self._events:
            now, _, call = heapq.heappop(self._events)
            end = min(now, self._fleet.seconds)
            self.result.replica_seconds += max(0.0, end - before) * (len(self._replicas) + len(self._leaving))
            before = end
            call(now)

    def _add(self, now: float) -> None:
        replica = Replica(next(self._ids), self._fleet.n_slots, self._fleet.n_blocks)
        self._replicas[replica.id] = replica
        self._n_starting = max(0, self._n_starting - 1)
        self.result.most_replicas = max(self.result.most_replicas, len(self._replicas))
        self._note(now, replica)

    def _note(self, now: float, replica: Replica) -> None:
        """Keep the load of a replica, and send what waits where there is room."""
        self._loads.pop(replica.id, None)
        if replica.id in self._replicas and replica.load < LIMIT * replica.n_slots:
            self._loads[replica.id] = replica.load
        while self._pending and self._loads:
            self._send(now, self._pending.popleft())

    def _send(self, now: float, request: Request) -> None:
        if not self._loads:
            self._pending.append(request)
            return
        replica = self._replicas[self._router.pick(self._loads, request.route)]
        replica.queue.append(request)
        self._begin(now, replica)
        self._note(now, replica)

    def _ask(self, now: float, talk: Conversation) -> None:
        """The next turn of a conversation."""
        talk.say(max(8, round(talk.rng.lognormvariate(4.2, 0.8))))
        n_answer = max(8, round(talk.rng.lognormvariate(4.8, 0.6)))
        request = Request(talk, PrefixRoute(tuple(talk.blocks), str(talk.id)), now, n_answer)
        self._n_open += 1
        self._send(now, request)

    def _begin(self, now: float, replica: Replica) -> None:
        """Give free slots to requests that wait."""
        while replica.queue and replica.n_running < replica.n_slots:
            request = replica.queue.popleft()
            replica.n_running += 1
            blocks = request.route.blocks
            cached = min(replica.cached(blocks), len(blocks) - 1)
            replica.remember(blocks)
            known = next((i for i, block in enumerate(blocks) if block not in self._computed), len(blocks))
            self._computed.update(blocks)
            result = self.result
            result.n_prompt += len(blocks) * BLOCK
            result.n_cached += cached * BLOCK
            result.n_reusable += min(known, len(blocks) - 1) * BLOCK
            seconds = (len(blocks) - cached) * BLOCK / self._fleet.speed.prefill
            replica.busy_until = max(now, replica.busy_until) + seconds
            self._at(replica.busy_until, lambda now, r=request: self._first(now, replica, r))

    def _first(self, now: float, replica: Replica, request: Request) -> None:
        self.result.first.append(now - request.arrived)
        seconds = request.n_answer * self._fleet.speed.step(replica.n_running)
        self._at(now + seconds, lambda now: self._end(now, replica, request))

    def _end(self, now: float, replica: Replica, request: Request) -> None:
        talk, result = request.talk, self.result
        result.n_requests += 1
        result.n_generated += request.n_answer * (now <= self._fleet.seconds)
        talk.say(request.n_answer)
        replica.remember(talk.blocks[:-1])
        self._computed.update(talk.blocks[:-1])
        replica.n_running -= 1
        self._n_open -= 1
        self._begin(now, replica)
        self._note(now, replica)
        if replica.leaves and not replica.load:
            self._leaving.remove(replica)
        talk.turns -= 1
        if talk.turns > 0:
            self._at(now + talk.rng.expovariate(1 / self._fleet.traffic.pause), lambda now: self._ask(now, talk))

    def _scale(self, now: float) -> None:
        """Serve's rule: as many replicas as keep the target, once it has held for the delay."""
        scales = self._fleet.scales
        assert scales is not None
        self._history.append((now, self._n_open))
        while self._history[0][0] < now - LOOK_BACK:
            self._history.popleft()
        mean = sum(n for _, n in self._history) / len(self._history)
        wanted = min(scales.max, max(scales.min, ceil(mean / (scales.target or self._fleet.n_slots))))
        n = len(self._replicas) + self._n_starting
        more = (wanted > n) - (wanted < n)
        if more != self._wanted_since[0]:
            self._wanted_since = more, now
        delay = scales.upscale_delay if more > 0 else scales.downscale_delay
        if more and now - self._wanted_since[1] >= delay:
            for _ in range(wanted - n):
                self._n_starting += 1
                self._at(now + self._fleet.speed.start, self._add)
            for replica in sorted(self._replicas.values(), key=lambda r: r.load)[: max(0, n - wanted)]:
                del self._replicas[replica.id]
                self._loads.pop(replica.id, None)
                replica.leaves = True
                if replica.load:
                    self._leaving.append(replica)
            self._router.keep(self._replicas)
            self._wanted_since = 0, now
        if self._n_open or now < self._fleet.seconds:
            self._at(now + 1.0, self._scale)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/simulate-fleet", description=__doc__)
    parser.add_argument("--replicas", default="10,100,1000", help="numbers of replicas, separated by commas")
    parser.add_argument("--routers", default=",".join(ROUTERS), help="of " + ", ".join(ROUTERS))
    parser.add_argument("--seconds", type=float, default=600.0, help="of traffic")
    parser.add_argument("--rate", type=float, default=Traffic.rate, help="conversations per second and replica")
    parser.add_argument("--systems", type=int, default=Traffic.systems, help="system prompts of the fleet")
    parser.add_argument("--cache", type=int, default=Fleet.n_blocks * BLOCK, help="tokens of a replica's KV cache")
    parser.add_argument("--prefill", type=float, default=Speed.prefill, help="tokens per second, from bench")
    parser.add_argument("--decode", default="1:21,4:108,8:207,16:257", help="streams:tokens per second, from bench")
    parser.add_argument("--autoscale", metavar="MIN:MAX", help="replicas follow the queue")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="cache hits by the number of replicas: .svg or .png")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pairs = [pair.partition(":") for pair in options.decode.split(",")]
    speed = Speed(options.prefill, tuple((int(n), float(rate)) for n, _, rate in pairs))
    scales = None
    if options.autoscale:
        low, _, high = options.autoscale.partition(":")
        scales = Autoscaling(min=int(low), max=int(high))
    curves: dict[str, list[tuple[float, float]]] = {}
    for n in map(int, options.replicas.split(",")):
        for name in options.routers.split(","):
            fleet = Fleet(
                replicas=n,
                n_blocks=options.cache // BLOCK,
                speed=speed,
                traffic=Traffic(rate=options.rate, systems=options.systems),
                seconds=options.seconds,
                scales=scales,
                seed=options.seed,
            )
            told = fleet.run(ROUTERS[name]).told()
            curves.setdefault(name, []).append((len(str(n)) - 1, 100 * told["cache_hit_rate"]))
            print(json.dumps({"replicas": n, "router": name, **told}) if options.json else f"{n:6} {name:20} {told}")
    if options.plot:
        plot(options.plot, curves, "reusable prompt tokens found in the cache, %", "replicas, power of ten")


if __name__ == "__main__":
    main()
