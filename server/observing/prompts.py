"""Prompt files of --log-prompts-dir: a file for each request, which only the user may read."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path

from logitless.frontend.workers import to_thread
from logitless.models.atomic_write import open_private
from logitless.models.tokenizer import Tokenizer
from logitless.server.observing.record import Record

log = logging.getLogger("logitless.http")


class PromptFiles:
    """The prompts of requests, as the model sees them, in files below `folder`."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._numbers = count(1)

    async def write(self, record: Record, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> None:
        """Write a request's prompts before it is computed. A full disk is a warning, not an error."""
        name = f"{time.time_ns()}-{next(self._numbers)}-{re.sub(r'[^A-Za-z0-9._-]', '_', record.id)}.json"
        try:
            await to_thread(partial(self._write, self._folder / name, record, prompts, tokenizer))
        except OSError as error:
            log.warning("--log-prompts-dir %s: %s", self._folder, error.strerror)

    def _write(self, path: Path, record: Record, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> None:
        texts = [tokenizer.pieces(ids).decode("utf-8", "replace") for ids in prompts]
        lines = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": record.id,
            "method": record.method,
            "path": record.path,
            "model": record.model,
            "prompts": texts,
        }
        with open(path, "x", encoding="utf-8", opener=open_private) as file:
            json.dump(lines, file, ensure_ascii=False, indent=1)
