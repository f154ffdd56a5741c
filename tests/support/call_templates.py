"""Chat templates that write calls, one for each form, as published ones write them."""

from pathlib import Path

from mtpbuild.runtime.text.chat_template import ChatTemplates, TemplateText

FILES = Path(__file__).parents[1] / "data" / "chat_templates"
CALLED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
EACH = "{% for t in m.tool_calls %}{% set c = t.function %}"
DONE = "{% endif %}{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
DSML = "｜DSML｜"

WRITTEN = {
    "deepseek_v31": CALLED
    + "{{ '<｜tool▁calls▁begin｜>' }}"
    + EACH
    + "{{ '<｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' + c.arguments }}"
    + "{{ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}"
    + DONE,
    "deepseek_v32": CALLED
    + f"{{{{ '\\n\\n<{DSML}function_calls>\\n' }}}}"
    + EACH
    + f"<{DSML}invoke name=\"{{{{ c.name }}}}\">{{{{ '\\n' }}}}"
    + "{% for k, v in c.arguments.items() %}"
    + f'<{DSML}parameter name="{{{{ k }}}}" '
    + f"string=\"{{{{ 'true' if v is string else 'false' }}}}\">{VALUE}</{DSML}parameter>"
    + "{{ '\\n' }}{% endfor %}"
    + f"</{DSML}invoke>{{{{ '\\n' }}}}{{% endfor %}}</{DSML}function_calls>"
    + DONE,
    "glm47": CALLED
    + EACH
    + "<tool_call>{{ c.name }}{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    + f"<arg_value>{VALUE}</arg_value>{{% endfor %}}</tool_call>{{% endfor %}}"
    + DONE,
    "kimi_k2": CALLED
    + "<|tool_calls_section_begin|>{% for t in m.tool_calls %}{% set c = t.function %}"
    + "<|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>"
    + "{{ c.arguments if c.arguments is string else c.arguments | tojson }}<|tool_call_end|>"
    + "{% endfor %}<|tool_calls_section_end|>"
    + DONE,
    "minimax_m2": CALLED
    + "{{ '\\n<minimax:tool_call>\\n' }}"
    + EACH
    + "{{ '<invoke name=\"' + c.name + '\">\\n' }}{% for k, v in c.arguments.items() %}"
    + f'<parameter name="{{{{ k }}}}">{VALUE}</parameter>'
    + "{{ '\\n' }}{% endfor %}{{ '</invoke>\\n' }}{% endfor %}</minimax:tool_call>"
    + DONE,
}
UNKNOWN = {
    "no calls": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "only a marker": "{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}",
    "other tags": CALLED
    + EACH
    + "<tool_call>{{ c.name }}{% for k, v in c.arguments.items() %}<arg {{ k }}>{{ v }}</arg>"
    + "{% endfor %}</tool_call>{% endfor %}"
    + DONE,
    "MiniMax-M3's": CALLED
    + "<minimax:tool_call>"
    + EACH
    + '<call tool="{{ c.name }}">{{ c.arguments | tojson }}</call>{% endfor %}'
    + "</minimax:tool_call>"
    + DONE,
    "python": CALLED + EACH + "[{{ c.name }}({{ c.arguments }})]{% endfor %}" + DONE,
}
LIKE = {"deepseek_v3": "deepseek", "glm45": "glm", "hermes": "qwen", "qwen3_coder": "qwen3_5"}


def templates_of(text: str) -> ChatTemplates:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplates({"default": TemplateText("template", text)}, tokens)


def template_of(form: str) -> ChatTemplates:
    """A template that writes calls in a form."""
    if form in WRITTEN:
        return templates_of(WRITTEN[form])
    return templates_of((FILES / f"{LIKE[form]}_like.jinja").read_text())
