"""`logitless plan`: the memory that serving a model takes, and what runs where, with nothing allocated."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from server.cli import load

if TYPE_CHECKING:
    from graph.partition import Placement


def run(options: SimpleNamespace) -> int:
    report = make(options)
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def make(options: SimpleNamespace) -> dict[str, Any]:
    """Bytes per device, and the ops that each runs in the largest ordinary step."""
    path = load.model_path(options, "plan")
    engine = load.open_engine(path, options)
    placement, sizes = engine.measure()
    names = [d.device for d in sizes]
    ops: dict[str, Counter[str]] = {name: Counter() for name in names}
    for segment in placement.segments:
        ops[names[segment.backend]].update(t.op for t in segment.nodes)
    devices = [
        {
            "device": d.device,
            "weights": d.weights,
            "kv": d.states,
            "arena": d.arena,
            "feeds": d.feeds,
            "total": d.weights + d.states + d.arena + d.feeds,
            "ops": dict(sorted(ops[d.device].items())),
        }
        for d in sizes
    ]
    opts = engine.options
    return {
        "model": str(path),
        "n_ctx": engine.n_ctx,
        "n_slots": opts.n_slots,
        "n_ubatch": opts.n_ubatch,
        "type_k": opts.type_k,
        "type_v": opts.type_v,
        "devices": devices,
        "segments": len(placement.segments),
        "seams": len(placement.seams),
        "crossings": crossings(placement, names),
    }


def crossings(placement: Placement, names: Sequence[str]) -> list[dict[str, Any]]:
    """Copies from one device to another in a step: which ops' results, how many, and their bytes."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for seam in placement.seams:
        source = seam.src[0]
        ends = names[placement.backend_of[id(source)]], names[seam.attrs["to"]]
        found.setdefault((*ends, source.op), []).append(seam.nbytes)
    return [
        {"from": start, "to": end, "op": op, "copies": len(sizes), "bytes": sum(sizes)}
        for (start, end, op), sizes in found.items()
    ]


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['model']}: {report['n_ctx']} tokens of context for {report['n_slots']} slots, "
        f"steps of up to {report['n_ubatch']} tokens, cache {report['type_k']}/{report['type_v']}",
        "",
        f"{'device':<10}{'weights':>14}{'KV cache':>14}{'arena':>14}{'feeds':>14}{'total':>14}",
    ]
    for d in report["devices"]:
        columns = (mib(d[key]) for key in ("weights", "kv", "arena", "feeds", "total"))
        lines.append(f"{d['device']:<10}" + "".join(f"{text:>14}" for text in columns))
    lines.append("")
    for d in report["devices"]:
        counts = ", ".join(f"{op} × {n}" for op, n in d["ops"].items())
        lines.append(f"{d['device']} runs {sum(d['ops'].values())} nodes: {counts or 'none'}")
    lines.append(f"{report['segments']} segments, {report['seams']} copies between devices")
    for c in report["crossings"]:
        lines.append(f"{c['from']} → {c['to']}: {c['op']} × {c['copies']}, {c['bytes']:,} bytes a step")
    return "\n".join(lines)


def own_bytes() -> int:
    """What this process has in memory: the interpreter, code, and graphs."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * os.sysconf("SC_PAGE_SIZE")


def mib(n: int) -> str:
    return f"{n / 2**20:,.1f} MiB"
