"""Split-K: the sum over K of a product, in one order for any number of rows.

K is cut into chunks, each summed from its first block to its last, and the chunks' sums are added
in order. With few rows, `SPLIT` teams of threads of one group sum chunks in parallel; with many
rows, one thread sums them in turn. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from logitless.backends.gpu.language.dialect import KERNELS, LANES, Shape
from logitless.backends.gpu.matmul import launch
from logitless.graph.tensor import Tensor

CHUNKS = 32  # of K on SIMT devices
SPLITS = (16, 32)  # teams of 16 threads in a group
FEW_GROUPS = 512  # that do not fill a large GPU, so that each had better have many threads
FULL = 1024  # groups of 64 threads that do
# The variants of SIMT devices.
SIMT_TILES = [{"WG": LANES * n, "MT": mt, "SPLIT": n, "CHUNKS": CHUNKS} for mt in (1, 4, 8) for n in SPLITS]
SIMT_TILES.append({"WG": 64, "MT": 8, "SPLIT": 1, "CHUNKS": CHUNKS})


def tile_for(
    m: int, mt: int, parts: Sequence[Tensor], shape: Shape, kernel: str, pair: bool
) -> tuple[launch.Tile, int]:
    """The tile of a product of m rows, and its number of teams. `mt`: rows a group where they fit;
    `pair`: of a GLU.
    """
    tiles, units = -(-m // mt), sum(-(-w.shape[0] // LANES) for w in parts)
    if m > 16 and mt == 8 and tiles * -(-units * LANES // 64) >= FULL:
        choices = []
    else:
        few, many = SPLITS
        choices = [(mt, many), (mt, few)] if tiles * units <= FEW_GROUPS else [(mt, few)]
        choices += [(rows, few) for rows in (4, 1) if rows < mt]  # for devices with little memory of a group
    for rows, split in choices:
        if fitting := KERNELS[kernel].find(shape, MT=rows, SPLIT=split, PAIR=pair):
            return launch.Tile(rows, 1, dict(fitting)["WG"] // (LANES * split)), split
    return launch.Tile(8, 1, 64 // LANES), 1


UNIT = "GY * (WG < 16 ? 1u : UINT(WG / 16 / SPLIT)) + SUB / SPLIT"
SUMS = "float sums[(SPLIT > 1 ? MT * CHUNKS * WG / SPLIT : 1)]"


def frame(
    begin: str,
    step: str,
    *,
    row: str = launch.ROW,
    end: Callable[[str, str, str], str] = launch.end,
    after_pair: str = "",
) -> str:
    """Code of a kernel. `begin` finds a thread's weight, `step` adds block b to `acc`, `end`
    stores a row's sum. `after_pair`: what follows where a pair's results are `kept`.
    """
    return f"""
  {begin}
  uint group = unit, g = min(group, groups - 1u), split = SUB % SPLIT;
  uint xr[MT];
  UNROLL for (uint m = 0u; m < MT; m++) xr[m] = {row} * n_k;
#if PAIR
  LF kept[MT];
  for (uint p = 0u; p < 2u; p++) {{
  if (p == 1u) CHOOSE(1u)
#endif
  PRECISE LF tot[MT];
  UNROLL for (uint m = 0u; m < MT; m++) tot[m] = LSPLAT(0.0f);
  for (uint c = split * (CHUNKS / SPLIT); c < (split + 1u) * (CHUNKS / SPLIT); c++) {{
    PRECISE LF acc[MT];
    UNROLL for (uint m = 0u; m < MT; m++) acc[m] = LSPLAT(0.0f);
    for (uint b = c * n_blocks / CHUNKS; b < (c + 1u) * n_blocks / CHUNKS; b++) {{
      {step}
    }}
#if SPLIT == 1
    UNROLL for (uint m = 0u; m < MT; m++) tot[m] = tot[m] + acc[m];
#else
    UNROLL for (uint m = 0u; m < MT; m++) sums[((SUB / SPLIT * MT + m) * CHUNKS + c) * 16u + LANE] = acc[m];
#endif
  }}
#if SPLIT > 1
  BARRIER();
  if (split < MT) {{
    uint m = split;
    PRECISE float total = 0.0f;
    for (uint s = 0u; s < CHUNKS; s++) total = total + sums[((SUB / SPLIT * MT + m) * CHUNKS + s) * 16u + LANE];
    {end("total", "kept[0]", "group")}
  }}
#if PAIR
  BARRIER();
#endif
#else
  UNROLL for (uint m = 0u; m < MT; m++) {end("tot[m]", "kept[m]", "group")}
#endif
#if PAIR
  }}
  {after_pair}
#endif
"""
