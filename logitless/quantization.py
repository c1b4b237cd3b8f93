"""Quantization of model files, with and without an importance matrix; folders as files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from logitless.cli.outputs import check_output
from logitless.errors import FileError, OptionError, public_errors
from logitless.models.gguf.file import GGUFFile
from logitless.models.huggingface.visions import projector_file
from logitless.models.quantization.imatrix import read_imatrix
from logitless.models.quantization.presets import TypeOptions, check_type
from logitless.models.quantization.quantize_model import plan_copy, plan_quantization


def quantize(  # noqa: PLR0913  (llama-quantize's flags)
    model: str | Path,
    output: str | Path,
    file_type: str,
    *,
    imatrix: str | Path | None = None,
    allow_requantize: bool = False,
    pure: bool = False,
    leave_output_tensor: bool = False,
    output_tensor_type: str = "",
    token_embedding_type: str = "",
    tensor_type: Mapping[str, str] | None = None,
) -> None:
    """Write a model with fewer bits a weight: `file_type` is one of llama-quantize's, such as Q4_K_M.

    `imatrix`: an importance matrix, by which errors are weighed. `pure`: one type for all matrices;
    `tensor_type`: regular expressions and the types of the tensors whose names have them.
    `allow_requantize`: the model may be quantized already. Warns of rows that cannot have their
    type.

    >>> from logitless import quantize
    >>> quantize("model-F16.gguf", "model-Q4_K_M.gguf", "Q4_K_M")  # doctest: +SKIP"""
    with public_errors():
        options = TypeOptions(
            pure=pure,
            leave_output_tensor=leave_output_tensor,
            output_tensor_type=check_type(output_tensor_type) if output_tensor_type else "",
            token_embedding_type=check_type(token_embedding_type) if token_embedding_type else "",
            tensor_type={pattern: check_type(dtype) for pattern, dtype in (tensor_type or {}).items()},
        )
        check_output(output, "output", [("model", model), ("imatrix", imatrix)])
        matrix = None if imatrix is None else read_imatrix(imatrix)
        with GGUFFile.open(model) as gguf:
            plan = plan_quantization(
                gguf, file_type, imatrix=matrix, options=options, allow_requantize=allow_requantize
            )
            for line in plan.warnings():
                warnings.warn(line, stacklevel=2)
            plan.write(output)


def convert(folder: str | Path, output: str | Path, *, file_type: str = "", mmproj: bool = False) -> None:
    """Write a Hugging Face folder as a GGUF file, in its own types or one of llama-quantize's.

    `mmproj`: the folder's image encoder and projector instead of its text model. Warns of rows
    that cannot have their type.

    >>> from logitless import convert
    >>> convert("Qwen3-0.6B", "qwen3.gguf")  # doctest: +SKIP"""
    with public_errors():
        if not Path(folder).is_dir():
            raise FileError(f"{folder}: is no folder")
        if mmproj and file_type:
            raise OptionError("file_type: is of models; a projector has the types of the folder")
        check_output(output, "output")
        with GGUFFile.open(projector_file(Path(folder)) if mmproj else folder) as gguf:
            plan = plan_quantization(gguf, file_type, allow_requantize=True) if file_type else plan_copy(gguf)
            for line in plan.warnings():
                warnings.warn(line, stacklevel=2)
            plan.write(output)
