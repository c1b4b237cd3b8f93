"""Sampling parameters: the one declaration of each field that says how tokens are sampled.

`SamplerParams` has a line for each number: type, default, limits, meaning, and the flag that sets
the server's default. HTTP bodies and the Python API's parameters inherit these fields; the OpenAPI
document, `generation_settings` and the command line read the declarations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct

from logitless.models.param import FLOAT_MAX as FLOAT_MAX
from logitless.models.param import INT_MAX as INT_MAX
from logitless.models.param import Param as Param
from logitless.models.param import params_of as params_of

if TYPE_CHECKING:
    from logitless.engine.sampling.grammar_mask import GrammarConstraint
    from logitless.engine.sampling.logits_processors import LogitsProcessor

DEFAULT_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
LETTERS = dict(zip("edskypmxtai", (*DEFAULT_SAMPLERS, "adaptive_p", "infill"), strict=True))
ALIASES = {
    "top-k": "top_k",
    "top-p": "top_p",
    "nucleus": "top_p",
    "top-n-sigma": "top_n_sigma",
    "typical-p": "typ_p",
    "typical": "typ_p",
    "typ-p": "typ_p",
    "typ": "typ_p",
    "min-p": "min_p",
    "temp": "temperature",
    "adaptive-p": "adaptive_p",
}
MAX_CHAIN = 16  # codes of a row, the 0 at its end included


def _soft(
    doc: str,
    flag: str = "",
    low: float = -FLOAT_MAX,
    high: float = FLOAT_MAX,
    env: str = "",
    *,
    common: bool = False,
    key: str = "",
) -> Param:
    return Param(doc, low, high, flag=flag, env=env, common=common, key=key)


def _hard(doc: str, flag: str = "", low: float = 0, high: float = INT_MAX, *, key: str = "") -> Param:
    return Param(doc, low, high, hard=True, flag=flag, key=key)


class SamplerParams(Struct, frozen=True, kw_only=True):
    """The samplers' numbers, by llama-server's names and defaults."""

    seed: Annotated[
        int, Param("random seed; -1: a new one for each request", flag="-s --seed", env="LLAMA_ARG_SEED")
    ] = -1  # 4294967295 is the same
    temperature: Annotated[
        float,
        _soft(
            "temperature; 0: greedy",
            "--temp --temperature",
            0.0,
            env="LLAMA_ARG_TEMPERATURE LLAMA_ARG_TEMP",
            common=True,
            key="temp",
        ),
    ] = 0.8
    dynatemp_range: Annotated[float, _soft("dynamic temperature: half its range", "--dynatemp-range")] = 0.0
    dynatemp_exponent: Annotated[float, _soft("dynamic temperature: exponent", "--dynatemp-exp")] = 1.0
    top_k: Annotated[
        int, _soft("keep the k likeliest; 0: all", "--top-k", 0, INT_MAX, "LLAMA_ARG_TOP_K", common=True, key="top_k")
    ] = 40
    top_p: Annotated[
        float,
        _soft("keep this much probability; 1: all", "--top-p", 0, 1, "LLAMA_ARG_TOP_P", common=True, key="top_p"),
    ] = 0.95
    min_p: Annotated[
        float,
        _soft(
            "keep tokens with at least this part of the best one; 0: all",
            "--min-p",
            0,
            1,
            "LLAMA_ARG_MIN_P",
            key="min_p",
        ),
    ] = 0.05
    top_n_sigma: Annotated[
        float, _soft("keep within n deviations of the best; -1: all", "--top-n-sigma --top-nsigma")
    ] = -1.0
    typical_p: Annotated[float, _soft("locally typical sampling; 1: off", "--typical --typical-p")] = 1.0
    xtc_probability: Annotated[
        float,
        _soft("how often XTC removes the top choices; 0: never", "--xtc-probability", 0, 1, key="xtc_probability"),
    ] = 0.0
    xtc_threshold: Annotated[
        float, _soft("XTC: least probability of a top choice", "--xtc-threshold", 0, 1, key="xtc_threshold")
    ] = 0.1
    repeat_last_n: Annotated[
        int, _hard("tokens that penalties look at; -1: all", "--repeat-last-n", -1, key="penalty_last_n")
    ] = 64
    repeat_penalty: Annotated[
        float,
        _soft(
            "penalty of repeated tokens; 1: none",
            "--repeat-penalty",
            env="LLAMA_ARG_REPEAT_PENALTY",
            key="penalty_repeat",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, _soft("penalty of tokens that occurred", "--presence-penalty", env="LLAMA_ARG_PRESENCE_PENALTY")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _soft("penalty per occurrence", "--frequency-penalty", env="LLAMA_ARG_FREQUENCY_PENALTY")
    ] = 0.0
    dry_multiplier: Annotated[float, _soft("DRY: strength; 0: off", "--dry-multiplier")] = 0.0
    dry_base: Annotated[float, _soft("DRY: growth per token of the repetition", "--dry-base")] = 1.75
    dry_allowed_length: Annotated[int, _hard("DRY: repetitions up to here cost nothing", "--dry-allowed-length")] = 2
    dry_penalty_last_n: Annotated[int, _hard("DRY: tokens to look at; -1: all", "--dry-penalty-last-n", -1)] = -1
    dry_sequence_breakers: Annotated[
        tuple[str, ...],
        # each is looked for in every token
        Param("DRY: texts that end a repetition", least=1, most=64),
    ] = ("\n", ":", '"', "*")  # each is looked for in every token of the vocabulary
    mirostat: Annotated[int, _soft("0: off, 1 or 2: its version", "--mirostat", 0, 2, key="mirostat")] = 0
    mirostat_tau: Annotated[float, _soft("Mirostat: wanted surprise, tau", "--mirostat-ent", key="mirostat_tau")] = 5.0
    mirostat_eta: Annotated[float, _soft("Mirostat: learning rate, eta", "--mirostat-lr", key="mirostat_eta")] = 0.1
    adaptive_target: Annotated[
        float, _soft("adaptive-p: wanted probability; negative: off", "--adaptive-target", high=1)
    ] = -1.0
    adaptive_decay: Annotated[float, _hard("adaptive-p: memory", "--adaptive-decay", 0, 0.99)] = 0.9
    min_keep: Annotated[int, _hard("tokens that every sampler keeps at least")] = 0


class SamplingParams(SamplerParams, frozen=True, kw_only=True):
    """Sampling parameters of one sequence: the samplers' numbers, their chain, biases and constraint."""

    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    logit_bias: tuple[tuple[int, float], ...] = ()
    # all others have a bias of -∞; None: every token is allowed
    allowed_token_ids: tuple[int, ...] | None = None
    # their token ids: a token that completes one has a bias of -∞
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0  # end tokens and stop_token_ids have a bias of -∞ before so many tokens
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the generation, beside the end tokens
    # words of the seed's selection and XTC generators that are used up
    rng_used: tuple[int, int] = (0, 0)
    n_probs: int = 0
    post_sampling_probs: bool = False
    grammar: GrammarConstraint | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()  # of the Python API; they run on the host

    def active_samplers(self) -> list[str]:
        """The samplers of the chain that do anything with these settings."""
        active = {
            "penalties": self.repeat_last_n != 0
            and (self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0),
            "dry": self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0,
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typ_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0 and self.xtc_threshold <= 0.5,
            "temperature": self.temperature != 1 or self.dynatemp_range > 0,
            "adaptive_p": True,
            "infill": True,
        }
        return [name for name in self.samplers if active[name]]

    @property
    def conflict(self) -> str:
        """Why these cannot be had together; "": they can."""
        if self.logits_processors and ("infill" in self.samplers or self.post_sampling_probs):
            return "logits_processors cannot be had with infill and post_sampling_probs"
        if self.mirostat or "infill" not in self.samplers:
            return ""
        if "adaptive_p" in self.samplers or self.samplers.count("infill") > 1:
            return "a chain has infill once, and not with adaptive_p"
        return "infill cannot be had with a grammar" if self.grammar else ""


def chain_from_names(names: str | Iterable[str]) -> tuple[tuple[str, ...], list[str]]:
    """(samplers' proper names, unknown names), from names and aliases or llama.cpp's letters.

    ValueError: they are too many."""
    if isinstance(names, str):
        pairs = [(name, LETTERS.get(name, "")) for name in names]
    else:
        pairs = [(name, ALIASES.get(name.lower(), name.lower())) for name in names]
    chain = [proper for _, proper in pairs if proper in LETTERS.values()]
    if len(chain) > MAX_CHAIN - 2:
        raise ValueError(f"at most {MAX_CHAIN - 2} samplers can be chained")
    return tuple(chain), [name for name, proper in pairs if proper not in LETTERS.values()]
