"""Audio projectors, and the hyper-parameters of an audio encoder by GGUF's names.

A projector type is one row of data; sizes and tensors come from the file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from logitless.models.errors import ModelFileError, unsupported
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.keys import Keys
from logitless.models.media.projector_weights import projector_type

N_FRAMES = 3000  # frames of a chunk: 30 seconds
N_POSITIONS = N_FRAMES // 2  # of a chunk in Whisper's encoder
MAX_MEL = 256  # bins of a spectrogram
MAX_TAPS = 255  # of a depthwise convolution
SPAN, SPANS = 100, 8  # frames that are convolved by themselves, and most of such spans in a chunk (Qwen 3)


class AudioEncoderKind(Enum):
    """Layers from a spectrogram to rows."""

    WHISPER = auto()  # two convolutions over a chunk of 30 seconds, a transformer (Radford et al., 2022)
    CONFORMER = auto()  # Gemma 4's: any number of frames, attention to the rows before
    SPEECH = auto()  # Granite Speech's conformer: any number of frames, in pairs; attention within blocks
    SPANS = auto()  # three convolutions over each second, a transformer over eight of them (Qwen 3)


class AudioHead(Enum):
    """Layers from the encoder's rows to rows of the text model."""

    LINEAR = auto()  # one matrix (Qwen2-Audio)
    MLP = auto()  # two matrices, GELU (Voxtral)
    GATED = auto()  # RMS norm, SwiGLU, RMS norm, matrix (Ultravox)
    QUERIES = auto()  # a Q-Former: learned queries attend to windows of rows (Granite Speech)
    NORM_LINEAR = auto()  # one matrix, RMS norm, one matrix (Gemma 4)


@dataclass(frozen=True)
class AudioProjector:
    """Traits of one audio projector type."""

    head: AudioHead
    begin: str = ""  # text before the rows of a sound
    end: str = ""  # text after them
    pooled: bool = False  # the mean of each two rows, before the encoder's last norm
    stacked: bool = False  # several rows become one, side by side
    # the number of chunks is rounded up, and the last frames see the sound mirrored; else silence
    # follows a sound, and the encoder reads one chunk more than the sound fills, as in llama.cpp
    mirrored: bool = False
    encoder: AudioEncoderKind = AudioEncoderKind.WHISPER
    bounded: bool = False  # inputs and outputs of matrices may have bounds
    unused: tuple[str, ...] = ()  # tensors of files that the encoder does not need


_QWEN2 = AudioProjector(AudioHead.LINEAR, "<|audio_bos|>", "<|audio_eos|>", pooled=True)

AUDIO_PROJECTORS: dict[str, AudioProjector] = {
    "ultravox": AudioProjector(AudioHead.GATED, stacked=True),
    "qwen2a": _QWEN2,
    "qwen2.5o": _QWEN2,
    "voxtral": AudioProjector(AudioHead.MLP, "[BEGIN_AUDIO]", stacked=True, mirrored=True),
    "gemma4a": AudioProjector(
        *(AudioHead.NORM_LINEAR, "<|audio>", "<audio|>"), encoder=AudioEncoderKind.CONFORMER, bounded=True
    ),
    "granite_speech": AudioProjector(
        AudioHead.QUERIES,
        encoder=AudioEncoderKind.SPEECH,
        unused=tuple(f"a.enc_ctc_out{i}.{end}" for i in ("", "_mid") for end in ("weight", "bias")),  # of one layer
    ),
    "qwen3a": AudioProjector(AudioHead.MLP, "<|audio_start|>", "<|audio_end|>", encoder=AudioEncoderKind.SPANS),
}


@dataclass(frozen=True)
class SpeechParams:
    """Sizes of Granite Speech's encoder and its Q-Former."""

    block: int  # rows that attend to each other
    far: int  # longest distance of the table
    kernel: int  # taps of a convolution
    window: int  # rows that the same queries attend to
    n_queries: int
    n_head: int  # of the Q-Former
    n_layer: int
    features: tuple[int, ...]  # layers whose rows the Q-Former sees beside those of the last

    @classmethod
    def read(cls, gguf: GGUFFile, keys: Keys, n_embd: int, n_layer: int) -> SpeechParams:
        """The sizes by their keys. ModelFileError names the one at fault."""
        block, far = (keys.count(name) for name in ("chunk_size", "max_pos_emb"))
        kernel = keys.count("conv_kernel_size", high=MAX_TAPS)
        window = keys.count("projector.window_size", high=N_FRAMES // 2)  # rows of a chunk
        rate, n_head = (keys.count(f"projector.{name}") for name in ("downsample_rate", "head_count"))
        if not 1 < block <= far + 1:
            raise keys.error("chunk_size", f"is {block}, for distances of at most {far}")
        if kernel % 2 == 0:
            raise keys.error("conv_kernel_size", f"is {kernel}, an even number")
        if not window // rate:
            raise keys.error("projector.downsample_rate", f"is {rate}, for windows of {window}")
        if n_embd % n_head:
            raise keys.error("projector.head_count", f"is {n_head}, for vectors of {n_embd}")
        features = keys.get("feature_layer")
        layers = tuple(sorted(set(features.tolist()))) if isinstance(features, np.ndarray) else ()
        if any(layer not in range(n_layer + 1) for layer in layers):
            raise keys.error("feature_layer", f"has a layer that is none of {n_layer}")
        of_queries = {name.split(".")[2] for name in gguf.tensors if name.startswith("a.proj_blk.")}
        return cls(block, far, kernel, window, window // rate, n_head, len(of_queries), layers)


@dataclass(frozen=True)
class AudioParams:
    """Sizes and constants of one audio encoder and its projector."""

    kind: str  # key of AUDIO_PROJECTORS
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_mel: int
    stack: int  # rows of the encoder that become one
    eps: float
    speech: SpeechParams | None = None

    @property
    def projector(self) -> AudioProjector:
        return AUDIO_PROJECTORS[self.kind]

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def n_rows(self, n_frames: int = N_FRAMES) -> int:
        """Rows of a chunk in the prompt, without a last stack that is not full."""
        if self.projector.encoder is AudioEncoderKind.CONFORMER:
            return halved(n_frames, 2)
        if self.speech is not None:
            return -(-n_frames // self.speech.window) * self.speech.n_queries
        if self.projector.encoder is AudioEncoderKind.SPANS:
            return n_frames // SPAN * halved(SPAN, 3)
        return N_POSITIONS // (2 if self.projector.pooled else 1) // self.stack


def halved(n: int, times: int = 1) -> int:
    """Length of the output of so many convolutions of 3 with a stride of 2 and zeros at both ends."""
    return -(-n >> times)


def read_audio_params(gguf: GGUFFile) -> AudioParams:
    """The parameters of the audio encoder of a projector file. ModelFileError names the key at fault."""
    metadata, path = gguf.metadata, str(gguf.path)
    kind = projector_type(metadata, "audio")
    if not isinstance(kind, str) or kind not in AUDIO_PROJECTORS:
        raise ModelFileError(path, unsupported("audio projector type", kind, AUDIO_PROJECTORS))
    keys = Keys(metadata, "clip.audio", path)
    params = AudioParams(
        kind=kind,
        n_embd=keys.count("embedding_length"),
        n_ff=keys.count("feed_forward_length"),
        n_layer=keys.layers(),
        n_head=keys.count("attention.head_count"),
        n_mel=keys.count("num_mel_bins", high=MAX_MEL),
        stack=keys.count("projector.stack_factor") if AUDIO_PROJECTORS[kind].stacked else 1,
        eps=keys.positive("attention.layer_norm_epsilon", 1e-5),
    )
    if params.n_embd % params.n_head or params.head_dim % 4:
        raise keys.error("attention.head_count", f"is {params.n_head}, for vectors of {params.n_embd}")
    if AUDIO_PROJECTORS[kind].encoder is AudioEncoderKind.SPEECH:
        params = replace(params, speech=SpeechParams.read(gguf, keys, params.n_embd, params.n_layer))
        if params.n_mel % 2:
            raise keys.error("num_mel_bins", f"is {params.n_mel}, an odd number for two frames")
    if not params.n_rows():
        raise keys.error("projector.stack_factor", f"is {params.stack}, for {N_POSITIONS} rows")
    return params
