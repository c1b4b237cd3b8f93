"""Reasoning efforts of chat templates: the levels that a template knows, and the one for a request's level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from logitless.models.chat.errors import ChatTemplateError

NAMES = ("reasoning_effort", "reasoning_strength", "thinking_effort")
"""Variables in which templates read an effort."""

LEVELS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")
NEAREST = {
    "none": ("no_think", "minimal", "low"),
    "no_think": ("none", "minimal", "low"),
    "minimal": ("low",),
    "low": ("minimal",),
    "medium": (),
    "high": (),
    "xhigh": ("max", "high"),
    "max": ("xhigh", "high"),
}
"""Levels that stand in for one that a template does not know; without any, the template has its default."""
STRICT = {"minimal": ("low", "high"), "low": ("minimal", "high"), "medium": ("high", "low"), "high": ("max", "low")}
"""Stand-ins for templates that refuse other levels, whose default may be not to think."""
WRITTEN = ("low", "medium", "high")
"""Levels for templates that write any word into the prompt (gpt-oss)."""

_UNKNOWN = "MARK-E"
Render = Callable[[Mapping[str, Any]], str]
"""Renders a short conversation with these variables. Raises ChatTemplateError."""


class UnknownEffort(ChatTemplateError):
    """An effort that is none of the levels, which the template refuses."""


class Efforts:
    """The levels of one template, found by its renderings."""

    def __init__(self, render: Render, source: str) -> None:
        self._levels = {name: _levels(render, name) for name in NAMES if name in source}

    def variables(self, effort: Any) -> dict[str, Any]:
        """The template's variables for an effort, in its own words; none where it has no such level.

        Raises UnknownEffort if the effort is no level and the template refuses it."""
        chosen: dict[str, Any] = {}
        for name, (known, refuses) in self._levels.items():
            if effort in known or (isinstance(effort, str) and effort not in LEVELS and not refuses):
                chosen[name] = effort
            elif effort in LEVELS:
                others = STRICT.get(effort, NEAREST[effort]) if refuses else NEAREST[effort]
                if level := next((other for other in others if other in known), ""):
                    chosen[name] = level
            elif effort is not None:
                levels = ", ".join(level for level in LEVELS if level in known)
                raise UnknownEffort(f"the chat template knows {levels}, not {str(effort)[:32]!r}")
        return chosen


def _levels(render: Render, name: str) -> tuple[frozenset[str], bool]:
    """(levels that change the prompt in another way than an unknown word does, the template refuses such a word)."""

    def text(level: str) -> str | None:
        try:
            return render({name: level})
        except ChatTemplateError:
            return None

    unknown = text(_UNKNOWN)
    if unknown is not None and _UNKNOWN in unknown:
        return frozenset(WRITTEN), False
    texts = {level: text(level) for level in LEVELS}
    if unknown is None and not any(texts.values()):  # it refuses the conversation
        return frozenset(LEVELS), False
    return frozenset(level for level in LEVELS if texts[level] not in (None, unknown)), unknown is None
