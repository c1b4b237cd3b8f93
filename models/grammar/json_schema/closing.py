"""Closed objects: no members beside those that a schema names, as in llama.cpp."""

from __future__ import annotations

from typing import Any

from logitless.models.grammar.json_schema.walk import BRANCHES, Schema, parts, pointer, resolve, subschemas

_OPENING = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_DESCRIBES_MEMBERS = ("properties", *_OPENING, "$ref", *BRANCHES)
_ALTERNATIVES = ("anyOf", "oneOf")


class Closing:
    """Closes objects with `properties`: no members beside the named ones and those of `required`.

    An object stays open if it has a keyword for other members (`additionalProperties`,
    `patternProperties`, `unevaluatedProperties`), or must have more than it names
    (`minProperties`). Where a composition describes one object in several places (`allOf`, branches
    beside `properties`, the targets of their references), the places stay open; an `allOf` whose
    parts all can be closed has the members of them all, as in llama.cpp, and no others.
    `unevaluatedProperties: false` closes every object, each alternative with its own members."""

    def __init__(self, root: Schema) -> None:
        composed = [(path, parts) for path, part in subschemas(root) if (parts := _composition(root, path, part))]
        inner = _reached(root, [part for _, parts in composed for part in parts])
        self._open = {*inner, *(path for path, _ in composed)}
        # of the outermost compositions, and of objects that are inner elsewhere
        self._members: dict[str, dict[str, None] | None] = {}
        self._sealed: set[str] = set()  # alternatives, each with its own members
        self._root = root
        for path, _ in composed:
            if path not in inner:
                self._compose(path)
        for path, schema in subschemas(root):
            target = resolve(root, schema.get("$ref")) if isinstance(schema, dict) else None
            if target and path not in self._open and target[0] in inner:
                self._members[path] = _members(root, path)

    def _compose(self, path: str) -> None:
        """The members of a composition; of each alternative, where those of a sealed one differ."""
        _, schema = resolve(self._root, f"#{path}") or ("", None)
        assert isinstance(schema, dict)
        groups = _groups(path, schema)
        if not is_sealed(schema) or len(groups) != 1:
            self._members[path] = _members(self._root, path, is_sealed(schema))
            return
        at, key, alternatives = groups[0]
        shared = _members(self._root, path, True, without=(at, key))
        branches = [(f"{at}/{key}/{i}", part) for i, part in enumerate(alternatives)]
        each = [_members(self._root, branch, True) for branch, part in branches if part is not True]
        if shared is None or len(each) < len(branches) or None in each:
            self._members[path] = None
            return
        self._members |= {
            branch: {**shared, **(names or {})} for (branch, _), names in zip(branches, each, strict=True)
        }
        self._sealed |= {branch for branch, _ in branches}
        self._members[path] = dict.fromkeys(name for names in (shared, *each) for name in names or {})

    def __call__(self, schema: Schema, path: str) -> Schema:
        sealed = is_sealed(schema) or path in self._sealed
        if (names := self._members.get(path)) is not None and (names or sealed):
            own = schema.get("properties", {})
            schema["properties"] = {**dict.fromkeys(names, True), **own}
            schema["additionalProperties"] = False
            schema.pop("unevaluatedProperties", None)
            schema.setdefault("type", "object")
            return schema
        if path in self._open:
            return schema
        if sealed:  # and no composition
            del schema["unevaluatedProperties"]
            schema.setdefault("additionalProperties", False)
        if (
            isinstance(schema.get("properties"), dict)
            and not schema.keys() & {*_OPENING[:2]}
            and not _has_others(schema)
        ):
            schema["additionalProperties"] = schema.pop("unevaluatedProperties", False)
            if schema["additionalProperties"] is False:
                schema["properties"] = {**schema["properties"], **_undescribed(schema)}
        return schema


def _groups(path: str, schema: Schema) -> list[tuple[str, str, list[Any]]]:
    """(Pointer, keyword, alternatives) of a schema and of the parts of its `allOf`."""
    groups = [(path, key, schema[key]) for key in _ALTERNATIVES if isinstance(schema.get(key), list)]
    inner = [(path + pointer(step), part) for step, part in parts(schema) if step[0] == "allOf"]
    return groups + [group for at, part in inner if isinstance(part, dict) for group in _groups(at, part)]


def is_sealed(schema: Schema) -> bool:
    """True if `unevaluatedProperties: false` closes the schema's objects."""
    return schema.get("unevaluatedProperties") is False


def _has_others(schema: Schema) -> bool:
    """True if `minProperties` asks for more members than a schema names."""
    least, names = schema.get("minProperties", 0), {*schema["properties"], *_required(schema)}
    return isinstance(least, int) and not is_sealed(schema) and least > len(names)


def _undescribed(schema: Schema) -> dict[str, bool]:
    """Members that a schema or one of its branches requires, and does not describe."""
    return {name: True for name in _required(schema) if name not in schema["properties"]}


def _own_required(schema: Schema) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _required(schema: Schema) -> list[str]:
    branches = [part for step, part in parts(schema) if step[0] in (*_ALTERNATIVES, "allOf") and isinstance(part, dict)]
    return [*_own_required(schema), *(name for part in branches for name in _required(part))]


def _reached(root: Schema, paths: list[str]) -> set[str]:
    """Pointers of these schemas, of their branches and of the targets of their references."""
    reached = set(paths)
    work = [*paths]
    while work:
        path = work.pop()
        _, schema = resolve(root, f"#{path}") or ("", None)
        if isinstance(schema, dict):
            target = resolve(root, schema.get("$ref"))
            inner = {path + pointer(step) for step, _ in parts(schema) if step[0] in BRANCHES}
            inner |= {target[0]} if target else set()
            work += inner - reached
            reached |= inner
    return reached


def _members(
    root: Schema, path: str, sealed: bool = False, without: tuple[str, str] = ("", "")
) -> dict[str, None] | None:
    """Names of all members that a schema, its reference and its `allOf` describe; None: it may have others.

    `sealed`: all branches count; `without`: but these alternatives, of this schema."""
    names: dict[str, None] = {}
    work, visited = [(path, False)], set[str]()
    while work:
        at, is_part = work.pop(0)
        _, schema = resolve(root, f"#{at}") or ("", None)
        if at in visited or schema is True:
            continue
        visited.add(at)
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            return None
        if any(key in schema and not (key == "unevaluatedProperties" and is_sealed(schema)) for key in _OPENING):
            return None
        kinds = {step[0] for step, _ in parts(schema) if step[0] in BRANCHES} - (
            {without[1]} if at == without[0] else set()
        )
        properties, target = schema.get("properties", {}), resolve(root, schema.get("$ref"))
        if not isinstance(properties, dict) or ("$ref" in schema and target is None):
            return None
        if kinds - {*(BRANCHES if sealed else ("allOf", "anyOf", "oneOf") if is_part else ("allOf",))}:
            return None
        names |= dict.fromkeys([*properties, *([] if sealed else _own_required(schema))])
        work += [(at + pointer(step), True) for step, _ in parts(schema) if step[0] in kinds]
        work += [(target[0], True)] if target else []
    return names


def _composition(root: Schema, path: str, schema: Any) -> list[str]:
    """Pointers of the branches and the reference that describe members of the same object as the schema; none: it
    does so by itself."""
    if not isinstance(schema, dict):
        return []
    branches = [(step, part) for step, part in parts(schema) if step[0] in BRANCHES]
    describing = [
        step
        for step, part in branches
        if isinstance(part, dict)
        and (set(part) & {*_DESCRIBES_MEMBERS} or (step[0] == "allOf" and _own_required(part)))
    ]
    alternatives = {step[0] for step in describing} in ({"anyOf"}, {"oneOf"})
    own = [key for key in ("properties", "$ref") if key in schema]
    own += ["required"] if _own_required(schema) and not own and {step[0] for step in describing} == {"allOf"} else []
    if is_sealed(schema):
        if not describing and "$ref" not in schema:
            return []
    elif len(own) < 2 and (not describing or (not own and (alternatives or len(describing) == 1))):
        return []
    target = resolve(root, schema.get("$ref"))
    return [*(path + pointer(step) for step in describing), *([target[0]] if target else [])]
