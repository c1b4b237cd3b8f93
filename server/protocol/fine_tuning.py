"""Body of POST /v1/fine_tuning/jobs: parsed into a new job row; every 400 names its field."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logitless.engine.errors import InvalidRequest, NotSupported
from logitless.engine.finetuning.store import Row, Store, new_id
from logitless.server.protocol.fields import Fields, article, refuse

if TYPE_CHECKING:
    pass
from logitless.engine.finetuning.job import Hyperparameters

_METHODS = ("supervised", "dpo", "reinforcement")


def new_job(body: Mapping[str, Any], store: Store, base: str, names: set[str], n_ctx_train: int) -> Row:
    """The row of a job. InvalidRequest names the field that is wrong."""
    fields = Fields(body)
    model = fields.text("model")
    if model not in names:
        refuse("model", f"the server has {base!r} to fine-tune, not {model[:200]!r}")
    if not fields.text("training_file"):
        refuse("training_file", "is required")
    for name in ("training_file", "validation_file"):
        id = fields.text(name)
        row = store.get("files", id) if id else None
        if id and row is None:
            refuse(name, f"there is no file {id[:100]!r}")
        if row is not None and row["purpose"] != "fine-tune":
            refuse(name, f"the purpose of {id!r} is {row['purpose']!r}, not 'fine-tune'")
    suffix = fields.text("suffix")
    if len(suffix) > 64 or not all(c.isalnum() or c in "-_." for c in suffix):
        refuse("suffix", "must be at most 64 letters, digits, '-', '_' or '.'")
    if fields.array("integrations"):
        refuse("integrations", "must be empty: this server reports to no other services")
    method = fields.object("method")
    kind = method.get("type", "supervised")
    if kind not in _METHODS:
        refuse("method.type", f"must be one of {', '.join(_METHODS)}")
    if kind != "supervised":
        raise NotSupported(f"field 'method.type': {kind} is not supported yet")
    given = method.get("supervised") if method else None
    if given is not None and not isinstance(given, dict):
        refuse("method.supervised", f"expected an object, got {article(given)}")
    raw = (given or {}).get("hyperparameters") or fields.object("hyperparameters")
    if not isinstance(raw, dict):
        refuse("hyperparameters", f"expected an object, got {article(raw)}")
    h = _hyperparameters(raw, n_ctx_train)
    seed = fields.integer("seed", default=0, low=0, hard=True)
    id = new_id("ftjob")
    return {
        "id": id,
        "object": "fine_tuning.job",
        "created_at": int(time.time()),
        "finished_at": None,
        "started_at": None,
        "estimated_finish": None,
        "model": model,
        "model_name": f"ft:{Path(base).stem}:{suffix or 'logitless'}:{id.removeprefix('ftjob-')[:8]}",
        "fine_tuned_model": None,
        "organization_id": "logitless",
        "status": "queued",
        "training_file": fields.text("training_file"),
        "validation_file": fields.text("validation_file") or None,
        "result_files": [],
        "hyperparameters": asdict(h),
        "method": {"type": "supervised", "supervised": {"hyperparameters": asdict(h)}},
        "metadata": dict(fields.object("metadata")) or None,
        "integrations": [],
        "seed": seed,
        "trained_tokens": None,
        "user_provided_suffix": suffix or None,
        "error": None,
    }


def _hyperparameters(raw: Mapping[str, Any], n_ctx_train: int) -> Hyperparameters:
    unknown = set(raw) - set(asdict(Hyperparameters()))
    if unknown:
        refuse(f"hyperparameters.{min(unknown)}", "is not known")
    fields = Fields({k: None if v == "auto" else v for k, v in raw.items()})
    if raw.get("full") is True:
        for name in ("lora_r", "lora_alpha"):
            if raw.get(name) is not None:
                refuse(f"hyperparameters.{name}", "is of an adapter, and with full: true there is none")
    default = Hyperparameters()
    try:
        return Hyperparameters(
            fields.integer("n_epochs", default=default.n_epochs, low=1, high=1000, hard=True),
            fields.integer("batch_size", default=default.batch_size, low=1, high=1024, hard=True),
            fields.number(
                "learning_rate_multiplier", default=default.learning_rate_multiplier, low=1e-6, high=1e4, hard=True
            ),
            fields.integer(
                "context_length", default=min(default.context_length, n_ctx_train), low=2, high=1 << 16, hard=True
            ),
            fields.integer("lora_r", default=default.lora_r, low=1, high=1024, hard=True),
            fields.number("lora_alpha", default=default.lora_alpha, low=0, high=1e6, hard=True),
            fields.integer("warmup_steps", default=default.warmup_steps, low=0, hard=True),
            fields.boolean("full"),
        )
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("field '", "field 'hyperparameters.")) from None
