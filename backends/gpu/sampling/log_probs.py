"""Log-probabilities of a row's chosen token and of its likeliest: one work group a row."""

from __future__ import annotations

from logitless.backends.gpu.language.dialect import Kernel, Shape
from logitless.backends.gpu.lowering import Dispatch, dispatch, lower
from logitless.backends.gpu.sampling import candidates as c
from logitless.backends.gpu.sampling.sample import CPU, LOCAL, SIMT, SOFT, row_groups, threads
from logitless.backends.gpu.sampling.samplers import constants
from logitless.graph.ops.sampling.samplers import USUAL
from logitless.graph.tensor import Tensor

LISTED = "KEY(i) = k; ID(i) = i; own_key = max(own_key, k);"
ADD = """
      float x = value_of(k);
      PRECISE float y = (top <= -INF ? 0.0f : x == top ? 1.0f : EXP(x - top)) - lost;
      PRECISE float next = own + y;
      lost = (next - own) - y;
      own = next;"""
Kernel(
    "log_probs",
    "f32 L, i32 IDS TARGET, w f32 Y, rw u32 S",
    "uint n_vocab n_rows width n_top",
    f"""
  uint w0 = GX * {c.ARRAYS}u * n_vocab;
  for (uint r = GX; r < n_rows; r += NGX) {{
    uint n = n_vocab, order = 3u, last = 0u, taken = 0u, least_high = 0u, least_low = 0u;
    uint sel = 1u, keep = 1u, limit_key = 0u, count = 0u, own_key = 0u;
    float top = 0.0f;
    uvec2 goal = UVEC2(min(n_top, n), 0u);
    {c.each(LISTED, k="key_of(L[r * n_vocab + i])")}
    ra[LID] = own_key;
    {c.tree("ra[a] = max(ra[a], ra[b]);")}
    top = value_of(ra[0]);
    DEVICE_BARRIER();
    PRECISE float own = 0.0f;
    PRECISE float lost = 0.0f;
    {c.each(ADD, k="KEY(i)")}
    rf[LID] = own;
    {c.tree("rf[a] = rf[a] + rf[b];")}
    float lse = rf[0] > 0.0f ? LOG(rf[0]) : 0.0f;
    BARRIER();
    if (LID == 0u) {{
      uint target = TARGET[r] >= 0 ? UINT(TARGET[r]) : UINT(IDS[r * width]) & ID_BITS;
      Y[r * (1u + 2u * n_top)] = L[r * n_vocab + min(target, n_vocab - 1u)] - top - lse;
    }}
    if (n_top > 0u) {{
      {c.part()}
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
    cpu=CPU,
    soft=SOFT,
    local=LOCAL,
    functions=f"#define VARIANT {USUAL}\n{constants()}{c.FUNCTIONS}",
)


@lower("log_probs")
def _(t: Tensor, shape: Shape) -> list[Dispatch]:
    logits, ids, _ = t.src
    rows, n_vocab = logits.shape
    groups = row_groups(rows, shape)
    scratch = 4 * groups * c.ARRAYS * n_vocab
    words = (n_vocab, rows, ids.shape[1], t.attrs["n"])
    return [dispatch("log_probs", shape, (*t.src, t, None), words, groups, scratch, **threads("log_probs", shape))]
