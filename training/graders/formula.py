"""`calculate_output` of a multi grader: arithmetic on the rewards of its graders."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from logitless.training.graders.grade import GradeFault, GraderError

MOST_CHARACTERS = 2000
_TWO: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.BitXor: math.pow,  # OpenAI's
    ast.Pow: math.pow,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}


class Formula:
    """A formula of numbers, names, + - * / ^, parentheses and min, max, abs, floor, ceil, exp, sqrt, log."""

    def __init__(self, text: str, names: frozenset[str], where: str) -> None:
        """GraderError: `text` is none, or names something else than `names`."""
        if len(text) > MOST_CHARACTERS:
            raise GraderError(f"{where}: has more than {MOST_CHARACTERS} characters")
        self._names = names
        try:
            # Python's ^ binds less tightly than + and *; ** is what is meant
            self._tree = ast.parse(text.replace("^", "**").strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise GraderError(f"{where}: is no formula") from None
        self._check(self._tree, where)

    def __call__(self, values: Mapping[str, float]) -> float:
        """GradeFault: it has no value, such as a division by zero."""
        try:
            return float(self._value(self._tree, values))
        except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
            raise GradeFault(f"calculate_output: {error}", "formula_parse_error") from None

    def _check(self, node: ast.expr, where: str) -> None:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return
            case ast.Name(id=name) if name in self._names:
                return
            case ast.Name(id=name):
                raise GraderError(f"{where}: {name!r} is not one of the graders {', '.join(sorted(self._names))}")
            case ast.BinOp(left, op, right) if type(op) in _TWO:
                self._check(left, where)
                self._check(right, where)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
                self._check(operand, where)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and args:
                if len(args) > 1 and name not in ("min", "max"):
                    raise GraderError(f"{where}: {name} takes one argument")
                for arg in args:
                    self._check(arg, where)
            case _:
                raise GraderError(f"{where}: may have numbers, graders, + - * / ^ and {', '.join(_FUNCTIONS)}")

    def _value(self, node: Any, values: Mapping[str, float]) -> float:
        match node:
            case ast.Constant(value=int() | float() as value):
                return float(value)
            case ast.Name(id=name):
                return values[name]
            case ast.BinOp(left, op, right):
                return _TWO[type(op)](self._value(left, values), self._value(right, values))
            case ast.UnaryOp(op=op, operand=operand):
                value = self._value(operand, values)
                return -value if isinstance(op, ast.USub) else value
            case _:
                args = [self._value(arg, values) for arg in node.args]
                function = _FUNCTIONS[node.func.id]
                return float(function(args) if node.func.id in ("min", "max") else function(*args))
