"""Error lines of the product, collected from the code: the generated part of docs/troubleshooting.md.

An error class belongs to a row of KINDS, itself or by a class above it. A line is the message of a call of such a
class, with `…` for its computed parts. A message that a function gets as an argument is taken from the function's
calls. A call that only passes on the text of another error has no line of its own."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

from scripts.docs_pages import parsed

Function = ast.FunctionDef | ast.AsyncFunctionDef
ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("graph", "backends", "models", "training", "engine", "frontend", "server", "router", "cli", "extras")
ROOMS += ("logitless",)
LOGS = ("log", "logger")
LEAVES = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop, ast.unaryop)  # no statement is in them
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
    "ValueError": ("Values", "a flag, field, file or operand, which the line names first", "change it"),
    "Error": ("Python API", "misuse of an object, as after `close`", "change the call"),
}


class Calls(NamedTuple):
    """Statements of all modules that errors come from, found in one walk."""

    classes: list[ast.ClassDef]
    raised: list[ast.Call]
    returned: dict[str, list[ast.expr]]  # function → texts, conditions and sums of texts that it returns
    by_name: dict[str, list[tuple[ast.Module, Function | None, ast.Call]]]  # callable → its calls, and where they are
    defined: Counter[str]  # function → how many have its name


@cache
def modules() -> dict[Path, ast.Module]:
    """The product's modules."""
    paths = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    plain = (path for path in paths if not any(parent.is_symlink() for parent in path.parents))
    return {path: parsed(path) for path in plain}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def calls() -> Calls:
    found = Calls([], [], defaultdict(list), defaultdict(list), Counter())
    stack: list[tuple[ast.AST, ast.Module, Function | None]] = [(m, m, None) for m in modules().values()]
    while stack:
        node, module, inside = stack.pop()
        match node:
            case ast.Call():
                found.by_name[_name(node.func)].append((module, inside, node))
            case ast.Raise(exc=ast.Call() as call):
                found.raised.append(call)
            case ast.Return(value=ast.JoinedStr() | ast.IfExp() | ast.BinOp() as value) if inside:
                found.returned[inside.name].append(value)
            case ast.ClassDef():
                found.classes.append(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inside = node
                found.defined[node.name] += 1
        children = (child for child in ast.iter_child_nodes(node) if not isinstance(child, LEAVES))
        stack += [(child, module, inside) for child in children]
    return found


@cache
def classes() -> dict[str, str]:
    """Error class → its kind, itself or the nearest class above it."""
    above = {node.name: [_name(base) for base in node.bases] for node in calls().classes}

    def kind(name: str) -> str:
        return name if name in KINDS else next((k for base in above.get(name, ()) if (k := kind(base))), "")

    return {name: of for name in (*above, "ValueError") if (of := kind(name))}


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
            return [line for value in calls().returned.get(name, ()) for line in text(value)]
    return []


def _place(name: str) -> int:
    """The position of the message among the arguments of an error class."""
    for node in (node for node in calls().classes if node.name == name):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                names = [argument.arg for argument in method.args.args[1:]]
                return next((names.index(word) for word in ("message", "problem") if word in names), 0)
        return max((_place(_name(base)) for base in node.bases), default=0)
    return 0


def _parts(message: ast.expr) -> list[ast.expr]:
    """The message and, where it is a sum or has values in braces, these."""
    match message:
        case ast.JoinedStr(values=values):
            return [node.value for node in values if isinstance(node, ast.FormattedValue)]
        case ast.BinOp(left=left, right=right):
            return [*_parts(left), *_parts(right)]
    return [message]


@cache
def lines() -> dict[str, set[str]]:
    """Kind → its messages."""
    found: dict[str, set[str]] = defaultdict(set)
    takers: dict[str, tuple[str, int, ast.Module | None]]
    takers = {name: (kind, _place(name), None) for name, kind in classes().items()}
    fresh = list(takers)
    while fresh:  # functions that take a message, and then those that take it for them
        name = fresh.pop()
        kind, at, home = takers[name]
        for module, function, call in calls().by_name.get(name, ()):
            if home not in (None, module) or _name(getattr(call.func, "value", call)) in LOGS:
                continue
            message = call.args[at] if at < len(call.args) else None
            found[kind].update(text(message))
            if function is None or message is None:
                continue
            names = [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]
            for part in (node.id for node in _parts(message) if isinstance(node, ast.Name)):
                for node in ast.walk(function):
                    if isinstance(node, ast.Assign) and [_name(t) for t in node.targets] == [part]:
                        found[kind].update(text(node.value))
                own = calls().defined[function.name] > 1 or function.name.startswith("_")
                if part in names and function.name not in takers and not function.name.startswith("__"):
                    takers[function.name] = kind, names.index(part), module if own else None
                    fresh.append(function.name)
    return {kind: {line for line in of if " " in line.strip("… :")} for kind, of in found.items()}


def markdown() -> str:
    """A section for each kind: cause and cure, then its lines."""
    parts = []
    for kind, (title, cause, cure) in KINDS.items():
        if rows := sorted(lines().get(kind, ()), key=str.lower):
            parts.append(f"### {title}\n\nCause: {cause}. Cure: {cure}.\n")
            parts.append("\n".join(f"* `` {' '.join(row.split())} ``" for row in rows) + "\n")
    return "\n".join(parts)
