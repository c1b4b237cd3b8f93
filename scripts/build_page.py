"""Build of the page: modules of server/ui/web from the TypeScript of server/ui/src, and a manifest of both.

`bodies.d.ts`, the types of the server's answers, comes from the structs that the server answers with."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from logitless.frontend.answers import errors, fine_tuning, generation, llamacpp, models, openai
from logitless.server.openapi.schemas import of_types

ROOT = Path(__file__).resolve().parent.parent
SOURCES, BUILT = ROOT / "server" / "ui" / "src", ROOT / "server" / "ui" / "web"
BODIES, MANIFEST = SOURCES / "bodies.d.ts", SOURCES / "manifest.json"
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
    parts = ["// Answers of the server. Generated from its types by scripts/build-page."]
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


def manifest() -> str:
    """The text of manifest.json: a digest of each source and of each built file."""

    def digests(folder: Path, *patterns: str) -> dict[str, str]:
        files = sorted(path for pattern in patterns for path in folder.glob(pattern))
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    sources = digests(SOURCES, "*.ts", "vendor/*.d.ts", "package*.json", "tsconfig.json")
    return json.dumps({"sources": sources, "built": digests(BUILT, "*.js")}, indent=1) + "\n"


def _compiled() -> dict[str, str]:
    """Built files by name; ends the process when a type is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([COMPILER, "--project", SOURCES, "--outDir", folder], check=False)
        if done.returncode:
            sys.exit("build-page: the sources have errors")
        return {path.name: path.read_text() for path in sorted(Path(folder).glob("*.js"))}


def main() -> None:
    """Write the built files, or compare them with the sources."""
    parser = argparse.ArgumentParser(prog="scripts/build-page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only: fail when a committed file differs")
    check = parser.parse_args().check
    differ = [] if BODIES.is_file() and BODIES.read_text() == bodies() else [BODIES]
    if differ and not check:
        BODIES.write_text(bodies())
    built = _compiled()
    for path in BUILT.glob("*.js"):
        if path.name not in built:
            differ.append(path)
            if not check:
                path.unlink()
    for name, text in built.items():
        path = BUILT / name
        if not path.is_file() or path.read_text() != text:
            differ.append(path)
            if not check:
                path.write_text(text)
    if not MANIFEST.is_file() or MANIFEST.read_text() != manifest():
        differ.append(MANIFEST)
        if not check:
            MANIFEST.write_text(manifest())
    names = ", ".join(str(path.relative_to(ROOT)) for path in differ)
    if check and differ:
        sys.exit(f"build-page: run scripts/build-page; these differ from what the sources give: {names}")
    print(f"build-page: wrote {names}" if differ else "build-page: all files are those that the sources give")


if __name__ == "__main__":
    main()
