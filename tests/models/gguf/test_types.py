"""GGUF constants against the gguf package's."""

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType

from logitless.models.gguf.types import FILE_TYPES, TENSOR_TYPES, ValueType


def test_value_types() -> None:
    assert {t.name: int(t) for t in ValueType} == {t.name: int(t) for t in GGUFValueType}


NEWER = "Q2_0"  # which the package lacks: test_llama_cpp compares models of it


def test_tensor_types() -> None:
    for number, ours in TENSOR_TYPES.items():
        if ours[0] != NEWER:
            kind = GGMLQuantizationType(number)
            assert ours == (kind.name, *GGML_QUANT_SIZES[kind])


def test_file_types() -> None:
    for number, name in FILE_TYPES.items():
        if name != NEWER:
            assert LlamaFileType(number).name in (f"ALL_{name}", f"MOSTLY_{name}")
