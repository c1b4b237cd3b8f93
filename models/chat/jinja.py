"""Jinja environment of chat templates: Hugging Face's filters and functions, no access to Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from logitless.models.chat.errors import ChatTemplateError

MAX_CHARS = 64 * 1024 * 1024  # of a rendered text


class Renderer:
    """A parsed template. Raises ChatTemplateError if the source is not valid Jinja."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template, line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError):  # Python's, of the module that Jinja makes: 20 loops in each other
            raise ChatTemplateError("the chat template is nested too deeply") from None
        except MemoryError:
            raise ChatTemplateError("the chat template needs too much memory") from None

    def __call__(self, variables: dict[str, Any]) -> str:
        """The text for these variables. Raises ChatTemplateError, also if it becomes too long.

        Time and memory are bounded for templates of model files only (models/chat/sandbox.py)."""
        chunks: list[str] = []
        size = 0
        try:
            for chunk in self._template.generate(variables):
                size += len(chunk)
                if size > MAX_CHARS:
                    raise ChatTemplateError(f"the chat template writes more than {MAX_CHARS} characters")
                chunks.append(chunk)
        except ChatTemplateError:
            raise
        except MemoryError:
            raise ChatTemplateError("the chat template needs too much memory") from None
        except RecursionError:
            raise ChatTemplateError("the chat template recurses too deeply") from None
        except Exception as error:  # an expression of the template may raise any error
            raise ChatTemplateError(f"the chat template fails: {error or type(error).__name__}") from None
        return "".join(chunks)


class _Generation(Extension):
    """{% generation %}…{% endgeneration %}, which marks the assistant's part for training: its body as it is."""

    tags = {"generation"}  # noqa: RUF012 — jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_list_of,
    )


def _list_of(value: Any) -> list[Any]:
    """The items of a generator, which filters such as `map` and `select` give."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: object) -> None:
    raise ChatTemplateError(f"the chat template says: {message}")


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> SandboxedEnvironment:
    """Lists and dictionaries may be changed, as in llama.cpp: Kimi's templates do. They are a rendering's own."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
