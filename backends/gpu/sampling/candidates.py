"""Candidates of a row on GPUs: the list that samplers work on, and C text of its passes and selections.

Candidates are a list of n in the order of their ids, in the group's scratch: KEY (an unsigned
number in the order of the logits), ID, the order key OKH, OKL, the weight E (e^(logit − greatest))
and a probability BP. Their order (`order`) is a relation; the list is never sorted: 0 by id; 1 by
OKH; 2 by OKH, then OKL; 3 by KEY; greatest first, ties by id. A sampler that keeps the likeliest
takes the prefix of that order which reaches a count, or a sum of weights (`part`). It is found by
radix selection: 8 bits at a time, a histogram tells in which digit the goal is reached. After the
keys come digits of the index in the list, so ties are settled in the order of ids. Weights are
summed as integers in units of 2⁻³¹, so sums do not depend on the order of additions.

A GPU waits here for memory, one access after the other. So neighbouring threads read neighbouring
candidates, each thread has MANY loads in flight (`each`), and where few of many are needed, a lower
bound of their keys is found first and leaves a short list (BOUND). Only the loads are written out:
the loop over what was loaded is not, all samplers share one pass (sample.py) and all steps of a
selection another (`part`), so that compilers have little to do and registers suffice."""

from __future__ import annotations

ARRAYS = 6  # words a candidate
TOP = 100  # likeliest candidates that mirostat 1 looks at


FUNCTIONS = r"""
#define SELECTS (VARIANT >= 1) /* of graph/ops/sampling/samplers.py: USUAL */
#define ALL_SAMPLERS (VARIANT >= 2)
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
/* steps of `part` */
#define BOUND 0u
#define COUNT 1u
#define FIND 2u
#define PICK 3u
#define MOVE 4u
#define READY 5u
#define MOVED 5u /* words of a candidate that are its own for more than a pass */
#define WORD(a, i) S[w0 + (a) * n_vocab + (i)]
#define KEY(i) WORD(0u, i)
#define ID(i) WORD(1u, i)
#define OKH(i) WORD(2u, i)
#define OKL(i) WORD(3u, i)
#define E(i) WORD(4u, i)
#define BP(i) WORD(5u, i)
#define HIGH(i) (order == 0u ? 0u : WORD(order == 3u ? 0u : 2u, i)) /* KEY or OKH */
#define LOW(i) (ALL_SAMPLERS && order == 2u ? OKL(i) : 0u)
#define PARAM(c) Q[r * N_PARAMS + AT_##c]
FN bool reached(uint high, uint low, uint i, uint least_high, uint least_low, uint last) {
  return high > least_high || (high == least_high && (low > least_low || (low == least_low && i <= last)));
}
/* what a thread has gathered for digit `held` */
#define FLUSH { \
  uint to_ = held * COPIES + LID % COPIES; \
  if (own_count != 0u) ATOMIC_ADD(hist[to_], own_count); \
  if (sel == 2u && own_count != 0u) { \
    uint was = ATOMIC_ADD(h0[to_], own.x), carried = own.y + (was + own.x < was ? 1u : 0u); \
    if (carried != 0u) ATOMIC_ADD(h1[to_], carried); \
  } }
"""


Read = str | tuple[str, ...]  # an expression; or a condition, one where it holds, and one where not
LOW = "uint low = LOW(i);"  # typical_p alone has one, so it is not loaded ahead


def each(body: str, begin: str = "0u", end: str = "n", **reads: Read) -> str:
    """The body for every candidate i of a thread.

    `reads` are the words of a candidate that the body needs, by the name they have there. All are
    loaded, for MANY candidates, before the first is used."""
    take = " ".join(f"uint {name} = {name}_[u_];" for name in reads)
    return f"""
      for (uint i_ = {begin} + LID; i_ < {end}; i_ += MANY * WG) {{
        {" ".join(_load(name, read, end) for name, read in reads.items())}
        ROLLED for (uint u_ = 0u; u_ < MANY; u_++) {{
          uint i = i_ + u_ * WG;
          if (MANY == 1 || i < {end}) {{ {take} {body} }}
        }}
      }}"""


def _load(name: str, read: Read, end: str) -> str:
    if isinstance(read, tuple):
        condition, value, other = read
        then, otherwise = (_load("", expression, end) for expression in (value, other))
        return f"uint {name}_[MANY]; if ({condition}) {then.format(name)} else {otherwise.format(name)}"
    at = f"MANY == 1 || i_ + u_ * WG >= {end} ? i_ : i_ + u_ * WG"  # never what another thread writes
    loop = f"UNROLL for (uint u_ = 0u; u_ < MANY; u_++) {{{{ uint i = {at}; {{0}}_[u_] = {read}; }}}}"
    return f"uint {name}_[MANY]; {loop.format(name)}" if name else loop


# Whether a candidate is kept, of whom `high` is the key where those of a least key are.
KEPT = "(keep == 3u ? high >= limit_key : reached(high, low, i, least_high, least_low, last) == (keep == 1u))"


def tree(combine: str) -> str:
    """Reduce the threads' values in local memory at LID into 0, in the same pairs in every run."""
    return f"""
      BARRIER();
      ROLLED for (uint o = WG / 2; o > 0u; o >>= 1u) {{
        if (LID < o) {{ uint a = LID, b = LID + o; {combine} }}
        BARRIER();
      }}"""


# What a step of `part` does with a candidate. BOUND: the thread's greatest key. COUNT: those that are
# still possible count for their digit; equal digits of a thread, one after the other, are added up
# before. FIND: the last one that is taken. PICK: those that are kept get a place, in any order.
STEP = f"""
          {LOW}
          if (WG > 1 && step == BOUND) held = max(held, high);
          else if (WG > 1 && step == PICK) {{
            if (place < WG && {KEPT}) {{
              place = ATOMIC_TAKE(sh[5]);
              if (place < WG) ra[place] = i;
            }}
          }} else if ((high & mask_high) == least_high && (low & mask_low) == least_low) {{
            if (step == FIND) {{ sh[0] = i; sh[1] = high; sh[2] = low; }}
            else {{
              uint d = (word == 0u ? ~high : word == 1u ? ~low : i - from) >> shift & 255u;
              uvec2 m = UVEC2(sel == 2u ? units(U2F(e)) : 0u, 0u);
              if (WG > 1 && d == held) {{ own_count++; own = add64(own, m); }}
              else {{
                if (WG > 1) FLUSH
                held = d; own_count = 1u; own = m;
                if (WG == 1) {{ FLUSH own_count = 0u; }}
              }}
            }}
          }}"""
# All that is kept moves up, one part of the list after another, RUN neighbours a thread.
MOVE_UP = f"""
      {{
        uint filled = 0u;
        for (uint base = LID * RUN; base < n + LID * RUN; base += WG * RUN) {{ /* RUN neighbours a thread */
          uint inside = 0u, n_inside = 0u;
          ROLLED for (uint u = 0u; u < RUN; u++) {{
            uint i = min(base + u, n - 1u), high = keep == 3u ? KEY(i) : HIGH(i), low = LOW(i);
            if (base + u < n && {KEPT}) {{ inside |= 1u << u; n_inside++; }}
          }}
          uint to = filled + n_inside;
#if WG == 1
          filled = to;
#else
          ra[LID] = n_inside;
          DEVICE_BARRIER(); /* everything was read, here and before, that is written over */
          ROLLED for (uint o = 1u; o < WG; o <<= 2u) {{
            rb[LID] = ra[LID] + (LID >= o ? ra[LID - o] : 0u);
            BARRIER();
            ra[LID] = rb[LID] + (LID >= 2u * o ? rb[LID - 2u * o] : 0u);
            BARRIER();
          }}
          to = filled + ra[LID];
          filled += ra[WG - 1];
#endif
          to -= n_inside;
          ROLLED for (uint a = 0u; a < MOVED; a++) {{
            uint word[RUN], place = to;
            UNROLL for (uint u = 0u; u < RUN; u++) word[u] = WORD(a, min(base + u, n - 1u));
            DEVICE_BARRIER();
            UNROLL for (uint u = 0u; u < RUN; u++)
              if ((inside >> u & 1u) != 0u) {{ WORD(a, place) = word[u]; place++; }}
          }}
          DEVICE_BARRIER();
        }}
        n = filled;
      }}"""
# How what is kept comes together: a candidate a thread, or as many as there are.
KEEP = """(keep == 0u ? READY
          : WG > 1 && (keep == 1u ? taken : keep == 2u ? n - taken : count) <= WG ? PICK : MOVE)"""
# COUNT digits of the prefix of the order that reaches `goal`, which is at most the whole.
BEGIN_COUNT = """
          step = COUNT; digit = 0u; mask_high = 0u; mask_low = 0u; from = 0u; to = n; only = false;
          before = UVEC2(0u, 0u); least_high = 0u; least_low = 0u; taken = 0u;"""
# BOUND finds a key that a small count is not below: of the threads' greatest keys the one that
# reaches the count. Few others are not below it, and PICK makes a short list of them; where there
# are too many, because they are equal, the list stays as it is.
NARROWS = "WG > 1 && sel == 1u && keep == 1u && order != 0u && goal.x <= WG / 2u && n > 4u * WG"


def part(again: str = "") -> str:
    """The prefix of the order that reaches `goal`: its last member `last`, its length `taken`, its
    least keys. Then the candidates that are kept: 1 the prefix, 2 all but it, 3 keys of at least
    limit_key.

    All steps share one loop over the candidates. Digits count from the greatest key down, and from
    the beginning of the list up. `again`: conditions, with what they do, for another goal."""
    return f"""
      bool narrow = {NARROWS}, once = true, only;
      uint step, digit, mask_high, mask_low, from, to;
      uvec2 before;
      {BEGIN_COUNT}
      step = narrow ? BOUND : sel != 0u ? COUNT : {KEEP};
      ROLLED for (; step < MOVE;) {{
        uint word = 0u, shift = 0u;
        if (step == COUNT) {{
          ROLLED for (; digit < 12u; digit++) {{ /* of HIGH, LOW and the place */
            word = digit / 4u; shift = 24u - 8u * (digit % 4u);
            if (word == 0u ? order != 0u : word == 1u ? order == 2u : shift == 0u || (n - 1u) >> shift != 0u) break;
          }}
          if (only || digit == 12u) step = FIND;
          else for (uint d = LID; d < 256u * COPIES; d += WG) {{ hist[d] = 0u; h0[d] = 0u; h1[d] = 0u; }}
        }}
        if (LID == 0u) sh[5] = 0u;
        BARRIER();
        uint held = 0u, own_count = 0u, place = 0u;
        uvec2 own = UVEC2(0u, 0u);
        {
        each(
            STEP,
            "from",
            "to",
            high=("order != 0u || keep == 3u", "WORD(keep == 3u || order == 3u ? 0u : 2u, i)", "0u"),
            e=("step == COUNT && sel == 2u", "E(i)", "0u"),
        )
    }
        if (step == COUNT) {{
          FLUSH
          BARRIER();
          for (uint g = LID; g < 16u; g += WG) {{ /* copies into the first, and 16 digits into one of the 16 behind */
            uint all = 0u;
            uvec2 m = UVEC2(0u, 0u);
            ROLLED for (uint d = 16u * g; d < 16u * g + 16u; d++) {{
              uint at = d * COPIES;
              ROLLED for (uint c = at + 1u; c < at + COPIES; c++) {{
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
            ROLLED for (uint digits = 16u; digits != 0u; digits /= 16u) {{
              ROLLED for (uint end_d = d + 15u * digits; d < end_d; d += digits) {{
                uint at = (digits == 16u ? 256u + d / 16u : d) * COPIES;
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
          before = UVEC2(sh[1], sh[2]); taken = sh[3]; only = sh[4] == 1u; digit++;
        }} else if (step == FIND) {{
          BARRIER();
          last = sh[0]; least_high = sh[1]; least_low = sh[2]; taken++; from = 0u; to = n;
          bool further = once;
          once = false; step = {KEEP};
          if (further) {{
            further = false;
            {again}
            if (further) {{ {BEGIN_COUNT} }}
          }}
        }}
#if WG > 1
        else if (step == BOUND) {{
          uint above = 0u, equal = 0u, few = max(goal.x, 1u);
          ra[LID] = held;
          BARRIER();
          for (uint b = 0u; b < WG; b++) {{ above += ra[b] > held ? 1u : 0u; equal += ra[b] == held ? 1u : 0u; }}
          if (above < few && few <= above + equal) sh[0] = held;
          BARRIER();
          least_high = sh[0]; last = n; taken = few; step = PICK;
        }} else {{ /* put into the order of the list */
          BARRIER();
          if (sh[5] <= WG) {{
            n = sh[5];
            uint i = LID < n ? ra[LID] : 0u, to_place = 0u;
            for (uint b = 0u; b < n; b++) to_place += ra[b] < i ? 1u : 0u;
            ROLLED for (uint a = 0u; a < MOVED; a++) {{
              uint moved = WORD(a, i);
              DEVICE_BARRIER(); /* everything was read that is written over */
              if (LID < n) WORD(a, to_place) = moved;
            }}
          }}
          DEVICE_BARRIER();
          step = READY;
          if (narrow) {{ {BEGIN_COUNT} }}
          narrow = false;
        }}
#endif
      }}
      if (step == MOVE) {MOVE_UP}"""


# Sparse entries of one kind. A thread has all entries of its ids, so that they come in their order.
ENTRIES = """
        for (uint j = begin; j < end; j++) {
          uint id = UINT(IDS[j]);
          if (UINT(KIND[j]) != kind || id >= n_vocab || id % WG != LID) continue;
          uint at = id;
          if (n < n_vocab) { /* the list is in the order of ids */
            uint lo = 0u, hi = n;
            while (lo < hi) { uint mid = (lo + hi) / 2u; if (ID(mid) < id) lo = mid + 1u; else hi = mid; }
            at = lo;
            if (at >= n || ID(at) != id) continue;
          }
          PRECISE float x = value_of(KEY(at));
          float value = VALUE[j];
          if (kind == 0u) x = x + value;
          else if (kind == 2u) x = x - value;
          else {
            x = x <= 0.0f ? x * PARAM(REPEAT) : x / PARAM(REPEAT);
            x = x - (value * PARAM(FREQUENCY) + PARAM(PRESENCE));
          }
          KEY(at) = key_of(x);
        }
        is_sorted = 0u;"""
# How many of the likeliest leave mirostat 1 its surprise (Basu et al., 2021): the probabilities of
# the first 100.
ZIPF = """
      {
        if (LID == 0u) sh[5] = 0u;
        BARRIER();
        for (uint i = LID; i < n; i += WG) {
          uint high = HIGH(i);
          if (reached(high, 0u, i, least_high, 0u, last)) {
            uint at = ATOMIC_TAKE(sh[5]);
            hist[at] = high; h0[at] = i; rf_top[at] = U2F(E(i)) / whole;
          }
        }
        BARRIER();
        uint many = sh[5];
        for (uint a = LID; a < many; a += WG) {
          uint rank = 0u;
          for (uint b = 0u; b < many; b++) if (hist[b] > hist[a] || (hist[b] == hist[a] && h0[b] < h0[a])) rank++;
          h1[rank] = F2U(rf_top[a]);
        }
        BARRIER();
        PRECISE float tb = 0.0f;
        PRECISE float tt = 0.0f;
        ROLLED for (uint i = 0u; i + 1u < many; i++) {
          PRECISE float t = LOG(FLOAT(i + 2u) / FLOAT(i + 1u));
          tb = tb + t * LOG(U2F(h1[i]) / U2F(h1[i + 1u]));
          tt = tt + t * t;
        }
        float s_hat = tb / tt, eps = s_hat - 1.0f, vocabulary = FLOAT(n_vocab);
        float k = power((eps * power(2.0f, mu)) / (1.0f - power(vocabulary, -eps)), 1.0f / s_hat);
        n_likely = k >= 1.0f && k < 2147483648.0f ? UINT(k) : 1u;
        BARRIER();
      }"""
