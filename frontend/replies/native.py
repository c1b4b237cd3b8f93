"""POST /completion: llama-server's reply, whole or streamed."""

from __future__ import annotations

from msgspec.structs import astuple, replace

from logitless.engine.requests import Finished, Progress, Token
from logitless.frontend.answers import UNSET
from logitless.frontend.answers.generation import NativeChunk, NativeCompletion, Selected, TokenLogprob
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
                data.completion_probabilities = self._probabilities(result, self.probable(result))
            items.append(self._selected(data))
        return items if self.job.many else items[0]

    def token(self, result: Result, token: Token) -> bytes:
        result.n_tokens += 1
        n_prompt = token.timings.n_prompt if token.timings is not None else len(result.request.prompt)
        data = self._chunk(result, token.text, [token.id], token.id_slot, n_prompt)
        if token.prob is not None and self.job.top is not None:
            data.completion_probabilities = self._probabilities(result, [token])
        if self.params.timings_per_token and token.timings is not None:
            data.timings = timings(token.timings)
        return sse(data)

    def _probabilities(self, result: Result, tokens: list[Token]) -> list[TokenLogprob]:
        """Entries of the next tokens of a result."""
        probs = [token.prob for token in tokens if token.prob is not None]
        post = result.request.sampling.post_sampling_probs
        return entries(probs, self.tokenizer, self.job.top or 0, post, chosen=False)

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
