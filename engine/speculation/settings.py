"""Settings of speculative decoding: kinds of drafters, draft lengths, limits.

Names and defaults are llama-server's (its docs/speculative.md, 2026)."""

from __future__ import annotations

from dataclasses import dataclass

MODEL, MTP, EAGLE3, DFLASH, LEARN = "draft-simple", "draft-mtp", "draft-eagle3", "draft-dflash", "draft-learn"
HEADS = (MTP, EAGLE3, DFLASH, LEARN)  # which read the model's hidden states
MODELS = (MODEL, *HEADS)
NGRAM_KINDS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
KINDS = (*MODELS, *NGRAM_KINDS)
# llama-server's kinds that are not supported: they need special models
MODEL_ONLY = ("draft-dspark",)
CLIENT_N_MAX = 64  # tokens of a client's draft verified at once, by default
MAX_DRAFT = 4096  # tokens: the longest `speculative.n_max`


@dataclass(frozen=True, slots=True)
class NgramSizes:
    """Sizes of an n-gram drafter: key length, draft length, minimum occurrences of the key."""

    n: int = 12
    m: int = 48
    min_hits: int = 1


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Command-line settings of each kind of drafter."""

    draft_n_max: int = 3  # draft tokens of a draft model, MTP head or drafter
    simple: NgramSizes = NgramSizes()
    map_k: NgramSizes = NgramSizes()
    map_k4v: NgramSizes = NgramSizes()
    mod_n_match: int = 24
    mod_n_min: int = 48
    mod_n_max: int = 64
    cache_n_max: int = 16


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Speculation settings of one request.

    Without kinds and client draft there is no speculation."""

    kinds: tuple[str, ...] = ()
    n_max: int | None = None  # draft tokens at most; None: the kind's own limit
    n_min: int = 0  # shorter drafts are dropped
    p_min: float = 0.0  # probability below which a model's draft ends
    draft: tuple[int, ...] = ()  # the client's draft of the whole answer
