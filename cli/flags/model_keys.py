"""The flags that stand in for what a model's file says of itself."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import Flag, Group, choice, number, whole

if TYPE_CHECKING:
    from logitless.models.hparams.overrides import Overrides, Value

_TYPES = "int|float|bool|str"
_NEXT = re.compile(rf",(?=[^=,]+=(?:{_TYPES}):)")
_RULE = re.compile(rf"([^=]+)=({_TYPES}):(.*)", re.DOTALL)


def rules(text: str) -> list[tuple[str, Value]]:
    """KEY=TYPE:VALUE,..."""
    return [_rule(part) for part in _NEXT.split(text)]


def _rule(text: str) -> tuple[str, Value]:
    found = _RULE.fullmatch(text)
    if found is None:
        raise ValueError(f"is not KEY=TYPE:VALUE with a type of {_TYPES.replace('|', ', ')}")
    key, kind, value = found.groups()
    if kind == "bool":
        if value not in ("true", "false"):
            raise ValueError(f"has a bool {value!r} that is not true or false")
        return key, value == "true"
    if kind == "int":
        if not re.fullmatch(r"[+-]?\d{1,18}", value, re.ASCII):
            raise ValueError(f"has an int {value!r} that is not a whole number")
        return key, int(value)
    return key, value if kind == "str" else number()(value)


MODEL_KEYS = Group(
    "In the place of what the model's file says (0: as it says)",
    (
        Flag(
            "--override-kv",
            "values of the file's keys: KEY=TYPE:VALUE,... with a TYPE of int, float, bool or str; may be given again",
            rules,
            None,
            "RULES",
            many=True,
        ),
        Flag(
            "--rope-scaling",
            "how positions beyond the training context are handled: none, linear or yarn",
            choice("none", "linear", "yarn"),
            None,
            "TYPE",
            env="LLAMA_ARG_ROPE_SCALING_TYPE",
        ),
        Flag("--rope-scale", "the context grows by this factor", number(0), 0.0, env="LLAMA_ARG_ROPE_SCALE"),
        Flag("--rope-freq-scale", "the same, 1/N", number(0), 0.0, env="LLAMA_ARG_ROPE_FREQ_SCALE"),
        Flag("--rope-freq-base", "base of the rotations' frequencies", number(0), 0.0, env="LLAMA_ARG_ROPE_FREQ_BASE"),
        Flag(
            "--yarn-orig-ctx",
            "yarn: the context that the model was trained with",
            whole(0),
            0,
            env="LLAMA_ARG_YARN_ORIG_CTX",
        ),
    ),
)


def overrides(options: SimpleNamespace) -> Overrides:
    """What the flags say, of a command that has them or not."""
    from logitless.models.hparams.overrides import Overrides

    own: dict[str, Value] = {}
    if getattr(options, "rope_scaling", None):
        own["rope.scaling.type"] = options.rope_scaling
    for flag, key in (
        ("rope_scale", "rope.scaling.factor"),
        ("rope_freq_scale", "rope.scaling.factor"),
        ("rope_freq_base", "rope.freq_base"),
        ("yarn_orig_ctx", "rope.scaling.original_context_length"),
    ):
        if value := getattr(options, flag, 0):
            own[key] = 1 / value if flag == "rope_freq_scale" else value
    return Overrides(tuple(getattr(options, "override_kv", ())), tuple(own.items()))
