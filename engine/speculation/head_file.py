"""File of a draft head: its parameters and draft vocabulary, in the cache folder by the model's fingerprint.

A file that is damaged, of another format or of other shapes is ignored with one line."""

from __future__ import annotations

import io
import logging
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
        layout: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
            **{name: (np.float32, shape) for name, shape in shapes_of(values.hparams).items()},
            "ids": (np.int32, (len(values.ids),)),
            "progress": (np.float64, (2,)),
        }
        try:
            with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in layout}
        except Exception:  # of numpy or zipfile, about an archive that another program wrote
            self._ignore("it is damaged")
            return
        if any((arrays[name].dtype, arrays[name].shape) != traits for name, traits in layout.items()):
            self._ignore("it has other shapes")
            return
        ids, (n_steps, accuracy) = arrays.pop("ids").tolist(), arrays.pop("progress").tolist()
        finite = all(np.isfinite(array).all() for array in arrays.values())
        in_vocabulary = min(ids) >= 0 and max(ids) < values.hparams.n_vocab and len(set(ids)) == len(ids)
        if not (finite and in_vocabulary and 0 <= n_steps < 2**53 and 0 <= accuracy <= 1):
            self._ignore("it has values that no head has")
            return
        values.params = arrays
        values.ids[:] = ids
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
