"""Drafters by the architecture of their files."""

from __future__ import annotations

from logitless.graph.execution.session import Session
from logitless.models.drafters.dflash import DFlash
from logitless.models.drafters.drafter import FileDrafter
from logitless.models.drafters.drafter_file import DrafterFile
from logitless.models.drafters.eagle3 import Eagle3
from logitless.models.drafters.gemma4_assistant import Gemma4Assistant

KINDS: dict[str, type[FileDrafter]] = {"dflash": DFlash, "eagle3": Eagle3, "gemma4-assistant": Gemma4Assistant}


def define_drafter(session: Session, file: DrafterFile | None, n_ctx: int) -> FileDrafter | None:
    """Define the weights of a drafter on a session; None: there is none."""
    return None if file is None else KINDS[file.hparams.arch].define(session, file, n_ctx)
