"""POST /v1/verify: the reply to a client's draft."""

from __future__ import annotations

from logitless.engine.requests import Finished, Token
from logitless.frontend.answers.generation import Verification
from logitless.frontend.replies.probabilities import entries
from logitless.frontend.replies.reply import Reply, Result, timings


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
            probs = [token.prob for token in result.tokens if token.prob is not None]
            answer.completion_probabilities = entries(
                probs, self.tokenizer, self.job.top, request.sampling.post_sampling_probs, chosen=False
            )
        return answer

    def token(self, result: Result, token: Token) -> bytes:
        return b""  # it is no stream

    def finish(self, result: Result, finished: Finished) -> bytes:
        return b""
