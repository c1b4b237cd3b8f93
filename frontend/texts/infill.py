"""POST /infill: prefix and suffix → a prompt of the model's fill-in-the-middle tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Struct

from logitless.engine.errors import InvalidRequest
from logitless.engine.params import Generation
from logitless.engine.sampling.params import Param
from logitless.frontend.fields import bad_request
from logitless.frontend.parser import MAX_TOKENS, MAX_TOP, GenerationJob, Prompt, RequestParser
from logitless.models.tokenizer import Tokenizer

N_BATCH = 2048  # llama-server's --batch-size, by which it bounds the parts
_SNIPPET = "\n\n--- snippet ---\n\n"


class ExtraFile(Struct, frozen=True, kw_only=True):
    """Another file of the repository."""

    text: str
    filename: str = "tmp"


class Infill(Generation, frozen=True, kw_only=True):
    """POST /infill."""

    input_prefix: Annotated[str, Param("the text before the gap")]
    input_suffix: Annotated[str, Param("the text after the gap")]
    input_extra: Annotated[Sequence[ExtraFile], Param("other files: {filename, text}")] = ()
    prompt: Annotated[str, Param("the text that the gap begins with")] = ""
    n_probs: Annotated[int, Param("log-probabilities of so many likely tokens", 0, MAX_TOP, aliases=("logprobs",))] = 0


def parse_infill(body: Mapping[str, Any], parser: RequestParser) -> GenerationJob:
    """The completion that fills the gap."""
    tokenizer = parser.tokenizer
    pre, suf, mid = tokenizer.fim_pre_id, tokenizer.fim_suf_id, tokenizer.fim_mid_id
    if pre is None or suf is None or mid is None:
        raise InvalidRequest("this model's vocabulary has no tokens for infill")
    params = parser.read(Infill, body)
    prefix, suffix = (parser.encode(text, most=MAX_TOKENS) for text in (params.input_prefix, params.input_suffix))
    prompt = parser.encode(params.prompt, parse_special=True)
    extra = _extra(params.input_extra, tokenizer, parser)
    n_suffix = max(0, N_BATCH // 4 - 2 - len(prompt))
    n_extra = max(0, parser.n_ctx - N_BATCH - 2 * max(0, params.n_predict))
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    before, after = [pre, *prefix[-(3 * (N_BATCH // 4)) :], *prompt], [suf, *suffix[:n_suffix]]
    parts = (after, before) if parser.config.spm_infill else (before, after)
    ids = [*extra[len(extra) - min(n_extra, len(extra)) :], *bos, *parts[0], *parts[1], mid]
    return parser.job(params, [Prompt(tuple(ids))], top=params.n_probs or None)


def _extra(files: Sequence[ExtraFile], tokenizer: Tokenizer, parser: RequestParser) -> list[int]:
    """The tokens of other files, in the repository's form where the vocabulary has one."""
    ids: list[int] = []
    sep = tokenizer.fim_sep_id
    if tokenizer.fim_rep_id is not None:
        ids += [tokenizer.fim_rep_id, *parser.encode("myproject\n")]
    for file in files:
        ids += parser.encode(_SNIPPET) if sep is None else [sep, *parser.encode(f"{file.filename}\n")]
        ids += parser.encode(file.text, most=MAX_TOKENS)
        if len(ids) > MAX_TOKENS:
            bad_request("input_extra", f"has more than {MAX_TOKENS} tokens")
    if sep is not None:
        ids += [sep, *parser.encode("filename\n")]
    return ids
