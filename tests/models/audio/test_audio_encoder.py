"""Spectrograms, compared with a float64 reference; chunks of sounds; faults of files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from logitless.backends.registry import open_backends
from logitless.graph import Session
from logitless.models.audio.encoder import WhisperEncoder
from logitless.models.audio.params import AudioParams, read_audio_params
from logitless.models.audio.spectrogram import chunks_of
from logitless.models.audio.waveform import Waveform
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.media.params import read_media_params
from tests.helpers import reference_audio
from tests.helpers.audio_files import AUDIO_SPECS, AudioSpec, sound, write_audio_projector
from tests.helpers.vision_files import N_TEXT, SPECS


def params_of(path: Path) -> AudioParams:
    with GGUFFile.open(path) as gguf:
        return read_audio_params(gguf)


def test_rows_of_voxtral_are_those_of_the_reference(tmp_path: Path) -> None:
    """But for GELU's tanh approximation: 0.0013 of rows whose standard deviation is 1. The other types are compared
    with llama.cpp (test_llama_cpp_audio.py)."""
    spec, heard = AUDIO_SPECS["voxtral"], sound(3)
    path = write_audio_projector(tmp_path / "mm.gguf", spec)
    mel = reference_audio.spectrogram(heard, spec.n_mel, seconds=30)
    with GGUFFile.open(path) as gguf, Session(open_backends(["cpu"])) as session:
        p = read_audio_params(gguf)
        (chunk,) = chunks_of(heard, p)
        assert np.abs(chunk - mel).max() < 1e-4
        encoder = WhisperEncoder.define(session, gguf, p, N_TEXT)
        # two chunks at once: each is as alone
        rows = encoder.rows(2, 3000, spec.n_mel)
        (result,) = session.compute(rows, encoder.feeds([chunk, np.zeros_like(chunk)]))
    assert result.shape == (2 * p.n_rows(), N_TEXT)
    expected = reference_audio.rows(path, spec, mel)
    assert np.abs(result[: p.n_rows()] - expected).max() < 2e-3 * expected.std()


def test_chunks_of_long_sounds() -> None:
    """As in llama.cpp; of Voxtral as many as a sound has begun, and its end is mirrored."""
    usual = AudioParams("qwen2a", 8, 8, 1, 1, 80, 1, 1e-5)
    voxtral = replace(usual, kind="voxtral", stack=4)
    for seconds, n_usual, n_voxtral in ((0.0, 1, 1), (0.01, 1, 1), (29.98, 1, 1), (30, 2, 1), (30.5, 2, 2), (61, 3, 3)):
        heard = Waveform(np.ones(int(seconds * 16000), np.float32))
        for p, expected in ((usual, n_usual), (voxtral, n_voxtral)):
            assert [chunk.shape for chunk in chunks_of(heard, p)] == [(3000, 80)] * expected, (seconds, p.kind)
    heard = sound(30)
    expected = reference_audio.spectrogram(heard, 80, seconds=30)
    assert np.abs(chunks_of(heard, voxtral)[0] - expected).max() < 1e-4
    # silence follows here, where the reference mirrors
    assert np.abs(chunks_of(heard, usual)[0] - expected)[:-2].max() < 1e-4
    loud = Waveform(np.r_[sound(31).samples, np.sin(np.arange(480000))].astype(np.float32))
    quiet, _, *_ = chunks_of(loud, usual)
    assert quiet.min() > chunks_of(sound(31), usual)[0].min()  # what is silence depends on the whole sound


def test_chunks_of_a_conformer_have_their_own_sizes() -> None:
    """30 seconds each, the last as long as it is; silence is a constant."""
    p = AudioParams("gemma4a", 8, 8, 1, 1, 16, 1, 1e-5)
    for seconds, expected in ((0.0, [1]), (0.01, [1]), (1.2, [119]), (30, [2999]), (30.5, [2999, 49])):
        chunks = chunks_of(Waveform(np.zeros(int(seconds * 16000), np.float32)), p)
        assert [len(chunk) for chunk in chunks] == expected, seconds
        assert all((chunk == np.log(np.float32(1e-3))).all() for chunk in chunks)


def test_chunks_of_spans_are_filled_up_with_zeros() -> None:
    """Of 8 seconds each, the last of as many seconds as the sound has begun; the loudest is of the whole sound."""
    p = AudioParams("qwen3a", 8, 8, 1, 1, 16, 1, 1e-5)
    for seconds, expected in ((0.0, [100]), (0.01, [100]), (0.98, [100]), (1, [200]), (8, [800, 100])):
        chunks = chunks_of(Waveform(np.ones(int(seconds * 16000), np.float32)), p)
        assert [len(chunk) for chunk in chunks] == expected, seconds
    heard = sound(9.3)
    expected_frames = reference_audio.spectrogram(heard, 16, seconds=9.3)
    frames = np.concatenate(chunks_of(heard, p))
    assert np.abs(frames[: len(expected_frames)] - expected_frames).max() < 1e-4
    assert frames[931:].size
    assert not frames[931:].any()


def test_pairs_of_frames_are_of_the_whole_sound(tmp_path: Path) -> None:
    """The frame that begins at the end of a sound is none; a sound shorter than two frames has one pair."""
    p = params_of(write_audio_projector(tmp_path / "mm.gguf", AUDIO_SPECS["granite_speech"]))
    for seconds, n_pairs, n_rows in ((0.0, 1, 3), (0.01, 1, 3), (0.4, 20, 6), (0.41, 21, 6), (31, 1550, 312)):
        (chunk,) = chunks_of(Waveform(np.ones(int(seconds * 16000), np.float32)), p)
        assert (chunk.shape, p.n_rows(len(chunk))) == ((n_pairs, 32), n_rows), seconds


def test_silence_is_finite() -> None:
    for kind, length in (("qwen2a", 3000), ("qwen3a", 4)):
        (chunk,) = chunks_of(Waveform(np.zeros(500, np.float32)), AudioParams(kind, 8, 8, 1, 1, 128, 1, 1e-5))
        assert np.abs(chunk[:length] + 1.5).max() < 1e-6


def write(path: Path, spec: AudioSpec, **changes: int) -> Path:
    return write_audio_projector(path, replace(spec, **changes))


def test_faults_of_files_are_one_line(tmp_path: Path) -> None:
    ultravox = AUDIO_SPECS["ultravox"]
    for changes, text in (
        ({"kind": "lfm2a"}, "audio projector type 'lfm2a' is not supported; docs/models.md lists the 7 that are"),
        ({"n_head": 3}, "key 'clip.audio.attention.head_count' is 3, for vectors of 40"),
        ({"n_mel": 300}, "key 'clip.audio.num_mel_bins' is 300; supported are 1 to 256"),
        ({"stack": 0}, "key 'clip.audio.projector.stack_factor' is missing"),
        ({"stack": 1600}, "key 'clip.audio.projector.stack_factor' is 1600, for 1500 rows"),
    ):
        path = write(tmp_path / "f.gguf", ultravox, **changes)  # type: ignore[arg-type]
        with pytest.raises(ModelFileError, match=re.escape(text)):
            params_of(path)
    speech = AUDIO_SPECS["granite_speech"]
    for key, value, text in (
        ("chunk_size", 66, "chunk_size' is 66, for distances of at most 64"),
        ("conv_kernel_size", 4, "conv_kernel_size' is 4, an even number"),
        ("projector.downsample_rate", 16, "downsample_rate' is 16, for windows of 15"),
        ("projector.head_count", 3, "head_count' is 3, for vectors of 40"),
        ("feature_layer", [1, 4], "feature_layer' has a layer that is none of 3"),
    ):
        changed = replace(speech, keys=speech.keys | {key: value})
        with pytest.raises(ModelFileError, match=re.escape(text)):
            params_of(write_audio_projector(tmp_path / "f.gguf", changed))
    path = write(tmp_path / "f.gguf", ultravox)
    p = params_of(path)
    with GGUFFile.open(path) as gguf, Session(open_backends(["cpu"])) as session:
        with pytest.raises(
            ModelFileError, match=r"tensor 'a\.conv1d\.1\.weight' has shape .40, 80, 3., expected .40, 128, 3."
        ):
            WhisperEncoder.define(session, gguf, replace(p, n_mel=128), N_TEXT)
        with pytest.raises(
            ModelFileError, match=r"tensor 'a\.blk\.1\.attn_q\.weight' is unknown in a projector of type ultra"
        ):
            WhisperEncoder.define(session, gguf, replace(p, n_layer=1), N_TEXT)


def test_encoders_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of sounds alone, of both, and of images beside sounds of an unknown type."""
    result = {}
    both = AUDIO_SPECS["qwen2.5o audio"]
    for name, spec in (("audio", AUDIO_SPECS["voxtral"]), ("both", both)):
        with GGUFFile.open(write_audio_projector(tmp_path / name, spec)) as gguf:
            result[name] = read_media_params(gguf)
    assert (result["audio"].vision, result["audio"].kind, result["audio"].causal) == (None, "voxtral", True)
    assert result["both"].vision is not None
    assert result["both"].audio is not None
    assert result["both"].kind == "qwen2.5o"
    assert result["audio"].audio is not None
    assert (result["audio"].audio.n_rows(), result["both"].audio.n_rows()) == (375, 750)
    path = write_audio_projector(tmp_path / "f.gguf", replace(both, kind="gemma4v", vision=SPECS["gemma4v"]))
    with GGUFFile.open(path) as gguf:
        unknown = read_media_params(gguf)
    assert unknown.audio is None
    assert unknown.vision is not None
    assert "sounds are not read" in caplog.text
    assert any(t.name.startswith("a.blk") for t in GGUFReader(path).tensors)
