"""Chat templates of Ollama's models as Jinja. The three spellings of a format write the same, as Ollama's tests say."""

from __future__ import annotations

from typing import Any

import pytest

from logitless.engine.errors import InvalidRequest
from logitless.frontend.dialects.ollama_template import jinja_of
from logitless.models.chat.jinja import Renderer

SYSTEM = {"role": "system", "content": 'Be "brief"\n.'}
TALK = [
    {"role": "user", "content": "Hello {{ 1 }}"},
    {"role": "assistant", "content": "é🙂"},
    {"role": "user", "content": "Your name?"},
]
BRACKETS = (
    "[INST] {{ if .System }}{{ .System }}\n\n{{ end }}{{ .Prompt }}[/INST] ",
    "[INST] {{ if .System }}{{ .System }}\n\n{{ end }}{{ .Prompt }}[/INST] {{ .Response }}",
    '[INST] {{ if .System }}{{ .System }}\n\n{{ end }}\n{{- range .Messages }}\n{{- if eq .Role "user" }}{{ .Content }}'
    '[/INST] {{ else if eq .Role "assistant" }}{{ .Content }}[INST] {{ end }}\n{{- end }}',
)
CHATML = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}{{ if .Prompt }}<|im_start|>user\n"
    "{{ .Prompt }}<|im_end|>\n{{ end }}<|im_start|>assistant\n{{ .Response }}<|im_end|>\n",
    "\n{{- range $index, $_ := .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n",
    "{{- range $i, $_ := .Messages }}\n{{- $last := eq (len (slice $.Messages $i)) 1 -}}\n<|im_start|>{{ .Role }}\n"
    '{{ .Content }}{{ if or (ne .Role "assistant") (not $last) }}<|im_end|>\n{{ end }}\n'
    '{{- if and (ne .Role "assistant") $last }}<|im_start|>assistant\n{{ end }}{{ end }}',
)


def rendered(template: str, messages: list[Any], *, begins: bool = True) -> str:
    return Renderer(jinja_of(template))({"messages": messages, "add_generation_prompt": begins})


@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("template", BRACKETS)
def test_turns_in_brackets(template: str, system: list[Any]) -> None:
    first = 'Be "brief"\n.\n\n' if system else ""
    expected = f"[INST] {first}Hello {{{{ 1 }}}}[/INST] é🙂[INST] Your name?[/INST] "
    assert rendered(template, system + TALK) == expected


@pytest.mark.parametrize("template", CHATML)
def test_chatml(template: str) -> None:
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in [SYSTEM, *TALK])
    assert rendered(template, [SYSTEM, *TALK]) == f"{turns}<|im_start|>assistant\n"


def test_a_turn_that_is_over_is_written_to_its_end() -> None:
    turns = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert rendered(CHATML[0], said, begins=False) == turns
    assert rendered(CHATML[0], said) == f"{turns}<|im_start|>assistant\n"
    assert rendered(CHATML[0], []) == "<|im_start|>assistant\n"


def test_jinja_stays_as_it_is() -> None:
    for template in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ messages[0].content }}",
        "{{- bos_token }}",
    ):
        assert jinja_of(template) == template


@pytest.mark.parametrize(
    "template",
    [
        "{{ .Tools }}",
        "{{ with .System }}{{ end }}",
        "{{ if .System }}",
        "{{ end }}",
        "{{ else }}",
        "{{ if .System }}{{ else if }}{{ end }}",
        "{{ range .Messages }}{{ range .Messages }}{{ end }}{{ end }}",
        "{{ range .Messages }}{{ .Prompt }}{{ end }}",
        "{{ if eq .System }}{{ end }}",
        '{{ if eq .System "a }}{{ end }}',
        '{{ if eq .System "\\x41" }}{{ end }}',
        "{{ printf .System }}",
        "{{ .System | upper }}",
        "{{ $x }}",
        "{{ $last := eq (len (slice $.Messages $i)) 1 }}",
        "{{ self }}",
        "{{ " + "(" * 5000 + " }}",
        "{{ if .System }}" * 50,
    ],
)
def test_more_than_is_known_is_refused_by_its_name(template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^field 'template': [^\n]{1,120}$"):
        jinja_of(template)
