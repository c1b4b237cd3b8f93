"""AsyncLLM: a model for asyncio, with many requests at once."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from logitless.engine.async_engine import AsyncEngine, LoadedModel
from logitless.engine.errors import InvalidRequest, Unavailable
from logitless.engine.finetuning.status import ENDED, RUNNING
from logitless.engine.requests import Event
from logitless.engine.sampling.params import SamplingParams as EngineParams
from logitless.engine.stream import Delivery
from logitless.errors import Error, RequestError, TrainingError, public_errors
from logitless.frontend.config import FrontendConfig
from logitless.frontend.parser import GenerationJob, RequestParser
from logitless.jobs import (
    BeamSearch,
    ChatResult,
    CompletionResult,
    Messages,
    Prompt,
    chat_job,
    completion_job,
    first_of,
    one_params,
    one_result,
    plain_prompt,
)
from logitless.outputs import BeamSearchOutput, ChatChunk, ChatCompletion, Chunk, Completion, Pooled, Ranking, Score
from logitless.params import BeamSearchParams, LoRARequest, SamplingParams

if TYPE_CHECKING:
    from typing import Unpack

    from logitless.engine.finetuning.rollout_queue import Queues
    from logitless.engine.loading.open_model import OpenModel
    from logitless.engine.records.store import Row, Store
    from logitless.engine.scheduler.scheduler import Scheduler
    from logitless.options import Options
    from logitless.training.graders.grade import Surroundings

F32 = npt.NDArray[np.float32]
Rows = Iterable[Mapping[str, Any] | str]


class AsyncLLM:
    """A model that answers many requests at once, from the tasks of one event loop.

    `model` is a GGUF file or a Hugging Face folder; without one the demo model runs. Options are
    the flags of `logitless serve` by name: `ctx_size`, `parallel`, `device`, `lora`, … The header is read and
    every option checked here; the weights are loaded by `start`, by `async with`, or by the first
    request. Closing a generator (`aclosing`), or cancelling its task, cancels its request.

    >>> import asyncio
    >>> from logitless import AsyncLLM, SamplingParams
    >>> async def main():
    ...     async with AsyncLLM() as llm:
    ...         async for chunk in llm.generate("JULIET:", SamplingParams(temperature=0, max_tokens=4)):
    ...             reason = chunk.finish_reason
    ...         return reason
    >>> asyncio.run(main())
    'length'

    Raises OptionError, ModelError and DeviceError. Not for use after a fork: make it in the child.
    """

    def __init__(
        self, model: str | Path | None = None, *, data_dir: str | Path | None = None, **options: Unpack[Options]
    ) -> None:
        """`data_dir`: the folder of fine-tuning jobs, which outlive the process (default: they do not)."""
        from logitless.engine.loading.drafting import model_kinds
        from logitless.engine.loading.open_model import open_model
        from logitless.options import find_model

        with public_errors():
            path, checked = find_model(model, dict(options))
            self.model: OpenModel = open_model(path, checked)
        self.service = AsyncEngine()
        self.config = FrontendConfig(
            model_path=str(path),
            n_parallel=checked.n_slots,
            defaults=EngineParams(**self.model.sampling),
            speculation=self.model.speculation,
            models_that_draft=model_kinds(checked),
            pooling="rank" if checked.rerank else checked.pooling or "",
        )
        self._stack = ExitStack()
        self._data_dir = data_dir
        self._names: Collection[str] | None = None  # models whose jobs of `data_dir` this one runs; None: all
        self._queues: Queues | None = None
        self._loading: asyncio.Future[LoadedModel] | None = None
        self._parser: RequestParser | None = None
        self._closed = False
        self._pid = os.getpid()

    # -- life

    @property
    def in_this_process(self) -> bool:
        """True if this process opened the model; a fork of it did not."""
        return os.getpid() == self._pid

    @property
    def alive(self) -> bool:
        """True unless the engine has ended: by `close`, or by a fault."""
        return not self._closed and self.service.accepting

    async def start(self) -> None:
        """Load the weights; returns when requests can be served."""
        await self._ready()

    async def close(self) -> None:
        """Cancel running requests and free the model's memory. Closing twice is no error."""
        if self._closed:
            return
        if self._loading is not None:
            try:
                self._follow_loop()
            except Unavailable:  # it has ended with its event loop
                self._loading = None
        self._closed = True
        if self._loading is not None:
            await asyncio.wait([self._loading])
            await self.service.stop()
            if self.service.served is not None and self.service.served.engine is not None:
                self.service.served.engine.close()
        self._stack.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- text

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Continue a text, or token ids, as chunks; the last one has the `finish_reason`."""
        served = await self._ready()
        params = await self._adapted(served, params, lora_request)
        with public_errors():
            job = one_result(completion_job(self._writes(served), prompt, params))
        result = CompletionResult(served.tokenizer)
        async with aclosing(self._events(job)) as events:
            async for _, event in events:
                for chunk in result.chunks(event):
                    yield chunk

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        **fields: Any,
    ) -> AsyncGenerator[ChatChunk, None]:
        """Answer a conversation as chunks of a message.

        `messages` have OpenAI's shape. `fields` are others of POST /v1/chat/completions: `tools`,
        `tool_choice`, `response_format`, `reasoning_effort`, `chat_template_kwargs`, ….
        `sampling_params`: vLLM's name of `params`."""
        served = await self._ready()
        params = await self._adapted(served, one_params(params, sampling_params), lora_request)
        with public_errors():
            job = one_result(chat_job(self._writes(served), messages, params, fields))
        result = ChatResult(job, served.tokenizer)
        async with aclosing(self._events(job)) as events:
            async for _, event in events:
                for chunk in result.chat_chunks(event):
                    yield chunk

    async def complete(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        on_result: Callable[[], None] = lambda: None,
        *,
        lora_request: Loras = None,
    ) -> list[Completion]:
        """Continue several texts in one batch; `params` and `lora_request`: for all of them, or one for each.

        `on_result` is called as each of them is done."""
        served = await self._ready()
        pairs = _paired(prompts, params)
        loras = _per_prompt("lora_request", lora_request, len(pairs))
        adapted = [await self._adapted(served, *pair) for pair in zip((one for _, one in pairs), loras, strict=True)]
        with public_errors():
            parser = self._writes(served)
            jobs = [completion_job(parser, prompt, one) for (prompt, _), one in zip(pairs, adapted, strict=True)]
        results = [CompletionResult(served.tokenizer) for job in jobs for _ in job.requests]
        if results:
            async with aclosing(self._events(*jobs, whole=True)) as events:
                async for index, event in events:
                    results[index].add(event)
                    if results[index].finished is not None:
                        on_result()
        completions = iter([result.completion() for result in results])
        return [first_of([next(completions) for _ in job.requests]) for job in jobs]

    async def beam_search(self, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest continuations of each text, by beam search as vLLM does it.

        Slow: each token of all beams is a batch of requests of one token, ranked on the host."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params: expected BeamSearchParams, not {type(params).__name__}")
        served = await self._ready()
        with public_errors():
            parser = self._writes(served)
            texts = [parser.tokens(plain_prompt(f"prompts[{i}]", p)) for i, p in enumerate(_listed("prompts", prompts))]
        ends = () if params.ignore_eos else served.tokenizer.eog_ids
        one = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * params.beam_width)
        searches = [BeamSearch(ids, params, ends) for ids in texts]
        for _ in range(params.max_tokens):
            beams = [list(beam.tokens) for search in searches for beam in search.beams]
            steps = iter(await self.complete(beams, one))
            for search in searches:
                search.extend([next(steps).logprobs[0].top for _ in search.beams])
        return [BeamSearchOutput(search.result(self.detokenize)) for search in searches]

    async def answer(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        **fields: Any,
    ) -> ChatCompletion:
        """Answer a conversation as a whole message; see `chat`."""
        served = await self._ready()
        params = await self._adapted(served, one_params(params, sampling_params), lora_request)
        with public_errors():
            job = chat_job(self._writes(served), messages, params, fields)
        results = [ChatResult(job, served.tokenizer) for _ in job.requests]
        async with aclosing(self._events(job, whole=True)) as events:
            async for index, event in events:
                results[index].add(event)
        return first_of([result.chat_completion() for result in results])

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of requests without any: llama-server's defaults, over them those of the model's file."""
        return SamplingParams(**self.model.sampling)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text, with the BOS and EOS that the model wants."""
        if not isinstance(text, str):
            raise RequestError(f"text: expected a text, not {type(text).__name__}")
        return self.model.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of token ids. RequestError: one is not in the vocabulary."""
        ids = plain_prompt("token_ids", _listed("token_ids", token_ids))
        n_vocab = self.model.tokenizer.n_vocab
        if wrong := [id for id in ids if not 0 <= int(id) < n_vocab]:
            raise RequestError(f"token_ids: {wrong[0]} is outside the vocabulary of {n_vocab}")
        return self.model.tokenizer.pieces([int(id) for id in ids]).decode("utf-8", "replace")

    # -- vectors and scores

    async def embed(self, texts: Sequence[Prompt], *, pooling: str | None = None, normalize: bool = True) -> F32:
        """Embeddings of texts, shape (n, n_embd); `normalize`: to length 1.

        `pooling`: "mean", "cls", "last" (default: as the options or the model say)."""
        pooled = await self.encode(texts, pooling=pooling, normalize=normalize)
        vectors = [one.data for one in pooled]
        return np.stack(vectors) if vectors else np.zeros((0, self.model.hparams.n_embd), np.float32)

    async def encode(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling_task: str = "embed",
        pooling: str | None = None,
        normalize: bool = True,
    ) -> list[Pooled]:
        """Embeddings of texts as vLLM's `encode` gives them; see `embed`."""
        from logitless.frontend.texts.embeddings import normalized

        if pooling_task != "embed":
            raise RequestError(f"pooling_task: {pooling_task!r} is not there; 'embed' is, and rerank() ranks documents")
        served = await self._ready()
        embedder = served.embedder
        if embedder is None:
            raise RequestError("this model makes no vectors of texts")
        kind = pooling or self.config.pooling or embedder.for_texts
        if kind not in ("mean", "cls", "last"):
            raise RequestError(f"pooling: {kind!r} gives no embeddings; mean, cls and last do")
        with public_errors():
            parser = self._requests(served)
            listed = enumerate(_listed("texts", prompts))
            ids = [parser.tokens(plain_prompt(f"texts[{i}]", text)) for i, text in listed]
            for i, one in enumerate(ids):
                if len(one) > embedder.n_ctx:
                    raise RequestError(f"texts[{i}]: {len(one)} tokens exceed the context of {embedder.n_ctx}")
        vectors = await self._vectors(served, ids, kind)
        norm = 2 if normalize else -1
        return [Pooled(normalized(v, norm), tuple(of)) for v, of in zip(vectors, ids, strict=True)]

    async def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranking]:
        """The documents by relevance to the query, the best first, for models with a ranking head."""
        from logitless.frontend.texts.embeddings import parse_rerank

        served = await self._ready()
        _listed("documents", documents)
        if served.embedder is None or not served.embedder.ranks:
            raise RequestError("this model has no head that ranks documents", 501)
        body = {"query": query, "documents": list(documents), **({"top_n": top_n} if top_n is not None else {})}
        with public_errors():
            job = parse_rerank(body, self._requests(served), served.embedder)
        scores = [float(v[0]) for v in await self._vectors(served, job.pairs, "rank")]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: job.top_n]
        return [Ranking(i, scores[i], documents[i]) for i in order]

    async def score(
        self, texts: Sequence[str | Sequence[int] | Mapping[str, Any]], *, gradient_norm: bool = False
    ) -> list[Score]:
        """Log-probabilities and loss of given texts, token ids or training rows.

        `gradient_norm`: the norm of the loss's gradient by all weights, too."""
        from logitless.frontend.texts.score import parse_examples

        served = await self._ready()
        listed = enumerate(_listed("texts", texts))
        items = [dict(t) if isinstance(t, Mapping) else plain_prompt(f"texts[{i}]", t) for i, t in listed]
        if not items:
            return []
        assert served.engine is not None
        n_ctx, scores = served.engine.hparams.n_ctx_whole, []
        with public_errors():
            parser = self._writes(served)
            served.info.check_trainable()
            examples = parse_examples(items, parser, n_ctx)

            def ask(i: int, scheduler: Scheduler) -> Any:
                from logitless.training.score import score

                assert served.engine is not None
                return score(served.engine.tuned(scheduler.resolve_lora(None)), examples[i], gradient=gradient_norm)

            for i, example in enumerate(examples):
                s = await self.service.ask(partial(ask, i))
                ids = tuple(example.tokens.tolist())
                scores.append(Score(ids, s.log_probs, s.loss, s.n_counted, s.gradient_norm))
        return scores

    # -- fine-tuning

    async def finetune(
        self,
        data: str | Path | Rows,
        *,
        method: str = "supervised",
        grader: Mapping[str, Any] | None = None,
        validation: str | Path | Rows | None = None,
        suffix: str = "",
        seed: int = 0,
        integrations: Sequence[Mapping[str, Any]] | None = None,
        **hyperparameters: Any,
    ) -> AsyncFinetuneJob:
        """Begin to fine-tune the model on its own devices, while it goes on answering requests.

        `data`: a file of rows (.jsonl, .json, .csv, .parquet), or rows: `{"messages": […]}`,
        `{"prompt": …, "completion": …}`, `{"text": …}` or a text. `method`: "supervised", or from
        preferences "dpo", "orpo", "simpo" (rows with `prompt`, `chosen`, `rejected`) or "kto"
        (`prompt`, `completion`, `label`), with `beta` among the hyperparameters; or "reinforcement",
        from rewards that a `grader` gives to answers (rows with `messages` or `prompt`, and fields
        for the grader; docs/training.md has its hyperparameters). The others' are `n_epochs`,
        `batch_size`, `context_length`, `learning_rate_multiplier`, `warmup_steps` ("auto" or not
        given: chosen from the data), `validation_split`, `early_stopping_patience`, those of
        the adapter (`lora_r`, `lora_alpha`, `lora_target_modules`, `lora_rslora`, `lora_dora`,
        `lora_init`, `lora_plus_ratio`), `neftune_noise_alpha`, those of the optimizer
        (`optimizer`, `weight_decay`, `adam_beta1`, `adam_beta2`, `max_grad_norm`),
        `chat_template`, and `full=True` for all weights
        instead of an adapter. `integrations`: trackers that get the metrics, as OpenAI's:
        `[{"type": "wandb", "wandb": {"project": "…"}}]`, mlflow, tensorboard. Requests use the result
        by `SamplingParams(model=job.model)`."""
        from logitless.frontend.fine_tuning import JobModel, new_job
        from logitless.training.reporting.trackers import KINDS

        served = await self._ready()
        tuning = served.tuning
        if tuning is None:
            raise TrainingError("this model cannot be fine-tuned")
        with public_errors():
            served.info.check_trainable()
            files = {"training_file": await asyncio.to_thread(self._keep, tuning, data, "training.jsonl")}
            if validation is not None:
                files["validation_file"] = await asyncio.to_thread(self._keep, tuning, validation, "validation.jsonl")
            body = {
                **files,
                "model": tuning.base,
                "suffix": suffix,
                "seed": seed,
                "integrations": list(integrations or ()),
                "method": {"type": method, **({method: {"grader": dict(grader)}} if grader is not None else {})},
                "hyperparameters": hyperparameters,
            }
            n_ctx = self.model.hparams.n_ctx_whole
            around, weights = self._around(), tuning.weights
            row = new_job(
                body,
                tuning.store,
                JobModel(tuning.base, {tuning.base}, n_ctx, weights),
                around=around,
                trackers=KINDS,
            )
        tuning.store.put("jobs", row)
        tuning.created()
        return AsyncFinetuneJob(self, row["id"])

    def share_jobs(self, name: str, queues: Queues | None = None) -> None:
        """Share the jobs of `data_dir` with other processes, before `start`: this model is `name` there, one
        of the processes runs a job, and `follow_jobs` takes up its model in the others. With `queues` all of
        them sample the answers of reinforcement."""
        self.config = replace(self.config, alias=name)
        self._names, self._queues = {name}, queues

    async def follow_jobs(self) -> None:
        """Take up the models and jobs of the processes that share `data_dir`."""
        tuning = (await self._ready()).tuning
        if tuning is not None:
            with public_errors():
                await self.service.ask(lambda _: tuning.follow(), wakes=False)

    async def stats(self) -> dict[str, float]:
        """Counters and gauges of the scheduler: tokens, slots, KV blocks, preemptions, drafts."""
        await self._ready()

        def counters(scheduler: Scheduler) -> dict[str, float]:
            scheduler.count()
            return {name: n for name, n in asdict(scheduler.stats).items() if isinstance(n, int | float)}

        with public_errors():
            return await self.service.ask(counters, wakes=False)

    # -- within

    async def _ready(self) -> LoadedModel:
        if self._closed:
            raise Error("this model is closed")
        if not self.in_this_process:
            raise Error("this model belongs to the process that forked this one: open it again here")
        if self._loading is None:
            self.service.start(self._load)
            self._loading = asyncio.ensure_future(self.service.loaded())
        with public_errors():
            self._follow_loop()
            return await asyncio.shield(self._loading)

    def _follow_loop(self) -> None:
        """Take the model to the running event loop, if the one before is closed."""
        assert self._loading is not None
        before = self._loading.get_loop()
        if before is asyncio.get_running_loop():
            return
        if not before.is_closed():
            raise Error("this model belongs to the event loop that uses it: open another, or use LLM")
        self.service.move()
        self._loading = asyncio.ensure_future(self.service.loaded())

    async def _adapted(
        self, served: LoadedModel, params: SamplingParams | None, lora: LoRARequest | None
    ) -> SamplingParams | None:
        """The parameters with the adapter of a LoRARequest, whose file is read for its first request."""
        if lora is None:
            return params
        from logitless.models.adapters.lora import read_adapter

        if not isinstance(lora, LoRARequest):
            raise RequestError(f"lora_request: expected LoRARequest, not {type(lora).__name__}")
        params, path, adapters = one_params(params) or SamplingParams(), str(lora.lora_path), served.adapters
        if params.adapters is not None:
            raise RequestError("lora_request and SamplingParams.adapters are the same: give one of them")
        if adapters is None or served.engine is None:
            raise RequestError("lora_request: this model takes no adapters")
        gguf, registry = served.engine.gguf, adapters
        if all(entry.path != path for entry in adapters.entries):
            with public_errors():
                adapter = await asyncio.to_thread(read_adapter, path, gguf, self.model.hparams)
                await self.service.ask(lambda _: registry.add_once(path, lambda: adapter), wakes=False)
        return structs.replace(params, adapters={path: 1.0})

    def _load(self) -> LoadedModel:
        """On the engine's thread."""
        if not self.model.hparams.causal:
            return self.model.load()
        folder = self._data_dir or self._stack.enter_context(tempfile.TemporaryDirectory(prefix="logitless-"))
        from logitless.engine.records.store import Store

        store = Store(folder)
        self._stack.callback(store.close)
        served = self.model.load(store, name=self.config.model, names=self._names, around=self._around)
        if self._queues is not None and served.tuning is not None:
            served.tuning.share_rollouts(self._queues)
        return served

    def _around(self) -> Surroundings:
        from logitless.frontend.graders import surroundings

        return surroundings(self.service, self.config)

    def _requests(self, served: LoadedModel) -> RequestParser:
        if self._parser is None:
            self._parser = RequestParser.of(served, self.config)
        return self._parser

    def _writes(self, served: LoadedModel) -> RequestParser:
        """Parser of requests that generate. InvalidRequest: the model does not generate."""
        if not served.info.generates:
            raise InvalidRequest("this model makes vectors of texts (embed), it does not write")
        return self._requests(served)

    async def _events(self, *jobs: GenerationJob, whole: bool = False) -> AsyncGenerator[tuple[int, Event], None]:
        """(index of the request, event) of all requests. `whole`: see Delivery."""
        requests = [request for job in jobs for request in job.requests]
        with public_errors():
            stream = await self.service.submit(requests, delivery=Delivery(whole))
        async with stream:
            async for index, event in stream:
                yield index, event

    async def _vectors(self, served: LoadedModel, texts: Sequence[Sequence[int]], pooling: str) -> list[F32]:
        assert served.embedder is not None

        def embed(group: Sequence[Sequence[int]], _: Scheduler) -> list[F32]:
            return served.embed(group, pooling) or []

        vectors: dict[int, F32] = {}
        with public_errors():
            for group in served.embedder.groups(texts):
                computed = await self.service.ask(partial(embed, [texts[i] for i in group]))
                vectors |= dict(zip(group, computed, strict=True))
        return [vectors[i] for i in range(len(texts))]

    def _keep(self, tuning: Any, data: str | Path | Rows, name: str) -> str:
        """The id of the data as a file of the store; its rows are checked first."""
        with tuning.store.incoming() as part:
            if isinstance(data, str | Path):
                name = Path(data).name
                part.write_bytes(Path(data).read_bytes())
            else:
                from logitless.training.data.arrangement import rows_in

                lines = (json.dumps(dict(row)) for row in rows_in(data))
                part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            tuning.check(part, name)
            id: str = tuning.store.keep_file(part, name, "fine-tune")["id"]
            return id


Params = SamplingParams | Sequence[SamplingParams | None] | None
Loras = LoRARequest | Sequence[LoRARequest | None] | None


def _listed(label: str, values: Any) -> Sequence[Any]:
    """Several texts. RequestError with the label for a single one, or another type."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise RequestError(f"{label}: expected a list, not {type(values).__name__}")
    return list(values)


def _paired(prompts: Sequence[Prompt], params: Params) -> list[tuple[Prompt, SamplingParams | None]]:
    prompts = [plain_prompt(f"prompts[{i}]", prompt) for i, prompt in enumerate(_listed("prompts", prompts))]
    return list(zip(prompts, map(one_params, _per_prompt("params", params, len(prompts))), strict=True))


def _per_prompt(label: str, values: Any, n: int) -> Sequence[Any]:
    """One value for each of n prompts. RequestError: there are more or fewer."""
    if not isinstance(values, list | tuple):
        return [values] * n
    if len(values) != n:
        raise RequestError(f"{label}: {len(values)} of them for {n} prompts")
    return values


class JobHandle:
    """A fine-tuning job that runs beside requests: its state, and its end from any thread."""

    def __init__(self, llm: AsyncLLM, id: str) -> None:
        self._llm, self.id = llm, id

    @property
    def row(self) -> Row:
        """The job as OpenAI's API shows it."""
        row = self._store.get("jobs", self.id)
        assert row is not None
        return row

    @property
    def status(self) -> str:
        """One of validating_files, queued, running, paused, succeeded, failed, cancelled."""
        return str(self.row["status"])

    @property
    def model(self) -> str | None:
        """The result's name for SamplingParams(model=…), once there is one."""
        name = self.row["fine_tuned_model"]
        return None if name is None else str(name)

    def cancel(self) -> None:
        """End the job; one that has ended stays as it is."""
        self._set((*RUNNING, "paused"), "cancelled")

    def pause(self) -> None:
        """Stop the job after its current step; `resume` goes on."""
        self._set(RUNNING, "paused")

    def resume(self) -> None:
        """Go on with a paused job."""
        self._set(("paused",), "queued")

    def _set(self, allowed: tuple[str, ...], status: str) -> None:
        served = self._llm.service.served
        assert served is not None
        assert served.tuning is not None
        served.tuning.set_status(self.id, allowed, status)

    @property
    def _store(self) -> Store:
        served = self._llm.service.served
        if served is None or served.tuning is None:
            raise Error("this model is closed")
        return served.tuning.store


class AsyncFinetuneJob(JobHandle):
    """A fine-tuning job that runs beside requests."""

    async def events(self) -> AsyncGenerator[Row, None]:
        """Messages and metrics as they come, until the job ends."""
        changed, after = asyncio.Event(), 0
        self._llm.service.listeners.add(changed)
        try:
            while True:
                changed.clear()
                ended = self.status in ENDED
                for number, event in self._store.events(self.id, after):
                    after = number
                    yield event
                if ended:
                    return
                await changed.wait()
        finally:
            self._llm.service.listeners.discard(changed)

    async def wait(self) -> str:
        """The result's name. TrainingError: the job has failed, or was cancelled."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        row = self.row
        if row["status"] != "succeeded":
            reason = (row["error"] or {}).get("message") or f"the job was {row['status']}"
            raise TrainingError(reason)
        return str(row["fine_tuned_model"])
