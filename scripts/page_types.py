"""Types of the page: `bodies.d.ts`, those of the server's answers, and a check of the page's modules.

The modules (server/ui/web/*.js) name their types in comments, which the compiler reads (JSDoc). `bodies.d.ts` is made
of the structs that the server answers with."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from logitless.frontend.answers import errors, fine_tuning, generation, llamacpp, models, openai
from logitless.server.openapi.schemas import of_types

ROOT = Path(__file__).resolve().parent.parent
SOURCES, MODULES = ROOT / "server" / "ui" / "src", ROOT / "server" / "ui" / "web"
BODIES = SOURCES / "bodies.d.ts"
COMPILER = ROOT / "build" / "page" / "node_modules" / ".bin" / "tsc"
ANSWERS = (
    *(errors.Error, models.Models, llamacpp.Props, llamacpp.Adapter, llamacpp.SlotState, llamacpp.TokenIds),
    *(llamacpp.StreamState,),
    *(llamacpp.ToolEntry, llamacpp.ToolAnswer, generation.NativeChunk, generation.NativeCompletion, openai.ChatChunk),
    *(openai.ChatCompletion, openai.TextCompletion, fine_tuning.File, fine_tuning.Job, fine_tuning.JobEvent),
    *(fine_tuning.Checkpoint, fine_tuning.Graded),
)
SCALARS = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}


def bodies() -> str:
    """The text of bodies.d.ts."""
    _, components = of_types(ANSWERS)
    parts = ["// Answers of the server. Generated from its types by scripts/page-types."]
    for name, schema in sorted(components.items()):
        parts.append(f"/** {schema['description']} */\nexport interface {name} {{\n{_fields(schema)}}}")
    return "\n\n".join(parts) + "\n"


def _fields(schema: dict[str, Any]) -> str:
    required, lines = schema["required"], []
    for name, field in schema["properties"].items():
        comment = f" // {field['description']}" if "description" in field else ""
        key = name if name.isidentifier() else json.dumps(name)
        lines.append(f"  {key}{'' if name in required else '?'}: {_type(field)};{comment}\n")
    return "".join(lines)


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema as a type."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        within = _type(schema.get("items", {}))
        return f"({within})[]" if " | " in within else f"{within}[]"
    if kind == "object":
        return f"Record<string, {_type(schema.get('additionalProperties', {}))}>"
    return SCALARS.get(kind, "unknown") if isinstance(kind, str) else "unknown"


def main() -> None:
    """Write or compare bodies.d.ts, and check the types of all modules."""
    parser = argparse.ArgumentParser(prog="scripts/page-types", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only: fail when bodies.d.ts differs")
    if parser.parse_args().check and BODIES.read_text() != bodies():
        sys.exit("page-types: run scripts/page-types; bodies.d.ts differs from the server's types")
    BODIES.write_text(bodies())
    if subprocess.run([COMPILER, "--project", SOURCES], check=False).returncode:
        sys.exit("page-types: the modules have errors")
    print("page-types: the types are right")


if __name__ == "__main__":
    main()
