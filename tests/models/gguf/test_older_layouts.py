"""Files of older converters: their tensors in the layout of today's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.model import hparams_of
from logitless.models.quantization.quantize_model import plan_quantization
from logitless.models.weights.weights import check_weights
from tests.helpers.architecture_specs import PLAIN
from tests.helpers.reference_model import write


def written_in_2025(source: Path, path: Path, *, n_lost: int = 0) -> Path:
    """A Qwen 3 Next file as the first converter wrote it: the rows that transformers' fix_query_key_value_ordering
    takes apart, in one matrix. `n_lost`: rows that its end lacks."""
    reader = GGUFReader(source)
    tensors = {t.name: t for t in reader.tensors}
    sizes = [reader.fields[f"qwen3next.ssm.{key}"].contents() for key in ("group_count", "state_size", "inner_size")]
    n_groups, n_key, n_value = sizes[0], sizes[1], sizes[2] // sizes[0]
    writer = GGUFWriter(path, "qwen3next")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(
                field.name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for name, t in tensors.items():
        if name.endswith("attn_gate.weight"):
            continue
        data = t.data
        gate = tensors.get(name.replace("attn_qkv", "attn_gate"))
        if "attn_qkv" in name and gate is not None:
            q, k, v = np.split(data, [n_groups * n_key, 2 * n_groups * n_key])
            data = np.concatenate(
                [
                    part[i * n : (i + 1) * n]
                    for i in range(n_groups)
                    for part, n in ((q, n_key), (k, n_key), (v, n_value), (gate.data, n_value))
                ]
            )
            name, data = name.replace("attn_qkv", "ssm_in"), data[: len(data) - n_lost]
        writer.add_tensor(name, data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3next") / "2026.gguf"
    write(path, PLAIN["qwen3next"])
    return path


@pytest.mark.parametrize("file_type", ["F32", "Q8_0"])
def test_qwen3next_of_2025_has_the_tensors_of_2026(file_type: str, today: Path, tmp_path: Path) -> None:
    if file_type != "F32":
        with GGUFFile.open(today) as gguf:
            plan_quantization(gguf, file_type).write(tmp_path / "q.gguf")
        today = tmp_path / "q.gguf"
    with GGUFFile.open(today) as new, GGUFFile.open(written_in_2025(today, tmp_path / "2025.gguf")) as old:
        assert sorted(old.tensors) == sorted(new.tensors)
        assert check_weights(old, hparams_of(old)).keys() == check_weights(new, hparams_of(new)).keys()
        for name, info in new.tensors.items():
            ours = old.tensors[name]
            assert (ours.shape, ours.dtype, ours.nbytes) == (info.shape, info.dtype, info.nbytes)
            assert np.array_equal(old.bytes_of(name), new.bytes_of(name)), name
        assert (old.n_params, sorted(old.tensors)) == (new.n_params, sorted(new.tensors))


def test_rows_that_are_missing_are_named(today: Path, tmp_path: Path) -> None:
    cut = written_in_2025(today, tmp_path / "cut.gguf", n_lost=1)
    with (
        GGUFFile.open(cut) as gguf,
        pytest.raises(ModelFileError, match=r"tensor 'blk\.0\.attn_qkv\.weight' is missing"),
    ):
        check_weights(gguf, hparams_of(gguf))


def test_other_architectures_keep_their_ssm_in(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", PLAIN["granitehybrid"])
    with GGUFFile.open(tmp_path / "m.gguf") as gguf:
        assert any(name.endswith("ssm_in.weight") for name in gguf.tensors)
        assert all(info.source is None for info in gguf.tensors.values())
