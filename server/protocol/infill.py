"""POST /infill: what comes before and after a gap → a prompt of the model's fill-in-the-middle tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from logitless.engine.errors import NotSupported
from logitless.models.tokenizer import Tokenizer
from logitless.server.protocol.completions import MAX_TOP, Job, RequestParser
from logitless.server.protocol.fields import Fields, article, refuse

N_BATCH = 2048  # llama-server's --batch-size, by which it bounds the parts
_SNIPPET = "\n\n--- snippet ---\n\n"


def parse_infill(body: Mapping[str, Any], parser: RequestParser) -> Job:
    """The completion that fills the gap."""
    fields = Fields(body)
    tokenizer = parser.tokenizer
    pre, suf, mid = tokenizer.fim_pre_id, tokenizer.fim_suf_id, tokenizer.fim_mid_id
    if pre is None or suf is None or mid is None:
        raise NotSupported("this model's vocabulary has no tokens for infill")
    for name in ("input_prefix", "input_suffix"):
        if body.get(name) is None:
            refuse(name, "is required")
    prefix, suffix = (parser.encode(fields.text(name)) for name in ("input_prefix", "input_suffix"))
    prompt = parser.encode(fields.text("prompt"), parse_special=True)
    extra = _extra(fields, tokenizer, parser)
    n_predict = fields.integer("n_predict", "max_tokens", default=-1, low=-1, hard=True)
    n_suffix = max(0, N_BATCH // 4 - 2 - len(prompt))
    n_extra = max(0, parser.n_ctx - N_BATCH - 2 * max(0, n_predict))
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    before, after = [pre, *prefix[-(3 * (N_BATCH // 4)) :], *prompt], [suf, *suffix[:n_suffix]]
    parts = (after, before) if parser.config.spm_infill else (before, after)
    ids = [*extra[len(extra) - min(n_extra, len(extra)) :], *bos, *parts[0], *parts[1], mid]
    top = fields.integer("n_probs", "logprobs", default=0, low=0, high=MAX_TOP)
    return parser.job(fields, [tuple(ids)], top=top or None)


def _extra(fields: Fields, tokenizer: Tokenizer, parser: RequestParser) -> list[int]:
    """The tokens of other files, in the repository's form where the vocabulary has one."""
    ids: list[int] = []
    sep = tokenizer.fim_sep_id
    if tokenizer.fim_rep_id is not None:
        ids += [tokenizer.fim_rep_id, *parser.encode("myproject\n")]
    for i, chunk in enumerate(fields.array("input_extra") or ()):
        name = f"input_extra[{i}]"
        if not isinstance(chunk, dict):
            refuse(name, f"expected an object, got {article(chunk)}")
        text, file = chunk.get("text"), chunk.get("filename", "tmp")
        if not isinstance(text, str):
            refuse(f"{name}.text", f"expected a string, got {article(text)}")
        if not isinstance(file, str):
            refuse(f"{name}.filename", f"expected a string, got {article(file)}")
        ids += parser.encode(_SNIPPET) if sep is None else [sep, *parser.encode(f"{file}\n")]
        ids += parser.encode(text)
    if sep is not None:
        ids += [sep, *parser.encode("filename\n")]
    return ids
