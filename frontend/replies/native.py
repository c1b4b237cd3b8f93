"""POST /completion, llama-server's reply, whole or streamed; POST /v1/verify, the reply to a client's draft."""

from __future__ import annotations

from msgspec.structs import astuple, replace

from logitless.engine.requests import Finished, Progress, Token
from logitless.frontend.answers import UNSET
from logitless.frontend.answers.generation import NativeChunk, NativeCompletion, Selected, TokenLogprob, Verification
from logitless.frontend.replies.encoding import plain, sse
from logitless.frontend.replies.probabilities import entries
from logitless.frontend.replies.reply import Reply, Result, progress_fields, timings


class NativeReply(Reply):
    """llama-server's own completion object, or an array of them."""

    def whole(self) -> object:
        items = []
        for result in self.chosen():
            data = self.native(result)
            if self.job.top is not None:
                data.completion_probabilities = _probabilities(self, result, self.probable(result))
            items.append(self._selected(data))
        return items if self.job.many else items[0]

    def token(self, result: Result, token: Token) -> bytes:
        result.n_tokens += 1
        n_prompt = token.timings.n_prompt if token.timings is not None else len(result.request.prompt)
        data = self._chunk(result, token.text, [token.id], token.id_slot, n_prompt)
        if token.prob is not None and self.job.top is not None:
            data.completion_probabilities = _probabilities(self, result, [token])
        if self.params.timings_per_token and token.timings is not None:
            data.timings = timings(token.timings)
        return sse(data)

    def progress(self, result: Result, progress: Progress) -> bytes:
        return sse(replace(self._chunk(result, "", [], progress.id_slot, progress.total), **progress_fields(progress)))

    def finish(self, result: Result, finished: Finished) -> bytes:
        result.finished = finished
        rest = (
            sse(self._chunk(result, finished.text, [], finished.id_slot, finished.n_prompt)) if finished.text else b""
        )
        return rest + sse(self._selected(self.native(result)))

    def _chunk(self, result: Result, text: str, tokens: list[int], id_slot: int, n_prompt: int) -> NativeChunk:
        return NativeChunk(result.index, text, tokens, False, id_slot, result.n_tokens, n_prompt)

    def _selected(self, data: NativeCompletion) -> NativeCompletion | Selected:
        """`response_fields`: only these; a path with slashes is looked up and shown under its whole name."""
        if not self.params.response_fields:
            return data
        selected, fields = {}, dict(zip(data.__struct_encode_fields__, astuple(data), strict=True))
        for path in self.params.response_fields:
            first, *names = path.split("/")
            value = fields.get(first, UNSET)
            if value is UNSET:
                continue
            if names:
                value = plain(value)
            for name in names:
                if not isinstance(value, dict) or name not in value:
                    break
                value = value[name]
            else:
                selected[path] = value
        return selected


class VerifyReply(Reply):
    """(number of accepted draft tokens, the model's tokens: the accepted ones and the next one)."""

    id_prefix = "verify-"

    def whole(self) -> object:
        (result,) = self.results
        request, done = result.request, result.finished
        draft, tokens = request.speculation.draft, [token.id for token in result.tokens]
        n_accepted = 0
        while n_accepted < min(len(draft), len(tokens)) and tokens[n_accepted] == draft[n_accepted]:
            n_accepted += 1
        answer = Verification(
            **self.head,
            n_draft=len(draft),
            n_accepted=n_accepted,
            tokens=tokens,
            content=result.content,
            stop_type="eos" if done.stop_type == "eos" else "limit" if done.truncated else "none",
            id_slot=done.id_slot,
            tokens_evaluated=done.n_prompt,
            tokens_cached=done.n_in_cache,
            seed=done.seed,
            rng_used=list(done.rng_used),
            usage=self.usage(),
            timings=timings(done.timings),
        )
        if self.job.top is not None:
            answer.completion_probabilities = _probabilities(self, result, result.tokens)
        return answer

    def token(self, result: Result, token: Token) -> bytes:
        return b""  # it is no stream

    def finish(self, result: Result, finished: Finished) -> bytes:
        return b""


def _probabilities(reply: Reply, result: Result, tokens: list[Token]) -> list[TokenLogprob]:
    """Entries of the next tokens of a result."""
    probs = [token.prob for token in tokens if token.prob is not None]
    post = result.request.sampling.post_sampling_probs
    return entries(probs, reply.tokenizer, reply.job.top or 0, post, chosen=False)
