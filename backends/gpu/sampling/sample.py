"""Sampling and log-probabilities: one work group a row."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import KERNELS, Arg, Kernel, Shape
from logitless.backends.gpu.lowering import Buffers, Dispatch, dispatch, groups_for, lower
from logitless.backends.gpu.sampling import sample_body as text
from logitless.graph.ops.sampling import samplers
from logitless.graph.tensor import Tensor

# Threads of a group, and their work at a time: `each` reads MANY candidates ahead, COMPACT takes
# RUN neighbours, and counters of the histogram have COPIES, so that fewer threads wait for each
# other. A CPU gains nothing by any of it.
ALONE = {"MANY": 1, "RUN": 1, "COPIES": 1}
GPU = {"MANY": 8, "RUN": 4, "COPIES": 4}
# the largest first; the first that a shape's `threads` allow is taken
SIMT = [{"WG": 1024} | GPU, {"WG": 256} | GPU]
SOFT, CPU = {"WG": 256} | ALONE, {"WG": 1} | ALONE
ARRAYS = 6  # words a candidate, in scratch
MAX_GROUPS = 32  # rows that are sampled at a time: each takes scratch for the whole vocabulary

TYPICAL = """
          float p = whole > 0.0f ? U2F(e) / whole : 0.0f;
          OKH(i) = ~F2U(FABS(-LOG(p) - sum));
          OKL(i) = rank;"""
NEAR = """
          float p = whole > 0.0f ? U2F(e) / whole : 0.0f;
          BP(i) = F2U(p);
          float d = FABS((p - target) * (1.0f / 0.3f));
          if (k != LOWEST) KEY(i) = key_of(5.0f - 10.0f * d * d / (1.0f + d));"""
STEP = f"""
      uint sel = 0u, keep = 0u, stat = 0u, least = 0u;
      bool soft = what == TOP_P || what == TYP_P || what == XTC || what == MIROSTAT_1 || what == MIROSTAT_2
          || what == ADAPTIVE || what == DRAW;
      bool peak = soft || what == MIN_P || what == GREEDY || what == TOP_N_SIGMA || what == TEMPERATURE;
      uint min_keep = UINT(max(PARAM(MIN_KEEP), 0.0f));
      /* what a sampler leaves alone */
      if (what == TOP_K && !(PARAM(K) > 0.0f)) goto_next = true;
      if (what == TOP_P && !(PARAM(P) < 1.0f)) goto_next = true;
      if (what == TYP_P && !(PARAM(TYPICAL) < 1.0f)) goto_next = true;
      if (what == MIN_P && !(PARAM(LEAST_P) > 0.0f)) goto_next = true;
      if (what == TOP_N_SIGMA && (!(PARAM(N_SIGMA) > 0.0f) || n <= 1u)) goto_next = true;
      bool dynamic = what == TEMPERATURE && PARAM(RANGE) > 0.0f;
      if (dynamic && n <= 1u) goto_next = true;
      if (what == XTC) {{
        if (!(PARAM(XTC_PROBABILITY) > 0.0f) || PARAM(XTC_THRESHOLD) > 0.5f || n < 2u) goto_next = true;
        else {{
          used_xtc = 1u;
          if (min(FLOAT(DRAWS[4u * drawn_xtc + 2u]) * 2.3283064365386963e-10f, 0.99999994f) > PARAM(XTC_PROBABILITY))
            goto_next = true;
        }}
      }}
      if (!goto_next && (what == PENALTIES || what == DRY)) {{
        uint change = what == PENALTIES ? 1u : 2u;
        {text.CHANGE}
        goto_next = true;
      }}
      if (!goto_next) {{
      if (what == TOP_K || what == TOP_P || what == TYP_P || what == XTC || what == MIROSTAT_1 || what == MIROSTAT_2
          || dynamic) {{ SORT }}
      if (peak) {text.MAXIMUM}
      if (soft || dynamic) {text.SOFTMAX}
      /* numbers about all candidates that come before the goal is known */
      if (what == TYP_P || dynamic) stat = 1u;
      if (what == XTC) {{ stat = 2u; limit = PARAM(XTC_THRESHOLD); }}
      if (what == MIN_P) {{ stat = 3u; limit_key = key_of(top + LOG(PARAM(LEAST_P))); }}
      if (what == MIROSTAT_2) {{ stat = 4u; limit = mu; }}
      if (what == TOP_N_SIGMA) stat = 5u;
      for (uint again = 0u; stat != 0u && again < 2u; again++) {{
        {text.STATISTIC}
        if (stat == 5u) {{ limit = sum / FLOAT(count); stat = 6u; }} else break;
      }}
      /* what is wanted of the order */
      if (what == TOP_K) {{ sel = 1u; goal = UVEC2(min(UINT(PARAM(K)), n), 0u); keep = 1u; }}
      if (what == TOP_P) {{ sel = 2u; goal = fraction_of(total, PARAM(P), true); least = min_keep; keep = 1u; }}
      if (what == TYP_P) {{
        {text.each(TYPICAL, rank="HIGH(i)", e="E(i)")}
        DEVICE_BARRIER();
        order = 2u; is_sorted = 0u;
        sel = 2u; goal = add64(fraction_of(total, PARAM(TYPICAL), false), UVEC2(1u, 0u)); least = min_keep; keep = 1u;
      }}
      if (sel == 2u && (total.x | total.y) == 0u) {{ sel = 0u; keep = 0u; }} /* no sum of nothing reaches a part of 1 */
      if (what == MIN_P && top > -INF) {{
        if (is_sorted == 0u && count >= max(min_keep, 1u)) keep = 3u;
        else {{
          uint passed = is_sorted != 0u ? count : 0u;
          SORT
          sel = 1u; goal = UVEC2(min(max(max(passed, min_keep), 1u), n), 0u); keep = 1u;
        }}
      }}
      if (what == XTC) {{
        uint dropped = count == n ? n - 1u : count - 1u;
        if (count > 0u && dropped > 0u && n - dropped >= min_keep) {{ sel = 1u; goal = UVEC2(dropped, 0u); keep = 2u; }}
      }}
      if (what == MIROSTAT_1) {{ sel = 1u; goal = UVEC2(min(n, {text.TOP}u), 0u); }}
      if (what == MIROSTAT_2) {{ sel = 1u; goal = UVEC2(max(count, 1u), 0u); keep = 1u; }}
      if (what == DRAW) {{
        sel = 2u;
        goal = part_of(total, DRAWS[4u * drawn], DRAWS[4u * drawn + 1u], true);
      }}
      if (what == PROBS) {{ order = 3u; sel = 1u; goal = UVEC2(min(n_probs, n), 0u); keep = 1u; }}
      for (uint turn = {text.NARROWS} ? 0u : 1u; turn < 2u; turn++) {{
      if (turn == 0u) {text.BOUND}
      else for (uint again = 0u; sel != 0u && again < 2u; again++) {{
        {text.SELECT}
        if (what == MIROSTAT_1 && again == 0u) {{
          {text.ZIPF}
          goal = UVEC2(min(wanted, n), 0u); keep = 1u;
        }} else if (taken < min(least, n)) {{
          sel = 1u; goal = UVEC2(min(least, n), 0u);
        }} else break;
      }}
      if (keep != 0u) {text.COMPACT}
      }}
      /* logits that a sampler changes */
      float t = PARAM(TEMP);
      if (dynamic) {{
        float low = max(0.0f, t - PARAM(RANGE)), high = t + PARAM(RANGE);
        float share = sum / LOG(FLOAT(n));
        t = low + (high - low) * (share > 0.0f ? power(share, PARAM(EXPONENT)) : PARAM(EXPONENT) == 0.0f ? 1.0f : 0.0f);
      }}
      if (what == TEMPERATURE) {{
        {text.KEEP_ORDER}
        {text.each("KEY(i) = t > 0.0f ? key_of(value_of(k) / t) : i == best ? k : LOWEST;", k="KEY(i)")}
        DEVICE_BARRIER();
      }}
      if (what == TOP_N_SIGMA && count > 0u) {{
        {text.KEEP_ORDER}
        float bound = top - PARAM(N_SIGMA) * sqrt(sum / FLOAT(count));
        {text.each("if (value_of(k) < bound) KEY(i) = LOWEST;", k="KEY(i)")}
        DEVICE_BARRIER();
      }}
      if (what == ADAPTIVE && PARAM(TARGET) >= 0.0f) {{
        float target = min(max(PARAM(TARGET), 0.0f), 1.0f);
        if (weight != 0.0f) target = min(max(2.0f * target - mu / weight, 0.0f), 1.0f);
        {text.KEEP_ORDER}
        {text.each(NEAR, k="KEY(i)", e="E(i)")}
        is_sorted = 0u;
        DEVICE_BARRIER();
      }}
      /* the choice */
      if (what == GREEDY) {{
        chosen = plain ? best : ID(best); chosen_p = 1.0f; n_left = 1u;
        if (n_probs > 0u) {{
          DEVICE_BARRIER();
          if (LID == 0u) {{ KEY(0) = KEY(best); ID(0) = chosen; E(0) = F2U(1.0f); }}
        }}
        DEVICE_BARRIER();
        n = 1u; whole = 1.0f;
      }}
      if (what == DRAW) {{
        chosen = ID(last); chosen_p = whole > 0.0f ? U2F(E(last)) / whole : U2F(E(last)); n_left = n;
        if (final == DIST || n > 1u) used_dist = 1u;
        if (final == MIROSTAT_1 || final == MIROSTAT_2)
          mu = mu - PARAM(ETA) * (-(LOG(chosen_p) * 1.44269504f) - PARAM(TAU));
        if (final == ADAPTIVE && PARAM(TARGET) >= 0.0f) {{
          mu = U2F(BP(last)) + PARAM(DECAY) * mu;
          weight = 1.0f + PARAM(DECAY) * weight;
        }}
      }}
      if (what == PROBS) {{
        for (uint a = LID; a < n; a += WG) {{
          uint rank = 0u;
          for (uint b = 0u; b < n; b++) if (KEY(b) > KEY(a) || (KEY(b) == KEY(a) && b < a)) rank++;
          float p = whole > 0.0f ? U2F(E(a)) / whole : U2F(E(a));
          if (p > 0.0f) {{
            OUT[r * width + 3u + rank] = INT(ID(a));
            OUT[r * width + 3u + n_probs + rank] = U2I(F2U(p));
          }}
        }}
      }}
      }}
"""

MASKS = """
#define MASKED 1u
#define LATE 2u
#define ALL 0xffffffffu
#define MASK_WORD(w) S[r * (mask_words + 1u) + 1u + (w)]
"""
FIRST = "KEY(i) = (bits >> (i % 32u) & 1u) != 0u ? k : LOWEST; ID(i) = i;"
BODY = f"""
  uint width = n_probs == 0u ? 1u : 3u + 2u * n_probs, mask_words = (n_vocab + 31u) / 32u;
  uint per_row = has_mask != 0u ? 2u : 1u;
  uint w0 = has_mask * n_rows * (mask_words + 1u) + GX * {ARRAYS}u * n_vocab;
  for (uint start = GX; start < n_rows; start += NGX) {{
    int slot = SLOT[start];
    if (start > 0u && slot >= 0 && SLOT[start - 1u] == slot) continue; /* belongs to the rows before it */
    uint drawn = per_row * start, drawn_xtc = drawn;
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
      float mu = STATE[seat], weight = STATE[seat + 1u];
      if (!ISNAN(Q[r * N_PARAMS + AT_RESET])) mu = Q[r * N_PARAMS + AT_RESET];
      if (!ISNAN(Q[r * N_PARAMS + AT_RESET + 1u])) weight = Q[r * N_PARAMS + AT_RESET + 1u];
      float mu_before = mu, weight_before = weight;
      BARRIER();
      uint chosen = 0u, n_left = 0u, spent_dist = 0u, spent_xtc = 0u;
      float chosen_p = 0.0f;
      bool masked = has_mask != 0u && S[r * (mask_words + 1u)] == MASKED, finished = false;
      bool plain = first_code == GREEDY && begin == end && !masked && n_probs == 0u; /* needs no list */
      for (uint attempt = 0u; attempt < 2u && !finished; attempt++) {{
      uint n = n_vocab, order = 0u, is_sorted = 0u, best = 0u, last = 0u, taken = 0u, count = 0u, wanted = 0u;
      uint least_high = 0u, least_low = 0u, limit_key = 0u, used_dist = 0u, used_xtc = 0u, final = 0u;
      float top = 0.0f, whole = 0.0f, limit = 0.0f, sum = 0.0f;
      uvec2 total = UVEC2(0u, 0u), goal = UVEC2(0u, 0u);
      if (!plain) {text.each(FIRST, k="key_of(L[r * n_vocab + i])", bits="attempt > 0u ? MASK_WORD(i / 32u) : ALL")}
      DEVICE_BARRIER();
      {{ uint change = 0u; {text.CHANGE} }}
      uint at = 0u, what = first_code;
      while (what != DONE) {{
      bool goto_next = false;
      if (what <= TEMPERATURE) {{ /* a filter, or the end of the chain: the likeliest */
        if (what == 0u) what = GREEDY;
      }} else if (what < DRAW && final == 0u) {{
        final = what;
        if (what == DIST) what = DRAW;
      }}
      {STEP}
      /* what comes next */
      if (what == GREEDY || what == DRAW) {{
        drawn += used_dist; drawn_xtc += used_xtc; spent_dist += used_dist; spent_xtc += used_xtc;
        finished = attempt > 0u || !masked
            || (MASK_WORD(chosen / 32u) >> (chosen % 32u) & 1u) != 0u;
        if (!finished && final == ADAPTIVE) {{ mu = mu_before; weight = weight_before; }}
        what = finished && n_probs > 0u ? PROBS : DONE;
      }} else if (what == PROBS) what = DONE;
      else if (what == MIROSTAT_1 || what == MIROSTAT_2 || what == ADAPTIVE) what = DRAW;
      else {{
        at++;
        what = at < n_chain ? UINT(CHAIN[r * n_chain + at]) : 0u;
      }}
      DEVICE_BARRIER(); /* what comes next writes over candidates that other threads have read */
      }}
      }}
      if (LID == 0u) {{
        uint flags = (spent_dist == 0u ? NO_DIST : spent_dist == 2u ? TWO_DIST : 0u)
            | (spent_xtc == 0u ? NO_XTC : spent_xtc == 2u ? TWO_XTC : 0u);
        OUT[r * width] = U2I(chosen | flags);
        if (n_probs > 0u) {{ OUT[r * width + 1u] = INT(n_left); OUT[r * width + 2u] = U2I(F2U(chosen_p)); }}
        STATE[seat] = mu; STATE[seat + 1u] = weight;
      }}
      DEVICE_BARRIER();
    }}
  }}
"""
LOCAL = [
    ("uint", "hist", "(256 + 16) * COPIES"),
    ("uint", "h0", "(256 + 16) * COPIES"),
    ("uint", "h1", "(256 + 16) * COPIES"),
    ("uint", "ra", "WG"),
    ("uint", "rb", "WG"),
    ("float", "rf", "WG"),
    ("float", "rf_top", "128"),
    ("uint", "sh", "8"),
]
Kernel(
    "sample",
    [
        Arg("L", "f32"),
        Arg("STATE", "f32", "rw"),
        Arg("Q", "f32"),
        Arg("CHAIN", "i32"),
        Arg("DRAWS", "u32"),
        Arg("PTR", "i32"),
        Arg("KIND", "i32"),
        Arg("IDS", "i32"),
        Arg("VALUE", "f32"),
        Arg("SLOT", "i32"),
        Arg("OUT", "i32", "w"),
        Arg("S", "u32", "rw"),
    ],
    ["uint n_vocab", "uint n_rows", "uint n_chain", "uint n_probs", "uint n_seats", "uint has_mask"],
    BODY,
    simt=SIMT,
    cpu=[CPU],
    soft=[SOFT],
    local=LOCAL,
    functions=text.constants() + text.FUNCTIONS + MASKS,
)
# Each row's mask where `sample` looks for it: whether there is one (or the row waits for one), then
# its words.
Kernel(
    "sample_mask",
    [Arg("MASK", "u32"), Arg("ROW", "i32"), Arg("S", "u32", "w")],
    ["uint n", "uint n_words"],
    """
  FOR_EACH(i, n) {
    uint r = i / (n_words + 1u), w = i % (n_words + 1u);
    int row = ROW[r];
    S[i] = w == 0u ? (row >= 0 ? MASKED : row == -2 ? LATE : 0u) : row >= 0 ? MASK[UINT(row) * n_words + w - 1u] : 0u;
  }""",
    wg=64,
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
    scratch = 4 * (head + groups * ARRAYS * n_vocab)
    launches = []
    if masked:
        mask, row = t.src[10:]
        bufs: Buffers = (mask, row, None)
        launches.append(dispatch("sample_mask", shape, bufs, (head, mask_words), groups_for(head, shape, 64), scratch))
    words = (n_vocab, rows, chain.shape[1], t.attrs.get("n_probs", 0), state.shape[0], int(masked))
    bufs = (*t.src[:10], t, None)
    return [*launches, dispatch("sample", shape, bufs, words, groups, scratch, **threads("sample", shape))]


ADD = """
      float x = value_of(k);
      PRECISE float y = (top <= -INF ? 0.0f : x == top ? 1.0f : EXP(x - top)) - lost;
      PRECISE float next = own + y;
      lost = (next - own) - y;
      own = next;"""
Kernel(
    "log_probs",
    [Arg("L", "f32"), Arg("IDS", "i32"), Arg("TARGET", "i32"), Arg("Y", "f32", "w"), Arg("S", "u32", "rw")],
    ["uint n_vocab", "uint n_rows", "uint width", "uint n_top"],
    f"""
  uint w0 = GX * {ARRAYS}u * n_vocab;
  for (uint r = GX; r < n_rows; r += NGX) {{
    uint n = n_vocab, order = 3u, best = 0u, last = 0u, taken = 0u, least_high = 0u, least_low = 0u;
    uint sel = 1u, keep = 1u, limit_key = 0u, count = 0u;
    bool plain = false;
    float top = 0.0f;
    uvec2 goal = UVEC2(min(n_top, n), 0u);
    {text.each("KEY(i) = k; ID(i) = i;", k="key_of(L[r * n_vocab + i])")}
    DEVICE_BARRIER();
    {text.MAXIMUM}
    PRECISE float own = 0.0f;
    PRECISE float lost = 0.0f;
    {text.each(ADD, k="KEY(i)")}
    rf[LID] = own;
    {text.tree("rf[a] = rf[a] + rf[b];")}
    float lse = rf[0] > 0.0f ? LOG(rf[0]) : 0.0f;
    BARRIER();
    if (LID == 0u) {{
      uint target = TARGET[r] >= 0 ? UINT(TARGET[r]) : UINT(IDS[r * width]) & ID_BITS;
      Y[r * (1u + 2u * n_top)] = L[r * n_vocab + min(target, n_vocab - 1u)] - top - lse;
    }}
    if (n_top > 0u) {{
      for (uint turn = {text.NARROWS} ? 0u : 1u; turn < 2u; turn++) {{
        if (turn == 0u) {text.BOUND}
        else {text.SELECT}
        {text.COMPACT}
      }}
      for (uint i = LID; i < n_top; i += WG) {{
        uint to = r * (1u + 2u * n_top) + 1u + i;
        Y[to] = -1.0f; Y[to + n_top] = -INF;
      }}
      DEVICE_BARRIER();
      for (uint a = LID; a < n; a += WG) {{
        uint rank = 0u;
        for (uint b = 0u; b < n; b++) if (KEY(b) > KEY(a) || (KEY(b) == KEY(a) && b < a)) rank++;
        if (KEY(a) != LOWEST) {{
          uint to = r * (1u + 2u * n_top) + 1u + rank;
          Y[to] = FLOAT(ID(a)); Y[to + n_top] = (value_of(KEY(a)) - top) - lse;
        }}
      }}
    }}
    DEVICE_BARRIER();
  }}""",
    simt=SIMT,
    cpu=[CPU],
    soft=[SOFT],
    local=LOCAL,
    functions=text.constants() + text.FUNCTIONS,
)


@lower("log_probs")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    logits, ids, _ = t.src
    rows, n_vocab = logits.shape
    groups = row_groups(rows, shape)
    scratch = 4 * groups * ARRAYS * n_vocab
    words = (n_vocab, rows, ids.shape[1], t.attrs["n"])
    return [dispatch("log_probs", shape, (*t.src, t, None), words, groups, scratch, **threads("log_probs", shape))]


def threads(kernel: str, shape: Shape) -> dict[str, int]:
    """Threads of the largest group that the device allows a row."""
    sizes = [KERNELS[kernel].threads(variant) for variant in KERNELS[kernel].variants(shape)]
    return {"WG": max((size for size in sizes if size <= shape.threads), default=min(sizes))}


def row_groups(rows: int, shape: Shape) -> int:
    """Number of rows at a time."""
    return min(rows, max(1, shape.units // 4) if shape.name == "cpu" else MAX_GROUPS)
