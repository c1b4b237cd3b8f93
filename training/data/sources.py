"""Sources of rows: JSONL, JSON, CSV and Parquet files, and Hugging Face data sets by name."""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from logitless.training.data.dataset_rows import DatasetRow
from logitless.training.data.formats import of_one_format, parse_row
from logitless.training.errors import TrainingError

MAX_LINE = 16 << 20  # bytes of a JSONL line
MAX_CELL = 1 << 24  # characters of a CSV cell
HUB = "hf:"  # in front of a data set's name: hf:OWNER/NAME or hf:OWNER/NAME:SPLIT
Numbered = Iterator[tuple[int, dict[str, Any]]]


def is_rows(path: str | Path) -> bool:
    """True if the name is that of a file of rows, or of a data set; else it is a text."""
    return str(path).startswith(HUB) or Path(path).suffix.lower() in _READERS


def rows_of(path: str | Path, name: str, filename: str = "") -> Iterator[DatasetRow]:
    """Rows of a file or data set, all of one format. `filename`: the ending that counts, where
    `path` has none. TrainingError begins with `name` and says the line and the field at fault."""
    if str(path).startswith(HUB):
        yield from of_one_format(_parsed(_hub(str(path), name), name), name)
        return
    reader = _READERS.get(Path(filename or path).suffix.lower(), read_rows)
    with Path(path).open("rb") as file:
        yield from of_one_format(reader(file, name), name)


def _parsed(rows: Numbered, name: str) -> Iterator[DatasetRow]:
    number = 0
    for number, row in rows:
        yield parse_row(row, number, f"{name}: line {number}")
    if not number:
        raise TrainingError(f"{name}: has no rows")


# -- JSON


def read_rows(file: BinaryIO, name: str) -> Iterator[DatasetRow]:
    """Rows of a JSONL file, read line by line. TrainingError names the file, the line and the field at fault."""
    number = n_rows = 0
    while line := file.readline(MAX_LINE + len(BOM_UTF8) + 2):  # more than the longest line has with what is around it
        number += 1
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if len(line.removesuffix(b"\n")) > MAX_LINE:
            raise TrainingError(f"{name}: line {number}: is longer than {MAX_LINE} bytes")
        if line.strip():
            n_rows += 1
            where = f"{name}: line {number}"
            row = _decoded(line, where)
            if not isinstance(row, dict):
                raise TrainingError(f"{where}: must be a JSON object")
            yield parse_row(row, number, where)
    if not n_rows:
        raise TrainingError(f"{name}: has no rows")


def _array(file: BinaryIO, name: str) -> Iterator[DatasetRow]:
    """Rows of a .json file, which is one array of objects; its lines are counted in rows."""
    rows = _decoded(file.read().removeprefix(BOM_UTF8), name)
    if not isinstance(rows, list):
        raise TrainingError(f"{name}: must be an array of objects (a file with an object a line is a .jsonl)")
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise TrainingError(f"{name}: line {i}: must be a JSON object")
    return _parsed(iter(enumerate(rows, 1)), name)


def _decoded(raw: bytes, where: str) -> Any:
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate has no UTF-8
    except UnicodeDecodeError as error:
        raise TrainingError(f"{where}: byte {error.start} is not UTF-8") from None
    except UnicodeEncodeError:
        raise TrainingError(f"{where}: a surrogate escape without its partner") from None
    except _KeyTwice as error:
        raise TrainingError(f"{where}: key {str(error)[:100]!r} stands twice") from None
    except RecursionError:
        raise TrainingError(f"{where}: is nested too deeply") from None
    except json.JSONDecodeError as error:  # its line counts in a file of one value, and not in one row
        at = f"line {error.lineno}, column {error.colno}" if b"\n" in raw.strip() else f"column {error.pos + 1}"
        raise TrainingError(f"{where}: is not valid JSON: {error.msg}: {at}") from None
    except ValueError as error:
        raise TrainingError(f"{where}: is not valid JSON: {error}") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class _KeyTwice(ValueError):
    """Duplicate key of a JSON object."""


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise _KeyTwice(next(name for name in names if names.count(name) > 1))
    return row


# -- tables


def _csv(file: BinaryIO, name: str) -> Iterator[DatasetRow]:
    """Rows of a CSV file with a header; an empty cell is a missing field, and one with an array of
    objects is read as JSON (messages)."""
    csv.field_size_limit(MAX_CELL)
    lines = csv.reader(_texts(file, name), strict=True)

    def cell(text: str, where: str) -> Any:
        return _decoded(text.encode(), where) if text.lstrip().startswith("[{") else text or None

    def rows() -> Numbered:
        header = [field.strip() for field in next(lines, [])]
        if twice := next((field for field in header if header.count(field) > 1), None):
            raise TrainingError(f"{name}: line 1: column {twice!r} stands twice")
        number = lines.line_num + 1
        for cells in lines:
            where = f"{name}: line {number}"
            if cells and len(cells) != len(header):
                raise TrainingError(f"{where}: has {len(cells)} cells, and the header has {len(header)}")
            if cells:
                yield (
                    number,
                    {k: cell(v, f"{where}: field {k!r}") for k, v in zip(header, cells, strict=True)},
                )
            number = lines.line_num + 1

    try:
        yield from _parsed(rows(), name)
    except csv.Error as error:
        raise TrainingError(f"{name}: line {lines.line_num}: is not valid CSV: {error}") from None


def _texts(file: BinaryIO, name: str) -> Iterator[str]:
    """Lines of a UTF-8 file."""
    for i, line in enumerate(file, 1):
        try:
            yield (line.removeprefix(BOM_UTF8) if i == 1 else line).decode("utf-8")
        except UnicodeDecodeError as error:
            raise TrainingError(f"{name}: line {i}: byte {error.start} is not UTF-8") from None


def _parquet(file: BinaryIO, name: str) -> Iterator[DatasetRow]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise TrainingError(f"{name}: a .parquet needs pyarrow: pip install 'logitless[data]'") from None
    try:
        table = parquet.ParquetFile(file)
        rows = (row for batch in table.iter_batches(1024) for row in batch.to_pylist())
        yield from _parsed(iter(enumerate(rows, 1)), name)
    except (pyarrow.ArrowException, OSError) as error:
        raise TrainingError(f"{name}: is no valid Parquet file: {' '.join(str(error).split())[:200]}") from None


def _hub(source: str, name: str) -> Numbered:
    """Rows of a data set of the Hugging Face hub, or of its cache (HF_HUB_OFFLINE=1), or of a
    folder that `datasets` reads."""
    try:
        import datasets
    except ImportError:
        raise TrainingError(f"{name}: a data set by name needs datasets: pip install 'logitless[data]'") from None
    path, _, split = source.removeprefix(HUB).partition(":")
    if not path:
        raise TrainingError(f"{name}: a data set's name is missing: hf:OWNER/NAME, or hf:OWNER/NAME:SPLIT")
    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(path, split=split or "train")
    except Exception as error:  # of many libraries: the hub's, the network's, those of file formats
        raise TrainingError(f"{name}: cannot be loaded: {' '.join(str(error).split())[:300]}") from None
    return iter(enumerate(dataset, 1))


_READERS: dict[str, Callable[[BinaryIO, str], Iterator[DatasetRow]]] = {
    ".jsonl": read_rows,
    ".ndjson": read_rows,
    ".json": _array,
    ".csv": _csv,
    ".parquet": _parquet,
}
