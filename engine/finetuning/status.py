"""Status of a fine-tuning job: the words of OpenAI's API, in groups."""

from __future__ import annotations

RUNNING = ("validating_files", "queued", "running")
ENDED = ("succeeded", "failed", "cancelled")
