"""File of a drafter: its traits, hyper-parameters and tensors, checked against the model that it drafts for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from logitless.models.architectures.registry import DRAFTERS
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams, read_hparams
from logitless.models.hparams.keys import Keys
from logitless.models.hparams.layer_sizes import LayerSizes
from logitless.models.model import exposes_layers
from logitless.models.weights.tensor_map import TensorSlice, layer_tensors
from logitless.models.weights.weights import check_tensors

MAX_VOCAB_DIFFERENCE = 128  # tokens that a vocabulary may have more or fewer than the model's; llama.cpp's rule


@dataclass(frozen=True)
class DrafterFile:
    """An open file of a drafter that fits its model."""

    gguf: GGUFFile
    hparams: Hparams
    target: Hparams  # the model's
    parts: dict[str, TensorSlice]  # tensors by name
    target_layers: tuple[int, ...]  # layers of the model whose inputs are its features; n_layer: the last one's output
    norm_before_residual: bool = False  # the residual stream begins with normalised features
    norm_before_fc: bool = False  # features are normalised before they are combined
    ids: npt.NDArray[np.int32] | None = None  # ids in the model's vocabulary by the drafter's own; None: the same
    block_size: int = 1  # tokens that are drafted at once, with the one before them (DFlash)
    mask_token: int = 0  # stands for the tokens of a block that are not known yet
    causal: bool = True  # tokens of a block see those before them only

    @property
    def width(self) -> int:
        """Numbers of a token's hidden state in the ring buffer (Hidden); 1: DFlash uses none."""
        widths = {"dflash": 1, "gemma4-assistant": self.target.n_embd}
        return widths.get(self.hparams.arch, self.hparams.n_embd)

    def draft_rows(self, n_draft: int) -> dict[str, Any]:
        """Keywords of HiddenRows for drafts of `n_draft` tokens."""
        arch = self.hparams.arch
        n_block = min(1 + n_draft, self.block_size)
        return {"behind": arch == "eagle3", "n_block": n_block, "fixed": arch == "gemma4-assistant"}

    @property
    def kv_layers(self) -> tuple[LayerSizes | int, ...]:
        """Sizes of each layer's KV cache, or the layer of the model whose cache it reads."""
        h, reads = self.hparams, self.hparams.arch == "gemma4-assistant"
        return tuple(_source(h, self.target, i) if reads else h.sizes(i) for i in range(h.n_layer))


def drafter_kind(path: str | Path) -> str:
    """`general.architecture` of a drafter's file; "": the file is no drafter. ModelFileError: it cannot be read."""
    file = Path(path)
    state = file.stat() if file.exists() else None
    return _kind(file, state and (state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(16)  # options ask for it several times
def _kind(path: Path, _state: tuple[int, int, int] | None) -> str:
    """Kind of the drafter in a file of this inode, size and time."""
    with GGUFFile.open(path) as gguf:
        arch = gguf.metadata.get("general.architecture")
    return arch if isinstance(arch, str) and arch in DRAFTERS else ""


def open_drafter(path: str | Path, target: Hparams) -> DrafterFile:
    """Open a drafter for a model of these hyper-parameters. ModelFileError names what does not fit."""
    gguf = GGUFFile.open(path)
    try:
        return _read(gguf, target)
    except BaseException:
        gguf.close()
        raise


def _read(gguf: GGUFFile, target: Hparams) -> DrafterFile:
    h = read_hparams(gguf.metadata, target.n_vocab, str(gguf.path))
    keys = Keys(gguf.metadata, h.arch, str(gguf.path))
    if h.arch == "gemma4-assistant":
        file = _gemma4(DrafterFile(gguf, h, target, {}, ()), keys)
        return replace(file, parts=check_tensors(gguf, h, dict(_gemma4_tensors(file)), _is_unused))
    if not exposes_layers(target):
        raise ModelFileError(gguf.path, f"reads hidden states between layers, which {target.arch} does not have")
    n_tokens = gguf.metadata.length("tokenizer.ggml.tokens")
    if n_tokens is not None and abs(n_tokens - target.n_vocab) > MAX_VOCAB_DIFFERENCE:
        raise ModelFileError(gguf.path, f"its vocabulary has {n_tokens} tokens, the model's has {target.n_vocab}")
    file = DrafterFile(gguf, h, target, {}, _target_layers(keys, target), ids=_ids(gguf, target))
    file = _eagle3(file, keys) if h.arch == "eagle3" else _dflash(file, keys)
    return replace(file, parts=check_tensors(gguf, h, dict(_tensors(file)), lambda name: name == "d2t"))


def _gemma4(file: DrafterFile, keys: Keys) -> DrafterFile:
    """Check the model's caches, which its layers read."""
    h, target = file.hparams, file.target
    width = keys.count("embedding_length_out")
    if width != target.n_embd:
        raise keys.error("embedding_length_out", f"is {width}, the model's embedding_length is {target.n_embd}")
    if target.mla or target.recurrent or target.n_layer < 2:
        raise ModelFileError(keys.file, f"reads the caches of a Gemma 4 model, which {target.arch} does not have")
    for layer in range(h.n_layer):
        source = _source(h, target, layer)
        heads, cached = ((size.n_head_kv, size.head_dim) for size in (h.sizes(layer), target.sizes(source)))
        if heads != cached or h.is_local(layer) != target.is_local(source):
            which = ("full-attention", "sliding-window")
            reads, has = which[h.is_local(layer)], which[target.is_local(source)]
            raise ModelFileError(
                keys.file,
                f"block {layer} reads {heads[0]} {reads} heads of {heads[1]}, layer {source} of the model has "
                f"{cached[0]} {has} heads of {cached[1]}",
            )
    return file


def _source(h: Hparams, target: Hparams, layer: int) -> int:
    """The layer of the model whose cache a layer of a Gemma 4 assistant reads: that of its last layer, or, with a
    sliding window, of the one before."""
    return target.kv_source(target.n_layer - 1 - h.is_local(layer))


def _gemma4_tensors(file: DrafterFile) -> Iterator[tuple[str, TensorSlice]]:
    h, n = file.hparams, file.target.n_embd
    shapes = {
        "token_embd": (h.n_vocab, h.n_embd),
        "output_norm": (h.n_embd,),
        "nextn.pre_projection": (h.n_embd, 2 * n),
        "nextn.post_projection": (n, h.n_embd),
    }
    for name, shape in shapes.items():
        yield f"{name}.weight", TensorSlice(f"{name}.weight", shape)
    yield "rope_freqs.weight", TensorSlice("rope_freqs.weight", (h.rope_dim // 2,), required=False)
    for i in range(h.n_layer):
        for name, part in layer_tensors(h, i, file.gguf.tensors):
            if not name.startswith((f"blk.{i}.attn_k", f"blk.{i}.attn_v")):
                yield name, part


def _is_unused(name: str) -> bool:
    """True for the tensors of Gemma 4's LM head over groups of tokens, which llama.cpp does not run either."""
    return name.startswith("masked_embd_")


def _eagle3(file: DrafterFile, keys: Keys) -> DrafterFile:
    n_layer, target = file.hparams.n_layer, file.target
    if n_layer != 1:
        raise keys.error("block_count", f"is {n_layer}: {keys.arch} has one block")
    if len(file.target_layers) != 3:
        raise keys.error("target_layers", f"has {len(file.target_layers)} layers, expected 3")
    width = keys.count("target_hidden_size")
    if width != target.n_embd:
        raise keys.error("target_hidden_size", f"is {width}, the model's embedding_length is {target.n_embd}")
    before_residual, before_fc = (keys.flag(f"norm_before_{part}", False) for part in ("residual", "fc"))
    return replace(file, norm_before_residual=before_residual, norm_before_fc=before_fc)


def _dflash(file: DrafterFile, keys: Keys) -> DrafterFile:
    n_embd, target, key = file.hparams.n_embd, file.target, "tokenizer.ggml.mask_token_id"
    if n_embd != target.n_embd:
        raise keys.error("embedding_length", f"is {n_embd}, the model's is {target.n_embd}")
    mask = keys.metadata.get(key)
    if not isinstance(mask, int) or not 0 <= mask < target.n_vocab:
        raise ModelFileError(keys.file, f"key '{key}' is {mask}, expected a token of the model")
    size = keys.count("block_size", 16, 2)  # with the last token
    causal = keys.flag("attention.causal", keys.get("decoder_arch") == "laguna")
    return replace(file, block_size=size, mask_token=mask, causal=causal)


def _target_layers(keys: Keys, target: Hparams) -> tuple[int, ...]:
    """Layers of the model whose inputs are the features."""
    key, value = "target_layers", keys.get("target_layers")
    if value is None:
        raise keys.error(key, "is missing")
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or not value.size:
        raise keys.error(key, "is not a list of layers")
    layers = tuple(value.tolist())
    if not all(0 <= layer <= target.n_layer for layer in layers):
        raise keys.error(key, f"is {list(layers)}, the model has {target.n_layer} layers")
    return layers


def _ids(gguf: GGUFFile, target: Hparams) -> npt.NDArray[np.int32] | None:
    """`d2t`: the model's token of each of the drafter's own."""
    info = gguf.tensors.get("d2t")
    if info is None:
        return None
    if info.dtype not in ("i64", "i32") or len(info.shape) != 1:
        raise ModelFileError(gguf.path, f"tensor 'd2t' is {info.dtype} {info.shape}, expected whole numbers")
    ids = np.frombuffer(gguf.bytes_of("d2t").tobytes(), np.int64 if info.dtype == "i64" else np.int32)
    if not ids.size or ids.min() < 0 or ids.max() >= target.n_vocab or len(np.unique(ids)) != len(ids):
        raise ModelFileError(gguf.path, f"tensor 'd2t' does not map to tokens 0 to {target.n_vocab - 1}, each once")
    return ids.astype(np.int32)


def _tensors(file: DrafterFile) -> Iterator[tuple[str, TensorSlice]]:
    h, present = file.hparams, file.gguf.tensors
    n_features = len(file.target_layers) * file.target.n_embd
    shares = h.n_embd == file.target.n_embd  # else the model's own matrices do not fit
    yield "fc.weight", TensorSlice("fc.weight", (h.n_embd, n_features))
    if file.norm_before_fc or h.arch == "dflash":
        n = n_features if file.norm_before_fc else h.n_embd
        yield "enc.output_norm.weight", TensorSlice("enc.output_norm.weight", (n,))
    embedding, n_out = "token_embd.weight", len(file.ids) if file.ids is not None else h.n_vocab
    n_rows = present[embedding].shape[0] if embedding in present else h.n_vocab
    yield embedding, TensorSlice(embedding, (max(n_rows, h.n_vocab), h.n_embd), required=not shares)
    yield "output_norm.weight", TensorSlice("output_norm.weight", (h.n_embd,))
    needs_head = file.ids is not None or not shares
    yield "output.weight", TensorSlice("output.weight", (n_out, h.n_embd), required=needs_head)
    yield "rope_freqs.weight", TensorSlice("rope_freqs.weight", (h.rope_dim // 2,), required=False)
    for i in range(h.n_layer):
        b = f"blk.{i}."
        if h.arch == "eagle3":
            yield b + "attn_norm_2.weight", TensorSlice(b + "attn_norm_2.weight", (h.n_embd,))
        for name, part in layer_tensors(h, i, present):
            wide = h.arch == "eagle3" and name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight"))
            yield name, replace(part, shape=(part.shape[0], 2 * h.n_embd)) if wide else part
