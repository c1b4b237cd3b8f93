"""How a request wants to be speculated on. Names and defaults are llama-server's (docs/speculative.md there, 2026)."""

from __future__ import annotations

from dataclasses import dataclass

MODEL, NEXTN = "draft-simple", "draft-mtp"
MODELS = (MODEL, NEXTN)
NGRAM_KINDS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
KINDS = (*MODELS, *NGRAM_KINDS)
MODEL_ONLY = ("draft-eagle3", "draft-dflash")  # llama-server has them; they need models made for them
CLIENT_N_MAX = 64  # tokens of a client's draft verified at once, unless the request says otherwise
MAX_DRAFT = 4096  # tokens: the longest `speculative.n_max`


@dataclass(frozen=True, slots=True)
class NgramSizes:
    """Lengths of an n-gram kind: of the key, of the draft, and how often the key must have occurred."""

    n: int = 12
    m: int = 48
    min_hits: int = 1


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """What the command line says of each kind."""

    draft_n_max: int = 3  # of a draft model, or of the model's own block
    simple: NgramSizes = NgramSizes()
    map_k: NgramSizes = NgramSizes()
    map_k4v: NgramSizes = NgramSizes()
    mod_n_match: int = 24
    mod_n_min: int = 48
    mod_n_max: int = 64
    cache_n_max: int = 16


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """One request's wishes. No kinds and no client's draft: every step gives one token."""

    kinds: tuple[str, ...] = ()
    n_max: int | None = None  # tokens drafted at once; None: as many as the kind does by itself
    n_min: int = 0  # a shorter draft is not worth a try
    p_min: float = 0.0  # a model's draft stops where it gives its choice less than this
    draft: tuple[int, ...] = ()  # the client's guess of what follows the prompt
