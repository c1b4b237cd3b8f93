"""Sampling kernel's code on GPUs: a group of threads runs the sampler chain of a row.

Candidates are a list of n in the order of their ids, in the group's scratch: KEY (an unsigned
number in the order of the logits), ID, the order key OKH, OKL, the weight E (e^(logit − greatest))
and a probability BP. Their order (`order`) is a relation; the list is never sorted: 0 by id; 1 by
OKH; 2 by OKH, then OKL; 3 by KEY; greatest first, ties by id. A sampler that takes the likeliest is
a `SELECT`: the prefix of that order which reaches a count, or a sum of weights. It is found by
radix selection: 8 bits at a time, a histogram tells in which digit the goal is reached. After the
keys come digits of the index in the list, so ties are settled in the order of ids. Weights are
summed as integers in units of 2⁻³¹, so sums do not depend on the order of additions.

A GPU waits here for memory, one access after the other. So neighbouring threads read neighbouring
candidates, each thread has MANY loads in flight (`each`), and where few of many are needed, a lower
bound of their keys is found first and leaves a short list (`BOUND`)."""

from __future__ import annotations

from logitless.graph.ops.sampling import samplers as s

TOP = 100  # likeliest candidates that mirostat 1 looks at


def constants() -> str:
    """The codes and columns of graph/ops/sampling/samplers.py, as defines."""
    names = {
        **{n: getattr(s, n) for n in ("PENALTIES", "DRY", "TOP_N_SIGMA", "TOP_K", "TYP_P", "TOP_P", "MIN_P", "XTC")},
        **{n: getattr(s, n) for n in ("TEMPERATURE", "GREEDY", "DIST", "MIROSTAT_1", "MIROSTAT_2", "ADAPTIVE")},
        **{f"AT_{n}": getattr(s, n) for n in ("TEMP", "RANGE", "EXPONENT", "K", "P", "LEAST_P", "N_SIGMA", "TYPICAL")},
        **{f"AT_{n}": getattr(s, n) for n in ("XTC_PROBABILITY", "XTC_THRESHOLD", "REPEAT", "FREQUENCY", "PRESENCE")},
        **{f"AT_{n}": getattr(s, n) for n in ("MIN_KEEP", "TAU", "ETA", "TARGET", "DECAY", "RESET")},
        **{n: getattr(s, n) for n in ("N_PARAMS", "N_STATE", "NO_DIST", "NO_XTC", "TWO_DIST", "TWO_XTC")},
        "DRAW": 32,
        "PROBS": 33,
        "DONE": 34,
        "ID_BITS": s.ID,
    }
    return "".join(f"#define {name} {value}u\n" for name, value in names.items())


FUNCTIONS = r"""
#define LOWEST 0x007fffffu /* the key of -inf */
FN uint key_of(float x) {
  if (ISNAN(x)) return LOWEST;
  uint bits = F2U(x);
  if (bits == 0x80000000u) bits = 0u;
  return (bits >> 31) != 0u ? ~bits : (bits | 0x80000000u);
}
FN float value_of(uint key) { return U2F((key >> 31) != 0u ? (key & 0x7fffffffu) : ~key); }
FN uvec2 add64(uvec2 a, uvec2 b) { /* low word in x, high word in y */
  uint low = a.x + b.x;
  return UVEC2(low, a.y + b.y + (low < a.x ? 1u : 0u));
}
FN bool reaches(uvec2 a, uvec2 goal) { return a.y > goal.y || (a.y == goal.y && a.x >= goal.x); }
FN uvec2 part_of(uvec2 total, uint low, uint high, bool round_up) { /* total · (high:low) / 2^64 */
  uint r0 = total.x * low, h0 = MULHI(total.x, low);
  uvec2 middle = add64(add64(UVEC2(h0, 0u), UVEC2(total.x * high, MULHI(total.x, high))),
                       UVEC2(total.y * low, MULHI(total.y, low)));
  uvec2 result = add64(UVEC2(total.y * high, MULHI(total.y, high)), UVEC2(middle.y, 0u));
  return round_up && (middle.x | r0) != 0u ? add64(result, UVEC2(1u, 0u)) : result;
}
FN uvec2 fraction_of(uvec2 total, float f, bool round_up) { /* total · f for f below 1 */
  float scaled = max(f, 0.0f) * 4294967296.0f;
  uint high = UINT(scaled);
  return part_of(total, UINT((scaled - FLOAT(high)) * 4294967296.0f), high, round_up);
}
FN uint units(float e) { return UINT(RINT(e * 2147483648.0f)); }
FN float float_of(uvec2 m) { return FMA(FLOAT(m.y), 2.0f, FLOAT(m.x) * 4.6566128730773926e-10f); }
FN float power(float base, float exponent) { return EXP(exponent * LOG(base)); }
#define KEY(i) S[w0 + (i)]
#define ID(i) S[w0 + n_vocab + (i)]
#define OKH(i) S[w0 + 2u * n_vocab + (i)]
#define OKL(i) S[w0 + 3u * n_vocab + (i)]
#define E(i) S[w0 + 4u * n_vocab + (i)]
#define BP(i) S[w0 + 5u * n_vocab + (i)]
#define HIGH(i) (order == 0u ? 0u : S[w0 + (order == 3u ? 0u : 2u * n_vocab) + (i)]) /* KEY or OKH */
#define LOW(i) (order == 2u ? OKL(i) : 0u)
#define SORT if (is_sorted == 0u) { order = 3u; is_sorted = 1u; }
#define PARAM(c) Q[r * N_PARAMS + AT_##c]
/* whether COMPACT keeps candidate i, of whom high is HIGH(i), or KEY(i) with keep == 3 */
FN bool reached(uint high, uint low, uint i, uint least_high, uint least_low, uint last) {
  return high > least_high || (high == least_high && (low > least_low || (low == least_low && i <= last)));
}
#define KEPT(high, low, i) \
  (keep == 3u ? high >= limit_key : reached(high, low, i, least_high, least_low, last) == (keep == 1u))
/* what a thread has gathered for digit `held` */
#define FLUSH { \
  uint to_ = held * COPIES + LID % COPIES; \
  if (own_count != 0u) ATOMIC_ADD(hist[to_], own_count); \
  if (sel == 2u && own_count != 0u) { \
    uint was = ATOMIC_ADD(h0[to_], own.x), carried = own.y + (was + own.x < was ? 1u : 0u); \
    if (carried != 0u) ATOMIC_ADD(h1[to_], carried); \
  } }
"""


def each(body: str, begin: str = "0u", end: str = "n", **reads: str) -> str:
    """The body for every candidate i of a thread.

    `reads` are the words of a candidate that the body needs, by the name they have there. All are
    loaded, for MANY candidates, before the first is used.
    """
    arrays = "".join(f"uint {name}_[MANY]; " for name in reads)
    ask = " ".join(f"{name}_[u_] = {what};" for name, what in reads.items())
    take = " ".join(f"uint {name} = {name}_[u_];" for name in reads)
    return f"""
      for (uint i_ = {begin} + LID; i_ < {end}; i_ += MANY * WG) {{
        {arrays}
        UNROLL for (uint u_ = 0u; u_ < MANY; u_++) {{
          uint i = MANY == 1 || i_ + u_ * WG >= {end} ? i_ : i_ + u_ * WG; /* never what another thread writes */
          {ask}
        }}
        UNROLL for (uint u_ = 0u; u_ < MANY; u_++) {{
          uint i = i_ + u_ * WG;
          if (MANY == 1 || i < {end}) {{ {take} {body} }}
        }}
      }}"""


KEEP_ORDER = f"""
      if (order == 3u) {{ {each("OKH(i) = k;", k="KEY(i)")} order = 1u; }}"""


def tree(combine: str) -> str:
    """Reduce the threads' values in local memory at LID into 0, in the same pairs in every run."""
    return f"""
      BARRIER();
      for (uint o = WG / 2; o > 0u; o >>= 1u) {{
        if (LID < o) {{ uint a = LID, b = LID + o; {combine} }}
        BARRIER();
      }}"""


GREATER = "if (k > own_key) { own_key = k; own_at = i; }"
# `best`: index of the greatest key, the lowest of several; `top` its logit. `plain`: of the logits,
# without a list.
MAXIMUM = f"""
      {{
        uint own_key = 0u, own_at = 0u;
        {each(GREATER, k="plain ? key_of(L[r * n_vocab + i]) : KEY(i)")}
        ra[LID] = own_key; rb[LID] = own_at;
        {tree("if (ra[b] > ra[a] || (ra[b] == ra[a] && rb[b] < rb[a])) { ra[a] = ra[b]; rb[a] = rb[b]; }")}
        top = value_of(ra[0]); best = rb[0];
        BARRIER();
      }}"""
WEIGH = """
          float x = value_of(k);
          float e = top <= -INF ? 0.0f : x == top ? 1.0f : EXP(x - top);
          E(i) = F2U(e);
          own = add64(own, UVEC2(units(e), 0u));"""
SOFTMAX = f"""
      {{
        uvec2 own = UVEC2(0u, 0u);
        {each(WEIGH, k="KEY(i)")}
        ra[LID] = own.x; rb[LID] = own.y;
        {tree("uvec2 m = add64(UVEC2(ra[a], rb[a]), UVEC2(ra[b], rb[b])); ra[a] = m.x; rb[a] = m.y;")}
        total = UVEC2(ra[0], rb[0]); whole = float_of(total);
        DEVICE_BARRIER(); /* weights are read by other threads than wrote them */
      }}"""
TERM = """
          float p = weighed && whole > 0.0f ? U2F(e) / whole : 0.0f;
          float term = 0.0f;
          if (stat == 1u) term = p > 0.0f ? -p * LOG(p) : 0.0f;
          else if (stat == 2u) own_count += p >= limit ? 1u : 0u;
          else if (stat == 3u) own_count += k >= limit_key ? 1u : 0u;
          else if (stat == 4u) own_count += -(LOG(p) * 1.44269504f) <= limit ? 1u : 0u;
          else if (k != LOWEST) {
            own_count++;
            term = stat == 5u ? value_of(k) : (value_of(k) - limit) * (value_of(k) - limit);
          }
          PRECISE float y = term - lost;
          PRECISE float next = own_sum + y;
          lost = (next - own_sum) - y;
          own_sum = next;"""
# `count` and `sum` of what `stat` names, over the candidates.
STATISTIC = f"""
      {{
        bool weighed = stat == 1u || stat == 2u || stat == 4u;
        uint own_count = 0u;
        PRECISE float own_sum = 0.0f;
        PRECISE float lost = 0.0f;
        {each(TERM, k="KEY(i)", e="weighed ? E(i) : 0u")}
        ra[LID] = own_count; rf[LID] = own_sum;
        {tree("ra[a] += ra[b]; rf[a] = rf[a] + rf[b];")}
        count = ra[0]; sum = rf[0];
        BARRIER();
      }}"""
# Candidates that are still possible count for their digit. Equal digits of a thread, one after the
# other, are added up before.
COUNT = """
            if ((high & mask_high) == least_high && (low & mask_low) == least_low) {
              uint d = (word == 0u ? ~high : word == 1u ? ~low : i - from) >> shift & 255u;
              uvec2 m = UVEC2(sel == 2u ? units(U2F(e)) : 0u, 0u);
              if (WG > 1 && d == held) { own_count++; own = add64(own, m); }
              else {
                if (WG > 1) FLUSH
                held = d; own_count = 1u; own = m;
                if (WG == 1) { FLUSH own_count = 0u; }
              }
            }"""
FOUND = """
          if ((high & mask_high) == least_high && (low & mask_low) == least_low) {
            sh[0] = i; sh[1] = high; sh[2] = low;
          }"""
# The prefix of the order that reaches `goal`, which is at most the whole: its last member `last`,
# its length `taken`, its least keys. Digits count from the greatest key down, and from the
# beginning of the list up.
SELECT = f"""
      {{
        uint mask_high = 0u, mask_low = 0u, from = 0u, to = n;
        bool alone = false;
        uvec2 before = UVEC2(0u, 0u);
        least_high = 0u; least_low = 0u; taken = 0u;
        for (uint pass = 0u; pass < 12u && !alone; pass++) {{
          uint word = pass / 4u, shift = 24u - 8u * (pass % 4u); /* of HIGH, LOW and the place */
          if (word == 0u ? order == 0u : word == 1u ? order != 2u : shift != 0u && (n - 1u) >> shift == 0u) continue;
          for (uint d = LID; d < 256u * COPIES; d += WG) {{ hist[d] = 0u; h0[d] = 0u; h1[d] = 0u; }}
          BARRIER();
          uint held = 0u, own_count = 0u;
          uvec2 own = UVEC2(0u, 0u);
          {each(COUNT, "from", "to", high="HIGH(i)", low="LOW(i)", e="sel == 2u ? E(i) : 0u")}
          FLUSH
          BARRIER();
          for (uint g = LID; g < 16u; g += WG) {{ /* copies into the first, and 16 digits into one of the 16 behind */
            uint all = 0u;
            uvec2 m = UVEC2(0u, 0u);
            for (uint d = 16u * g; d < 16u * g + 16u; d++) {{
              uint at = d * COPIES;
              for (uint c = at + 1u; c < at + COPIES; c++) {{
                uvec2 both = add64(UVEC2(h0[at], h1[at]), UVEC2(h0[c], h1[c]));
                hist[at] += hist[c]; h0[at] = both.x; h1[at] = both.y;
              }}
              all += hist[at];
              m = add64(m, UVEC2(h0[at], h1[at]));
            }}
            uint at = (256u + g) * COPIES;
            hist[at] = all; h0[at] = m.x; h1[at] = m.y;
          }}
          BARRIER();
          if (LID == 0u) {{
            uint d = 0u;
            for (uint step = 16u; step != 0u; step /= 16u) {{
              for (uint end_d = d + 15u * step; d < end_d; d += step) {{
                uint at = (step == 16u ? 256u + d / 16u : d) * COPIES;
                uvec2 after = add64(before, sel == 2u ? UVEC2(h0[at], h1[at]) : UVEC2(hist[at], 0u));
                if (hist[at] != 0u && reaches(after, goal)) break;
                before = after; taken += hist[at];
              }}
            }}
            sh[0] = d; sh[1] = before.x; sh[2] = before.y; sh[3] = taken; sh[4] = hist[d * COPIES];
          }}
          BARRIER();
          if (word == 0u) {{ least_high |= (255u - sh[0]) << shift; mask_high |= 255u << shift; }}
          else if (word == 1u) {{ least_low |= (255u - sh[0]) << shift; mask_low |= 255u << shift; }}
          else {{ from += sh[0] << shift; to = min(to, from + (1u << shift)); }}
          before = UVEC2(sh[1], sh[2]); taken = sh[3]; alone = sh[4] == 1u;
          BARRIER();
        }}
        {each(FOUND, "from", "to", high="HIGH(i)", low="LOW(i)")}
        BARRIER();
        last = sh[0]; least_high = sh[1]; least_low = sh[2]; taken++;
        BARRIER();
      }}"""
READ = "k{0} = KEY(i); id{0} = ID(i); high{0} = OKH(i); low{0} = OKL(i); e{0} = E(i);"
WRITE = "KEY(to) = k{0}; ID(to) = id{0}; OKH(to) = high{0}; OKL(to) = low{0}; E(to) = e{0};"
# Whether a small count is to be taken of a short list, which COMPACT makes before SELECT, in turn
# 0. BOUND finds a key that so many are not below: of the threads' greatest keys the one that
# reaches the count. Few others are not below it; where there are too many, because they are equal,
# the list stays as it is.
NARROWS = "WG > 1 && sel == 1u && keep == 1u && order != 0u && goal.x <= WG / 2u && n > 4u * WG"
BOUND = f"""
      {{
        uint own = 0u, above = 0u, equal = 0u, few = max(goal.x, 1u);
        {each("if (high > own) own = high;", high="HIGH(i)")}
        ra[LID] = own;
        BARRIER();
        for (uint b = 0u; b < WG; b++) {{ above += ra[b] > own ? 1u : 0u; equal += ra[b] == own ? 1u : 0u; }}
        if (above < few && few <= above + equal) sh[0] = own;
        BARRIER();
        least_high = sh[0]; least_low = 0u; last = n; taken = few;
      }}"""
PICK = """
          if (place < WG && KEPT(high, low, i)) {
            place = ATOMIC_TAKE(sh[5]);
            if (place < WG) ra[place] = i;
          }"""
# keep 1: the prefix that SELECT or BOUND found, 2: all but it, 3: keys of at least limit_key. At
# most a candidate a thread is found in any order, then put in the order of the list; more are moved
# up one part of the list after another.
COMPACT = f"""
      {{
#if WG > 1
        if ((keep == 1u ? taken : keep == 2u ? n - taken : count) <= WG) {{
          if (LID == 0u) sh[5] = 0u;
          BARRIER();
          uint place = 0u;
          {each(PICK, high="keep == 3u ? KEY(i) : HIGH(i)", low="LOW(i)")}
          BARRIER();
          if (sh[5] <= WG) {{
            n = sh[5];
            uint i = LID < n ? ra[LID] : 0u, to = 0u, k, id, high, low, e;
            for (uint b = 0u; b < n; b++) to += ra[b] < i ? 1u : 0u;
            {READ.format("")}
            DEVICE_BARRIER(); /* everything was read that is written over */
            if (LID < n) {{ {WRITE.format("")} }}
          }}
          DEVICE_BARRIER();
        }} else
#endif
        {{
        uint filled = 0u;
        for (uint base = LID * RUN; base < n + LID * RUN; base += WG * RUN) {{ /* RUN neighbours a thread */
          uint inside = 0u, found = 0u, k[RUN], id[RUN], high[RUN], low[RUN], e[RUN];
          UNROLL for (uint u = 0u; u < RUN; u++) {{
            uint i = min(base + u, n - 1u), by_high = keep == 3u ? KEY(i) : HIGH(i), by_low = LOW(i);
            if (base + u < n && KEPT(by_high, by_low, i)) {{ inside |= 1u << u; found++; }}
          }}
          UNROLL for (uint u = 0u; u < RUN; u++) {{
            uint i = base + u;
            if ((inside >> u & 1u) != 0u) {{ {READ.format("[u]")} }}
          }}
          uint to = filled + found;
#if WG == 1
          filled = to;
#else
          ra[LID] = found;
          DEVICE_BARRIER(); /* everything was read, here and before, that is written over */
          for (uint o = 1u; o < WG; o <<= 2u) {{
            rb[LID] = ra[LID] + (LID >= o ? ra[LID - o] : 0u);
            BARRIER();
            ra[LID] = rb[LID] + (LID >= 2u * o ? rb[LID - 2u * o] : 0u);
            BARRIER();
          }}
          to = filled + ra[LID];
          filled += ra[WG - 1];
#endif
          to -= found;
          UNROLL for (uint u = 0u; u < RUN; u++) if ((inside >> u & 1u) != 0u) {{ {WRITE.format("[u]")} to++; }}
          DEVICE_BARRIER();
        }}
        n = filled;
        }}
      }}"""
# Sparse entries of one kind. A thread has all entries of its ids, so that they come in their order.
CHANGE = f"""
      {{
        bool some = false;
        for (uint j = begin; j < end; j++) some = some || UINT(KIND[j]) == change;
        if (some) {{
          {KEEP_ORDER}
          DEVICE_BARRIER();
          for (uint j = begin; j < end; j++) {{
            uint id = UINT(IDS[j]);
            if (UINT(KIND[j]) != change || id >= n_vocab || id % WG != LID) continue;
            uint at = id;
            if (n < n_vocab) {{ /* the list is in the order of ids */
              uint lo = 0u, hi = n;
              while (lo < hi) {{ uint mid = (lo + hi) / 2u; if (ID(mid) < id) lo = mid + 1u; else hi = mid; }}
              at = lo;
              if (at >= n || ID(at) != id) continue;
            }}
            PRECISE float x = value_of(KEY(at));
            float value = VALUE[j];
            if (change == 0u) x = x + value;
            else if (change == 2u) x = x - value;
            else {{
              x = x <= 0.0f ? x * PARAM(REPEAT) : x / PARAM(REPEAT);
              x = x - (value * PARAM(FREQUENCY) + PARAM(PRESENCE));
            }}
            KEY(at) = key_of(x);
          }}
          is_sorted = 0u;
          DEVICE_BARRIER();
        }}
      }}"""
TOPMOST = """
          if (reached(high, 0u, i, least_high, 0u, last)) {
            uint at = ATOMIC_TAKE(sh[5]);
            hist[at] = high; h0[at] = i; rf_top[at] = U2F(e) / whole;
          }"""
# How many of the likeliest leave mirostat 1 its surprise (Basu et al., 2021): the probabilities of
# the first 100.
ZIPF = f"""
      {{
        if (LID == 0u) sh[5] = 0u;
        BARRIER();
        {each(TOPMOST, high="HIGH(i)", e="E(i)")}
        BARRIER();
        uint many = sh[5];
        for (uint a = LID; a < many; a += WG) {{
          uint rank = 0u;
          for (uint b = 0u; b < many; b++) if (hist[b] > hist[a] || (hist[b] == hist[a] && h0[b] < h0[a])) rank++;
          h1[rank] = F2U(rf_top[a]);
        }}
        BARRIER();
        PRECISE float tb = 0.0f;
        PRECISE float tt = 0.0f;
        for (uint i = 0u; i + 1u < many; i++) {{
          PRECISE float t = LOG(FLOAT(i + 2u) / FLOAT(i + 1u));
          tb = tb + t * LOG(U2F(h1[i]) / U2F(h1[i + 1u]));
          tt = tt + t * t;
        }}
        float s_hat = tb / tt, eps = s_hat - 1.0f, vocabulary = FLOAT(n_vocab);
        float k = power((eps * power(2.0f, mu)) / (1.0f - power(vocabulary, -eps)), 1.0f / s_hat);
        wanted = k >= 1.0f && k < 2147483648.0f ? UINT(k) : 1u;
        BARRIER();
      }}"""
