"""/v1/chat/completions: conversations, content parts, templates that refuse, the shape of the stream."""

from __future__ import annotations

import msgspec
import pytest
from kvyard.front.service import Job
from kvyard.front.text.chat import ChatTemplate
from kvyard.front.text.support import TextSupport

from tests.front.http.conftest import Serve, events
from tests.front.http.scripted import Script

EOS = 2


async def test_an_answer(serve: Serve) -> None:
    async with serve(lambda job, index: [504, 3575, EOS]) as served:
        answer = await served.chat()
        body = answer.json()
        text = served.text.tokenizer.decode([504, 3575])
        assert body["object"] == "chat.completion"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        assert body["usage"]["completion_tokens"] == 3


async def test_the_prompt_is_the_templates(serve: Serve) -> None:
    async with serve(" x") as served:
        await served.chat(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
        assert served.text.tokenizer.decode(served.service.jobs[0].prompt) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_a_token_that_the_model_has_no_row_for_never_reaches_the_engine(
    serve: Serve, support: TextSupport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support.tokenizer, "vocab_size", 3000)
    beyond = support.tokenizer.encode(" neoliberal")[0]
    async with serve(" x") as served:
        for answer, param in (
            (await served.chat(messages=[{"role": "user", "content": "Say neoliberal"}]), "messages"),
            (await served.complete(prompt="Say neoliberal"), "prompt"),
            (await served.complete(prompt=[beyond]), "prompt"),
        ):
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == (param, "invalid_value")
            assert f"{beyond} is no token id; the model has the ids 0 to 2999" in error["message"]
        assert served.service.jobs == []


async def test_content_in_parts_is_joined(serve: Serve) -> None:
    async with serve(" x") as served:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        await served.chat(messages=[{"role": "user", "content": parts}])
        assert "user\none\ntwo<|im_end|>" in served.text.tokenizer.decode(served.service.jobs[0].prompt)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"content": "no role"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": []}], "messages[1].content"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        ("text", "messages"),
    ],
)
async def test_messages_that_cannot_be_taken(serve: Serve, messages: object, param: str) -> None:
    async with serve(" x") as served:
        answer = await served.chat(messages=messages)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


async def test_BOUNDARY_03_a_chat_without_a_limit_gets_the_whole_window(serve: Serve) -> None:
    async with serve([EOS] * 300, max_model_len=128) as served:
        body = (await served.chat(ignore_eos=True)).json()
        assert body["usage"]["total_tokens"] == 128
        assert body["choices"][0]["finish_reason"] == "length"


async def test_the_newer_limit_wins(serve: Serve) -> None:
    async with serve([300] * 50) as served:
        body = (await served.chat(max_tokens=20, max_completion_tokens=4)).json()
        assert body["usage"]["completion_tokens"] == 4


def with_template(support: TextSupport, source: str | None) -> TextSupport:
    return TextSupport(support.tokenizer, None if source is None else ChatTemplate(source, {}))


async def test_API_14_a_template_that_refuses_is_quoted(serve: Serve, support: TextSupport) -> None:
    text = with_template(
        support,
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% elif m.role not in ['user', 'assistant'] %}{{ raise_exception('Unknown role: ' + m.role) }}"
        "{% elif not loop.first and loop.previtem.role == m.role %}{{ raise_exception('Roles must alternate') }}"
        "{% endif %}{{ m.content }}{% endfor %}",
    )
    async with serve(" x", text=text) as served:
        for roles, words in (
            (["system", "user"], "System role not supported"),
            (["user", "user"], "Roles must alternate"),
            (["wizard"], "Unknown role: wizard"),
        ):
            answer = await served.chat(messages=[{"role": role, "content": "Hi"} for role in roles])
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
        assert (await served.chat()).status_code == 200


async def test_API_14_a_model_without_a_template(serve: Serve, support: TextSupport) -> None:
    async with serve(" x", text=with_template(support, None)) as served:
        answer = await served.chat()
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
        assert (await served.complete()).status_code == 200


async def test_template_variables_and_an_open_end(serve: Serve, support: TextSupport) -> None:
    source = (
        "{{ mood }}|{% for m in messages %}{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    async with serve(" x", text=with_template(support, source)) as served:
        decode = served.text.tokenizer.decode
        await served.chat(chat_template_kwargs={"mood": "calm"})
        assert decode(served.service.jobs[-1].prompt) == "calm|Hi<end>A:"
        await served.chat(add_generation_prompt=False)
        assert decode(served.service.jobs[-1].prompt) == "|Hi<end>"
        await served.chat(continue_final_message=True)
        assert decode(served.service.jobs[-1].prompt) == "|Hi"
        contradictions: tuple[dict[str, object], ...] = (
            {"chat_template_kwargs": {"messages": []}},
            {"continue_final_message": True, "add_generation_prompt": True},
        )
        for wrong in contradictions:
            assert (await served.chat(**wrong)).status_code == 400


async def chunks_of(served: object, **fields: object) -> list[dict[str, object]]:
    answer = await served.chat(stream=True, **fields)  # type: ignore[attr-defined] # Served
    data = events(answer.text)
    assert data[-1] == "[DONE]"
    return [msgspec.json.decode(each) for each in data[:-1]]


async def test_API_09_the_role_once_and_the_finish_reason_last(serve: Serve) -> None:
    async with serve([*range(300, 320), EOS]) as served:
        chunks = await chunks_of(served)
        choices = [chunk["choices"][0] for chunk in chunks]  # type: ignore[index] # decoded JSON
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "stop"
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == served.text.tokenizer.decode(list(range(300, 320)))


async def test_API_11_each_choice_finishes_once_with_its_own_text(serve: Serve) -> None:
    lengths = (5, 30, 60)

    def script(job: Job, index: int) -> Script:
        return [300 + index] * lengths[index] + [EOS]

    async with serve(script) as served:
        chunks = await chunks_of(served, n=3, return_token_ids=True)
        assert chunks[0]["prompt_token_ids"] == served.service.jobs[0].prompt
        assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
        for index in range(3):
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]  # type: ignore[attr-defined]
            assert [c["finish_reason"] for c in own].count("stop") == 1
            assert own[-1]["finish_reason"] == "stop"
            ids = [token for c in own for token in c.get("token_ids", [])]
            assert ids == [*script(served.service.jobs[0], index)]
            assert "role" in own[0]["delta"]
