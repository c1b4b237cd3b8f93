"""Answers of batches, in OpenAI's and in Anthropic's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from logitless.frontend.answers import doc

Moment = Annotated[int | None, doc("Unix time in seconds; null: not yet")]
Instant = Annotated[str | None, doc("RFC 3339; null: not yet")]


class BatchCounts(Struct):
    """Requests of a batch."""

    total: int
    completed: Annotated[int, doc("answered")]
    failed: Annotated[int, doc("answered with an error")]


class Batch(Struct, kw_only=True):
    """A batch of requests."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Annotated[dict[str, Any] | None, doc("why the input file was refused")]
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: Annotated[str | None, doc("the answers, in any order; null: there are none")]
    error_file_id: Annotated[str | None, doc("the requests that failed or expired; null: there are none")]
    created_at: Moment
    in_progress_at: Moment
    expires_at: Moment
    finalizing_at: Moment
    completed_at: Moment
    failed_at: Moment
    expired_at: Moment
    cancelling_at: Moment
    cancelled_at: Moment
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class MessageBatchCounts(Struct, kw_only=True):
    """Requests of a message batch."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(Struct, kw_only=True):
    """A message batch."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: Instant
    archived_at: Instant = None
    cancel_initiated_at: Instant
    results_url: Annotated[str | None, doc("null: it has not ended")]


class MessageBatchPage(Struct):
    """Part of a list of message batches, the newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedBatch(Struct):
    """A message batch has been deleted."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"
