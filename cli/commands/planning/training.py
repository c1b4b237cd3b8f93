"""`logitless plan finetune` and `plan train`: memory that these commands need with the same flags."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from logitless.cli.commands.planning.plan import large_pages, measured, mib, own_bytes
from logitless.cli.commands.training import finetune
from logitless.cli.commands.training.train import start_model
from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.setup import training_run
from logitless.cli.setup.model import model_path, open_session
from logitless.cli.setup.unused_flags import check_used
from logitless.engine.loading.open_model import scoring_hparams
from logitless.models.gguf.file import GGUFFile
from logitless.training.errors import TrainingError
from logitless.training.run import plan_run, reader_of
from logitless.training.step import Footprint, Steps
from logitless.training.trainable import Trainable

_COLUMNS = ("weights", "parameters", "optimizer", "gradients", "arena", "feeds", "total")


def run(options: SimpleNamespace) -> int:
    try:
        report = measured(make, options)
    except TrainingError as error:
        raise CliError(training_run.flagged(error)) from None
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def make(options: SimpleNamespace) -> dict[str, Any]:
    """Bytes per device of the whole run, and of the process on the host beside them."""
    new = hasattr(options, "shape")
    command = f"plan {'train' if new else 'finetune'}"
    check_used(options, full=bool(new or options.full or options.output), command=command)
    if new:
        with tempfile.TemporaryDirectory(prefix="logitless-") as folder:
            start = Path(folder) / "start.gguf"
            start_model(start, options)
            return _report(options, start, options.shape, full=True)
    if options.lora_out and (options.full or options.output):
        raise UsageError("plan finetune: --lora-out is an adapter, -o and --full are the whole model: give one of them")
    path = model_path(options, "plan finetune")
    return _report(options, path, str(path), full=bool(options.full or options.output))


def _report(o: SimpleNamespace, path: Path, name: str, *, full: bool) -> dict[str, Any]:
    with GGUFFile.open(path) as gguf, ExitStack() as stack:
        h = scoring_hparams(gguf, path)
        config = training_run.config_of(o, full=full)
        reader = reader_of(config, o.file, gguf, h, partial(training_run.open_media, o, None))
        plan = plan_run(config, o.file, reader, h.n_ctx_whole)
        settings = plan.settings
        session = stack.enter_context(open_session(o))
        adapter = None if full else finetune.adapter_of(config)
        more = {"n_ctx": settings.n_ctx, "patterns": config.train_tensors}
        trainable = finetune.trainable(session, gguf, h, adapter=adapter, options=o, **more)
        steps = Steps(trainable, settings, media=None if reader.media is None else reader.media.media)
        devices = steps.footprint(settings.grad_acc)
        saved = 0 if full else 4 * trainable.n_params  # an adapter is written as a whole
        pages = sum(large_pages(d.device, d.weights, d.total - d.weights - d.feeds) for d in devices)
        process = own_bytes() + saved + pages
        del plan, steps
        return _as_report(name, trainable, settings.batch_size, settings.n_ctx, devices, process)


def _as_report(
    name: str, t: Trainable, n_batch: int, n_ctx: int, devices: list[Footprint], process: int
) -> dict[str, Any]:
    return {
        "model": name,
        "kind": t.kind,
        "n_params": t.n_params,
        "n_tensors": len(t.params),
        "n_batch": n_batch,
        "n_ctx": n_ctx,
        "devices": [{**asdict(d), "total": d.total} for d in devices],
        "process": process,
        "total": process + sum(d.total for d in devices),
    }


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['model']}: {report['kind']} of {report['n_params']} parameters in {report['n_tensors']} tensors, "
        f"{report['n_batch']} windows of {report['n_ctx']} tokens a device run",
        "",
        f"{'device':<10}" + "".join(f"{column:>14}" for column in _COLUMNS),
    ]
    for d in report["devices"]:
        lines.append(f"{d['device']:<10}" + "".join(f"{mib(d[column]):>14}" for column in _COLUMNS))
    lines.append(f"the process itself, with its code, tables and data (with --file): {mib(report['process'])}")
    lines.append(f"in all: {mib(report['total'])}")
    return "\n".join(lines)
