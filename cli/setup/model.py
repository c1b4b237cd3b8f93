"""The model that the flags name: its file, downloaded where need be, and its options."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from logitless.cli.flags.flags import UsageError
from logitless.cli.progress import COMPILING, show_compiling
from logitless.engine.loading.options import ModelOptions

if TYPE_CHECKING:
    from logitless.graph.execution.session import Session


def model_options(options: SimpleNamespace, **settings: Any) -> ModelOptions:
    """The model options of a command's flags; `settings` come first."""
    names = {f.name for f in fields(ModelOptions)}
    return ModelOptions(**({k: v for k, v in vars(options).items() if k in names} | settings))


def choose_device(options: SimpleNamespace, most: int | None = None) -> None:
    """Set `device` to at most so many names where it is `auto`, and say on stderr why, if there is a GPU."""
    from logitless.backends.default_device import AUTO, NO_GPU
    from logitless.backends.registry import default_device

    if options.device == AUTO:
        default = default_device(max(options.threads, 0))
        options.device = ",".join(default.names[:most])
        if default.why != NO_GPU:
            print(f"logitless: device {options.device} ({default.why})", file=sys.stderr)


@contextmanager
def open_session(o: SimpleNamespace, *, trains: bool = True) -> Iterator[Session]:
    """A session on the devices of --device; kernels of training are compiled meanwhile, if it `trains`."""
    from logitless.backends.registry import open_backends
    from logitless.graph.execution.session import Session

    show_compiling()
    choose_device(o)
    session = Session(open_backends(o.device.split(","), max(o.threads, 0)))
    for backend in session.backends if trains else ():
        backend.prefetch_training(())
    try:
        yield session
    finally:
        COMPILING.end()
        session.close()


def model_path(options: SimpleNamespace, command: str) -> Path:
    """The model's file. UsageError: no flag names one."""
    path = named_model(options)
    if path is None:
        raise UsageError(f"{command}: -m FILE is required")
    return path


def named_model(options: SimpleNamespace) -> Path | None:
    """The model's file, downloaded if need be; None: no flag names one."""
    if any(getattr(options, flag, None) for flag in ("hf_repo", "hf_file", "model_url", "docker_repo")):
        from logitless.cli.hub import model_source

        return model_source.find(options)
    return Path(options.model) if options.model else None


def find_draft_model(options: SimpleNamespace, path: Path) -> None:
    """Set `model_draft` to the draft model, the MTP head or the drafter of the hub, downloaded if need be.

    `path`: the model's file."""
    from logitless.engine.speculation.settings import HEADS, MODEL, MTP

    if options.hf_repo_draft is not None and options.model_draft:
        raise UsageError("--hf-repo-draft and --model-draft: give one of them")
    kinds = [kind.strip() for kind in options.spec_type.split(",")]
    repo, head = options.hf_repo_draft, next((kind for kind in HEADS if kind in kinds and MODEL not in kinds), "")
    if repo is None and head and not options.model_draft and not (head == MTP and _has_mtp_head(path)):
        repo = options.hf_repo
    if repo is None:
        return
    from logitless.cli.hub import model_source

    hub = model_source.hub_of(options)
    file = hub.block(repo, path, head.removeprefix("draft-")) if head else None
    if file is None and options.hf_repo_draft is not None:
        file = hub.model(repo)
    options.model_draft = None if file is None else str(file)


def find_projector(options: SimpleNamespace, path: Path) -> None:
    """Set `mmproj` to the projector of --mmproj-url, or the one that the hub or its cache has for the
    model, downloaded if need be.

    `path`: the model's file. One that cannot be used is left out, unless a flag names it."""
    address, repo = (getattr(options, name, None) for name in ("mmproj_url", "hf_repo"))  # plan has neither
    if address is not None and options.mmproj:
        raise UsageError("--mmproj and --mmproj-url: give one of them")
    cached = repo is not None or "snapshots" in path.parts
    if options.mmproj or (address is None and not (options.mmproj_auto and cached)):
        return
    from logitless.cli.hub import model_source

    projector = model_source.find_projector(options, path)
    if projector is not None and (address is not None or _is_usable(projector, path)):
        options.mmproj = str(projector)
    elif projector is not None:
        options.mmproj_auto = False  # it has been tried


def _is_usable(projector: Path, path: Path) -> bool:
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.media.projector_choice import is_usable
    from logitless.models.model import hparams_of

    with GGUFFile.open(path) as gguf:
        return is_usable(projector, gguf, hparams_of(gguf))


def _has_mtp_head(path: Path) -> bool:
    from logitless.models.architectures.mtp import can_guess
    from logitless.models.gguf.file import GGUFFile
    from logitless.models.model import hparams_of

    with GGUFFile.open(path) as gguf:
        return can_guess(gguf, hparams_of(gguf))
