"""The text of the sampling kernel: a group of threads runs the chain of samplers of a row (graph/ops/samplers.py).

Candidates are a list in the order of their ids, n long, in the group's scratch: KEY (an unsigned number in the order of
the logits), ID, the order key OKH, OKL, the weight E (e^(logit − greatest)) and a probability BP. Their order (`order`)
is a relation, the list itself is never sorted: 0 by id; 1 by OKH; 2 by OKH, then OKL; 3 by KEY; greatest first, ties by
id. A sampler that takes the likeliest becomes `SELECT`: the prefix of that order which reaches a count, or a sum of
weights. It is found by radix: 8 bits at a time, a histogram says in which digit the goal is reached. What is equal in
all bits is settled in the order of ids. Weights are summed as integers in units of 2⁻³¹, so their sums do not depend
on who adds first, and the additions to the histogram may come in any order.
"""

from __future__ import annotations

from graph.ops import samplers as s

TOP = 100  # of the likeliest that mirostat 1 looks at


def constants() -> str:
    """The codes and columns of graph/ops/samplers.py, as defines."""
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
#define HIGH(i) (order == 3u ? KEY(i) : OKH(i))
#define LOW(i) (order == 2u ? OKL(i) : 0u)
#define EACH(i) for (uint i = LID; i < n; i += WG)
#define KEEP_ORDER if (order == 3u) { EACH(i) OKH(i) = KEY(i); order = 1u; }
#define SORT if (is_sorted == 0u) { order = 3u; is_sorted = 1u; }
#define PARAM(c) Q[r * N_PARAMS + AT_##c]
"""


def tree(combine: str) -> str:
    """Combine what each thread has left in local memory at LID, into 0: the same pairs in every run."""
    return f"""
      BARRIER();
      for (uint o = WG / 2; o > 0u; o >>= 1u) {{
        if (LID < o) {{ uint a = LID, b = LID + o; {combine} }}
        BARRIER();
      }}"""


# `best`: index of the greatest key, the lowest of several; `top` its logit.
MAXIMUM = f"""
      {{
        uint own_key = 0u, own_at = 0u;
        EACH(i) {{ uint k = KEY(i); if (k > own_key) {{ own_key = k; own_at = i; }} }}
        ra[LID] = own_key; rb[LID] = own_at;
        {tree("if (ra[b] > ra[a] || (ra[b] == ra[a] && rb[b] < rb[a])) { ra[a] = ra[b]; rb[a] = rb[b]; }")}
        top = value_of(ra[0]); best = rb[0];
        BARRIER();
      }}"""
SOFTMAX = f"""
      {{
        uvec2 own = UVEC2(0u, 0u);
        EACH(i) {{
          float x = value_of(KEY(i));
          float e = top <= -INF ? 0.0f : x == top ? 1.0f : EXP(x - top);
          E(i) = F2U(e);
          own = add64(own, UVEC2(units(e), 0u));
        }}
        ra[LID] = own.x; rb[LID] = own.y;
        {tree("uvec2 m = add64(UVEC2(ra[a], rb[a]), UVEC2(ra[b], rb[b])); ra[a] = m.x; rb[a] = m.y;")}
        total = UVEC2(ra[0], rb[0]); whole = float_of(total);
        DEVICE_BARRIER(); /* weights are read by other threads than wrote them */
      }}"""
# `count` and `sum` of what `stat` names, over the candidates.
STATISTIC = f"""
      {{
        uint own_count = 0u;
        PRECISE float own_sum = 0.0f;
        PRECISE float lost = 0.0f;
        EACH(i) {{
          uint k = KEY(i);
          float p = stat == 1u || stat == 2u || stat == 4u ? (whole > 0.0f ? U2F(E(i)) / whole : 0.0f) : 0.0f;
          float term = 0.0f;
          if (stat == 1u) term = p > 0.0f ? -p * LOG(p) : 0.0f;
          else if (stat == 2u) own_count += p >= limit ? 1u : 0u;
          else if (stat == 3u) own_count += k >= limit_key ? 1u : 0u;
          else if (stat == 4u) own_count += -(LOG(p) * 1.44269504f) <= limit ? 1u : 0u;
          else if (k != LOWEST) {{
            own_count++;
            term = stat == 5u ? value_of(k) : (value_of(k) - limit) * (value_of(k) - limit);
          }}
          PRECISE float y = term - lost;
          PRECISE float next = own_sum + y;
          lost = (next - own_sum) - y;
          own_sum = next;
        }}
        ra[LID] = own_count; rf[LID] = own_sum;
        {tree("ra[a] += ra[b]; rf[a] = rf[a] + rf[b];")}
        count = ra[0]; sum = rf[0];
        BARRIER();
      }}"""
# The prefix of the order that reaches `goal`: its last member `last`, its length `taken`, its least keys.
SELECT = """
      {
        uint passes = order == 0u ? 0u : order == 2u ? 8u : 4u;
        uint mask_high = 0u, mask_low = 0u;
        uvec2 before = UVEC2(0u, 0u);
        least_high = 0u; least_low = 0u;
        taken = 0u;
        for (uint pass = 0u; pass < passes; pass++) {
          uint shift = 24u - 8u * (pass % 4u);
          for (uint d = LID; d < 256u; d += WG) { hist[d] = 0u; if (sel == 2u) { m0[d] = 0u; m1[d] = 0u; m2[d] = 0u; } }
          BARRIER();
          EACH(i) {
            uint high = HIGH(i), low = LOW(i);
            if ((high & mask_high) == least_high && (low & mask_low) == least_low) {
              uint d = ((pass < 4u ? high : low) >> shift) & 255u;
              ATOMIC_ADD(hist[d], 1u);
              if (sel == 2u) {
                uint m = units(U2F(E(i)));
                ATOMIC_ADD(m0[d], m & 2047u); ATOMIC_ADD(m1[d], (m >> 11) & 2047u); ATOMIC_ADD(m2[d], m >> 22);
              }
            }
          }
          BARRIER();
          if (LID == 0u) {
            uint found = 0u;
            for (uint j = 0u; j < 256u; j++) {
              uint d = 255u - j;
              if (hist[d] == 0u) continue;
              found = d;
              uvec2 here = UVEC2(hist[d], 0u);
              if (sel == 2u) here = add64(UVEC2(m0[d], 0u), add64(
                  UVEC2(m1[d] << 11, m1[d] >> 21), UVEC2(m2[d] << 22, m2[d] >> 10)));
              uvec2 after = add64(before, here);
              if (reaches(after, goal)) break;
              sh[3] = d;
              before = after; taken += hist[d];
            }
            /* where rounding left the goal unreached, the last digit is it: take back what was added for it */
            sh[0] = found; sh[1] = before.x; sh[2] = before.y; sh[4] = taken;
          }
          BARRIER();
          if (pass < 4u) { least_high |= sh[0] << shift; mask_high |= 255u << shift; }
          else { least_low |= sh[0] << shift; mask_low |= 255u << shift; }
          before = UVEC2(sh[1], sh[2]); taken = sh[4];
          BARRIER();
        }
        /* of those that are equal: each thread sums up a stretch of the list, then one finds the place */
        uint stretch = (n + WG - 1u) / WG;
        uvec2 own = UVEC2(0u, 0u);
        for (uint i = LID * stretch; i < min(n, LID * stretch + stretch); i++)
          if ((HIGH(i) & mask_high) == least_high && (LOW(i) & mask_low) == least_low)
            own = add64(own, UVEC2(sel == 2u ? units(U2F(E(i))) : 1u, 0u));
        ra[LID] = own.x; rb[LID] = own.y;
        BARRIER();
        if (LID == 0u) {
          uint from = 0u;
          uvec2 run = before;
          for (; from + 1u < WG; from++) {
            uvec2 after = add64(run, UVEC2(ra[from], rb[from]));
            if (reaches(after, goal)) break;
            run = after;
          }
          uint equal = 0u, at = 0u;
          bool there = false;
          for (uint i = 0u; i < n && !there; i++) {
            if ((HIGH(i) & mask_high) != least_high || (LOW(i) & mask_low) != least_low) continue;
            equal++; at = i;
            if (i / stretch < from) continue;
            run = add64(run, UVEC2(sel == 2u ? units(U2F(E(i))) : 1u, 0u));
            there = reaches(run, goal);
          }
          sh[0] = at; sh[1] = equal;
        }
        BARRIER();
        last = sh[0]; taken += sh[1];
        BARRIER();
      }"""
# keep 1: the prefix that SELECT found, 2: all but it, 3: keys of at least limit_key.
COMPACT = """
      {
        uint filled = 0u;
        for (uint base = 0u; base < n; base += WG) {
          uint i = base + LID;
          uint k = 0u, id = 0u, high = 0u, low = 0u, e = 0u, inside = 0u;
          if (i < n) {
            k = KEY(i); id = ID(i); high = OKH(i); low = OKL(i); e = E(i);
            uint by_high = order == 3u ? k : order == 0u ? 0u : high, by_low = order == 2u ? low : 0u;
            bool first_part = by_high > least_high || (by_high == least_high
                && (by_low > least_low || (by_low == least_low && i <= last)));
            inside = (keep == 1u ? first_part : keep == 2u ? !first_part : k >= limit_key) ? 1u : 0u;
          }
#if WG == 1
          uint to = filled;
          filled += inside;
#else
          ra[LID] = inside;
          DEVICE_BARRIER(); /* everything was read, here and before, that is written over */
          for (uint o = 1u; o < WG; o <<= 1u) {
            uint add = LID >= o ? ra[LID - o] : 0u;
            BARRIER();
            ra[LID] += add;
            BARRIER();
          }
          uint to = filled + ra[LID] - inside;
          filled += ra[WG - 1];
#endif
          if (inside != 0u) { KEY(to) = k; ID(to) = id; OKH(to) = high; OKL(to) = low; E(to) = e; }
          DEVICE_BARRIER();
        }
        n = filled;
      }"""
# Sparse entries of one kind. A thread has all entries of its ids, so that they come in their order.
CHANGE = """
      {
        bool some = false;
        for (uint j = begin; j < end; j++) some = some || UINT(KIND[j]) == change;
        if (some) {
          KEEP_ORDER
          DEVICE_BARRIER();
          for (uint j = begin; j < end; j++) {
            uint id = UINT(IDS[j]);
            if (UINT(KIND[j]) != change || id >= n_vocab || id % WG != LID) continue;
            uint at = id;
            if (n < n_vocab) { /* the list is in the order of ids */
              uint lo = 0u, hi = n;
              while (lo < hi) { uint mid = (lo + hi) / 2u; if (ID(mid) < id) lo = mid + 1u; else hi = mid; }
              at = lo;
              if (at >= n || ID(at) != id) continue;
            }
            PRECISE float x = value_of(KEY(at));
            float value = VALUE[j];
            if (change == 0u) x = x + value;
            else if (change == 2u) x = x - value;
            else {
              x = x <= 0.0f ? x * PARAM(REPEAT) : x / PARAM(REPEAT);
              x = x - (value * PARAM(FREQUENCY) + PARAM(PRESENCE));
            }
            KEY(at) = key_of(x);
          }
          is_sorted = 0u;
          DEVICE_BARRIER();
        }
      }"""
# How many of the likeliest leave mirostat 1 its surprise (Basu et al., 2021): the probabilities of the first 100.
ZIPF = """
      {
        if (LID == 0u) sh[5] = 0u;
        BARRIER();
        EACH(i) {
          uint high = HIGH(i);
          if (high > least_high || (high == least_high && i <= last)) {
            uint at = ATOMIC_TAKE(sh[5]);
            hist[at] = high; m0[at] = i; rf_top[at] = U2F(E(i)) / whole;
          }
        }
        BARRIER();
        uint many = sh[5];
        for (uint a = LID; a < many; a += WG) {
          uint rank = 0u;
          for (uint b = 0u; b < many; b++) if (hist[b] > hist[a] || (hist[b] == hist[a] && m0[b] < m0[a])) rank++;
          m1[rank] = F2U(rf_top[a]);
        }
        BARRIER();
        PRECISE float tb = 0.0f;
        PRECISE float tt = 0.0f;
        for (uint i = 0u; i + 1u < many; i++) {
          PRECISE float t = LOG(FLOAT(i + 2u) / FLOAT(i + 1u));
          tb = tb + t * LOG(U2F(m1[i]) / U2F(m1[i + 1u]));
          tt = tt + t * t;
        }
        float s_hat = tb / tt, eps = s_hat - 1.0f, vocabulary = FLOAT(n_vocab);
        float k = power((eps * power(2.0f, mu)) / (1.0f - power(vocabulary, -eps)), 1.0f / s_hat);
        wanted = k >= 1.0f && k < 2147483648.0f ? UINT(k) : 1u;
        BARRIER();
      }"""
