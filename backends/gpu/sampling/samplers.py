"""Samplers of a chain on GPUs: a row of C text for each code (graph/ops/sampling/samplers.py).

sample.py runs a row's chain, one sampler after the other. Each makes passes over the candidates,
then keeps a part of their order or changes their logits. Its text names variables of sample.py and
macros of candidates.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from logitless.backends.gpu.sampling import candidates as c
from logitless.graph.ops.sampling import samplers as s


@dataclass(frozen=True)
class Sampler:
    """C text of a sampler.

    `inert`: when it leaves the candidates alone. `begin`: what comes first. `passes`: those that it
    needs; in STATISTIC each candidate adds `term` or counts, in CHANGE it runs `change`, before
    which come `limits` and `changes`. `goal`: which part of the order is kept. `choose`: what is
    done with the part."""

    inert: str = ""
    begin: str = ""
    passes: str = "0u"
    limits: str = ""
    term: str = ""
    changes: str = ""
    change: str = ""
    goal: str = ""
    choose: str = ""


def first(count: str) -> str:
    """Goal: so many of the likeliest."""
    return f"sel = 1u; goal = UVEC2({count}, 0u); keep = 1u;"


def mass(part: str) -> str:
    """Goal: the likeliest that reach a part of all weights; all, where these are nothing."""
    return f"if ((total.x | total.y) != 0u) {{ sel = 2u; goal = {part}; least = min_keep; keep = 1u; }}"


SORT = "if (is_sorted == 0u) { order = 3u; is_sorted = 1u; }"
SOFTMAX = "LIKELIEST | WEIGH"
ENTROPY = "term = p > 0.0f ? -p * LOG(p) : 0.0f;"
SURPRISE = "-(LOG({}) * 1.44269504f)"
RATED = "final == ADAPTIVE && PARAM(TARGET) >= 0.0f"
SAMPLERS = {
    "BEGIN": Sampler(passes="FIRST"),  # the list of all candidates, and biases
    "PENALTIES": Sampler(),  # they are entries, as biases are
    "DRY": Sampler(),
    "TOP_N_SIGMA": Sampler(
        inert="!(PARAM(N_SIGMA) > 0.0f) || n <= 1u",
        passes="LIKELIEST | STATISTIC | DEVIATION | CHANGE",
        term="""
            if (k != LOWEST) {
              own_a++;
              term = pass == STATISTIC ? value_of(k) : (value_of(k) - limit) * (value_of(k) - limit);
            }""",
        changes="limit = count > 0u ? top - PARAM(N_SIGMA) * sqrt(sum / FLOAT(count)) : -INF;",
        change="if (value_of(k) < limit) KEY(i) = LOWEST;",
    ),
    "TOP_K": Sampler(inert="!(PARAM(K) > 0.0f)", begin=SORT, goal=first("min(UINT(PARAM(K)), n)")),
    "TYP_P": Sampler(
        inert="!(PARAM(TYPICAL) < 1.0f)",
        begin=SORT,
        passes=f"{SOFTMAX} | STATISTIC | CHANGE",
        term=ENTROPY,
        change="uint rank = HIGH(i); OKH(i) = ~F2U(FABS(-LOG(p) - sum)); OKL(i) = rank;",
        goal=mass("add64(fraction_of(total, PARAM(TYPICAL), false), UVEC2(1u, 0u))"),
    ),
    "TOP_P": Sampler(
        inert="!(PARAM(P) < 1.0f)", begin=SORT, passes=SOFTMAX, goal=mass("fraction_of(total, PARAM(P), true)")
    ),
    "MIN_P": Sampler(
        inert="!(PARAM(LEAST_P) > 0.0f)",
        passes="LIKELIEST | STATISTIC",
        limits="limit_key = key_of(top + LOG(PARAM(LEAST_P)));",
        term="own_a += k >= limit_key ? 1u : 0u;",
        goal=f"""
        if (top > -INF) {{
          uint passed = is_sorted != 0u ? count : 0u;
          if (is_sorted == 0u && count >= max(min_keep, 1u)) keep = 3u;
          else {{ {SORT} {first("min(max(max(passed, min_keep), 1u), n)")} }}
        }}""",
    ),
    "XTC": Sampler(
        inert="!(PARAM(XTC_PROBABILITY) > 0.0f) || PARAM(XTC_THRESHOLD) > 0.5f || n < 2u",
        begin=f"""
        used_xtc = 1u;
        if (min(FLOAT(DRAWS[4u * drawn_xtc + 2u]) * 2.3283064365386963e-10f, 0.99999994f) > PARAM(XTC_PROBABILITY))
          inert = true;
        else {{ {SORT} }}""",
        passes=f"{SOFTMAX} | STATISTIC",
        limits="limit = PARAM(XTC_THRESHOLD);",
        term="own_a += p >= limit ? 1u : 0u;",
        goal="""
        uint dropped = count == n ? n - 1u : count - 1u;
        if (count > 0u && dropped > 0u && n - dropped >= min_keep) {
          sel = 1u; goal = UVEC2(dropped, 0u); keep = 2u;
        }""",
    ),
    "TEMPERATURE": Sampler(
        inert="dynamic && n <= 1u",
        begin=f"if (dynamic) {{ {SORT} }}",
        passes="LIKELIEST | CHANGE | (dynamic ? WEIGH | STATISTIC : 0u)",
        term=ENTROPY,
        changes="""
        limit = PARAM(TEMP);
        if (dynamic) {
          float low = max(0.0f, limit - PARAM(RANGE)), high = limit + PARAM(RANGE);
          float share = sum / LOG(FLOAT(n));
          limit = low + (high - low)
              * (share > 0.0f ? power(share, PARAM(EXPONENT)) : PARAM(EXPONENT) == 0.0f ? 1.0f : 0.0f);
        }""",
        change="KEY(i) = limit > 0.0f ? key_of(value_of(k) / limit) : i == best ? k : LOWEST;",
    ),
    "GREEDY": Sampler(
        passes="plain ? 0u : LIKELIEST",
        choose="""
        chosen = plain ? best : ID(best); chosen_p = 1.0f; n_left = 1u;
        if (n_probs > 0u) { KEY(0) = KEY(best); ID(0) = chosen; E(0) = F2U(1.0f); }
        n = 1u; whole = 1.0f;""",
    ),
    "MIROSTAT_1": Sampler(begin=SORT, passes=SOFTMAX, goal=f"sel = 1u; goal = UVEC2(min(n, {c.TOP}u), 0u);"),
    "MIROSTAT_2": Sampler(
        begin=SORT,
        passes=f"{SOFTMAX} | STATISTIC",
        limits="limit = mu;",
        term=f"own_a += {SURPRISE.format('p')} <= limit ? 1u : 0u;",
        goal=first("max(count, 1u)"),
    ),
    "ADAPTIVE": Sampler(
        passes=f"{SOFTMAX} | (PARAM(TARGET) >= 0.0f ? CHANGE : 0u)",
        changes="""
        limit = min(max(PARAM(TARGET), 0.0f), 1.0f);
        if (weight != 0.0f) limit = min(max(2.0f * limit - mu / weight, 0.0f), 1.0f);""",
        change="""
            BP(i) = F2U(p);
            float d = FABS((p - limit) * (1.0f / 0.3f));
            if (k != LOWEST) KEY(i) = key_of(5.0f - 10.0f * d * d / (1.0f + d));""",
    ),
    "DRAW": Sampler(
        passes=SOFTMAX,
        goal="sel = 2u; goal = part_of(total, DRAWS[4u * drawn], DRAWS[4u * drawn + 1u], true);",
        choose=f"""
        chosen = ID(last); chosen_p = whole > 0.0f ? U2F(E(last)) / whole : U2F(E(last)); n_left = n;
        if (final == DIST || n > 1u) used_dist = 1u;
        if (ALL_SAMPLERS && (final == MIROSTAT_1 || final == MIROSTAT_2))
          mu = mu - PARAM(ETA) * ({SURPRISE.format("chosen_p")} - PARAM(TAU));
        if (ALL_SAMPLERS && {RATED}) {{
          mu = U2F(BP(last)) + PARAM(DECAY) * mu;
          weight = 1.0f + PARAM(DECAY) * weight;
        }}""",
    ),
    "PROBS": Sampler(begin="order = 3u;", goal=first("min(n_probs, n)")),
}
# What samplers.py has no code for, and the first variant of the kernel that has each.
OWN = {"DRAW": 32, "PROBS": 33, "DONE": 34, "BEGIN": 35}
FIRST_VARIANTS = {"DRAW": s.USUAL, "PROBS": s.ALL, "BEGIN": s.GREEDY_ONLY}
COLUMNS = """TEMP RANGE EXPONENT K P LEAST_P N_SIGMA TYPICAL XTC_PROBABILITY XTC_THRESHOLD REPEAT FREQUENCY PRESENCE
    MIN_KEEP TAU ETA TARGET DECAY RESET"""


def constants() -> str:
    """The codes and columns of graph/ops/sampling/samplers.py, as defines."""
    names = {name: getattr(s, name) for name in (*SAMPLERS, "DIST") if name not in OWN} | OWN
    names |= {f"AT_{name}": getattr(s, name) for name in COLUMNS.split()}
    names |= {n: getattr(s, n) for n in ("N_PARAMS", "N_STATE", "NO_DIST", "NO_XTC", "TWO_DIST", "TWO_XTC")}
    names["ID_BITS"] = s.ID
    return "".join(f"#define {name} {value}u\n" for name, value in names.items())


def by_sampler(field: str, form: str = "{{ {} }}") -> str:
    """Code that runs the text which the sampler `what` has in a field, if the kernel's variant has the sampler."""
    texts = {name: getattr(sampler, field) for name, sampler in SAMPLERS.items()}
    same: dict[str, list[str]] = {}
    for name, text in texts.items():
        if text not in ("", "0u"):
            variant = FIRST_VARIANTS[name] if name in OWN else s.variant_of(np.array(getattr(s, name)))
            same.setdefault(text, []).append(f"(VARIANT >= {variant} && what == {name})")
    return " else ".join(f"if ({' || '.join(names)}) {form.format(text)}" for text, names in same.items())
