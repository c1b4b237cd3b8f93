"""Answers of files, fine-tuning jobs and their lists."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Struct

from logitless.frontend.answers import doc

T = TypeVar("T")
Time = Annotated[int, doc("Unix time in seconds")]


class Page(Struct, Generic[T], kw_only=True):
    """Part of a list: `limit` entries after the one that the query's `after` names."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool
    first_id: Annotated[str | None, doc("null: there is none")]
    last_id: str | None


class Deleted(Struct, kw_only=True):
    """It has been deleted."""

    id: str
    object: Literal["file", "model", "response"]
    deleted: Literal[True] = True


class File(Struct, kw_only=True):
    """An uploaded file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: Time
    expires_at: Annotated[int | None, doc("null: never")]
    filename: str
    purpose: str
    status: str
    status_details: str | None


class Job(Struct, kw_only=True):
    """A fine-tuning job."""

    id: str
    object: Literal["fine_tuning.job"]
    created_at: Time
    finished_at: Annotated[int | None, doc("Unix time in seconds; null: not yet")]
    started_at: Annotated[int | None, doc("Unix time in seconds; null: not yet")]
    estimated_finish: int | None
    model: Annotated[str, doc("the model to train further")]
    fine_tuned_model: Annotated[str | None, doc("its name; null: there is none yet")]
    organization_id: str
    status: Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
    training_file: str
    validation_file: str | None
    result_files: list[str]
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    metadata: dict[str, Any] | None
    integrations: list[Any]
    seed: int
    trained_tokens: Annotated[int | None, doc("so far")]
    user_provided_suffix: str | None
    error: dict[str, Any] | None


class JobEvent(Struct, kw_only=True):
    """An event of a job: a message, or the metrics of a step."""

    id: str
    object: Literal["fine_tuning.job.event"]
    created_at: Time
    level: str
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class Checkpoint(Struct, kw_only=True):
    """A checkpoint of a job."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: Time
    fine_tuned_model_checkpoint: Annotated[str, doc("the name of a model")]
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, Any]


class ValidGrader(Struct, kw_only=True):
    """A grader that can be used."""

    grader: dict[str, Any]


class GraderErrors(Struct, kw_only=True):
    """Faults of a grading; with one, the reward is 0."""

    formula_parse_error: bool = False
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False
    invalid_variable_error: bool = False
    other_error: bool = False
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    model_grader_server_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_server_error_details: str | None = None
    details: Annotated[str | None, doc("the fault in words; null: there is none")] = None


class GraderMetadata(Struct, kw_only=True):
    """Origin of a reward."""

    name: str
    type: str
    errors: GraderErrors
    execution_time: Annotated[float, doc("seconds")]
    scores: Annotated[dict[str, float], doc("rewards by grader")]
    token_usage: Annotated[int | None, doc("tokens of the models that were asked; null: none was")]
    sampled_model_name: str | None


class Graded(Struct, kw_only=True):
    """The reward of an answer."""

    reward: float
    sub_rewards: Annotated[dict[str, float], doc("those of a multi grader's own")]
    metadata: GraderMetadata
    model_grader_token_usage_per_model: dict[str, int]
