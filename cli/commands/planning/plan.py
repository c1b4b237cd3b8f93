"""`logitless plan`: memory and placement of serving a model, with nothing allocated on a device.

The process is measured: this one gets all parts of a server's (imports, the vocabulary, kernels, the
programs of its plans), but no memory of devices."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from logitless.backends.host_memory import LARGE_PAGE, total_memory
from logitless.cli.commands.planning import dry_run
from logitless.cli.progress import COMPILING, show_compiling
from logitless.cli.setup.model import find_projector, model_options, model_path
from logitless.engine.loading.memory import cache_disk_bytes, cache_ram_bytes
from logitless.engine.loading.open_model import OpenModel, open_model
from logitless.engine.runner.model_runner import ModelRunner
from logitless.graph.execution.partition import Placement
from logitless.graph.execution.plan import describe
from logitless.graph.execution.session import DeviceBytes
from logitless.models.grammar import vocabulary
from logitless.models.weights.placement import beyond_memory

T = TypeVar("T")
Report = TypeVar("Report")


def run(options: SimpleNamespace) -> int:
    report = measured(make, options)
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def measured(make: Callable[[T], Report], options: T) -> Report:
    """The report of `make`, from a fresh process if this one compiled kernels: compilers stay in memory."""
    report = make(options)
    if COMPILING.happened:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context  # a server does not import it

        COMPILING.end()
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            report = fresh.submit(make, options).result()
    return report


def make(options: SimpleNamespace) -> dict[str, Any]:
    """Bytes per device, and the ops that each runs in the largest ordinary step and its encoder."""
    path = model_path(options, "plan")
    find_projector(options, path)
    show_compiling()
    model = open_model(path, model_options(options), generates=True)
    engine = model.engine()
    draft = model.draft_engine(engine)
    for one in (engine, draft):
        if one is not None:
            one.session.eval_order = options.eval_order
    sizes, sizes_of_draft, process = dry_run_bytes(model, engine, draft)
    placement, arenas = engine.measure()  # after the dry run: a server keeps no graph
    names = [d.device for d in sizes]
    ops: dict[str, Counter[str]] = {name: Counter() for name in names}
    of_encoder = [engine.session.measure(build)[0] for build in engine.source_graphs]
    for segment in (segment for one in (placement, *of_encoder) for segment in one.segments):
        ops[names[segment.backend]].update(t.op for t in segment.nodes)
    devices = [
        memory_of(d) | {"parts": of_model, "ops": dict(sorted(ops[d.device].items()))}
        for d, of_model in zip(sizes, parts(placement, len(names)), strict=True)
    ]
    opts = engine.options
    return {
        "model": str(path),
        "n_ctx": engine.n_ctx,
        "n_slots": opts.n_slots,
        "n_ubatch": opts.n_ubatch,
        "type_k": opts.type_k,
        "type_v": opts.type_v,
        "device_reason": opts.device_reason,
        "devices": devices,
        "experts": experts_of(engine),
        "beyond_memory": beyond_memory_of(engine),
        "projector": projector_of(engine, names),
        "draft": draft and {"model": options.model_draft, "devices": [memory_of(d) for d in sizes_of_draft]},
        "process": process,
        "total": process + sum(d.total for d in sizes + sizes_of_draft) + packed_experts(engine),
        "prompts": cache_ram_bytes(options.cache_ram, total_memory()),
        "prompts_on_disk": cache_disk_bytes(options.cache_disk_size) if options.cache_disk else None,
        "segments": len(placement.segments),
        "seams": len(placement.transfers),
        "crossings": crossings(placement, names),
        "eval_order": options.eval_order,
        "arena_by_order": {o: sum(engine.measure(o)[1].sizes.values()) for o in ("left", "right")},
        "nodes": describe(placement, arenas, names).splitlines() if options.dump_plan else None,
    }


def experts_of(engine: ModelRunner) -> dict[str, Any] | None:
    """The expert cache (--moe-cache-mib): what has room, and the most that a token uploads."""
    cache = engine.session.expert_cache
    if cache is None:
        return None
    n_used = cache.n_layers * (engine.hparams.experts.n_used if engine.hparams.experts else 0)
    return {
        "slots": cache.n_slots,
        "experts": cache.n_experts,
        "on_host": packed_experts(engine),
        "of_token": n_used,
        "bytes_of_token": n_used * cache.all_nbytes // cache.n_experts,
    }


def beyond_memory_of(engine: ModelRunner) -> dict[str, Any] | None:
    """Weights that host memory has no room for, and the line that says what they cost."""
    weights, host_nbytes = engine.model.tensors, engine.expert_memory.host_nbytes
    beyond = beyond_memory(engine.session, engine.hparams, weights, host_nbytes)
    if beyond is None:
        return None
    return {"in_file": beyond.nbytes, "of_token": beyond.of_token, "text": str(beyond)}


def packed_experts(engine: ModelRunner) -> int:
    """Bytes of the experts in host memory that devices cache."""
    cache = engine.session.expert_cache
    return cache.all_nbytes if cache is not None and cache.packs else 0


def projector_of(engine: ModelRunner, names: Sequence[str]) -> dict[str, Any] | None:
    """The file that images and sounds are read with, its type, and the devices that run the encoders."""
    if engine.media is None:
        return None
    placements = [engine.session.measure(build)[0] for build in engine.media.largest]
    runs = {
        placement.backend_of[node]
        for placement in placements
        for node in placement.order
        for leaf in node.src
        if leaf.op == "variable" and leaf.attrs["constant"]
    }
    return {
        "file": engine.options.mmproj,
        "type": engine.media.params.kind,
        "devices": [names[i] for i in sorted(runs)],
    }


def memory_of(d: DeviceBytes) -> dict[str, Any]:
    """A device's bytes by purpose."""
    return {
        "device": d.device,
        "weights": d.weights,
        "kv": d.variables,
        "arena": d.arena,
        "feeds": d.feeds,
        "total": d.total,
    }


def dry_run_bytes(
    model: OpenModel, engine: ModelRunner, draft: ModelRunner | None
) -> tuple[list[DeviceBytes], list[DeviceBytes], int]:
    """Bytes of each device, of the draft model's devices, and of a server process with all slots busy."""
    import asyncio

    def make_all() -> tuple[list[DeviceBytes], list[DeviceBytes], object]:
        sizes, programs = engine.dry_run()
        of_draft, others = draft.dry_run() if draft is not None else ([], None)
        vocabulary.prepare_ahead(model.tokenizer)
        return sizes, of_draft, (programs, others)

    serving = dry_run.dry_run(model, engine, make_all, own_bytes)
    (sizes, of_draft, _), process = asyncio.run(serving)
    ends = sum(large_pages(d.device, d.weights, d.variables + d.arena) for d in sizes + of_draft)
    return sizes, of_draft, process + ends


def large_pages(device: str, weights: int, others: int) -> int:
    """Bytes lost to rounding up to large pages on the CPU (backends/host_memory.py)."""
    return -weights % LARGE_PAGE + -others % LARGE_PAGE if device == "cpu" else 0


def parts(placement: Placement, n_devices: int) -> list[list[str]]:
    """Layers and other tensors on each device; of a layer perhaps some weights only."""
    tensors_by_device: list[dict[str, set[str]]] = [{} for _ in range(n_devices)]
    whole: dict[str, set[str]] = {}
    for t in placement.order:
        for leaf in t.src:
            if leaf.op == "variable" and leaf.attrs["constant"]:
                match = re.match(r"blk\.(\d+)\.", leaf.name)
                part = match[1] if match else leaf.name.removesuffix(".weight")
                part = "drafter" if part.startswith("draft.") else part
                for owner in (whole, tensors_by_device[placement.backend_of[t]]):
                    owner.setdefault(part, set()).add(leaf.name)
    contents = []
    for device in tensors_by_device:
        layers: dict[str, list[int]] = {}  # by extent
        for part in sorted((p for p in device if p.isdecimal()), key=int):
            n, of = len(device[part]), len(whole[part])
            layers.setdefault("" if n == of else f" ({n} of {of} weights)", []).append(int(part))
        contents.append([f"layers {_ranges(numbers)}{extent}" for extent, numbers in layers.items()])
        contents[-1] += [part for part in device if not part.isdecimal()]
    return contents


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges: 0-3,5."""
    rows: list[list[int]] = []
    for n in numbers:
        if rows and rows[-1][-1] == n - 1:
            rows[-1].append(n)
        else:
            rows.append([n])
    return ",".join(f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]) for row in rows)


def crossings(placement: Placement, names: Sequence[str]) -> list[dict[str, Any]]:
    """Copies between devices in a step: op of the result, count, bytes."""
    sizes_by_copy: dict[tuple[str, str, str], list[int]] = {}
    for seam in placement.transfers:
        source = seam.src[0]
        ends = names[placement.backend_of[source]], names[seam.attrs["to"]]
        sizes_by_copy.setdefault((*ends, source.op), []).append(seam.nbytes)
    return [
        {"from": start, "to": end, "op": op, "copies": len(sizes), "bytes": sum(sizes)}
        for (start, end, op), sizes in sizes_by_copy.items()
    ]


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['model']}: {report['n_ctx']} tokens of context for {report['n_slots']} slots, "
        f"steps of up to {report['n_ubatch']} tokens, cache {report['type_k']}/{report['type_v']}",
        "",
        *memory_table(report["devices"]),
    ]
    if report["draft"] is not None:
        lines += ["", f"{report['draft']['model']}, which drafts:", *memory_table(report["draft"]["devices"]), ""]
    lines.append(f"the process itself, with its code, its tables and the vocabulary: {mib(report['process'])}")
    lines.append(f"in all, when every cell of the cache was used: {mib(report['total'])}")
    if (beyond := report["beyond_memory"]) is not None:
        lines.append(beyond["text"])
    if (experts := report["experts"]) is not None:
        share = f"{experts['slots']} of {experts['experts']} ({experts['slots'] / experts['experts']:.1%})"
        where = mib(experts["on_host"]) + " of host memory" if experts["on_host"] else "the file"
        lines.append(
            f"experts (--moe-cache-mib): {share} on the devices, all in {where}; a token needs {experts['of_token']}, "
            f"which are {mib(experts['bytes_of_token'])} to upload where none is there"
        )
    if (projector := report["projector"]) is not None:
        lines.append(
            f"media: {projector['file']} ({projector['type']}), weights and rows counted above, encoded by "
            + " and ".join(projector["devices"])
        )
    if report["device_reason"]:
        lines.append(f"device: {', '.join(d['device'] for d in report['devices'])} ({report['device_reason']})")
    most = "as much as there is" if report["prompts"] is None else f"up to {mib(report['prompts'])} more"
    lines.append(f"prompts that have left the cache (--cache-ram): {most}")
    if (on_disk := report["prompts_on_disk"]) is not None:
        lines.append(f"prompts that have left that memory (--cache-disk): up to {mib(on_disk)} of files")
    lines.append("")
    for d in report["devices"]:
        lines.append(f"{d['device']} has {', '.join(d['parts']) or 'nothing of the model'}")
        counts = ", ".join(f"{op} × {n}" for op, n in d["ops"].items())
        lines.append(f"{d['device']} runs {sum(d['ops'].values())} nodes: {counts or 'none'}")
    lines.append(f"{report['segments']} segments, {report['seams']} copies between devices")
    for c in report["crossings"]:
        lines.append(f"{c['from']} → {c['to']}: {c['op']} × {c['copies']}, {c['bytes']:,} bytes a step")
    left, right = report["arena_by_order"].values()
    order = report["eval_order"] if report["eval_order"] != "auto" else "left" if left <= right else "right"
    sizes = f"{left:,} bytes from the left, {right:,} from the right"
    lines.append(f"results of the largest ordinary step: {sizes}; {order} it is")
    return "\n".join([*lines, "", *report["nodes"]] if report["nodes"] else lines)


def memory_table(devices: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"{'device':<10}{'weights':>14}{'KV cache':>14}{'arena':>14}{'feeds':>14}{'total':>14}"]
    for d in devices:
        columns = (mib(d[key]) for key in ("weights", "kv", "arena", "feeds", "total"))
        lines.append(f"{d['device']:<10}" + "".join(f"{text:>14}" for text in columns))
    return lines


def own_bytes() -> int:
    """Resident bytes of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * os.sysconf("SC_PAGE_SIZE")


def mib(n: int) -> str:
    return f"{n / 2**20:,.1f} MiB"
