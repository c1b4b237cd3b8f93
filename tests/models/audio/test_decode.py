"""Sound files: samples of every coding, rates and channels, and files that are refused."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from logitless.models.audio.decode import MAX_CHANNELS, AudioError, audio_format, decode_audio
from logitless.models.audio.wav import MAX_CHUNKS
from logitless.models.audio.waveform import Waveform
from tests.helpers.fuzz import examples, mutated
from tests.helpers.sounds import F32, changed, chunk, packed, riff, sine, wav

TONE = sine(440, 4000)


def test_a_waveform_is_known_by_its_samples() -> None:
    other = TONE.copy()
    other[17] = np.nextafter(other[17], np.float32(2))
    assert Waveform(TONE).seconds == 0.25
    assert Waveform(TONE).digest == Waveform(TONE.copy()).digest == Waveform(np.repeat(TONE, 2)[::2]).digest
    assert len({Waveform(x).digest for x in (TONE, other, TONE[:-1])}) == 3


@pytest.mark.parametrize(("width", "step"), [(1, 2**-7), (2, 2**-15), (3, 2**-23), (4, 2**-24)])
def test_integers(width: int, step: float) -> None:
    result = decode_audio(wav(TONE, width=width)).samples
    assert result.dtype == np.float32
    assert np.abs(result - TONE).max() <= step / 2
    full = np.float32([-1, 0, 1])
    assert np.abs(decode_audio(wav(full, width=width)).samples - full).max() <= step


@pytest.mark.parametrize("bits", [32, 64])
def test_floats(bits: int) -> None:
    raw = TONE.astype(f"<f{bits // 8}").tobytes()
    np.testing.assert_array_equal(decode_audio(riff(3, bits, raw)).samples, TONE)
    guid = (3).to_bytes(2, "little") + b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
    plain = riff(3, bits, raw)
    extensible = plain[:12] + chunk(b"fmt ", b"\xfe\xff" + plain[22:36] + b"\x16\0" + bytes(6) + guid) + plain[36:]
    np.testing.assert_array_equal(decode_audio(extensible).samples, TONE)


def test_loud_floats_are_cut() -> None:
    loud = np.float32([3, -3, 0.5])
    np.testing.assert_array_equal(decode_audio(riff(3, 32, loud.tobytes())).samples, np.float32([1, -1, 0.5]))
    huge = np.float32([3e38, -3e38] * 1000)  # whose spectrum has no room in 32 bits
    assert np.abs(decode_audio(riff(3, 32, huge.tobytes(), rate=44_100)).samples).max() <= 1


@pytest.mark.parametrize("channels", [2, 3, MAX_CHANNELS])
def test_channels_are_averaged(channels: int) -> None:
    parts = np.stack([sine(200 * (i + 1), 4000) for i in range(channels)], 1)
    result = decode_audio(riff(3, 32, parts.tobytes(), channels=channels)).samples
    assert np.abs(result - parts.astype(np.float64).mean(1)).max() < 1e-6


def test_a_streamed_file_ends_with_its_samples() -> None:
    whole = wav(TONE)
    expected = decode_audio(whole).samples
    for size in (0, 0xFFFF_FFFF):
        streamed = changed(whole, [(40, size.to_bytes(4, "little"))])
        np.testing.assert_array_equal(decode_audio(streamed).samples, expected)
    odd = riff(1, 16, whole[44:], extra=chunk(b"LIST", b"odd"))
    np.testing.assert_array_equal(decode_audio(odd).samples, expected)


def test_a_large_file_is_the_same_in_blocks() -> None:
    long = sine(300, 200_001)
    np.testing.assert_array_equal(decode_audio(riff(3, 32, long.tobytes())).samples, long)


MANY = chunk(b"LIST", b"") * (MAX_CHUNKS + 1)
NAN = np.float32([0, np.nan]).tobytes()
BROKEN = {
    "is no sound of a known format": b"hello, this is no sound",
    "has no samples": riff(1, 16, b""),
    "cut off": wav(TONE)[:-1],
    "there are 0": wav(TONE)[:44],
    "does not tell the coding": b"RIFF\0\0\0\0WAVE" + chunk(b"data", b"ab"),
    "coding 2 of 4 bits": riff(2, 4, b"abcd"),
    "coding 1 of 12 bits": riff(1, 12, b"abcd"),
    "rate of 0 Hz": riff(1, 16, b"abcd", rate=0),
    "rate of 4000000000 Hz": riff(1, 16, b"abcd", rate=4_000_000_000),
    "0 channels": riff(1, 16, b"abcd", channels=0),
    "has 9 channels": riff(1, 16, b"abcd" * 9, channels=9),
    "no numbers": riff(3, 32, NAN),
    "are no numbers": riff(3, 64, np.float64([1e300]).tobytes()),
    "4026531840 bytes should follow": b"RIFF\0\0\0\0WAVE" + chunk(b"LIST", b"", 0xF000_0000),
    f"more than {MAX_CHUNKS} chunks": riff(1, 16, b"ab", extra=MANY),
    "is longer than 2 seconds": wav(np.zeros(32_001, np.float32)),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_broken_files_are_refused(reason: str) -> None:
    with pytest.raises(AudioError) as refused:
        decode_audio(BROKEN[reason], max_seconds=2)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_seconds_are_not_longer() -> None:
    assert decode_audio(wav(np.zeros(32_000, np.float32)), max_seconds=2).seconds == 2


def test_the_work_ends_when_nobody_waits() -> None:
    class Left(Exception):
        pass

    def check() -> None:
        raise Left

    with pytest.raises(Left):
        decode_audio(wav(TONE), check=check)


def test_other_formats_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert len(decode_audio(wav(TONE)).samples) == 4000
    with pytest.raises(AudioError, match=r"is FLAC, which needs soundfile .*logitless\[audio\]"):
        decode_audio(b"fLaC" + bytes(100))


FORMS = {"MP3": ("MP3", None, 44_100), "FLAC": ("FLAC", None, 44_100), "Ogg": ("OGG", None, 44_100)}
FORMS["Opus"] = ("OGG", "OPUS", 48_000)


@pytest.mark.parametrize("form", FORMS)
def test_packed_files(form: str) -> None:
    pytest.importorskip("soundfile")
    kind, coding, rate = FORMS[form]
    data = packed(np.stack([sine(440, rate, rate)] * 2, 1), rate, kind, coding)
    assert audio_format(data) == ("Ogg" if form == "Opus" else form)
    result = decode_audio(data).samples
    assert len(result) == 16_000
    expected = sine(440, 16_000)
    assert np.abs(result - expected)[1600:-1600].max() < (1e-4 if form == "FLAC" else 0.02)


def test_packed_files_are_bounded() -> None:
    """An hour of silence in few bytes, a cut file, and a streamed one."""
    pytest.importorskip("soundfile")
    bomb = packed(np.zeros(3600 * 1000, np.float32), 1000, "FLAC")
    assert len(bomb) < 1 << 16
    with pytest.raises(AudioError, match="is longer than 600 seconds"):
        decode_audio(bomb)
    whole = packed(TONE, 16_000, "FLAC")
    with pytest.raises(AudioError, match=r"FLAC that cannot be decoded|is cut off or broken: \d+ of 4000 samples"):
        decode_audio(whole[: len(whole) // 2])
    streamed = changed(whole, [(21, bytes([whole[21] & 0xF0, 0, 0, 0, 0]))])  # of STREAMINFO: 36 bits, unknown
    np.testing.assert_array_equal(decode_audio(streamed).samples, decode_audio(whole).samples)


def _files() -> dict[str, bytes]:
    tone: F32 = np.stack([sine(440, 3000, 44_100), sine(300, 3000, 44_100)], 1)
    files = {f"wav{width}": wav(tone, 44_100, width) for width in (1, 2, 3, 4)}
    files["float"] = riff(3, 32, tone.tobytes(), rate=44_100, channels=2)
    try:
        return files | {form: packed(tone, rate, kind, coding) for form, (kind, coding, rate) in FORMS.items()}
    except ImportError:
        return files


def test_mutated_files() -> None:
    """300, 15,000 with --fuzz 50: a waveform within its bounds, or one line."""
    files, n_read, refusals = _files(), 0, set()
    for seed in range(examples(300)):
        data = mutated(files, random.Random(seed))
        try:
            result = decode_audio(data).samples
        except AudioError as error:
            refusals.add(str(error))
        else:
            n_read += 1
            assert len(result), seed
            assert np.abs(result).max() <= 1, seed
    assert n_read > 10
    assert not [line for line in refusals if "\n" in line or not line]
