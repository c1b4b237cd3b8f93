"""Family of Hugging Face's models: its architecture in GGUF, its keys of metadata, its moves of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from logitless.models.gguf.write import Key
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.moves import Move

Keys = Iterator[tuple[str, Key]]
Rules = tuple[tuple[str, Move], ...]  # (end of a tensor's name in GGUF, its move)
Targets = tuple[tuple[str, Move | None], ...]
# (end of a name of Hugging Face, the tensor of these numbers or those that are made of it), before the map of names
Splits = tuple[tuple[str, str | Targets], ...]


def made_of(targets: str | Targets) -> Targets:
    """Tensors with their moves."""
    return ((targets, None),) if isinstance(targets, str) else targets


def nothing(config: Config) -> Keys:
    """No keys beside those of all."""
    yield from ()


@dataclass(frozen=True)
class Family:
    arch: str  # GGUF's
    keys: Callable[[Config], Keys] = nothing  # without the architecture's prefix
    moves: Rules = ()
    splits: Splits = ()
    renamed: tuple[tuple[str, str], ...] = ()  # (pattern, its replacement) in names, before all other rules
    unused: str = ""  # a pattern of names whose tensors are not of the network here
    required: tuple[str, ...] = ()  # tensors that GGUF's architecture may lack, and this one may not
    numbers: tuple[tuple[str, str], ...] = ()  # (end of a name, key) of one number of each layer
    names: str = ""  # the architecture whose map of names stands for this one's, which the gguf package has not
    biases: str = ""  # a pattern of weights that have a bias, where GGUF's architecture has some without
    mtp: bool = False  # the folder may have blocks that predict one token more, which models/architectures/mtp.py runs

    def name_of(self, name: str) -> str:
        """A tensor's name by the rules of `renamed`."""
        for pattern, new in self.renamed:
            name = re.sub(pattern, new, name)
        return name
