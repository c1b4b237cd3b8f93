"""Body of POST /v1/fine_tuning/jobs: parsed into a new job row; every 400 names its field."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Annotated, Any, NamedTuple

from msgspec import Struct, defstruct
from msgspec.structs import asdict as asdict_struct

from logitless.engine.errors import InvalidRequest
from logitless.engine.finetuning.job import base_of, method_row
from logitless.engine.finetuning.status import ENDED
from logitless.engine.finetuning.tuned_models import TunedModel, find
from logitless.engine.records.store import Row, Store, new_id
from logitless.engine.sampling.params import INT_MAX, Param
from logitless.frontend.fields import as_object, bad_request, read
from logitless.models.chat.errors import ChatTemplateError
from logitless.models.chat.template import ChatTemplate
from logitless.training.adapters.options import HYPERPARAMETERS, lora_options
from logitless.training.config import (
    AUTO,
    FIELDS,
    METHODS,
    NONE,
    OF_ADAPTER,
    PREFERENCE,
    REINFORCEMENT,
    SUPERVISED,
    job_default,
    job_defaults,
    job_fields,
    job_param,
    not_of_method,
    unused,
)
from logitless.training.errors import TrainingError
from logitless.training.graders.grade import GradedSample, Grader, GraderError, Surroundings
from logitless.training.graders.parse import endpoint_of, parse_grader
from logitless.training.reporting.trackers import KINDS, TENSORBOARD, WANDB

_KINDS = (*METHODS, REINFORCEMENT)
MAX_TEMPLATE = 1 << 18  # characters
_OF_ADAPTERS = tuple(name for name, (_, param) in FIELDS.items() if param.of == OF_ADAPTER and param.job != NONE)


def _struct(name: str, method: str, *methods: str) -> type[Struct]:
    """The struct of the hyperparameters of jobs of these methods, as training/config.py declares them."""
    names = {name: (field, of) for of in (*methods, method) for name, field in job_fields(of).items()}
    declared: list[Any] = []
    for name_in_job, (field, of) in names.items():
        kind, param = job_param(field, of)
        declared.append((name_in_job, Annotated[kind, param], job_default(field, of)))
    return defstruct(name, declared, frozen=True, kw_only=True, module=__name__)


HyperparametersBody = _struct("HyperparametersBody", SUPERVISED, *PREFERENCE)
ReinforcementHyperparametersBody = _struct("ReinforcementHyperparametersBody", REINFORCEMENT)


class ReinforcementBody(Struct, frozen=True, kw_only=True):
    """`method.reinforcement`."""

    grader: dict[str, Any]
    hyperparameters: dict[str, Any] | None = None


class MethodBody(Struct, frozen=True, kw_only=True):
    """`method.supervised`, `method.dpo` and so on."""

    hyperparameters: dict[str, Any] | None = None


class Method(Struct, frozen=True, kw_only=True):
    """`method`: how the model learns; the field of its type has its hyperparameters."""

    type: str = SUPERVISED
    supervised: MethodBody | None = None
    dpo: MethodBody | None = None
    orpo: MethodBody | None = None
    kto: MethodBody | None = None
    simpo: MethodBody | None = None
    reinforcement: ReinforcementBody | None = None


class WandbBody(Struct, frozen=True, kw_only=True):
    """`integrations[].wandb`."""

    project: str
    name: str | None = None
    entity: str | None = None
    tags: list[str] | None = None


class MlflowBody(Struct, frozen=True, kw_only=True):
    """`integrations[].mlflow`."""

    experiment: str
    name: str | None = None
    tags: list[str] | None = None


class IntegrationBody(Struct, frozen=True, kw_only=True):
    """`integrations[]`: a tracker that gets the metrics."""

    type: str
    wandb: WandbBody | None = None
    mlflow: MlflowBody | None = None
    tensorboard: dict[str, Any] | None = None


class JobBody(Struct, frozen=True, kw_only=True):
    """POST /v1/fine_tuning/jobs."""

    model: Annotated[str, Param("the model that is served, or a fine-tuned one to start from")] = ""
    training_file: Annotated[str, Param("the id of an uploaded file")]
    validation_file: Annotated[str, Param("the id of an uploaded file")] = ""
    suffix: Annotated[str, Param("part of the result's name")] = ""
    integrations: Annotated[
        Sequence[IntegrationBody], Param("{type: wandb, wandb: {project}}, mlflow, tensorboard", most=8)
    ] = ()
    method: Annotated[Method, Param("{type: TYPE, TYPE: {hyperparameters}}; with a grader of reinforcement")] = Method()
    hyperparameters: Annotated[
        Mapping[str, Any],
        Param(
            'n_epochs, batch_size, lora_r, full and others; "auto": chosen from the data',
            fields=(HyperparametersBody, ReinforcementHyperparametersBody),
        ),
    ] = {}
    seed: Annotated[int, Param("of the order and the dropout", 0, INT_MAX, hard=True)] = 0
    metadata: Annotated[Mapping[str, Any], Param("any object; the job shows it")] = {}


class JobModel(NamedTuple):
    """The served model that jobs start from. `weights`: those of which adapters have some; None: not known."""

    base: str
    names: Set[str]
    n_ctx_train: int
    weights: Collection[str] | None = None


def new_job(
    body: Mapping[str, Any],
    store: Store,
    served: JobModel,
    may_see: Callable[[Row], bool] = lambda _: True,
    around: Surroundings | None = None,
    trackers: Collection[str] = (),
) -> Row:
    """The row of a job. InvalidRequest names the field that is wrong. `may_see`: the files and jobs that count;
    `around`: the means of graders; `trackers`: those of the network that are allowed."""
    base, names, n_ctx_train, weights = served
    params = read(JobBody, body)
    model, suffix = params.model, params.suffix
    start = None if model in names else find(store, model)
    if model not in names and (start is None or not may_see(start.job)):
        bad_request("model", f"the server has {base!r} to fine-tune, not {model[:200]!r}")
    if start is not None and not start.is_checkpoint and start.job["status"] not in ENDED:
        bad_request("model", f"{model} is being trained: start from one of its checkpoints, {model}@STEP")
    for name, file in (("training_file", params.training_file), ("validation_file", params.validation_file)):
        row = store.get("files", file) if file else None
        row = row if row is not None and may_see(row) else None
        if row is None and (file or name == "training_file"):
            bad_request(name, f"there is no file {file[:100]!r}")
        if row is not None and row["purpose"] != "fine-tune":
            bad_request(name, f"the purpose of {file!r} is {row['purpose']!r}, not 'fine-tune'")
    if len(suffix) > 64 or not all(c.isalnum() or c in "-_." for c in suffix):
        bad_request("suffix", "must be at most 64 letters, digits, '-', '_' or '.'")
    kind = params.method.type
    if kind not in _KINDS:
        bad_request("method.type", f"must be one of {', '.join(_KINDS)}")
    if other := next((m for m in _KINDS if m != kind and getattr(params.method, m) is not None), None):
        bad_request(f"method.{other}", f"is not of the type {kind}")
    value: MethodBody | ReinforcementBody | None = getattr(params.method, kind)
    grader = value.grader if isinstance(value, ReinforcementBody) else None
    judge: Grader | None = None
    if kind == REINFORCEMENT:
        if grader is None:
            bad_request("method.reinforcement.grader", "is required: it gives the rewards")
        judge = grader_of(grader, around or Surroundings(), "method.reinforcement.grader")
    h = _hyperparameters((value and value.hyperparameters) or params.hyperparameters, kind, n_ctx_train, start, weights)
    if h.get("max_tool_turns") and judge is not None and endpoint_of(judge) is None:
        bad_request("hyperparameters.max_tool_turns", "needs a grader of type endpoint, which answers the tools")
    if h["validation_split"] and params.validation_file:
        bad_request("hyperparameters.validation_split", "there is a validation_file: give one of them")
    if h["early_stopping_patience"] and not (h["validation_split"] or params.validation_file):
        bad_request("hyperparameters.early_stopping_patience", "needs a validation_file or a validation_split")
    integrations = [_integration(one, f"integrations[{i}]", trackers) for i, one in enumerate(params.integrations)]
    id = new_id("ftjob")
    return {
        "id": id,
        "object": "fine_tuning.job",
        "created_at": int(time.time()),
        "finished_at": None,
        "started_at": None,
        "estimated_finish": None,
        "model": model,
        "base": base_of(start.job) if start is not None else model,
        "model_name": f"ft:{base.rpartition('/')[2]}:{suffix or 'logitless'}:{id.removeprefix('ftjob-')[:8]}",
        "fine_tuned_model": None,
        "organization_id": "logitless",
        "status": "queued",
        "training_file": params.training_file,
        "validation_file": params.validation_file or None,
        "result_files": [],
        "hyperparameters": h,
        "method": method_row(kind, h, grader),
        "metadata": dict(params.metadata) or None,
        "integrations": integrations,
        "seed": params.seed,
        "trained_tokens": None,
        "user_provided_suffix": suffix or None,
        "error": None,
    }


def _hyperparameters(
    raw: Mapping[str, Any],
    method: str,
    n_ctx_train: int,
    start: TunedModel | None,
    weights: Collection[str] | None,
) -> dict[str, Any]:
    raw, own, within = _flattened(raw), job_fields(method), "hyperparameters."
    for name in sorted(raw.keys() - own.keys()):
        field = next((field for of in _KINDS for job, field in job_fields(of).items() if job == name), None)
        if field is None:
            bad_request(within + name, "is not known")
        param = FIELDS[field][1]
        bad_request(within + name, not_of_method(param.job_methods or param.methods, method))
    fields = {name: None if value == AUTO else value for name, value in raw.items()}
    if start is not None:
        fields = _inherited(fields, start)
    chosen = [own[name] for name, value in fields.items() if value is not None]
    choices = {"method": method, "full": fields.get("full") is True, "optimizer": fields.get("optimizer") or "adamw"}
    for field, reason in unused({**dict.fromkeys(FIELDS, True), **choices}, chosen):
        bad_request(within + (FIELDS[field][1].job or field), reason)
    body = ReinforcementHyperparametersBody if method == REINFORCEMENT else HyperparametersBody
    defaults = {**job_defaults(method), **({"weight_decay": 0.0} if choices["optimizer"] == "sgd" else {})}
    parsed = read(body, fields, within=within, context_length=min(n_ctx_train, 1 << 16))
    values = {name: getattr(parsed, name) if fields.get(name) is not None else defaults[name] for name in own}
    _check_template(values["chat_template"], f"{within}chat_template")
    try:
        options = lora_options(values)
        if weights is not None and not values["full"]:
            options.check_targets(weights)
    except TrainingError as error:
        name, _, problem = str(error).partition(": ")
        bad_request(within + name, problem)
    return values


def _check_template(source: str, field: str) -> None:
    """InvalidRequest: it is no chat template."""
    if len(source) > MAX_TEMPLATE:
        bad_request(field, f"has more than {MAX_TEMPLATE} characters")
    try:
        if source:
            ChatTemplate(source, bos_token="", eos_token="")
    except ChatTemplateError as error:
        bad_request(field, " ".join(str(error).split()))


def _flattened(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Hyperparameters with those of the object `lora`, whose names have no lora_ in front."""
    lora = raw.get("lora")
    if lora is None:
        return raw
    for name in as_object("hyperparameters.lora", lora):
        if f"lora_{name}" not in _OF_ADAPTERS:
            bad_request(f"hyperparameters.lora.{name}", "is not known")
        if raw.get(f"lora_{name}") is not None:
            bad_request(f"hyperparameters.lora.{name}", f"stands also in lora_{name}: give one of them")
    return {k: v for k, v in raw.items() if k != "lora"} | {f"lora_{k}": v for k, v in lora.items()}


def _inherited(fields: Mapping[str, Any], start: TunedModel) -> dict[str, Any]:
    """Hyperparameters with those of the model that a job starts from, which it cannot change."""
    fixed: dict[str, Any] = {"full": start.whole}
    if not start.whole:
        before = start.job["hyperparameters"]
        fixed |= {name: before.get(name, job_default(name, SUPERVISED)) for name in HYPERPARAMETERS}
        if fixed["lora_dora"]:
            bad_request("model", f"{start.name} is a DoRA adapter, from which no job starts")
        if fixed["lora_init"] == "pissa":  # twice the rank, over the model's own weights
            fixed |= {"lora_r": 2 * fixed["lora_r"], "lora_alpha": 0.0, "lora_rslora": False, "lora_init": "gaussian"}
    for name, value in fixed.items():
        if fields.get(name) not in (None, value):
            kind = "a whole model" if start.whole else "an adapter"
            bad_request(f"hyperparameters.{name}", f"{start.name} is {kind}, whose {name} is {json.dumps(value)}")
    return {**fields, **fixed}


def _integration(body: IntegrationBody, field: str, allowed: Collection[str]) -> Row:
    kind = body.type
    if kind not in KINDS:
        bad_request(f"{field}.type", f"must be one of {', '.join(KINDS)}")
    if other := next((k for k in KINDS if k != kind and getattr(body, k) is not None), None):
        bad_request(f"{field}.{other}", f"is not of the type {kind}")
    if kind != TENSORBOARD and kind not in allowed:
        bad_request(f"{field}.type", f"{kind} is off: start with --allow-integrations {kind}")
    value = getattr(body, kind)
    if kind == TENSORBOARD:
        if value:
            bad_request(f"{field}.tensorboard.{next(iter(value))}", "is not known: its files are the server's")
        return {"type": kind, kind: {}}
    if value is None:
        bad_request(f"{field}.{kind}", "is required")
    values = asdict_struct(value)
    project = "project" if kind == WANDB else "experiment"
    if not values[project].strip():
        bad_request(f"{field}.{kind}.{project}", "must not be empty")
    return {"type": kind, kind: values}


# -- graders


class GraderBody(Struct, frozen=True, kw_only=True):
    """POST /v1/fine_tuning/alpha/graders/validate."""

    grader: Annotated[
        Mapping[str, Any], Param("string_check, text_similarity, score_model, multi, endpoint or python, as OpenAI's")
    ]


class GradeBody(GraderBody, frozen=True, kw_only=True):
    """POST /v1/fine_tuning/alpha/graders/run."""

    model_sample: Annotated[str, Param("the model's answer")]
    item: Annotated[Mapping[str, Any], Param("the row of data that it answers")] = {}


def grader_of(spec: Any, around: Surroundings, field: str = "grader") -> Grader:
    """The grader. InvalidRequest names the field that is wrong."""
    try:
        return parse_grader(spec, around, field)
    except GraderError as error:
        name, _, problem = str(error).partition(": ")
        raise InvalidRequest(f"field '{name}': {problem}") from None


def parse_grading(body: Mapping[str, Any], around: Surroundings) -> tuple[Grader, GradedSample, Mapping[str, Any]]:
    """The grader, the answer and its row of data."""
    params = read(GradeBody, body)
    return grader_of(params.grader, around), GradedSample(params.model_sample), params.item
