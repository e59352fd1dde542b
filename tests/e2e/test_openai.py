"""The `openai` package as client of the real daemon, for everything the daemon serves."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.daemon import DaemonProcess
from tests.e2e.metrics import idle_again

MODEL = "smollm2-135m"


@pytest.fixture
def client(shared_daemon: DaemonProcess) -> OpenAI:
    return OpenAI(base_url=shared_daemon.base + "/v1", api_key="none", max_retries=0)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_completion_and_usage(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=2, temperature=0)
    assert answer.choices[0].text == " Paris."
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 2, 7)


def test_token_ids_are_a_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[504, 3575, 282, 4649, 314], max_tokens=2, temperature=0)
    assert answer.choices[0].text == " Paris."


def test_a_stream_is_the_answer_in_parts_with_usage_when_asked(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0)
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="Once upon a time",
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finishes[-1] == "length"
    assert all(reason is None for reason in finishes[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_chat_and_its_stream(client: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello."}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    text = answer.choices[0].message.content
    assert text
    assert answer.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"


def test_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=1, temperature=0, logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert abs((logprobs.token_logprobs[0] or 0) + 0.25807) < 1e-3
    assert len(logprobs.top_logprobs[0]) == 5


def test_choices_with_one_seed_differ_and_repeat(client: OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(model=MODEL, prompt="I like", max_tokens=16, temperature=1.2, n=4, seed=7)
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = texts()
    assert len(set(first)) == 4
    assert texts() == first


def test_stop_strings_and_stop_by_the_model(client: OpenAI) -> None:
    stopped = client.completions.create(
        model=MODEL, prompt="1, 1, 2, 3, 5, 8,", max_tokens=40, temperature=0, stop=["20"]
    )
    assert stopped.choices[0].text == " 13, 16, "
    assert stopped.choices[0].finish_reason == "stop"
    ended = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=200, temperature=0
    )
    assert ended.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in (ended.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"temperature": -1}, "temperature"), ({"max_tokens": 100_000}, "max_tokens"), ({"n": 0}, "n")],
)
def test_bad_values_are_the_clients_errors(client: OpenAI, wrong: dict[str, object], name: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="x", **wrong)  # type: ignore[call-overload]  # wrong on purpose
    assert name in str(error.value)


def test_a_chat_is_scored_too(shared_daemon: DaemonProcess) -> None:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 2,
        "prompt_logprobs": 1,
    }
    answer = shared_daemon.post("/v1/chat/completions", asked).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    for entry in answer["prompt_logprobs"][1:]:
        assert min(each["rank"] for each in entry.values()) == 1
        assert all(each["logprob"] <= 0 for each in entry.values())


def test_nothing_is_left_behind(shared_daemon: DaemonProcess) -> None:
    idle_again(shared_daemon)
