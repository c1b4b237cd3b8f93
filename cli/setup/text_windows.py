"""A text as windows of tokens, each by itself, and the model that runs on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.setup.model import model_path, open_session
from logitless.engine.loading.open_model import scoring_hparams
from logitless.graph.execution.session import Session
from logitless.models import tokenizer
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import Model, define_model

N_WINDOW = 512  # tokens of a window, as in llama.cpp's tools, where the model has as many


@dataclass(frozen=True)
class TextRun:
    gguf: GGUFFile
    session: Session
    model: Model
    windows: npt.NDArray[np.int32]  # (windows, tokens); the first token is BOS, where the model wants one


@contextmanager
def text_run(o: SimpleNamespace, command: str) -> Iterator[TextRun]:
    """The model of -m and the windows of -f; it sets `ctx_size` where no flag does. CliError: too few tokens."""
    path = model_path(o, command)
    if not o.file:
        raise UsageError(f"{command}: -f FILE is required: the text")
    with GGUFFile.open(path) as gguf:
        h = scoring_hparams(gguf, path)
        if o.ctx_size is None:
            o.ctx_size = min(N_WINDOW, h.n_ctx_whole)
        if o.ctx_size > h.n_ctx_whole:
            raise CliError(f"--ctx-size {o.ctx_size}: is more than the model's {h.n_ctx_whole}")
        windows = _windows(o, gguf, path)
        with open_session(o, trains=False) as session:
            yield TextRun(gguf, session, define_model(session, gguf, h, o.ctx_size), windows)


def _windows(o: SimpleNamespace, gguf: GGUFFile, path: Path) -> npt.NDArray[np.int32]:
    """Whole windows of the text, as llama.cpp's tools take them: the first token of each gives way to BOS."""
    try:
        text = Path(o.file).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CliError(f"{o.file}: {error.strerror}") from None
    vocabulary = tokenizer.from_metadata(gguf.metadata, path=path)
    ids = vocabulary.encode(text, parse_special=getattr(o, "parse_special", False))
    n = len(ids) // o.ctx_size
    if n <= o.chunk:
        wanted = f"{o.chunk + 1} windows of {o.ctx_size}" if o.chunk else f"a window of {o.ctx_size}"
        raise CliError(f"{o.file}: has {len(ids)} tokens, too few for {wanted} (--ctx-size)")
    windows = np.array(ids[: n * o.ctx_size], np.int32).reshape(n, o.ctx_size)[o.chunk :][: o.chunks]
    if vocabulary.add_bos and vocabulary.bos_id is not None:
        windows[:, 0] = vocabulary.bos_id
    return windows
