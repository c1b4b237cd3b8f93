"""Base of the encoders of images and sounds: parameters, and weights on the session of the text model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy.typing as npt

from logitless.graph.dtype import dtype_of
from logitless.graph.execution.session import Session
from logitless.graph.tensor import Tensor, variable
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.projector_weights import Declaration, ProjectorWeights

Array = npt.NDArray[Any]


class ProjectorTraits(Protocol):
    """Traits of a projector type that its tensors depend on."""

    @property
    def bounded(self) -> bool: ...  # matrices may have bounds of their inputs and outputs
    @property
    def unused(self) -> tuple[str, ...]: ...  # tensors that files have and the encoder does not need


class EncoderParams(Protocol):
    """Parameters of an encoder and its projector."""

    @property
    def kind(self) -> str: ...  # the projector's type
    @property
    def projector(self) -> ProjectorTraits: ...


P = TypeVar("P", bound=EncoderParams)


@dataclass(frozen=True)
class ProjectorEncoder(ABC, Generic[P]):
    """The encoder of one projector file: tiles of one size → rows of the text model.

    A size is (height, width) of pixels, or (frames, mel bins) of a spectrogram."""

    audio: ClassVar[bool] = False
    p: P
    w: ProjectorWeights
    constants: Mapping[str, Tensor] = field(default_factory=dict)  # by the names of `numbers`

    @classmethod
    def declaration(cls, gguf: GGUFFile, p: P, n_text: int) -> Declaration:
        """The tensors of the encoder and the projector of a text model of this width. ModelFileError: they are such
        that no graph can be built of them."""
        traits = p.projector
        w = Declaration(
            gguf=gguf, kind=p.kind, n_text=n_text, audio=cls.audio, bounded=traits.bounded, unused=traits.unused
        )
        constants = {name: variable(name, v.shape, dtype_of(v)) for name, v in cls.numbers(p).items()}
        encoder = cls(p, w, constants)
        w.record(lambda: [*encoder.rows(1, *encoder.usual_size), *encoder.row_table()])
        return w

    @classmethod
    def define(cls, session: Session, gguf: GGUFFile, p: P, n_text: int) -> Self:
        """Define weights and constants. ModelFileError names the tensor at fault."""
        w = cls.declaration(gguf, p, n_text).load(session)
        return cls(p, w, {name: session.constant(f"vision.{name}", v) for name, v in cls.numbers(p).items()})

    @staticmethod
    def numbers(p: P) -> Mapping[str, Array]:
        """Constants that follow from the parameters."""
        return {}

    @property
    def states(self) -> list[str]:
        """Names of the encoder's constants on the session."""
        return [t.name for t in (*self.w.tensors.values(), *self.constants.values())]

    @property
    @abstractmethod
    def usual_size(self) -> tuple[int, int]:
        """Size of a tile as large as usual ones become."""

    @abstractmethod
    def n_inputs(self, height: int, width: int, /) -> int:
        """Inputs of a tile that attend to each other."""

    @abstractmethod
    def feeds(self, tiles: Sequence[Array], /) -> dict[str, Array]:
        """Inputs of `rows` for tiles of one size."""

    @abstractmethod
    def rows(self, n_tiles: int, height: int, width: int, /) -> list[Tensor]:
        """Rows (n_tiles · rows of a tile, n_text) f32 of tiles of one size, then as many for each deepstack layer."""

    def row_table(self) -> list[Tensor]:
        """The kinds of rows (n, n_text) that tiles have beside those of `rows`, such as line ends; most have none."""
        return []

    @abstractmethod
    def row_places(self, height: int, width: int, /) -> tuple[Array, Array, Array]:
        """Indices of a tile's rows in the prompt: those of `rows`, those of extra rows; and the kinds of these."""
