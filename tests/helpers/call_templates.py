"""Short chat templates that write tool calls as the documentation of model families shows them."""

from __future__ import annotations

_BEFORE = (
    "{% if tools %}<|sys|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}(OPEN){{ m.reasoning_content }}(CLOSE){% endif %}{{ m.content }}"
    "{% if m.tool_calls %}"
)
_AFTER = "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
_ITEMS = "{% for k, v in f.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_LIST = (
    _EACH
    + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{{ "" if loop.last else ", " }}{% endfor %}'
)


def template(calls: str, opening: str = "<think>", closing: str = "</think>") -> str:
    """A whole template around the part that writes the calls of message m."""
    written = calls.replace("\n", '{{ "\\n" }}')  # Jinja drops a line break after a block
    return (_BEFORE + written + _AFTER).replace("(OPEN)", opening).replace("(CLOSE)", closing)


_NEARLY = "[" + _EACH + "{{ f.name }}({% for k, v in f.arguments.items() %}"
_NEARLY_END = "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
BARE_PYTHON = template(_NEARLY + "{{ k }}={{ v }}" + _NEARLY_END)  # vLLM's for Llama 3.2
QUOTED_PYTHON = template(_NEARLY + '{{ k }}="{{ v }}"' + _NEARLY_END)  # vLLM's for Llama 4
REPR_PYTHON = template(_NEARLY + "{{ k }}={{ v }}r" + _NEARLY_END)  # vLLM's for ToolACE
LINES_OF_PYTHON = template(  # OLMo 3
    "<function_calls>"
    + _EACH
    + "\n{{ f.name }}("
    + _ITEMS
    + "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
    "{% endfor %}\n</function_calls>"
)
GRANITE = template("<|tool_call|>[" + _LIST + "]")
HUNYUAN = template("<tool_calls>[" + _LIST + "]</tool_calls>")
PLAIN_LIST = template("[" + _LIST + "]")
APERTUS = template(
    "<|tools_prefix|>["
    + _EACH
    + '{"{{ f.name }}": {{ f.arguments | tojson }}}{{ "" if loop.last else ", " }}{% endfor %}'
    "]<|tools_suffix|>",
    "<|inner_prefix|>",
    "<|inner_suffix|>",
)
WRAPPED = template(
    _EACH + '\n<calls:one>\n{"id": "{{ c.id }}", "function": {"name": "{{ f.name }}", '
    '"arguments": {{ f.arguments | tojson }}}}\n</calls:one>{% endfor %}'
)
KIMI = template(
    "<|tool_calls_section_begin|>" + _EACH + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
)
FUNCTIONARY = template(_EACH + "<function={{ f.name }}>{{ f.arguments | tojson }}</function>{% endfor %}<|python_tag|>")
FUNCTIONARY = FUNCTIONARY.replace(
    "{% endfor %}<|python_tag|>{% endif %}", "{% endfor %}<|eom_id|>{% else %}<|eot_id|>{% endif %}"
)
FUNCTIONARY = "{# <|python_tag|> #}" + FUNCTIONARY
LLAMA4_COMMENT = "{# <|header_start|>ipython #}"
LLAMA4 = LLAMA4_COMMENT + template(
    "<|python_start|><|python_end|>"
    + _EACH
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}'
)
GLM_46 = template(
    _EACH
    + "\n<tool_call>{{ f.name }}"
    + _ITEMS
    + "\n<arg_key>{{ k }}</arg_key>\n<arg_value>"
    + _VALUE
    + "</arg_value>{% endfor %}\n</tool_call>{% endfor %}"
)
GLM_47 = template(
    _EACH
    + "<tool_call>{{ f.name }}"
    + _ITEMS
    + "<arg_key>{{ k }}</arg_key><arg_value>"
    + _VALUE
    + "</arg_value>{% endfor %}</tool_call>{% endfor %}"
)
SEED = template(
    _EACH
    + "\n<seed:tool_call>\n<function={{ f.name }}>\n"
    + _ITEMS
    + "<parameter={{ k }}>"
    + _VALUE
    + "</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}",
    "<seed:think>",
    "</seed:think>",
)
MINIMAX = template(
    "\n<minimax:tool_call>\n"
    + _EACH
    + '<invoke name="{{ f.name }}">\n'
    + _ITEMS
    + '<parameter name="{{ k }}">'
    + _VALUE
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
)
LINES = template(
    _EACH
    + "\n<do:call>\n<fn={{ f.name }}>\n"
    + _ITEMS
    + "<p={{ k }}>\n"
    + _VALUE
    + "\n</p>\n{% endfor %}</fn>\n</do:call>{% endfor %}"
)
_NS = "]<]minimax[>["
MINIMAX_M3 = template(
    _NS
    + "<tool_call>\n"
    + _EACH
    + _NS
    + '<invoke name="{{ f.name }}">\n'
    + _ITEMS
    + f"{_NS}<{{{{ k }}}}>{_VALUE}{_NS}</{{{{ k }}}}>\n{{% endfor %}}{_NS}</invoke>\n{{% endfor %}}{_NS}</tool_call>",
    "<mm:think>",
    "</mm:think>",
)
LFM = template(
    "<|tool_call_start|>[" + _LIST.replace('}}}{{ ""', '}}, "id": "{{ c.id }}"}{{ ""') + "]<|tool_call_end|>"
)
PYTHON = template(
    "<|tool_call_start|>["
    + _EACH
    + "{{ f.name }}("
    + _ITEMS
    + """{{ k }}={% if v is string %}{{ "'" ~ v ~ "'" }}{% else %}{{ v }}{% endif %}"""
    + '{{ "" if loop.last else ", " }}{% endfor %}){{ "" if loop.last else ", " }}{% endfor %}]<|tool_call_end|>'
)
PYTHON_ONLY = PYTHON.replace("<|tool_call_start|>", "").replace("<|tool_call_end|>", "")
COHERE = (
    "{% if tools %}<|sys|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.tool_calls %}<|START_ACTION|>["
    + _EACH
    + '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    '{{ "" if loop.last else ", " }}{% endfor %}]<|END_ACTION|>'
    "{% elif m.role == 'assistant' %}<|START_TEXT|>{{ m.content }}<|END_TEXT|>"
    "{% else %}{{ m.content }}" + _AFTER
)
DSML = template(
    "\n\n<｜DSML｜function_calls>\n"
    + _EACH
    + '<｜DSML｜invoke name="{{ f.name }}">\n'
    + _ITEMS
    + """<｜DSML｜parameter name="{{ k }}" string="{{ 'true' if v is string else 'false' }}">"""
    + _VALUE
    + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜function_calls>"
)
_QUEUE = "{% set queue = namespace(ids=[]) %}{% for m in messages if m.role != 'tool' %}"
_QUEUE += "{% for c in m.tool_calls or [] %}{% set _ = queue.ids.append(c.id) %}{% endfor %}{% endfor %}"
KIMI_QUEUE = _QUEUE + KIMI.replace("{{ c.id }}", "{{ queue.ids.pop(0) }}")
EMPTY_THOUGHT = COHERE.replace("<|START_ACTION|>", "<|START_THINKING|><|END_THINKING|><|START_ACTION|>")
LINE_AFTER = template("<TOOLCALL>[" + _LIST + "]</TOOLCALL>").replace(
    "{% endif %}<|end|>", "{% else %}{{ 'X' if 0 }}{% endif %}<|end|>{{ '\\n' if m.tool_calls else '' }}"
)
FUNCTOOLS = template(" functools[" + _LIST + "]")
NAME_FIRST = template(
    _EACH + "{{ f.name }}\n{{ f.arguments | tojson }}{{ '' if loop.last else '>>>' }}{% endfor %}"
).replace("|>{% if m.reasoning", "|>>>>{% if m.reasoning")  # Functionary's: the prompt ends in what begins a call
TOOLS_ONLY = (
    "{% if tools %}List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
)
MINICPM = template(
    _EACH
    + '<function name="{{ f.name }}">{% for k, v in f.arguments.items() %}<param name="{{ k }}">'
    + "{{ '<![CDATA[' + v + ']]>' if v is string and '<' in v else v }}</param>{% endfor %}</function>{% endfor %}"
)
SOLAR = template(
    "<|tool_calls|>"
    + _EACH
    + "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>{{ f.arguments | tojson }}"
    "<|tool_call:end|>{% endfor %}<|calls|>"
)
ID_OBJECT = template(
    _EACH + '<call id="{{ c.id }}">{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</call>{% endfor %}'
)
ID_TAGS = template(
    _EACH + '<invoke id="{{ c.id }}" name="{{ f.name }}">' + _ITEMS + '<arg name="{{ k }}">' + _VALUE + "</arg>"
    "{% endfor %}</invoke>{% endfor %}"
)
ID_PYTHON = template(
    _EACH
    + "<py>{{ c.id }} = {{ f.name }}("
    + _ITEMS
    + '{{ k }}={{ v | tojson }}{{ "" if loop.last else ", " }}{% endfor %})</py>{% endfor %}'
)
NUMBER_FIRST = template(
    _EACH + "<call {{ loop.index }}>{{ f.name }}<args>{{ f.arguments | tojson }}</call>{% endfor %}"
)
ID_WITHOUT_TAG = template(_EACH + "{{ c.id }}: {{ f.name }} {{ f.arguments | tojson }};{% endfor %}")
