"""JSON schemas prepared for the grammar engine: references, closed objects, rewritten and dropped keywords."""

from logitless.models.grammar.json_schema.prepare import (
    compile_error,
    fault,
    object_schema,
    parameters_of,
    prepared,
)
from logitless.models.grammar.json_schema.walk import resolve, standalone, subschemas

__all__ = [
    "compile_error",
    "fault",
    "object_schema",
    "parameters_of",
    "prepared",
    "resolve",
    "standalone",
    "subschemas",
]
