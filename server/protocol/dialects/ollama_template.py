"""Ollama's `template` of a request: Go's syntax with `.System`, `.Prompt`, `.Response` and `if`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from logitless.server.protocol.fields import bad_request

_ACTION = re.compile(r"\{\{(-)?\s*(.*?)\s*(-)?\}\}", re.DOTALL)
_VARIABLE = re.compile(r"\.(System|Prompt|Response|Suffix)")
_MAX_DEPTH = 32


def prompt_of(template: str, prompt: str, system: str) -> str:
    """The text that the template makes, up to the answer's place. InvalidRequest: it has more than
    is known here."""
    values = {"System": system, "Prompt": prompt, "Response": "", "Suffix": ""}
    told: list[str] = []
    shows = [True]  # of the `if`s that are open
    for text, action in pieces(template):
        if shows[-1]:
            told.append(text)
        word, _, rest = action.partition(" ")
        if not action or action.startswith("/*"):
            continue
        if word == "if" and (found := _VARIABLE.fullmatch(rest.strip())) and len(shows) < _MAX_DEPTH:
            shows.append(shows[-1] and bool(values[found[1]]))
        elif action == "else" and len(shows) > 1:
            shows[-1] = shows[-2] and not shows[-1]
        elif action == "end" and len(shows) > 1:
            shows.pop()
        elif found := _VARIABLE.fullmatch(action):
            if found[1] == "Response" and shows[-1]:
                return "".join(told)
            told.append(values[found[1]] if shows[-1] else "")
        else:
            bad_request("template", f"{action[:40]!r} is not known here: variables and `if` are")
    if len(shows) > 1:
        bad_request("template", "an `if` has no `end`")
    return "".join(told)


def pieces(template: str) -> Iterator[tuple[str, str]]:
    """(text, the action after it); the last has no action. A dash inside the braces takes the blanks
    beside them away."""
    at, strip = 0, False
    for match in _ACTION.finditer(template):
        text = template[at : match.start()]
        text = text.lstrip() if strip else text
        yield text.rstrip() if match[1] else text, match[2]
        at, strip = match.end(), bool(match[3])
    text = template[at:]
    yield text.lstrip() if strip else text, ""
