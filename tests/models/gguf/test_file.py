"""GGUF reader: equal to gguf's own on good files, one clear line on bad ones."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile, TensorInfo
from logitless.models.gguf.write import copied_keys, write_gguf
from logitless.models.hparams.overrides import Overrides

STRINGS = [
    "",
    "a",
    "\0",
    "\0\0\0\0\0\0\0\0\0",
    "é" * 200,
    "",
    "",
    "x" * 255,
    "y" * 256,
    "z" * 70000,
    *map(str, range(300)),
]


def write_model(path: Path, **split: int) -> None:
    writer = GGUFWriter(path, "llama", **split)
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.eps", 1e-5)
    writer.add_bool("llama.flag", True)
    writer.add_int64("llama.negative", -(2**40))
    writer.add_array("llama.strings", STRINGS)
    writer.add_array("llama.floats", [0.5, -1.0, 3.0])
    writer.add_array("llama.bools", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", rng.standard_normal((6, 64), np.float32))
    writer.add_tensor("blk.0.norm.weight", rng.standard_normal(5, np.float32))
    writer.add_tensor("blk.0.ffn.weight", np.zeros((4, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_model(path)
    return path.read_bytes()


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, ne: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def gguf(*items: bytes, keys: int = 0, tensors: int = 0, data: bytes = b"", version: int = 3, align: int = 32) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(items)
    return header + bytes(-len(header) % align) + data


def assert_equals_reader(path: Path) -> None:
    """Everything that gguf's reader sees, ours sees too."""
    expected = GGUFReader(path)
    with GGUFFile.open(path) as file:
        fields = {name: field for name, field in expected.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for name, field in fields.items():
            value = file.metadata[name]
            if field.types[0] != GGUFValueType.ARRAY:
                assert value == field.contents(), name
                assert type(value) in (int, float, bool, str)
            elif field.types[1] == GGUFValueType.STRING:
                assert value == [bytes(field.parts[i]) for i in field.data], name
            else:
                np.testing.assert_array_equal(value, field.contents(), name)
        assert list(file.tensors) == [t.name for t in expected.tensors]
        assert file.n_params == sum(t.n_elements for t in expected.tensors)
        for t in expected.tensors:
            info = file.tensors[t.name]
            shape = tuple(reversed(t.shape.tolist()))
            assert info == TensorInfo(t.name, shape, t.tensor_type.name.lower(), t.data_offset, t.n_bytes)
            np.testing.assert_array_equal(file.bytes_of(t.name), t.data.reshape(-1).view(np.uint8))


def test_reads_what_gguf_reads(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf")
    assert_equals_reader(tmp_path / "model.gguf")


def test_reads_every_shared_model(shared_data: Path) -> None:
    paths = sorted(shared_data.glob("models/*.gguf"))
    assert paths
    for path in paths:
        assert_equals_reader(path)


def naive_strings(data: bytes, name: bytes) -> list[bytes]:
    """The string array under a key, read one by one: gguf's reader takes ten seconds for a large
    vocabulary."""
    pos = data.index(string(name) + struct.pack("<II", 9, 8)) + 8 + len(name) + 8
    (count,) = struct.unpack_from("<Q", data, pos)
    pos += 8
    result = []
    for _ in range(count):
        (n,) = struct.unpack_from("<Q", data, pos)
        result.append(data[pos + 8 : pos + 8 + n])
        pos += 8 + n
    return result


def test_reads_every_shared_vocabulary(shared_data: Path) -> None:
    paths = sorted(shared_data.glob("vocabs/*.gguf"))
    assert paths
    for path in paths:
        data = path.read_bytes()
        with GGUFFile.open(path) as file:
            for name, value in file.metadata.items():
                if isinstance(value, list):
                    assert value == naive_strings(data, name.encode()), (path.name, name)
            assert len(file.metadata["tokenizer.ggml.tokens"]) == len(file.metadata["tokenizer.ggml.token_type"])


def test_reads_what_gguf_reads_of_a_vocabulary(shared_data: Path) -> None:
    assert_equals_reader(shared_data / "vocabs" / "ggml-vocab-bert-bge.gguf")


def test_types_of_values(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert file.metadata["llama.strings"] == [s.encode() for s in STRINGS]
        assert file.metadata["llama.strings"] is file.metadata["llama.strings"]
        assert file.metadata["llama.bools"].dtype == np.bool_
        assert not file.metadata["llama.floats"].flags.writeable
        assert not file.bytes_of("token_embd.weight").flags.writeable
        assert "llama.nothing" not in file.metadata
        assert (file.version, file.alignment, file.size) == (3, 32, os.path.getsize(tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 5, 10, 11])
@pytest.mark.parametrize("value", [7, 70_000, 3_000_000_000, -5])
def test_override_of_number_is_written(tmp_path: Path, kind: int, value: int) -> None:
    """A type of whole numbers in the file may be too small for the value that stands in."""
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    nbytes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 10: 8, 11: 8}[kind]
    old.write_bytes(gguf(key(b"a.n", kind, bytes(nbytes)), keys=1))
    with GGUFFile.open(old, Overrides((("a.n", value),))) as file:
        write_gguf(new, "llama", copied_keys(file.metadata), [])
    with GGUFFile.open(new) as file:
        assert file.metadata["a.n"] == value


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """And not the one beside it, which is there until the end."""
    with pytest.raises(IsADirectoryError) as refused:
        write_gguf(tmp_path, "llama", {}, [])
    assert refused.value.filename == str(tmp_path)


@given(
    st.lists(st.one_of(st.binary(max_size=12), st.sampled_from([b"", b"\0" * 9, b"w" * 300]), st.binary(max_size=2)))
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_strings(tmp_path: Path, strings: list[bytes]) -> None:
    strings *= 5  # long enough for several walks between chains
    array = struct.pack("<IQ", 8, len(strings)) + b"".join(map(string, strings))
    path = tmp_path / "strings.gguf"
    path.write_bytes(gguf(key(b"s", 9, array), key(b"after", 0, b"\x07"), keys=2))
    with GGUFFile.open(path) as file:
        assert file.metadata["s"] == strings
        assert file.metadata["after"] == 7


def test_large_string_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for lengths in (rng.integers(0, 3, 100_000), rng.integers(1, 40, 60_000), np.zeros(50_000, np.int64)):
        strings = [b"k" * n for n in lengths.tolist()]
        path = tmp_path / "large.gguf"
        path.write_bytes(
            gguf(key(b"s", 9, struct.pack("<IQ", 8, len(strings)) + b"".join(map(string, strings))), keys=1)
        )
        with GGUFFile.open(path) as file:
            assert file.metadata["s"] == strings


def test_views_outlive_close(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    file = GGUFFile.open(tmp_path / "m.gguf")
    view = file.bytes_of("token_embd.weight")
    before = view.copy()
    file.release()
    np.testing.assert_array_equal(view, before)
    file.close()
    np.testing.assert_array_equal(view, before)
    del view
    file.close()
    file.close()
    file.release()
    with pytest.raises(ModelFileError, match="closed"):
        file.bytes_of("token_embd.weight")
    with pytest.raises(ModelFileError, match=r"'llama\.strings': the file has been closed"):
        file.metadata["llama.strings"]


def test_missing_tensor(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    with GGUFFile.open(tmp_path / "m.gguf") as file, pytest.raises(ModelFileError, match=r"m\.gguf: has no tensor 'x'"):
        file.bytes_of("x")


def test_split_model(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", split_max_tensors=1)
    write_model(tmp_path / "whole.gguf")
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    with GGUFFile.open(parts[0]) as file, GGUFFile.open(tmp_path / "whole.gguf") as whole:
        assert list(file.tensors) == list(whole.tensors)
        assert [info.part for info in file.tensors.values()] == [0, 1, 2]
        for name in whole.tensors:
            np.testing.assert_array_equal(file.bytes_of(name), whole.bytes_of(name))
        file.release()
        assert file.size == sum(p.stat().st_size for p in parts)
        assert file.metadata["llama.block_count"] == 2
    with pytest.raises(ModelFileError, match=r"is part 2 of 3; open the first part, m-00001-of-00003\.gguf"):
        GGUFFile.open(parts[1])
    parts[1].rename(tmp_path / "kept")
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf: no such file"):
        GGUFFile.open(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelFileError, match=r"key 'split\.no' is not 1"):
        GGUFFile.open(parts[0])
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ModelFileError, match=r"is part 1 of 3, but is not named"):
        GGUFFile.open(tmp_path / "first.gguf")


F32 = bytes(64)
ONE_TENSOR: Callable[..., bytes] = lambda *a, **k: gguf(tensor(*a, **k), tensors=1, data=F32)  # noqa: E731
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "magic": (b"hello, world", "is not a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "only magic": (b"GGUF", "header: needs 4 bytes but the file ends at byte 4"),
    "version 1": (gguf(version=1), "has GGUF version 1"),
    "version 99": (gguf(version=99), "has GGUF version 99"),
    "big endian": (gguf(version=3 << 24), "big-endian GGUF .version 3."),
    "no counts": (gguf()[:12], "header: needs 8 bytes"),
    "tensor count": (gguf(tensors=2**60), f"claims {2**60} tensors"),
    "key count": (gguf(keys=2**63), f"claims {2**63} keys"),
    "key length": (gguf(struct.pack("<QI", 2**62, 0), bytes(16), keys=1), f"key 0: needs {2**62} bytes"),
    "key not UTF-8": (gguf(key(b"\xff\xfe", 0, b"\1"), keys=1), "not UTF-8"),
    "key with newlines": (gguf(key(b"a\nb", 77, b"\1"), keys=1), r"key 'a\\nb': has the unknown value type 77"),
    "key twice": (gguf(key(b"k", 0, b"\1") * 2, keys=2), "key 'k': appears twice"),
    "value type": (gguf(key(b"k", 13, b"\1"), keys=1), "unknown value type 13"),
    "bool": (gguf(key(b"k", 7, b"\2"), keys=1), "a bool is 2"),
    "string length": (gguf(key(b"k", 8, struct.pack("<Q", 2**63)), keys=1), "key 'k': needs"),
    "array type": (gguf(key(b"k", 9, struct.pack("<IQ", 99, 0)), keys=1), "array of the unknown value type 99"),
    "nested array": (gguf(key(b"k", 9, struct.pack("<IQ", 9, 0)), keys=1), "array of arrays"),
    "array length": (gguf(key(b"k", 9, struct.pack("<IQ", 4, 2**61)), keys=1), f"claims {2**61} numbers"),
    "strings": (gguf(key(b"k", 9, struct.pack("<IQ", 8, 2**61)), keys=1), f"claims {2**61} strings"),
    "last string": (
        gguf(key(b"k", 9, struct.pack("<IQ", 8, 2) + string(b"a") + b"\x80" + bytes(7)), keys=1),
        "string 1 of 2",
    ),
    "alignment 0": (gguf(key(b"general.alignment", 4, bytes(4)), keys=1), "'general.alignment': is '0', not a power"),
    "alignment 24": (gguf(key(b"general.alignment", 4, b"\x18\0\0\0"), keys=1), "not a power of two"),
    "alignment text": (gguf(key(b"general.alignment", 8, string(b"x")), keys=1), "not a power of two"),
    "architectures": (
        gguf(key(b"general.architecture", 9, struct.pack("<IQ", 8, 1) + string(b"llama")), keys=1),
        "'general.architecture': is no text",
    ),
    "architecture 5": (gguf(key(b"general.architecture", 4, b"\5\0\0\0"), keys=1), "ure': is no text"),
    "tensor cut": (ONE_TENSOR(b"t", (4, 4))[:50], "tensor 't': needs"),
    "tensor name": (gguf(struct.pack("<Q", 2**40) + bytes(32), tensors=1), f"tensor 0: needs {2**40} bytes"),
    "tensor twice": (gguf(tensor(b"t", (4,)), tensor(b"t", (4,), offset=32), tensors=2, data=F32), "'t' appears twice"),
    "tensor type": (ONE_TENSOR(b"t", (4,), 4), "tensor 't': has the unknown type 4 "),
    "5 dimensions": (ONE_TENSOR(b"t", (1, 1, 1, 1, 1)), "has 5 dimensions"),
    "dimension 0": (ONE_TENSOR(b"t", (4, 0)), r"not positive: \(0, 4\)"),
    "negative": (ONE_TENSOR(b"t", (2**64 - 1,)), r"not positive: \(-1,\)"),
    "overflow": (ONE_TENSOR(b"t", (2**32, 2**32)), "overflows"),
    "row length": (ONE_TENSOR(b"t", (33,), 8), "rows of 33 elements, not a multiple of Q8_0's block of 32"),
    "unaligned": (ONE_TENSOR(b"t", (4,), offset=4), "tensor 't' lies at offset 4, not a multiple of 32"),
    "offset": (ONE_TENSOR(b"t", (4,), offset=2**63), "tensor 't' needs bytes"),
    "data": (ONE_TENSOR(b"t", (17,)), r"tensor 't' needs bytes 64\.\.132 but the file has 128"),
    "overlap": (gguf(tensor(b"a", (9,)), tensor(b"b", (1,), offset=32), tensors=2, data=F32), "'a' and 'b' overlap"),
    "split count": (gguf(key(b"split.count", 10, struct.pack("<Q", 2**50)), keys=1), "'split.count' is not a number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        GGUFFile.open(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_bad_bool_array_is_found_on_access(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf(key(b"k", 9, struct.pack("<IQ", 7, 2) + b"\0\5"), keys=1))
    with GGUFFile.open(path) as file, pytest.raises(ModelFileError, match="neither 0 nor 1"):
        file.metadata["k"]


def test_bad_utf8_in_a_value_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "latin.gguf"
    path.write_bytes(gguf(key(b"general.author", 8, string(b"Ren\xe9")), keys=1))
    with GGUFFile.open(path) as file:
        assert file.metadata["general.author"] == "Ren\ufffd"


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "missing.gguf", "no such file"),
        (tmp_path, "is a directory"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("a\0b"), "cannot be opened"),
        (tmp_path / ("n" * 300), "cannot be opened: File name too long"),
    ):
        with pytest.raises(ModelFileError, match=message) as caught:
            GGUFFile.open(path)
        assert len(str(caught.value).splitlines()) == 1


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:  # not chmod: root may read every file
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "secret.gguf"
    path.write_bytes(gguf())
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelFileError, match="cannot be opened: Permission denied"):
        GGUFFile.open(path)


def test_error_pickles() -> None:
    error = pickle.loads(pickle.dumps(ModelFileError("a.gguf", "key 'k'\nis bad")))
    assert str(error) == r"a.gguf: key 'k'\x0ais bad"
    assert isinstance(error, ValueError)


def open_all(path: Path) -> None:
    """Open the file and touch all that it offers."""
    try:
        with GGUFFile.open(path) as file:
            for name in file.metadata:
                file.metadata[name]
            for name in file.tensors:
                file.bytes_of(name).sum()
    except ModelFileError as e:
        if len(str(e).splitlines()) != 1:
            raise


def test_every_truncation_is_refused(tmp_path: Path, model: bytes) -> None:
    path = tmp_path / "cut.gguf"
    for n in (
        *range(1, 1500, 7),
        *range(len(model) - 2000, len(model) - 32, 13),
    ):  # the last tensor is followed by padding
        path.write_bytes(model[:n])
        with pytest.raises(ModelFileError):
            GGUFFile.open(path)


NUMBERS = st.sampled_from([0, 1, 2, 7, 8, 9, 12, 255, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1])
EDITS: list[st.SearchStrategy[Any]] = [
    st.tuples(st.just("byte"), st.integers(0, 2**20), st.integers(0, 255)),
    st.tuples(st.just("u64"), st.integers(0, 2**20), NUMBERS),
    st.tuples(st.just("u32"), st.integers(0, 2**20), NUMBERS),
    st.tuples(st.just("cut"), st.integers(0, 2**20), st.integers(1, 64)),
    st.tuples(st.just("insert"), st.integers(0, 2**20), st.binary(min_size=1, max_size=32)),
    st.tuples(st.just("end"), st.integers(0, 2**20), st.just(0)),
]


@given(st.lists(st.one_of(EDITS), min_size=1, max_size=4), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400)
def test_corrupt_files_never_crash(tmp_path: Path, model: bytes, edits: list[tuple[str, int, Any]], head: bool) -> None:
    data = bytearray(model)
    for kind, where, what in edits:
        # most of the file is one long string and tensor data: aim at the structures before and
        # after it
        at = where % len(data) if not head else (where % 400 if where % 2 else len(data) - 1 - where % 2000) % len(data)
        if kind == "byte":
            data[at] = what
        elif kind == "cut":
            del data[at : at + what]
        elif kind == "insert":
            data[at:at] = what
        elif kind == "end":
            del data[max(at, 1) :]
        else:
            width = 8 if kind == "u64" else 4
            data[at : at + width] = (what % 2 ** (8 * width)).to_bytes(width, "little")
        data = data or bytearray(b"G")
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(data)
    open_all(path)


def test_absurd_numbers_take_no_memory(tmp_path: Path, model: bytes) -> None:
    path = tmp_path / "absurd.gguf"
    # every eight bytes of the header, and of the table after the strings, claim something absurd in
    # turn
    places = itertools.chain(range(4, 300, 3), range(len(model) - 2300, len(model) - 1900, 3))
    tracemalloc.start()
    try:
        for at, number in itertools.product(places, (2**32 - 1, 2**60)):
            path.write_bytes(model[:at] + struct.pack("<Q", number) + model[at + 8 :])
            open_all(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
