"""The python grader: a process of its own, with little memory, little time and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitless.training.graders.grade import Grade, GradedSample, GradeFault, GraderError

SECONDS = 30.0  # of one answer, and of the processor
NBYTES = 1 << 30  # of memory
MOST_CHARACTERS = 256_000  # OpenAI's limit of a source
_CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True)
class Python:
    """The number that the source's `grade(sample, item)` returns."""

    name: str
    source: str
    kind: str = "python"

    @classmethod
    def parse(cls, name: str, source: str, where: str) -> Python:
        if len(source) > MOST_CHARACTERS:
            raise GraderError(f"{where}.source: has more than {MOST_CHARACTERS} characters")
        try:
            compile(source, "grader", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise GraderError(f"{where}.source: {' '.join(str(error).split())}") from None
        return cls(name, source)

    def grade(self, sample: GradedSample, item: Mapping[str, Any]) -> Grade:
        job = {"source": self.source, "sample": sample.row, "item": item, "seconds": SECONDS, "nbytes": NBYTES}
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-X", "utf8", str(_CHILD)],
                input=json.dumps(job).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"OPENBLAS_NUM_THREADS": "1", "PATH": os.defpath},
                cwd="/",
                timeout=SECONDS,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:  # it has been killed
            reply = f"{self.name} took more than {SECONDS:g} seconds"
            raise GradeFault(reply, "python_grader_runtime_error", timed_out=True) from None
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            reason = "ended without a reward (its memory or its time ran out)"
            raise GradeFault(f"{self.name} {reason}", "python_grader_runtime_error") from None
        if problem := answer.get("error"):
            raise GradeFault(f"{self.name}: {problem}"[:1000], str(answer["kind"]))
        return Grade(float(answer["reward"]))
