"""Ollama's chat templates, in Go's syntax: a request's template rendered, a model's translated to Jinja.

A request's may have `.System`, `.Prompt`, `.Response`, `.Suffix` and `if`; a created model's also
variables, `range .Messages` and comparisons."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from logitless.frontend.fields import bad_request

_ACTION = re.compile(r"\{\{(-)?\s*(.*?)\s*(-)?\}\}", re.DOTALL)
_VARIABLE = re.compile(r"\.(System|Prompt|Response|Suffix)")
_MAX_DEPTH = 32
_WORD = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[()]|[^\s()"]+)')
_TURN = {".System": "system", ".Prompt": "prompt", ".Response": "response"}
_MESSAGE = {".Role": "m.role", ".Content": "(m.content or '')", ".Thinking": "(m.reasoning_content or '')"}
_COMPARISONS = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_RANGE = re.compile(r"range (?:(\$\w+)\s*,\s*\$\w+\s*:=\s*)?\$?\.Messages")
_LAST = re.compile(r"(\$\w+)\s*:=\s*eq \(len \(slice \$?\.Messages (\$\w+)\)\) 1")  # of many models' templates
_MESSAGES = """\
{%- set of = namespace(system='') -%}
{%- for m in messages if m.role == 'system' -%}
{%- set of.system = of.system ~ ('\\n\\n' if of.system else '') ~ m.content -%}
{%- endfor -%}
{%- set system = of.system -%}
"""
_TURNS = """\
{%- macro turn(system, prompt, response, last) -%}BODY{%- endmacro -%}
{%- set of = namespace(system='', prompt='', response='') -%}
{%- for m in messages -%}
{%- if (of.response and m.role != 'assistant') or (of.prompt and m.role == 'system') -%}
{{ turn(of.system, of.prompt, of.response, false) }}
{%- set of.system = '' -%}{%- set of.prompt = '' -%}{%- set of.response = '' -%}
{%- endif -%}
{%- if m.role == 'system' -%}
{%- set of.system = of.system ~ ('\\n\\n' if of.system else '') ~ (m.content or '') -%}
{%- elif m.role == 'assistant' -%}
{%- set of.response = of.response ~ (m.content or '') -%}
{%- else -%}
{%- set of.prompt = of.prompt ~ ('\\n\\n' if of.prompt else '') ~ (m.content or '') -%}
{%- endif -%}
{%- endfor -%}
{%- if of.response -%}
{{ turn(of.system, of.prompt, of.response, false) }}
{%- if add_generation_prompt -%}{{ turn('', '', '', true) }}{%- endif -%}
{%- elif add_generation_prompt or of.system or of.prompt -%}
{{ turn(of.system, of.prompt, '', add_generation_prompt) }}
{%- endif -%}
"""


def prompt_of(template: str, prompt: str, system: str) -> str:
    """Render a request's template up to the place of the answer. InvalidRequest: it has unknown actions."""
    values = {"System": system, "Prompt": prompt, "Response": "", "Suffix": ""}
    parts: list[str] = []
    shows = [True]  # of the `if`s that are open
    for text, action in _pieces(template):
        if shows[-1]:
            parts.append(text)
        word, _, rest = action.partition(" ")
        if not action or action.startswith("/*"):
            continue
        if word == "if" and (match := _VARIABLE.fullmatch(rest.strip())) and len(shows) < _MAX_DEPTH:
            shows.append(shows[-1] and bool(values[match[1]]))
        elif action == "else" and len(shows) > 1:
            shows[-1] = shows[-2] and not shows[-1]
        elif action == "end" and len(shows) > 1:
            shows.pop()
        elif match := _VARIABLE.fullmatch(action):
            if match[1] == "Response" and shows[-1]:
                return "".join(parts)
            parts.append(values[match[1]] if shows[-1] else "")
        else:
            bad_request("template", f"{action[:40]!r} is not known here: variables and `if` are")
    if len(shows) > 1:
        bad_request("template", "an `if` has no `end`")
    return "".join(parts)


def jinja_of(template: str) -> str:
    """Translate a chat template to Jinja; a template in Jinja is returned. InvalidRequest names an unknown action.

    A template without `.Messages` is rendered for each turn: a system message, a prompt and its
    response. The last turn ends at the place of the response, as in Ollama."""
    if "{%" in template or re.search(r"\{\{-?\s*(messages|bos_token)\b", template):
        return template
    by_message = _RANGE.search(template) is not None
    if not by_message and not re.search(r"\.Response\b", template):
        template += "{{ .Response }}"
    body = _Translation(by_message).of(template)
    return _MESSAGES + body if by_message else _TURNS.replace("BODY", body)


@dataclass
class _Translation:
    """The translation of one template. `blocks`: ends of the open blocks."""

    by_message: bool
    blocks: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # Jinja of Go's variables
    is_cut: bool = False  # behind the place of the response

    def of(self, template: str) -> str:
        parts: list[str] = []
        for text, action in _pieces(template):
            if text:
                parts.append(self._literal(json.dumps(text, ensure_ascii=False)))
            if action and not action.startswith("/*"):
                parts.append(self._action(action))
        if self.blocks:
            bad_request("template", "a block has no `end`")
        return "".join(parts)

    def _literal(self, value: str) -> str:
        return f"{{{{ {value} if not last else '' }}}}" if self.is_cut else f"{{{{ {value} }}}}"

    def _action(self, action: str) -> str:
        word, _, rest = action.partition(" ")
        if match := _LAST.fullmatch(action):
            if self.names.get(match[2]) != "loop.index0":
                self._refuse(action)
            self.names[match[1]] = "loop.last"
            return ""
        if match := _RANGE.fullmatch(action):
            if "endfor" in self.blocks:
                self._refuse(action)
            if match[1]:
                self.names[match[1]] = "loop.index0"
            return self._opened("for m in messages", "endfor")
        if word == "if":
            return self._opened(f"if {self._expression(rest)}", "endif")
        if word == "else" and self.blocks and self.blocks[-1] == "endif":
            if not rest:
                return "{% else %}"
            if rest.startswith("if "):
                return f"{{% elif {self._expression(rest[3:])} %}}"
        elif action == "end" and self.blocks:
            return f"{{% {self.blocks.pop()} %}}"
        elif action == ".Response" and not self.by_message:
            self.is_cut = True
            return self._literal("response")
        elif word not in ("else", "end"):
            return self._literal(self._expression(action))
        return self._refuse(action)

    def _opened(self, block: str, end: str) -> str:
        if len(self.blocks) >= _MAX_DEPTH:
            bad_request("template", f"has more than {_MAX_DEPTH} blocks in each other")
        self.blocks.append(end)
        return f"{{% {block} %}}"

    def _expression(self, text: str) -> str:
        words, end = [], 0
        while text[end:].strip():
            match = _WORD.match(text, end)
            if match is None:
                return self._refuse(text)
            words.append(match[1])
            end = match.end()
        if words.count("(") > _MAX_DEPTH:
            self._refuse(text)
        rest = iter(words)
        value = self._call(rest, text)
        if next(rest, None) is not None:
            self._refuse(text)
        return value

    def _call(self, words: Iterator[str], whole: str) -> str:
        """A value, or a function with its values, up to a closing parenthesis or the end."""
        name, values = next(words, ")"), []
        if name not in (*_COMPARISONS, "and", "or", "not", "len"):
            value = self._value(name, words, whole)
            if next(words, ")") != ")":
                self._refuse(whole)
            return value
        for word in words:
            if word == ")":
                break
            values.append(self._value(word, words, whole))
        if name in ("and", "or") and values:
            return f"({f' {name} '.join(values)})"
        if name == "eq" and len(values) > 2:
            return f"({values[0]} in [{', '.join(values[1:])}])"
        if name in _COMPARISONS and len(values) == 2:
            return f"({values[0]} {_COMPARISONS[name]} {values[1]})"
        if len(values) == 1 and name in ("not", "len"):
            return f"(not {values[0]})" if name == "not" else f"({values[0]}|length)"
        return self._refuse(whole)

    def _value(self, word: str, words: Iterator[str], whole: str) -> str:
        if word == "(":
            return self._call(words, whole)
        if word.startswith('"'):
            try:
                return json.dumps(json.loads(word), ensure_ascii=False)
            except ValueError:
                return self._refuse(whole)
        if re.fullmatch(r"-?\d{1,9}|true|false", word):
            return word
        if word in self.names:
            return self.names[word]
        if word in ("$.System", ".System"):
            return "system"
        if word in ("$.Messages", ".Messages") and self.by_message:
            return "messages"
        known = (_MESSAGE if "endfor" in self.blocks else {}) if self.by_message else _TURN
        return known[word] if word in known else self._refuse(whole)

    def _refuse(self, action: str) -> str:
        bad_request("template", f"{action[:40]!r} is not known here: give the template in Jinja")


def _pieces(template: str) -> Iterator[tuple[str, str]]:
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
