"""The Jinja that chat templates are written in: what Hugging Face's renderer offers, in a sandbox with limits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from logitless.models.chat import limits
from logitless.models.chat.limits import MAX_CHARS, TooLarge

MAX_SECONDS = 5.0
_TICK, _CONCAT = "logitless_tick", "logitless_concatenated"


class ChatTemplateError(ValueError):
    """A chat template that cannot be parsed, or that refuses or fails on these messages; the text is one line."""

    def __init__(self, problem: str) -> None:
        super().__init__(" ".join(problem.split()))


class Renderer:
    """A parsed template. Raises ChatTemplateError if the source is not valid Jinja."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template, line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise ChatTemplateError("the chat template is nested too deeply") from None

    def __call__(self, variables: dict[str, Any]) -> str:
        """The text for these variables. Raises ChatTemplateError, also if it takes too long or becomes too long."""
        chunks: list[str] = []
        size = 0
        try:
            for chunk in self._template.generate(variables | {_TICK: _ticker()}):
                size += len(chunk)
                if size > MAX_CHARS:
                    raise ChatTemplateError(f"the chat template writes more than {MAX_CHARS} characters")
                chunks.append(chunk)
        except ChatTemplateError:
            raise
        except TooLarge as error:
            raise ChatTemplateError(f"the chat template {error}") from None
        except RecursionError:
            raise ChatTemplateError("the chat template recurses too deeply") from None
        except Exception as error:  # whatever an expression of the template may raise
            raise ChatTemplateError(f"the chat template fails: {error or type(error).__name__}") from None
        return "".join(chunks)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which loops count and texts have a limit."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(
            nodes.For
        ):  # a loop need not write anything, so each round must look at the clock
            tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno).set_lineno(loop.lineno))
        _Concatenations().visit(template)
        template.set_environment(self)
        return template

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        limits.operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and getattr(value, "__name__", "") in ("format", "format_map"):
            limits.method(text, "format", ())
        return super().wrap_str_format(value)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            limits.method(text, obj.__name__, args)
        return super().call(context, obj, *args, **kwargs)


class _Concatenations(NodeTransformer):
    """Makes a ~ b a call, which can have a limit."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(_CONCAT, "load"), node.nodes, [], None, None, lineno=node.lineno)


def _ticker() -> Callable[[], None]:
    deadline = time.monotonic() + MAX_SECONDS

    def tick() -> None:
        if time.monotonic() > deadline:
            raise ChatTemplateError(f"the chat template runs longer than {MAX_SECONDS:g} s")

    return tick


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


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters = limits.filters(environment.filters)
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]
    environment.globals[_CONCAT] = limits.concatenated
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
