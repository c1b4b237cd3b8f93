"""File of a draft head: its parameters and draft vocabulary, in the cache folder by the model's fingerprint.

A file that is damaged, of another format or of other shapes is ignored with one line."""

from __future__ import annotations

import io
import logging
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np

from logitless.models.atomic_write import private, unfinished
from logitless.models.drafters.draft_head import HeadValues, shapes_of
from logitless.models.weights.fingerprint import fingerprint

log = logging.getLogger("logitless.speculation")
MAGIC = b"logitless draft head 1\n"  # of this format
CHECK_NBYTES = 32


class HeadFile:
    """The file of a model's draft head."""

    def __init__(self, folder: Path, values: HeadValues) -> None:
        """`folder`: of the cache. `values`: the head's."""
        h = values.hparams
        self._values = values
        self.path = folder / "draft-heads" / fingerprint(values.gguf, h, h.n_ctx_train)
        self._problem = ""  # the last one

    def load(self) -> None:
        """Give the head the values of the file, if there are some."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._ignore(error.strerror or str(error))
            return
        payload = content[len(MAGIC) + CHECK_NBYTES :]
        if not content.startswith(MAGIC.split(b" 1")[0]):
            self._ignore("it is no draft head")
        elif not content.startswith(MAGIC):
            self._ignore("it has another format")
        elif sha256(payload).digest() != content[len(MAGIC) : len(MAGIC) + CHECK_NBYTES]:
            self._ignore("it is damaged")
        else:
            self._take(payload)

    def _take(self, payload: bytes) -> None:
        values = self._values
        try:
            with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
                params = {name: arrays[name] for name in values.params}
                ids, (n_steps, accuracy) = arrays["ids"], arrays["progress"].tolist()
        except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
            self._ignore(str(error))
            return
        fits = all(params[name].shape == shape for name, shape in shapes_of(values.hparams).items())
        in_vocabulary = ids.shape == (len(values.ids),) and ids.min() >= 0 and ids.max() < values.hparams.n_vocab
        if not (fits and in_vocabulary and len(set(ids.tolist())) == len(ids)):
            self._ignore("it has other shapes")
            return
        values.params = {name: np.ascontiguousarray(value, np.float32) for name, value in params.items()}
        values.ids[:] = ids.tolist()
        values.n_steps, values.accuracy = int(n_steps), accuracy
        log.info("the draft head has learnt for %d steps (%s)", n_steps, self.path)

    def _ignore(self, problem: str) -> None:
        log.warning("draft head %s: ignored, %s; it learns anew", self.path, " ".join(problem.split()))

    def content(self) -> bytes:
        """The values of the moment, as `write` takes them."""
        values, payload = self._values, io.BytesIO()
        progress = np.array([values.n_steps, values.accuracy])
        np.savez(payload, ids=np.array(values.ids, np.int32), progress=progress, **values.params)  # type: ignore[arg-type]
        return MAGIC + sha256(payload.getvalue()).digest() + payload.getvalue()

    def write(self, content: bytes) -> None:
        """Write the file, which only this user can read, in one step. An error is one line, once."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with unfinished(private(self.path)) as part:
                part.write_bytes(content)
        except OSError as error:
            problem = error.strerror or str(error)
            if problem != self._problem:
                log.warning("draft head %s: not written: %s", self.path, problem)
            self._problem = problem
        else:
            self._problem = ""
