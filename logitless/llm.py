"""LLM: a model for ordinary code, from any thread."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from logitless.async_llm import AsyncFinetuneJob, AsyncLLM, JobHandle, Loras, Params, Rows
from logitless.cli.progress import ProgressBar, compile_progress
from logitless.errors import Error, RequestError
from logitless.jobs import Messages, Prompt
from logitless.outputs import BeamSearchOutput, ChatChunk, ChatCompletion, Chunk, Completion, Pooled, Ranking, Score
from logitless.params import BeamSearchParams, LoRARequest, SamplingParams

if TYPE_CHECKING:
    from typing import Unpack

    from logitless.engine.records.store import Row
    from logitless.options import Options

T = TypeVar("T")
F32 = npt.NDArray[np.float32]


class LLM:
    """A model that generates, chats, embeds, ranks, scores and learns, from any thread.

    `model` is a GGUF file or a Hugging Face folder; without one the demo model runs. Options are
    the flags of `logitless serve` by name: `ctx_size`, `parallel`, `device`, `lora`, …

    >>> from logitless import LLM, SamplingParams
    >>> llm = LLM()
    >>> greedy = SamplingParams(temperature=0, max_tokens=6)
    >>> one = llm.generate("ROMEO:", greedy)
    >>> both = llm.generate(["ROMEO:", "JULIET:"], greedy)  # a batch: the same bits, less time
    >>> both[0].text == one.text
    True
    >>> "".join(chunk.text for chunk in llm.stream("ROMEO:", greedy)) == one.text
    True
    >>> llm.chat([{"role": "user", "content": "Good night!"}], greedy).message.role
    'assistant'
    >>> llm.detokenize(llm.tokenize("Good night!", add_special=False))
    'Good night!'
    >>> llm.close()

    Any thread may call, several at once, also inside a running event loop (Jupyter). The engine
    has a thread of its own; signals, logging, environment and working directory of the process
    stay as they are. `close`, or the end of the process, ends it. After `os.fork` the child cannot
    use the model of its parent, and gets an Error: open it in the child, or use "spawn".

    Raises OptionError, ModelError and DeviceError, each of one line."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        data_dir: str | Path | None = None,
        progress: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Open the model and load its weights.

        `data_dir`: the folder of fine-tuning jobs, which outlive the process (default: they do
        not). `progress`: show bars of compiled kernels and batches (default: on a terminal)."""
        self._progress = sys.stderr.isatty() if progress is None else progress
        self._llm = AsyncLLM(model, data_dir=data_dir, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="logitless", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._llm, self._loop, self._thread)  # also at exit
        try:
            with compile_progress() if self._progress else nullcontext():
                self._run(self._llm.start())
        except BaseException:
            self.close()
            raise

    @property
    def async_llm(self) -> AsyncLLM:
        """The model below; its coroutines are for its own event loop only."""
        return self._llm

    def close(self) -> None:
        """Cancel running requests and free the model's memory. Closing twice is no error."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- text

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompts: str | Mapping[str, Any],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        lora_request: Loras = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        lora_request: Loras = None,
    ) -> Completion | list[Completion]:
        """Continue a text, or several in one batch. A prompt is a text, or a list of token ids.

        `params`: for all prompts, or a list with one for each. Results are in the prompts' order,
        and the same whatever shares the batch. vLLM's `{"prompt": …}`, `{"prompt_token_ids": …}` and
        `sampling_params` are taken, too, and `lora_request`: one for all prompts, or a list."""
        params = sampling_params if params is None else params
        if isinstance(prompts, str | Mapping):
            (completion,) = self._run(self._llm.complete([prompts], params, lora_request=lora_request))
            return completion
        if not isinstance(prompts, Sequence):
            raise RequestError(f"prompts: expected a text or a list of prompts, not {type(prompts).__name__}")
        with ProgressBar("generating", len(prompts), self._progress and len(prompts) > 1) as bar:
            return self._run(self._llm.complete(prompts, params, bar.advance, lora_request=lora_request))

    def chat(self, messages: Messages, params: SamplingParams | None = None, **fields: Any) -> ChatCompletion:
        """Answer a conversation. `messages` have OpenAI's shape: `{"role": …, "content": …}`.

        `fields` are others of POST /v1/chat/completions: `tools`, `tool_choice`,
        `response_format`, `reasoning_effort`, `chat_template_kwargs`, …."""
        return self._run(self._llm.answer(messages, params, **fields))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> Iterator[Chunk]:
        """Continue a text as chunks. Leaving the loop cancels the request."""
        return self._iterate(lambda: self._llm.generate(prompt, params, lora_request=lora_request))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **fields: Any
    ) -> Iterator[ChatChunk]:
        """Answer a conversation as chunks of a message; see `chat`."""
        return self._iterate(lambda: self._llm.chat(messages, params, **fields))

    def beam_search(self, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest continuations of each text, by beam search; see AsyncLLM.beam_search.

        >>> from logitless import LLM, BeamSearchParams
        >>> with LLM() as llm:
        ...     (output,) = llm.beam_search(["ROMEO:"], BeamSearchParams(beam_width=3, max_tokens=4))
        >>> len(output.sequences)
        3"""
        return self._run(self._llm.beam_search(prompts, params))

    def get_default_sampling_params(self) -> SamplingParams:
        """Parameters of requests without any: llama-server's defaults, over them those of the model's file."""
        return self._llm.get_default_sampling_params()

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text, with the BOS and EOS that the model wants."""
        return self._llm.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of token ids. RequestError: one is not in the vocabulary."""
        return self._llm.detokenize(token_ids)

    # -- vectors and scores

    def embed(self, texts: str | Sequence[Prompt], *, pooling: str | None = None, normalize: bool = True) -> F32:
        """Embeddings: shape (n_embd,) of one text, (n, n_embd) of several.

        `pooling`: "mean", "cls" or "last" (default: as the options or the model say)."""
        if isinstance(texts, str):
            vector: F32 = self._run(self._llm.embed([texts], pooling=pooling, normalize=normalize))[0]
            return vector
        return self._run(self._llm.embed(texts, pooling=pooling, normalize=normalize))

    def encode(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Prompt],
        *,
        pooling_task: str = "embed",
        pooling: str | None = None,
        normalize: bool = True,
    ) -> list[Pooled]:
        """Embeddings in the shape of vLLM's results, `outputs.data`; see `embed`."""
        listed = [prompts] if isinstance(prompts, str | Mapping) else prompts
        return self._run(self._llm.encode(listed, pooling_task=pooling_task, pooling=pooling, normalize=normalize))

    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranking]:
        """The documents by relevance to the query, the best first, for models with a ranking head."""
        return self._run(self._llm.rerank(query, documents, top_n=top_n))

    @overload
    def score(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self, texts: str | Mapping[str, Any], *, gradient_norm: bool = False
    ) -> Score: ...
    @overload
    def score(
        self, texts: Sequence[str | Sequence[int] | Mapping[str, Any]], *, gradient_norm: bool = False
    ) -> list[Score]: ...
    def score(
        self,
        texts: str | Mapping[str, Any] | Sequence[str | Sequence[int] | Mapping[str, Any]],
        *,
        gradient_norm: bool = False,
    ) -> Score | list[Score]:
        """Log-probabilities and loss of given texts, token ids or training rows, or of one text or row."""
        if isinstance(texts, str | Mapping):
            return self._run(self._llm.score([texts], gradient_norm=gradient_norm))[0]
        return self._run(self._llm.score(texts, gradient_norm=gradient_norm))

    # -- fine-tuning

    def finetune(
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
    ) -> FinetuneJob:
        """Begin to fine-tune the model, while it goes on answering requests; see AsyncLLM.finetune.

        >>> from logitless import LLM, SamplingParams
        >>> rows = [{"prompt": "Who is there?", "completion": " Nay, answer me."}] * 4
        >>> with LLM() as llm:
        ...     name = llm.finetune(rows, n_epochs=1, batch_size=4, context_length=32).wait()
        ...     answer = llm.generate("Who is there?", SamplingParams(model=name, max_tokens=4))
        >>> name.startswith("ft:")
        True"""
        run = self._llm.finetune(
            data,
            method=method,
            grader=grader,
            validation=validation,
            suffix=suffix,
            seed=seed,
            integrations=integrations,
            **hyperparameters,
        )
        return FinetuneJob(self, self._run(run))

    def stats(self) -> dict[str, float]:
        """Counters and gauges of the scheduler: tokens, slots, KV blocks, preemptions, drafts."""
        return self._run(self._llm.stats())

    # -- within

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of the model's loop; an interrupt of this thread cancels it."""
        problem = self._problem()
        if problem:
            work.close()
            raise Error(problem)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _problem(self) -> str:
        """The reason why this thread cannot use the model; "": it can."""
        if not self._llm.in_this_process:
            return "this model belongs to the process that forked this one: open it again here"
        if not self._end.alive:
            return "this model is closed"
        if threading.current_thread() is self._thread:
            return "this is the model's own event loop: use LLM.async_llm there"
        return ""

    def _iterate(self, make: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
        stream = make()

        async def following() -> T | None:
            return await anext(stream, None)  # None: it has ended

        try:
            while (item := self._run(following())) is not None:
                yield item
        finally:
            if not self._problem():
                self._run(stream.aclose())


def _end(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close the model and end its thread; in a fork there is neither."""
    if not llm.in_this_process:
        return
    closing = asyncio.run_coroutine_threadsafe(llm.close(), loop)
    closing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))  # here, if it is done already
    if threading.current_thread() is not thread:  # the garbage collector runs in any thread
        closing.result()
        thread.join()
        loop.close()


class FinetuneJob(JobHandle):
    """A fine-tuning job that runs beside requests."""

    def __init__(self, llm: LLM, job: AsyncFinetuneJob) -> None:
        super().__init__(llm.async_llm, job.id)
        self._caller, self._job = llm, job

    def events(self) -> Iterator[Row]:
        """Messages and metrics as they come, until the job ends."""
        return self._caller._iterate(self._job.events)

    def wait(self) -> str:
        """The result's name. TrainingError: the job has failed, or was cancelled."""
        return self._caller._run(self._job.wait())
