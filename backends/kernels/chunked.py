"""A product's sum over K where lanes are threads, or elements of a vector: one order for any number of rows.

K is cut into chunks, each summed from its first block to its last, and the chunks' sums are added in order. For few
rows the chunks are summed side by side by threads of one group (`SPLIT`), for many rows one after the other by one
thread; the bits are the same. `BLOCK_STEP` stands for what adds block b to `acc`.
"""

from __future__ import annotations

from backends.kernels import product
from backends.kernels.dialect import LANES

CHUNKS = 16  # of K on SIMT devices
SIMT_TILES = [{"WG": LANES * CHUNKS, "MT": mt, "SPLIT": CHUNKS, "CHUNKS": CHUNKS} for mt in (1, 4, 8)]
SIMT_TILES.append({"WG": 64, "MT": 8, "SPLIT": 1, "CHUNKS": CHUNKS})

FRAME = f"""
  BEGIN
  uint group = unit, g = min(group, groups - 1u), split = SUB % SPLIT;
  uint xr[MT];
  UNROLL for (uint m = 0u; m < MT; m++) xr[m] = min(GX * MT + m, n_m - 1u) * n_k;
#if PAIR
  LF kept[MT];
  for (uint p = 0u; p < 2u; p++) {{
  if (p == 1u) CHOOSE(1u)
#endif
  PRECISE LF tot[MT];
  UNROLL for (uint m = 0u; m < MT; m++) tot[m] = LSPLAT(0.0f);
  for (uint c = split; c < CHUNKS; c += SPLIT) {{
    PRECISE LF acc[MT];
    UNROLL for (uint m = 0u; m < MT; m++) acc[m] = LSPLAT(0.0f);
    for (uint b = c * n_blocks / CHUNKS; b < (c + 1u) * n_blocks / CHUNKS; b++) {{
      BLOCK_STEP
    }}
#if SPLIT == 1
    UNROLL for (uint m = 0u; m < MT; m++) tot[m] = tot[m] + acc[m];
#else
    UNROLL for (uint m = 0u; m < MT; m++) sums[m * WG + LID] = acc[m];
#endif
  }}
#if SPLIT > 1
  BARRIER();
  if (SUB < MT) {{
    uint m = SUB;
    PRECISE float total = 0.0f;
    for (uint s = 0u; s < SPLIT; s++) total = total + sums[m * WG + s * 16u + LANE];
    {product.end("total", "kept[0]", "group")}
  }}
#if PAIR
  BARRIER();
#endif
#else
  UNROLL for (uint m = 0u; m < MT; m++) {product.end("tot[m]", "kept[m]", "group")}
#endif
#if PAIR
  }}
#endif
"""
UNIT = "GY * (WG < 16 ? 1u : UINT(WG / 16 / SPLIT)) + SUB / SPLIT"
