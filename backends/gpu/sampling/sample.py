"""Sampling on GPUs: one work group runs the sampler chain of a row.

The chain is data: a row's codes name the samplers (samplers.py), which take their turns in one loop.
The kernel has three variants of one text: greedy, the usual samplers, all. Each run takes the first
that has the samplers of all rows, so that no device compiles what nobody uses."""

from __future__ import annotations

import re
from dataclasses import replace

from logitless.backends.gpu.language.dialect import KERNELS, Kernel, Shape
from logitless.backends.gpu.lowering import Buffers, Dispatch, VariantChoice, dispatch, lower
from logitless.backends.gpu.sampling import candidates as c
from logitless.backends.gpu.sampling.samplers import by_sampler, constants
from logitless.graph.ops.sampling import samplers
from logitless.graph.tensor import Tensor

# Threads of a group, and their work at a time: `each` reads MANY candidates ahead, MOVE takes
# RUN neighbours, and counters of the histogram have COPIES, so that fewer threads wait for each
# other. A CPU gains nothing by any of it.
ALONE = {"MANY": 1, "RUN": 1, "COPIES": 1}
GPU = {"MANY": 8, "RUN": 4, "COPIES": 4}
SIMT = [{"WG": 512} | GPU, {"WG": 256} | GPU]
SOFT, CPU = [{"WG": 256} | ALONE], [{"WG": 1} | ALONE]
VARIANTS = samplers.GREEDY_ONLY, samplers.USUAL, samplers.ALL  # of the kernel `sample`
MAX_GROUPS = 32  # rows that are sampled at a time: each takes scratch for the whole vocabulary

# A row's variables, by their types. They lie in local memory: thread 0 decides what comes next, and
# no thread has registers for them while it does something else.
STATE = {
    "uint": """what position final todo kind n order is_sorted best last taken count least_high least_low limit_key
        sel keep least min_keep used_dist used_xtc spent_dist spent_xtc drawn drawn_xtc chosen n_left""",
    "bool": "inert dynamic listed finished",
    "float": "mu weight mu_before weight_before chosen_p top whole limit sum",
    "uvec2": "total goal",
}
TYPES = {name: kind for kind, names in STATE.items() for name in names.split()}
PLACES = {name: 2 * i for i, name in enumerate(TYPES)}  # words in `row`
FORMS = {"uint": ("{}", "{}"), "bool": ("{} != 0u", "{} ? 1u : 0u"), "float": ("U2F({})", "F2U({})")}


def in_variants(sizes: list[dict[str, int]]) -> list[dict[str, int]]:
    """Each of the sizes in each of the kernel's variants."""
    return [size | {"VARIANT": variant} for variant in VARIANTS for size in sizes]


def _words(text: str) -> list[str]:
    """The variables that a text names."""
    return [name for name in TYPES if re.search(rf"\b{name}\b", text)]


def _loaded(text: str) -> str:
    """The text with its variables in registers."""
    lines = []
    for name in _words(text):
        kind, at = TYPES[name], f"row[{PLACES[name]}]"
        value = f"UVEC2({at}, row[{PLACES[name] + 1}])" if kind == "uvec2" else FORMS[kind][0].format(at)
        lines.append(f"{kind} {name} = {value};")
    return f"{' '.join(lines)} {text}"


def _stored(text: str) -> str:
    """Code that stores the variables that a text changes."""
    lines = []
    for name in _words(text):
        if not re.search(rf"\b{name}(\.[xy])? *([-+|]?=[^=]|\+\+)", text):
            continue
        kind, at = TYPES[name], PLACES[name]
        if kind == "uvec2":
            lines.append(f"row[{at}] = {name}.x; row[{at + 1}] = {name}.y;")
        else:
            lines.append(f"row[{at}] = {FORMS[kind][1].format(name)};")
    return " ".join(lines)


def together(text: str) -> str:
    """Text for all threads, which change the same variables in the same way."""
    return f"{{ {_loaded(text)} BARRIER(); if (LID == 0u) {{ {_stored(text)} }} DEVICE_BARRIER(); }}"


def alone(text: str) -> str:
    """Text for thread 0, while the others wait."""
    return f"if (LID == 0u) {{ {_loaded(text)} {_stored(text)} }} DEVICE_BARRIER();"


def read(name: str) -> str:
    """A variable where the text has not loaded it."""
    return f"row[{PLACES[name]}]"


# What a pass does with a candidate of key k: the greatest key is found (FIRST, LIKELIEST), weights
# e of the softmax are written and summed (WEIGH), terms are counted and summed (STATISTIC,
# DEVIATION), or keys are changed (CHANGE).
PASS = f"""
          if (pass == FIRST) {{
            uint mask = attempt > 0u ? MASK_WORD(i / 32u) : ALL;
            k = (mask >> (i % 32u) & 1u) != 0u ? key_of(U2F(k)) : LOWEST;
            if (!plain) {{ KEY(i) = k; ID(i) = i; }}
          }}
          if (pass <= LIKELIEST) {{ if (k > own_a) {{ own_a = k; own_b = i; }} }}
          else if (SELECTS && pass == WEIGH) {{
            float x = value_of(k);
            float of_top = top <= -INF ? 0.0f : x == top ? 1.0f : EXP(x - top);
            E(i) = F2U(of_top);
            uvec2 both = add64(UVEC2(own_a, own_b), UVEC2(units(of_top), 0u));
            own_a = both.x; own_b = both.y;
          }} else if (SELECTS) {{
            float p = whole > 0.0f ? U2F(e) / whole : 0.0f;
            if (pass == CHANGE) {{
              if (order == 3u && what != TYP_P) OKH(i) = k;
              {by_sampler("change")}
            }} else {{
              float term = 0.0f;
              {by_sampler("term")}
              PRECISE float y = term - lost;
              PRECISE float next = own_sum + y;
              lost = (next - own_sum) - y;
              own_sum = next;
            }}
          }}"""
COMBINE = """
          if (pass <= LIKELIEST) {
            if (ra[b] > ra[a] || (ra[b] == ra[a] && rb[b] < rb[a])) { ra[a] = ra[b]; rb[a] = rb[b]; }
          }
          else if (SELECTS && pass == WEIGH) {
            uvec2 both = add64(UVEC2(ra[a], rb[a]), UVEC2(ra[b], rb[b]));
            ra[a] = both.x; rb[a] = both.y;
          } else if (SELECTS) { ra[a] += ra[b]; rf[a] = rf[a] + rf[b]; }"""
FIRST = "pass != FIRST"
WEIGHTS = "SELECTS && pass != FIRST"
PASSED = f"""
          uint own_a = 0u, own_b = 0u, second = SELECTS && pass > WEIGH ? 4u : 0u; /* weights, where they are known */
          PRECISE float own_sum = 0.0f;
          PRECISE float lost = 0.0f;
          {c.each(PASS, k=(FIRST, "KEY(i)", "F2U(L[r * n_vocab + i])"), e=(WEIGHTS, "WORD(second, i)", "0u"))}
          ra[LID] = own_a; rb[LID] = own_b; rf[LID] = own_sum;
          {c.tree(COMBINE)}"""
RESULT = """
          if (pass == CHANGE) {
            if (what == TYP_P) order = 2u; else if (order == 3u) order = 1u;
            if (what == TYP_P || what == ADAPTIVE) is_sorted = 0u;
          } else if (pass <= LIKELIEST) { top = value_of(ra[0]); best = rb[0]; }
          else if (pass == WEIGH) { total = UVEC2(ra[0], rb[0]); whole = float_of(total); }
          else { count = ra[0]; sum = rf[0]; }"""
BEFORE = f"""
          if (pass == STATISTIC) {{ {by_sampler("limits")} }}
          if (pass == DEVIATION) limit = sum / FLOAT(count);
          if (pass == CHANGE) {{ {by_sampler("changes")} }}"""
# The part of the order that is the goal, kept or dropped; mirostat 1 looks at it for its goal.
PART = c.part(f"""
            if (ALL_SAMPLERS && what == MIROSTAT_1) {{
              uint n_likely = 0u;
              {c.ZIPF}
              goal = UVEC2(min(n_likely, n), 0u); keep = 1u; further = true;
            }} else if (taken < min(least, n)) {{ sel = 1u; goal = UVEC2(min(least, n), 0u); further = true; }}""")
BEGIN = """
      n = n_vocab; order = 0u; is_sorted = 0u; used_dist = 0u; used_xtc = 0u; final = 0u; position = ALL;
      what = BEGIN; top = 0.0f; whole = 0.0f; limit_key = 0u;
      count = 0u; last = 0u; taken = 0u; least_high = 0u; least_low = 0u;"""
NEXT = """
      if (what == GREEDY || what == DRAW) {
        drawn += used_dist; drawn_xtc += used_xtc; spent_dist += used_dist; spent_xtc += used_xtc;
        finished = attempt > 0u || !masked || (MASK_WORD(chosen / 32u) >> (chosen % 32u) & 1u) != 0u;
        if (!finished && final == ADAPTIVE) { mu = mu_before; weight = weight_before; }
        what = finished && n_probs > 0u ? PROBS : DONE;
      } else if (what == PROBS) what = DONE;
      else if (what == MIROSTAT_1 || what == MIROSTAT_2 || what == ADAPTIVE) what = DRAW;
      else {
        position++;
        what = position < n_chain ? UINT(CHAIN[r * n_chain + position]) : 0u;
        if (what == 0u) what = GREEDY; /* the end of the chain: the likeliest */
        else if (what > TEMPERATURE && final == 0u) {
          final = what;
          if (what == DIST) what = DRAW;
        }
      }"""
DECIDE = f"""
      sel = 0u; keep = 0u; least = 0u; todo = 0u; min_keep = UINT(max(PARAM(MIN_KEEP), 0.0f));
      dynamic = what == TEMPERATURE && PARAM(RANGE) > 0.0f; inert = false; listed = false;
      kind = what == BEGIN ? 0u : what == PENALTIES ? 1u : what == DRY ? 2u : 3u;
      for (uint j = begin; kind < 3u && j < end; j++) listed = listed || UINT(KIND[j]) == kind;
      {by_sampler("inert", "inert = {};")}
      if (!inert) {{ {by_sampler("begin")} }}
      if (!inert) {{ {by_sampler("passes", "todo = {};")} }}
      if (listed && order == 3u) todo |= CHANGE;"""
PROBS = """
        for (uint a = LID; a < n; a += WG) {
          uint rank = 0u;
          for (uint b = 0u; b < n; b++) if (KEY(b) > KEY(a) || (KEY(b) == KEY(a) && b < a)) rank++;
          float p = whole > 0.0f ? U2F(E(a)) / whole : U2F(E(a));
          if (p > 0.0f) {
            OUT[r * width + 3u + rank] = INT(ID(a));
            OUT[r * width + 3u + n_probs + rank] = U2I(F2U(p));
          }
        }"""
STEP = f"""
      {alone(DECIDE)}
      ROLLED for (uint pass = FIRST; pass <= CHANGE; pass <<= 1u) {{
        if (({read("todo")} & pass) == 0u) continue;
        {alone(BEFORE)}
        {{ {_loaded(PASSED)} }}
        {alone(RESULT)}
      }}
      if ({read("listed")} != 0u) {together(c.ENTRIES)}
      {alone("if (!inert) { " + by_sampler("goal") + " }")}
      if (SELECTS && ({read("sel")} | {read("keep")}) != 0u) {together(PART)}
      if (ALL_SAMPLERS && {read("what")} == PROBS) {{ {_loaded(PROBS)} }}
      BARRIER();
      {alone(by_sampler("choose") + NEXT)}"""

MASKS = """
#define MASKED 1u
#define LATE 2u
#define ALL 0xffffffffu
#define MASK_WORD(w) S[r * (mask_words + 1u) + 1u + (w)]
"""
FLAGS = """
#define FIRST 1u
#define LIKELIEST 2u
#define WEIGH 4u
#define STATISTIC 8u
#define DEVIATION 16u
#define CHANGE 32u
"""
# Before the kernel: Intel's compiler of OpenCL takes subgroups of 32, for which it has no registers.
NARROW = """
#ifdef cl_intel_required_subgroup_size
__attribute__((intel_reqd_sub_group_size(16)))
#endif
"""
START = """
      mu_before = STATE[seat]; weight_before = STATE[seat + 1u]; spent_dist = 0u; spent_xtc = 0u; finished = false;
      if (!ISNAN(Q[r * N_PARAMS + AT_RESET])) mu_before = Q[r * N_PARAMS + AT_RESET];
      if (!ISNAN(Q[r * N_PARAMS + AT_RESET + 1u])) weight_before = Q[r * N_PARAMS + AT_RESET + 1u];
      mu = mu_before; weight = weight_before;"""
END = """
      uint flags = (spent_dist == 0u ? NO_DIST : spent_dist == 2u ? TWO_DIST : 0u)
          | (spent_xtc == 0u ? NO_XTC : spent_xtc == 2u ? TWO_XTC : 0u);
      OUT[r * width] = U2I(chosen | flags);
      if (n_probs > 0u) { OUT[r * width + 1u] = INT(n_left); OUT[r * width + 2u] = U2I(F2U(chosen_p)); }
      STATE[seat] = mu; STATE[seat + 1u] = weight;"""
BODY = f"""
  uint width = n_probs == 0u ? 1u : 3u + 2u * n_probs, mask_words = (n_vocab + 31u) / 32u;
  uint per_row = has_mask != 0u ? 2u : 1u;
  uint w0 = has_mask * n_rows * (mask_words + 1u) + GX * {c.ARRAYS}u * n_vocab;
  for (uint start = GX; start < n_rows; start += NGX) {{
    int slot = SLOT[start];
    if (start > 0u && slot >= 0 && SLOT[start - 1u] == slot) continue; /* belongs to the rows before it */
    {alone("drawn = per_row * start; drawn_xtc = drawn;")}
    for (uint r = start; r < n_rows && (r == start || (slot >= 0 && SLOT[r] == slot)); r++) {{
      uint begin = UINT(PTR[r]), end = UINT(PTR[r + 1u]), first_code = UINT(CHAIN[r * n_chain]);
      for (uint i = LID; n_probs > 0u && i < n_probs; i += WG) {{
        OUT[r * width + 3u + i] = -1; OUT[r * width + 3u + n_probs + i] = 0;
      }}
      DEVICE_BARRIER();
      if (first_code == 0u || (has_mask != 0u && S[r * (mask_words + 1u)] == LATE)) {{
        if (LID == 0u) {{
          OUT[r * width] = U2I(NO_DIST | NO_XTC);
          if (n_probs > 0u) {{ OUT[r * width + 1u] = 0; OUT[r * width + 2u] = 0; }}
          for (uint i = 0u; i < n_probs; i++) OUT[r * width + 3u + i] = 0;
        }}
        DEVICE_BARRIER();
        continue;
      }}
      uint seat = UINT(min(max(slot, 0), INT(n_seats) - 1)) * N_STATE;
      bool masked = has_mask != 0u && S[r * (mask_words + 1u)] == MASKED;
      bool plain = first_code == GREEDY && begin == end && !masked && n_probs == 0u; /* needs no list */
      {alone(START)}
      ROLLED for (uint attempt = 0u; attempt < 2u && {read("finished")} == 0u; attempt++) {{
        {alone(BEGIN)}
        while ({read("what")} != DONE) {{ {STEP} }}
        BARRIER();
      }}
      {alone(END)}
    }}
  }}
"""
DIGITS = "272 * COPIES"  # counters of the histogram: 256, and 16 of 16 each
LOCAL = f"""uint hist[{DIGITS}] h0[{DIGITS}] h1[{DIGITS}] ra[WG] rb[WG], float rf[WG] rf_top[128], \
uint sh[8] row[{2 * len(TYPES)}]"""
Kernel(
    "sample",
    "f32 L, rw f32 STATE, f32 Q, i32 CHAIN, u32 DRAWS, i32 PTR KIND IDS, f32 VALUE, i32 SLOT, w i32 OUT, rw u32 S",
    "uint n_vocab n_rows n_chain n_probs n_seats has_mask",
    BODY,
    simt=in_variants(SIMT),
    cpu=in_variants(CPU),
    soft=in_variants(SOFT),
    local=LOCAL.replace(DIGITS, f"(VARIANT > 0 ? {DIGITS} : 1)"),
    functions=constants() + c.FUNCTIONS + FLAGS + MASKS + NARROW,
)
# Each row's mask where `sample` looks for it: whether there is one (or the row waits for one), then
# its words.
Kernel(
    "sample_mask",
    "u32 MASK, i32 ROW, w u32 S",
    "uint n n_words",
    """
  FOR_EACH(i, n) {
    uint r = i / (n_words + 1u), w = i % (n_words + 1u);
    int row = ROW[r];
    S[i] = w == 0u ? (row >= 0 ? MASKED : row == -2 ? LATE : 0u) : row >= 0 ? MASK[UINT(row) * n_words + w - 1u] : 0u;
  }""",
    functions=MASKS,
)


@lower("sample")
def _(t: Tensor, shape: Shape) -> list[Dispatch] | None:
    logits, state, params, chain = t.src[:4]
    rows, n_vocab = logits.shape
    if params.shape[1] != samplers.N_PARAMS or state.shape[1] != samplers.N_STATE:
        return None
    groups = row_groups(rows, shape)
    masked = len(t.src) > 10
    mask_words = -(-n_vocab // 32)
    head = rows * (mask_words + 1) if masked else 0
    scratch = 4 * (head + groups * c.ARRAYS * n_vocab)
    launches = []
    if masked:
        mask, row = t.src[10:]
        bufs: Buffers = (mask, row, None)
        launches.append(dispatch("sample_mask", shape, bufs, (head, mask_words), scratch=scratch))
    words = (n_vocab, rows, chain.shape[1], t.attrs.get("n_probs", 0), state.shape[0], int(masked))
    bufs, size = (*t.src[:10], t, None), threads("sample", shape)
    whole = dispatch("sample", shape, bufs, words, groups, scratch, VARIANT=samplers.ALL, **size)
    if not t.attrs.get("n_probs", 0):
        variants = tuple(KERNELS["sample"].variant(shape, VARIANT=v, **size) for v in VARIANTS)
        whole = replace(whole, choice=VariantChoice(variants, chain, samplers.variant_of))
    return [*launches, whole]


def threads(kernel: str, shape: Shape) -> dict[str, int]:
    """Threads of a row's group: the largest that the device allows, where it is likely to have
    registers for so many; GPUs of phones, which have no dot products, have not."""
    sizes = [KERNELS[kernel].threads(variant) for variant in KERNELS[kernel].variants(shape)]
    most = min(shape.threads, 512 if shape.dot else 256)
    return {"WG": max((size for size in sizes if size <= most), default=min(sizes))}


def row_groups(rows: int, shape: Shape) -> int:
    """Number of rows at a time."""
    return min(rows, max(1, shape.units // 4) if shape.name == "cpu" else MAX_GROUPS)
