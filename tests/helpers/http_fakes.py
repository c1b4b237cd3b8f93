"""HTTP test doubles: a byte tokenizer, a template, and a scheduler that answers from the prompt.

A prompt that contains "say:" is answered with the text behind it, then the end token. Any other is
answered with the alphabet.
"""

from __future__ import annotations

import asyncio
import os
import threading
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from string import ascii_lowercase
from typing import Any, ClassVar, TypeVar

import aiohttp
from msgspec import structs
from openai import AsyncOpenAI

from logitless.engine.async_engine import AsyncEngine, LoadedModel, ModelInfo
from logitless.engine.errors import ExceedsContext
from logitless.engine.requests import CompletionRequest, Event, Finished, Lora, Progress, Timings, Token, TokenProb
from logitless.engine.sequence import Slot
from logitless.engine.stats import SchedulerStats
from logitless.models.adapters.stacked_lora import BASE, AdapterChoice
from logitless.models.chat.errors import ChatTemplateError
from logitless.models.chat.template import ChatTemplate
from logitless.models.chat.tool_calls.families import GENERIC
from logitless.server.app import make_app
from logitless.server.bodies.room import BODIES, Bodies
from logitless.server.config import ServerConfig
from tests.helpers.asgi_hosts import hosted

T = TypeVar("T")
HTTP_HOST = os.environ.get("LOGITLESS_TEST_HTTP_HOST", "aiohttp")  # for the tests of servers that name none
N_CTX = 512
BOS, EOS, HELLO = 256, 257, 258


class FakeTokenizer:
    """Tokenizer of bytes, <s>, </s>, and one longer token."""

    n_vocab, bos_id, eos_id, add_bos, add_space_prefix = 259, BOS, EOS, True, False
    eog_ids = frozenset({EOS})
    suppressed_ids: tuple[int, ...] = ()
    fim_pre_id = fim_suf_id = fim_mid_id = fim_rep_id = fim_sep_id = None
    special: ClassVar = {BOS: b"<s>", EOS: b"</s>"}

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        ids = [BOS] if add_special and self.bos_id is not None else []
        raw = text.encode("utf-8", "replace")
        while raw:
            for id, piece in (*(self.special.items() if parse_special else ()), (HELLO, b"hello")):
                if raw.startswith(piece):
                    ids.append(id)
                    raw = raw[len(piece) :]
                    break
            else:
                ids.append(raw[0])
                raw = raw[1:]
        return ids

    def encode_parts(self, text: str, **how: bool) -> Iterable[list[int]]:
        return [self.encode(text, **how)]

    def piece(self, id: int, *, special: bool = True) -> bytes:
        if id in self.special:
            return self.special[id] if special else b""
        return b"hello" if id == HELLO else bytes([id])

    def pieces(self, ids: Iterable[int], *, special: bool = True) -> bytes:
        return b"".join(self.piece(id, special=special) for id in ids)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        return self.pieces(ids, special=special)


class FakeTemplate:
    """Template that writes <role>content</role> for every message."""

    source = "{{ fake }}"
    caps: ClassVar = {"supports_tools": False}
    calls, reasoning, between_parts = GENERIC, None, "\n"
    is_sandboxed = False

    continuation, turn_end = ChatTemplate.continuation, ChatTemplate.turn_end

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        if any(message["role"] == "villain" for message in messages):
            raise ChatTemplateError("villains may not speak")
        text = "".join(f"[{m['role']}]{m['content']}[/]" for m in messages)
        return "<s>" + "".join(map(str, kwargs.values())) + text + ("[assistant]" if add_generation_prompt else "")


class FakeAdapters:
    """Adapters with one finetuned model."""

    NAME = "ft:fake:me:1"
    entries: ClassVar = ()

    def find(self, name: str) -> int | None:
        return 0 if name == self.NAME else None


@dataclass(eq=False)
class FakeSequence:
    """One generation."""

    request: CompletionRequest
    id: int
    slot: Slot
    script: list[int]
    raw: bytes = b""
    n_sent: int = 0  # characters
    n_generated: int = 0
    n_cached: int = 0
    n_lost: int = 0
    started: bool = False
    done: bool = False
    has_new_line: bool = False
    drafts: None = None
    reasoning: None = None
    is_held: bool = False

    def hold(self, *, is_held: bool) -> None:
        self.is_held = is_held and self.n_generated > 0

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def n_computed(self) -> int:
        return self.n_prompt + self.n_generated if self.started else 0

    @property
    def n_remain(self) -> int:
        return max(-1, self.request.n_predict - self.n_generated)


@dataclass
class FakeScheduler:
    """Scheduler that makes one token per sequence and step. With a gate, each step waits for the
    test.
    """

    n_parallel: int = 4
    gate: threading.Semaphore | None = None
    running: list[FakeSequence] = field(default_factory=list)
    cancelled: list[FakeSequence] = field(default_factory=list)
    n_cancelled: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    n_begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))  # steps, with a gate
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    requests: list[CompletionRequest] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    numbers: Any = field(default_factory=count)
    n_ctx: int = N_CTX

    def __post_init__(self) -> None:
        self.slots = [Slot(i, self.n_ctx) for i in range(self.n_parallel)]
        self.stats = SchedulerStats()

    @property
    def idle(self) -> bool:
        return not self.running

    def resolve_lora(self, lora: Lora | None) -> AdapterChoice:
        return BASE

    def prepare_ahead(self, wanted: Callable[[], bool]) -> None:
        """No-op: there is no KV cache."""

    def count(self) -> None:
        """No-op: the gauges are always current."""

    def submit(self, request: CompletionRequest, client: str = "") -> FakeSequence:
        self.clients.append(client)
        text = self.tokenizer.pieces(request.prompt)
        if len(request.prompt) > self.n_ctx:
            raise ExceedsContext(
                f"the request exceeds the available context size ({self.n_ctx} tokens)",
                n_prompt_tokens=len(request.prompt),
                n_ctx=self.n_ctx,
            )
        if b"submit-boom" in text:
            raise RuntimeError("submit broke\nin two lines")
        _, said, answer = text.partition(b"say:")
        script = [*self.tokenizer.encode(answer.split(b"[/]")[0].decode(), add_special=False), EOS] if said else []
        number = next(self.numbers)
        slot = self.slots[number % self.n_parallel]
        sequence = FakeSequence(request, number, slot, script)
        slot.sequence = sequence  # type: ignore[assignment]
        self.requests.append(request)
        self.running.append(sequence)
        return sequence

    def cancel(self, seq: FakeSequence) -> None:
        if seq in self.running:
            self.running.remove(seq)
            seq.done = True
            self.cancelled.append(seq)
            self.n_cancelled.release()

    def step(self) -> list[tuple[FakeSequence, Event]]:
        if self.gate is not None:
            self.n_begun.release()
            self.gate.acquire()
        if any(b"step-boom" in self.tokenizer.pieces(s.request.prompt) for s in self.running):
            raise RuntimeError("the device is on fire\nTraceback (most recent call last)")
        return [(s, event) for s in list(self.running) for event in self._advance(s)]

    def _advance(self, s: FakeSequence) -> list[Event]:
        request, n_prompt = s.request, len(s.request.prompt)
        events: list[Event] = []
        if not s.started:
            s.started = True
            if request.return_progress:
                events.append(Progress(n_prompt, 0, n_prompt, 1.5, s.slot.id))
        if s.n_generated == request.n_predict:
            return [*events, self._finish(s, "limit")]
        id = s.script[s.n_generated] if s.script else ord(ascii_lowercase[s.n_generated % 26])
        s.n_generated += 1
        self.stats.tokens_predicted += 1
        self.stats.bytes_read += 4
        if id == EOS:
            text = self.tokenizer.piece(id).decode() if request.special else ""
            last = Token(id, text, self._prob(request, id), prompt_probs=self._of_prompt(s))
            return [*events, last, self._finish(s, "eos")]
        s.raw += self.tokenizer.piece(id, special=request.special)
        text = getincrementaldecoder("utf-8")("replace").decode(s.raw)
        for stop in request.stop:
            where = text.find(stop)
            if where >= 0:
                return [*events, Token(id, "", self._prob(request, id)), self._finish(s, "word", stop, text[:where])]
        is_held = max((n for stop in request.stop for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        fresh, s.n_sent = text[s.n_sent : len(text) - is_held], len(text) - is_held
        timings = Timings(0, n_prompt, 2.0, s.n_generated, 1.0)
        events.append(Token(id, fresh, self._prob(request, id), timings, s.slot.id, self._of_prompt(s)))
        if s.n_generated == request.n_predict or n_prompt + s.n_generated >= self.n_ctx:
            events.append(self._finish(s, "limit", text=text))
        return events

    def _finish(self, s: FakeSequence, stop_type: str, word: str = "", text: str = "") -> Finished:
        self.running.remove(s)
        s.done = True
        n_prompt = len(s.request.prompt)
        return Finished(
            stop_type,
            word,
            text[s.n_sent :],
            n_prompt=n_prompt,
            n_predicted=s.n_generated,
            n_in_cache=n_prompt + s.n_generated,
            id_slot=s.slot.id,
            seed=42,
            timings=Timings(0, n_prompt, 2.0, s.n_generated, 4.0),
            prompt_probs=self._of_prompt(s, always=True),
        )

    def _of_prompt(self, s: FakeSequence, always: bool = False) -> tuple[TokenProb | None, ...]:
        k = s.request.prompt_logprobs
        if k is None or not (always or s.n_generated == 1):
            return ()
        return (None, *(self._top(id, k) for id in s.request.prompt[1:]))

    def _prob(self, request: CompletionRequest, id: int) -> TokenProb | None:
        if not request.sampling.n_probs:
            return None
        prob = self._top(id, request.sampling.n_probs)
        if request.sampling.post_sampling_probs:
            return structs.replace(prob, value=0.5, top=tuple((i, 0.5) for i, _ in prob.top))
        return prob

    def _top(self, id: int, n: int) -> TokenProb:
        top = [(id, -0.5 - id / 1000), *((i, -float("inf")) for i in range(200, 220))]
        return TokenProb(id, -0.5 - id / 1000, tuple(top[:n]))


@dataclass
class Running:
    """A server on a real port, its scheduler, and clients."""

    url: str
    scheduler: Any  # a FakeScheduler unless given
    service: AsyncEngine
    http: aiohttp.ClientSession
    bodies: Bodies
    key: str = "none"
    routes: tuple[tuple[str, str], ...] = ()  # (method, path)

    @cached_property
    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **kwargs) as reply:
            return reply.status, await reply.json()

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        kwargs = kwargs if "data" in kwargs else {"json": body, **kwargs}
        async with self.http.post(self.url + path, **kwargs) as reply:
            return reply.status, await reply.json()


async def while_stepping(gate: threading.Semaphore, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`, while steps are released one by one."""
    task = asyncio.create_task(work)
    while not task.done():
        gate.release()
        await asyncio.wait([task], timeout=0.01)
    return task.result()


@asynccontextmanager
async def running(
    config: ServerConfig | None = None,
    scheduler: Any = None,
    template: Any = None,
    tokenizer: Any = None,
    embedder: Any = None,
    tuning: Any = None,
    sleep: Any = None,
    adapters: Any = None,
    media: Any = None,
    http_host: str = "",
    **settings: Any,
) -> AsyncIterator[Running]:
    """Start a server; stop it at the end. `http_host`: one of HOSTS, which are aiohttp and ASGI's."""
    config = replace(config or ServerConfig(model_path="fake.gguf"), **settings)
    scheduler = scheduler or FakeScheduler(config.n_parallel)
    service = AsyncEngine()
    n_ctx = getattr(scheduler, "n_ctx", N_CTX)
    info = ModelInfo(n_ctx=n_ctx, n_ctx_train=1024, n_vocab=259, n_embd=8, n_params=1000, nbytes=4000, ftype="F32")
    tokenizer, template = tokenizer or FakeTokenizer(), template or FakeTemplate()
    served = LoadedModel(
        scheduler, tokenizer, template, info, adapters, tuning=tuning, embedder=embedder, sleep=sleep, media=media
    )
    service.start(lambda: served)
    await service.loaded()
    app = make_app(service, config)
    key = config.api_keys[0] if config.api_keys else "none"
    try:
        async with hosted(app, http_host or HTTP_HOST) as url, aiohttp.ClientSession() as http:
            routes = [(r.method, r.resource.canonical) for r in app.router.routes() if r.resource]
            server = Running(url, scheduler, service, http, app[BODIES], key, tuple(routes))
            yield server
            if "openai" in server.__dict__:
                await server.openai.close()
    finally:
        if isinstance(scheduler, FakeScheduler) and scheduler.gate is not None:
            scheduler.gate.release(1000)
        await service.stop(2.0)
