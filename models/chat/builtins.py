"""Chat templates by the short names that llama.cpp's --chat-template knows, written in Jinja.

They render as llama.cpp's own formatter does for each name (facts from its `src/llama-chat.cpp`):
no BOS, which the tokenizer adds."""

from __future__ import annotations


def _turns(turn: str, generation: str, start: str = "") -> str:
    """A template that writes each message `m` the same way."""
    prompt = "{% if add_generation_prompt %}" + generation + "{% endif %}"
    return start + "{% for m in messages %}" + turn + "{% endfor %}" + prompt


def _roles(system: str, user: str, assistant: str, generation: str, start: str = "") -> str:
    """A template with one form for each role; `c` is the message's content."""
    turn = (
        "{% set c = m.content %}{% if m.role == 'system' %}"
        + system
        + "{% elif m.role == 'user' %}"
        + user
        + "{% else %}"
        f"{assistant}{{% endif %}}"
    )
    return _turns(turn, generation, start)


def _inst(start: str, system: str, user: str, assistant: str) -> str:
    """A template whose [INST] covers the system and the user's message, closed by the assistant's."""
    opened = "{% if not ns.open %}{% set ns.open = true %}" + start + "{% endif %}"
    close = "{% set ns.open = false %}"
    return _turns(
        f"{{% set c = m.content %}}{opened}{{% if m.role == 'system' %}}{system}{{% elif m.role == 'user' %}}{user}"
        f"{{% else %}}{assistant}{close}{{% endif %}}",
        "",
        "{% set ns = namespace(open=false) %}",
    )


def _mistral(lead: str, gap: str, answer: str) -> str:
    return _inst(f"{lead}[INST]{gap}", "{{ c + '\n\n' }}", "{{ c }}" + f"{lead}[/INST]", f"{gap}{answer}</s>")


def _mistral_v7(gap: str) -> str:
    return _roles(
        f"[SYSTEM_PROMPT]{gap}{{{{ c }}}}[/SYSTEM_PROMPT]",
        f"[INST]{gap}{{{{ c }}}}[/INST]",
        f"{gap}{{{{ c }}}}</s>",
        "",
    )


def _llama2(start: str, system: str, strip: bool = False) -> str:
    c = "{{ c | trim }}" if strip else "{{ c }}"
    return _inst(start, system.replace("C", c), c + " [/INST]", c + "</s>")


CHATML = _turns("{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}", "{{ '<|im_start|>assistant\n' }}")
"""Template of a model without one."""
CHATML_END = "<|im_end|>"

_SYS = "{{ '<<SYS>>\n' }}C{{ '\n<</SYS>>\n\n' }}"
_GEMMA = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system + m.content | trim %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if ns.system and m.role != 'assistant' %}{{ ns.system + '\n\n' }}{% set ns.system = '' %}{% endif %}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

_EXAONE = _roles(
    "{{ '[|system|]' + c | trim + '[|endofturn|]\n' }}",
    "{{ '[|user|]' + c | trim + '\n' }}",
    "{{ '[|assistant|]' + c | trim + '[|endofturn|]\n' }}",
    "[|assistant|]",
)


def _without_system(text: str) -> str:
    """The start of a conversation that has no system message first."""
    return "{% if not messages or messages[0].role != 'system' %}" + text + "{% endif %}"


_GRANITE = _turns(
    "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}",
    "<|start_of_role|>assistant<|end_of_role|>",
)
BUILTINS: dict[str, str] = {
    "chatml": CHATML,
    **{
        name: _turns(
            "{{ '<role>' + ('HUMAN' if m.role == 'user' else m.role | upper) + '</role>' + m.content }}", generation
        )
        for name, generation in (
            ("bailing", "<role>ASSISTANT</role>"),
            ("bailing-think", "<role>ASSISTANT</role><think>"),
        )
    },
    "bailing2": _turns(
        "{{ '<role>' + ('HUMAN' if m.role == 'user' else m.role | upper) + '</role>' + m.content + '<|role_end|>' }}",
        "<role>ASSISTANT</role>",
        _without_system("<role>SYSTEM</role>detailed thinking off<|role_end|>"),
    ),
    "deepseek-ocr": _turns("{{ m.content }}", ""),
    "exaone-moe": _turns(
        "{{ '<|' + m.role + '|>\n' + m.content | trim + '<|endofturn|>\n' }}", "{{ '<|assistant|>\n' }}"
    ),
    "exaone4": _EXAONE,
    "gigachat": _roles(
        "{{ c }}<|message_sep|>",
        "user<|role_sep|>{{ c }}<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
        "assistant<|role_sep|>{{ c }}<|message_sep|>",
        "assistant<|role_sep|>",
        "<s>",
    ),
    "gpt-oss": _turns(
        "{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
        "{{ '<|return|>' if m.role == 'assistant' else '<|end|>' }}",
        "<|start|>assistant",
    ),
    **dict.fromkeys(("granite", "granite-4.0", "granite-4.1"), _GRANITE),
    "grok-2": _roles(
        "{{ 'System: ' + c | trim + '<|separator|>\n\n' }}",
        "{{ 'Human: ' + c | trim + '<|separator|>\n\n' }}",
        "{{ 'Assistant: ' + c + '<|separator|>\n\n' }}",
        "Assistant:",
    ),
    "hunyuan-dense": _roles(
        "{{ c }}<｜hy_place▁holder▁no▁3｜>",
        "<｜hy_User｜>{{ c }}<｜hy_Assistant｜>",
        "<｜hy_Assistant｜>{{ c }}<｜hy_place▁holder▁no▁2｜>",
        "",
    ),
    "hunyuan-moe": _roles(
        "<|startoftext|>{{ c }}<|extra_4|>", "<|startoftext|>{{ c }}<|extra_0|>", "{{ c }}<|eos|>", ""
    ),
    "hunyuan-vl": _roles(
        "{{ c }}<｜hy_place▁holder▁no▁3｜>",
        "{{ c }}<｜hy_User｜>",
        "{{ c }}<｜hy_Assistant｜>",
        "",
        "<｜hy_begin▁of▁sentence｜>",
    ),
    "kimi-k2": _turns(
        "{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}",
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    "orion": _turns(
        "{% if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{% elif m.role == 'user' %}Human: "
        "{% if ns.system %}{{ ns.system + '\n\n' }}{% set ns.system = '' %}{% endif %}"
        "{{ m.content + '\n\nAssistant: </s>' }}{% else %}{{ m.content }}</s>{% endif %}",
        "",
        "{% set ns = namespace(system='') %}",
    ),
    "pangu-embedded": _turns(
        "[unused9]{{ {'system': '系统', 'user': '用户'}.get(m.role, '助手') }}：{{ m.content }}[unused10]",
        "[unused9]助手：",
        _without_system("[unused9]系统：[unused10]"),
    ),
    "rwkv-world": _turns(
        "{{ {'system': 'System', 'user': 'User'}.get(m.role, 'Assistant') + ': ' + m.content | trim + '\n\n' }}"
        "{% if loop.last and m.role == 'user' %}Assistant:{% endif %}",
        "",
    ),
    "seed_oss": _turns(
        "{{ '<seed:bos>' + m.role + '\n' }}{{ m.content | trim if m.role == 'assistant' else m.content }}<seed:eos>",
        "{{ '<seed:bos>assistant\n' }}",
    ),
    "solar-open": _turns("{{ '<|begin|>' + m.role + '<|content|>' + m.content + '<|end|>' }}", "<|begin|>assistant"),
    "yandex": _roles(
        "", "{{ ' Пользователь: ' + c + '\n\n' }}", "{{ ' Ассистент: ' + c + '\n\n' }}", " Ассистент:[SEP]"
    ),
    "chatglm3": _turns("{{ '<|' + m.role + '|>\n ' + m.content }}", "<|assistant|>", "[gMASK]sop"),
    "chatglm4": _turns("{{ '<|' + m.role + '|>\n' + m.content }}", "{{ '<|assistant|>\n' }}", "[gMASK]<sop>"),
    "command-r": _turns(
        "{{ '<|START_OF_TURN_TOKEN|><|' + {'system': 'SYSTEM', 'user': 'USER'}.get(m.role, 'CHATBOT') + '_TOKEN|>' }}"
        "{{ m.content | trim }}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "deepseek": _roles(
        "{{ c }}",
        "{{ '### Instruction:\n' + c + '\n' }}",
        "{{ '### Response:\n' + c + '\n<|EOT|>\n' }}",
        "{{ '### Response:\n' }}",
    ),
    "deepseek2": _roles(
        "{{ c + '\n\n' }}", "{{ 'User: ' + c + '\n\n' }}", "Assistant: {{ c }}<｜end▁of▁sentence｜>", "Assistant:"
    ),
    "deepseek3": _roles(
        "{{ c + '\n\n' }}", "<｜User｜>{{ c }}", "<｜Assistant｜>{{ c }}<｜end▁of▁sentence｜>", "<｜Assistant｜>"
    ),
    "exaone3": _EXAONE,
    "falcon3": _turns("{{ '<|' + m.role + '|>\n' + m.content + '\n' }}", "{{ '<|assistant|>\n' }}"),
    "gemma": _GEMMA,
    "glmedge": _turns("{{ '<|' + m.role + '|>\n' + m.content }}", "<|assistant|>"),
    "llama2": _llama2("[INST] ", "{{ '' }}C{{ '\n' }}"),
    "llama2-sys": _llama2("[INST] ", _SYS),
    "llama2-sys-bos": _llama2("{% if loop.first %}[INST] {% else %}<s>[INST] {% endif %}", _SYS),
    "llama2-sys-strip": _llama2("[INST] ", _SYS, strip=True),
    "llama3": _turns(
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}",
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
    ),
    "llama4": _turns(
        "{{ '<|header_start|>' + m.role + '<|header_end|>\n\n' + m.content | trim + '<|eot|>' }}",
        "{{ '<|header_start|>assistant<|header_end|>\n\n' }}",
    ),
    "megrez": _turns(
        "{{ '<|role_start|>' + m.role + '<|role_end|>' + m.content + '<|turn_end|>' }}",
        "<|role_start|>assistant<|role_end|>",
    ),
    "minicpm": _turns("{{ '<用户>' + m.content | trim + '<AI>' if m.role == 'user' else m.content | trim }}", ""),
    "mistral-v1": _mistral(" ", " ", "{{ c }}"),
    "mistral-v3": _mistral("", " ", "{{ c | trim }}"),
    "mistral-v3-tekken": _mistral("", "", "{{ c }}"),
    "mistral-v7": _mistral_v7(" "),
    "mistral-v7-tekken": _mistral_v7(""),
    "monarch": _turns(
        "{{ ('' if loop.first else '<s>') + m.role + '\n' + m.content + '</s>\n' }}", "{{ '<s>assistant\n' }}"
    ),
    "openchat": _roles(
        "{{ c }}<|end_of_turn|>",
        "GPT4 Correct User: {{ c }}<|end_of_turn|>",
        "GPT4 Correct Assistant: {{ c }}<|end_of_turn|>",
        "GPT4 Correct Assistant:",
    ),
    "phi3": _turns("{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}", "{{ '<|assistant|>\n' }}"),
    "phi4": _turns(
        "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}", "<|im_start|>assistant<|im_sep|>"
    ),
    "smolvlm": _roles(
        "{{ c + '\n\n' }}",
        "{{ 'User: ' + c + '<end_of_utterance>\n' }}",
        "{{ 'Assistant: ' + c + '<end_of_utterance>\n' }}",
        "Assistant:",
        "<|im_start|>",
    ),
    "vicuna": _roles(
        "{{ c + '\n\n' }}", "{{ 'USER: ' + c + '\n' }}", "{{ 'ASSISTANT: ' + c + '</s>\n' }}", "ASSISTANT:"
    ),
    "vicuna-orca": _roles(
        "{{ 'SYSTEM: ' + c + '\n' }}", "{{ 'USER: ' + c + '\n' }}", "{{ 'ASSISTANT: ' + c + '</s>\n' }}", "ASSISTANT:"
    ),
    "zephyr": _turns("{{ '<|' + m.role + '|>\n' + m.content + '<|endoftext|>\n' }}", "{{ '<|assistant|>\n' }}"),
}
"""Name → Jinja source."""
