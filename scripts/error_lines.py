"""Error lines of the product, collected from the code: the generated part of docs/troubleshooting.md.

An error class belongs to a row of KINDS, itself or by a class above it. A line is the message of a call of such a
class, with `…` for its computed parts. A message that a function gets as an argument is taken from the function's
calls. A call that only passes on the text of another error has no line of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("graph", "backends", "models", "training", "engine", "server", "router", "cli", "logitless")
FILES = "a file is damaged, cut, or of a kind that is not read"
FAULT = "a fault of the product or of a driver"
KINDS = {  # class → title, cause, cure
    "UsageError": ("Usage", "a flag is missing, unknown or malformed (code 2)", "`logitless COMMAND --help`"),
    "CliError": ("Command line", "a flag, a file or the machine (code 1)", "change what the line names"),
    "OptionError": ("Options", "a flag, or an option of `LLM`, has a value that cannot work", "change what it names"),
    "ModelFileError": ("Model files", FILES, "fetch or convert it again; [Models](models.md) has what is read"),
    "VocabError": ("Vocabularies", "the tokenizer of a file is incomplete or unknown", "convert the model again"),
    "PresetError": ("Types", "the name of a type is unknown", "`logitless quantize --list`"),
    "ChatTemplateError": ("Chat templates", "a template fails on the messages", "`--chat-template-file`"),
    "GrammarError": ("Grammars and schemas", "it is malformed, or cannot be enforced", "change the part that it names"),
    "AudioError": ("Sounds", FILES, "WAV, MP3, FLAC or Ogg within [the bounds](security.md#images-and-audio)"),
    "ImageError": ("Images", FILES, "PNG or JPEG within [the bounds](security.md#images-and-audio)"),
    "FileError": (
        "Media files",
        "a file that a request names cannot be read",
        "[Images](security.md#images-and-audio)",
    ),
    "TrainingError": ("Training", "rows or hyperparameters that cannot be trained", "[Training](training.md)"),
    "DeviceError": ("Devices", "a device is unknown or gone, or its memory is full", "`logitless devices`; `-ngl`"),
    "KernelRefused": ("Kernels", "a driver refuses a kernel", "its op runs on the next device; or `--device cpu`"),
    "KernelError": ("CPU kernels", FAULT, "report it with the lines of `logitless doctor`"),
    "ShaderError": ("Shaders", FAULT, "`--device cpu`, and report it"),
    "ProtocolError": ("Remote devices", "the ends of `--rpc` do not understand each other", "one version at both ends"),
    "RequestError": ("Requests", "a request cannot be served", "change the field that it names"),
    "InvalidRequest": ("Status 400", "a field has a wrong type or value", "change the field that it names"),
    "ExceedsContext": ("Status 400: context", "prompt and answer do not fit", "`-c`, `--context-shift`, fewer tokens"),
    "Unauthorized": ("Status 401", "no key, or another", "`Authorization: Bearer KEY`"),
    "Forbidden": ("Status 403", "the key, the origin or the host may not do this", "[Security](security.md)"),
    "NotFound": ("Status 404", "no such path or object, or another key's", "look into the list of its kind"),
    "TooLarge": ("Status 413", "beyond a bound", "[Limits](security.md#limits)"),
    "UnsupportedMediaType": ("Status 415: type", "a body of a type that forms send", "`application/json`"),
    "UnsupportedEncoding": ("Status 415: encoding", "an unknown `Content-Encoding`", "gzip, deflate, or none"),
    "TooManyRequests": ("Status 429", "the queue or a client's share is full", "wait as `Retry-After` says"),
    "ServerFault": ("Status 500", "the server failed", "the log has the reason under the request's id"),
    "NotSupported": ("Status 501", "the operator has not switched it on", "the flag that the line names"),
    "BadGateway": ("Status 502", "a model's server behind the router ended or hangs", "its log says why; ask again"),
    "Unavailable": ("Status 503", "the server is loading, full or ending", "ask again later"),
    "ToolError": ("Tools", "a tool of the server failed, or may not do this", "[Tools](tools.md)"),
    "FetchError": ("Addresses", "it cannot be fetched, or is not public", "[Downloads](security.md#downloads)"),
    "CatalogError": ("Router", "a preset or a folder of models is wrong", "[Models](operations.md#several-models)"),
    "Error": ("Python API", "misuse of an object, as after `close`", "change the call"),
}


@cache
def modules() -> list[ast.Module]:
    paths = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    plain = (path for path in paths if not any(parent.is_symlink() for parent in path.parents))
    return [ast.parse(path.read_text(encoding="utf-8")) for path in plain]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def classes() -> dict[str, str]:
    """Error class → its kind, itself or the nearest class above it."""
    above = {
        node.name: [_name(base) for base in node.bases]
        for module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    }

    def kind(name: str) -> str:
        return name if name in KINDS else next((k for base in above.get(name, ()) if (k := kind(base))), "")

    return {name: of for name in above if (of := kind(name))}


@cache
def _returned() -> dict[str, list[ast.expr]]:
    """Function → what it returns: texts, conditions and sums of texts."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for module in modules():
        for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
            values = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
            found[function.name] += [v for v in values if isinstance(v, ast.JoinedStr | ast.IfExp | ast.BinOp)]
    return found


def text(node: ast.expr | None) -> list[str]:
    """The messages that an expression can be; empty: another error's text, or a variable."""
    match node:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.JoinedStr(values=values):
            return ["".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in values)]
        case ast.IfExp(body=body, orelse=other):
            return text(body) + text(other)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            lefts, rights = text(left), text(right)
            return [a + b for a in lefts or ["…"] for b in rights or ["…"]] if lefts or rights else []
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(value)), attr="format")):
            return [value]
        case ast.Call(func=ast.Name(id=name)):
            return [line for value in _returned().get(name, ()) for line in text(value)]
    return []


def _calls(module: ast.Module) -> Iterator[tuple[Function | None, ast.Call]]:
    """Each call, with the innermost function around it."""

    def walk(node: ast.AST, inside: Function | None) -> Iterator[tuple[Function | None, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield inside, child
            yield from walk(child, child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else inside)

    yield from walk(module, None)


@cache
def lines() -> dict[str, set[str]]:
    """Kind → its messages."""
    found: dict[str, set[str]] = defaultdict(set)
    takers: dict[str, set[tuple[str, int]]] = {
        name: {(kind, at) for at in range(2)} for name, kind in classes().items()
    }
    fresh = set(takers)
    while fresh:  # functions that take a message, and then those that take it for them
        calls, fresh = fresh, set()
        for module in modules():
            for function, call in _calls(module):
                name = _name(call.func)
                if name not in calls:
                    continue
                for kind, at in takers[name]:
                    message = call.args[at] if at < len(call.args) else None
                    found[kind].update(text(message))
                    if function is None or not isinstance(message, ast.Name):
                        continue
                    for node in ast.walk(function):
                        if isinstance(node, ast.Assign) and [_name(t) for t in node.targets] == [message.id]:
                            found[kind].update(text(node.value))
                    names = [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]
                    if message.id in names and function.name not in takers and not function.name.startswith("__"):
                        takers[function.name] = {(kind, names.index(message.id))}
                        fresh.add(function.name)
    return {kind: {line for line in of if " " in line.strip("… :")} for kind, of in found.items()}


def markdown() -> str:
    """A section for each kind: cause and cure, then its lines."""
    parts = []
    for kind, (title, cause, cure) in KINDS.items():
        if rows := sorted(lines().get(kind, ()), key=str.lower):
            parts.append(f"### {title}\n\nCause: {cause}. Cure: {cure}.\n")
            parts.append("\n".join(f"* `` {' '.join(row.split())} ``" for row in rows) + "\n")
    return "\n".join(parts)
