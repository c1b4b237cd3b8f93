"""Reasoning efforts of chat templates: each level in the words of the template, or left out."""

from __future__ import annotations

from typing import Any

import pytest

from logitless.models.chat.efforts import UnknownEffort
from logitless.models.chat.template import ChatTemplate

USER = {"role": "user", "content": "Hi"}
TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"
REFUSES = (  # Hunyuan 3
    "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'no_think' %}"
    "{% elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no ' + reasoning_effort) }}"
    "{% endif %}" + TURNS + ":{{ reasoning_effort }}"
    "{% if add_generation_prompt %}<think:x>{{ '</think:x>' if reasoning_effort == 'no_think' }}{% endif %}"
)
IGNORES = TURNS + "{{ ':' }}{% if reasoning_effort in ['low', 'minimal'] %}<think></think>{% endif %}"  # Solar Open
WRITES = TURNS + ":{{ reasoning_effort or 'medium' }}"  # gpt-oss
NAMED_OTHERWISE = (  # Kimi K3
    "{% if thinking and thinking_effort is defined and thinking_effort not in ['low', 'high', 'max'] %}"
    "{{ raise_exception('no') }}{% endif %}" + TURNS + ":{{ thinking_effort }}"
)
KNOWS_NONE = TURNS + ":{{ 'off' if reasoning_effort == 'none' }}"
DEEP = TURNS + ":{{ 'deep' if reasoning_effort == 'max' }}"  # DeepSeek V4


def prompt(source: str, **variables: Any) -> str:
    return ChatTemplate(source, bos_token="", eos_token="").render([USER], **variables)


@pytest.mark.parametrize(
    ("source", "efforts"),
    [
        (REFUSES, {"none": "no_think<think:x></think:x>", "no_think": "no_think<think:x></think:x>"}),
        (REFUSES, {"minimal": "low<think:x>", "low": "low<think:x>"}),
        (REFUSES, dict.fromkeys(("medium", "high", "xhigh", "max"), "high<think:x>")),
        (IGNORES, dict.fromkeys(("none", "minimal", "low"), "<think></think>")),
        (IGNORES, dict.fromkeys(("medium", "high", "xhigh", "max", "banana"), "")),
        (WRITES, {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "banana": "banana"}),
        (WRITES, dict.fromkeys(("high", "xhigh", "max"), "high")),
        (NAMED_OTHERWISE, {"none": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max"}),
        (KNOWS_NONE, {"none": "off", "low": "", "banana": ""}),
        (DEEP, {"max": "deep", "xhigh": "deep", "high": "", "low": "", "none": ""}),
    ],
)
def test_efforts_reach_a_template_in_its_own_words(source: str, efforts: dict[str, str]) -> None:
    for effort, expected in efforts.items():
        assert prompt(source, reasoning_effort=effort) == f"Hi:{expected}", effort


def test_no_effort_leaves_the_template_its_default() -> None:
    assert prompt(REFUSES) == prompt(REFUSES, reasoning_effort=None) == "Hi:no_think<think:x></think:x>"
    assert prompt(WRITES) == "Hi:medium"


def test_a_variable_of_the_template_itself_counts_more_than_an_effort() -> None:
    assert prompt(NAMED_OTHERWISE, thinking_effort="max", reasoning_effort="low") == "Hi:max"


def test_an_effort_that_is_no_level_is_refused_where_the_template_would() -> None:
    with pytest.raises(UnknownEffort, match="the chat template knows no_think, low, high, not 'banana'"):
        prompt(REFUSES, reasoning_effort="banana")


def test_reasoning_without_a_word_gives_way_to_reasoning_that_is_continued() -> None:
    hunyuan = ChatTemplate("{# <think></think> #}" + REFUSES, bos_token="", eos_token="")
    assert hunyuan.without_empty_thought("a<think>b</think>c<think>\n\n</think>\n\n") == "a<think>b</think>c"
    for kept in ("a<think></think>b", "a<think>\n", "a<think>b</think>", ""):
        assert hunyuan.without_empty_thought(kept) == kept
