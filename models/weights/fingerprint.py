"""Model fingerprint: a hash that ties cached KV blocks and slot files to one model."""

from __future__ import annotations

from hashlib import blake2b

from logitless.models.architectures.rope import frequencies, rope_factors
from logitless.models.gguf.file import GGUFFile
from logitless.models.hparams.hparams import Hparams

SAMPLE = 512  # bytes of each tensor that are looked at, in the middle of it


def fingerprint(gguf: GGUFFile, h: Hparams, n_ctx: int) -> str:
    """Hex digest of the hyper-parameters, the RoPE frequencies (which `n_ctx` of one sequence
    may select) and every tensor's name, type, shape and some bytes: a finetuned model differs in
    all of its tensors."""
    digest = blake2b(repr(h).encode(), digest_size=16)
    frequency, magnitude = frequencies(h, rope_factors(gguf, h, n_ctx))
    digest.update(frequency.tobytes() + repr(magnitude).encode())
    for name, info in sorted(gguf.tensors.items()):
        raw = gguf.stored_bytes(name)
        start = max(0, (len(raw) - SAMPLE) // 2)
        digest.update(f"{name} {info.dtype} {info.shape}".encode() + raw[start : start + SAMPLE].tobytes())
    return digest.hexdigest()
