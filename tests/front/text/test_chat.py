"""Chat templates: what they see, what they may not do, and how they refuse."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from kvyard.front.text.chat import ChatTemplate, find_template
from kvyard.front.text.errors import ChatTemplateError, ModelTextError

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, object]] | None = None, **variables: object) -> str:
    template = ChatTemplate(
        source, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, lambda: datetime(2031, 5, 6)
    )
    return template.render(messages or USER, variables)


def test_messages_tokens_and_the_prompt_of_the_answer() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    assert render(source) == "<s>user: Hi</s>A:"
    assert render(source, add_generation_prompt=False) == "<s>user: Hi</s>"


def test_variables_of_the_request() -> None:
    assert render("{{ 'thinking' if enable_thinking else 'plain' }}", enable_thinking=True) == "thinking"
    assert render("{{ 'thinking' if enable_thinking else 'plain' }}") == "plain"


def test_blocks_leave_no_white_space() -> None:
    assert render("{% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_the_clock_is_given_from_outside() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "06 May 2031"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<ü & 'x'>"}]) == (
        '[{"role":"user","content":"<ü & \'x\'>"}]'
    )
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_loop_controls_and_training_marks() -> None:
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}said{% endgeneration %}!") == "said!"


def test_API_14_a_template_that_refuses_is_quoted() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
    assert render(source) == "ok"
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        render(source, [{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ messages[7].content }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ nothing.x.y }}"]
)
def test_API_14_whatever_goes_wrong_inside_is_about_the_conversation(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        shown = render(source)
    except ChatTemplateError:
        return
    assert shown == ""


def test_content_is_data_never_template() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 1 + 1 }}"}]) == "{{ 1 + 1 }}"


def test_a_template_that_does_not_compile_is_the_models_fault() -> None:
    with pytest.raises(ModelTextError, match="cannot be compiled"):
        ChatTemplate("{% if %}", {})


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    assert find_template(tmp_path, {}) is None
    assert find_template(tmp_path, {"chat_template": "from the configuration"}) == "from the configuration"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert find_template(tmp_path, {"chat_template": named}) == "d"
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert find_template(tmp_path, {"chat_template": "x"}) == "from its own file"


def test_a_variable_may_have_any_name() -> None:
    template = ChatTemplate("{{ self_ }}{{ messages[0].content }}", {})
    assert template.render(USER, {"self": 1, "template": 2, "self_": "ok "}).startswith("ok ")
