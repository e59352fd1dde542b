"""OpenAI's own package as the client."""

from __future__ import annotations

import openai
import pytest
from kvyard.front.service import Refusal

from tests.front.http.conftest import MODEL, Serve
from tests.front.http.scripted import Fail

EOS = 2


async def test_completions(serve: Serve) -> None:
    async with serve(" world, this is me") as served, served.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, logprobs=2, seed=1)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 4
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.tokens or []) == 4
        text = ""
        usage = None
        async for chunk in await client.completions.create(
            model=MODEL, prompt="Hello", max_tokens=4, stream=True, stream_options={"include_usage": True}
        ):
            text += "".join(choice.text for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == whole.choices[0].text
        assert usage == whole.usage


async def test_chat(serve: Serve) -> None:
    async with serve([504, 3575, EOS]) as served, served.openai() as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=1
        )
        assert whole.choices[0].message.role == "assistant"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.content or []) == 3
        text = ""
        roles: list[str] = []
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
        ):
            delta = chunk.choices[0].delta
            roles += [delta.role] if delta.role else []
            text += delta.content or ""
        assert (text, roles) == (whole.choices[0].message.content, ["assistant"])


async def test_the_streaming_helper(serve: Serve) -> None:
    async with serve([504, 3575, EOS]) as served, served.openai() as client:
        async with client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}]
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == served.text.tokenizer.decode([504, 3575])


async def test_extensions_go_through_extra_body(serve: Serve) -> None:
    async with serve([EOS] * 9) as served, served.openai() as client:
        whole = await client.completions.create(
            model=MODEL,
            prompt=[504, 3575],
            max_tokens=5,
            extra_body={"ignore_eos": True, "return_token_ids": True, "top_k": 3, "priority": 2},
        )
        assert whole.choices[0].model_extra is not None
        assert whole.choices[0].model_extra["token_ids"] == [EOS] * 5
        assert served.service.jobs[0].priority == 2


async def test_models(serve: Serve) -> None:
    async with serve() as served, served.openai() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_errors_are_the_packages_own(serve: Serve) -> None:
    async with serve(" x") as served, served.openai() as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model=MODEL, prompt="a", temperature=-1)
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await client.completions.create(model="gpt-9", prompt="a")
        served.service.no_room = Refusal(429, "queue_full", "the queue is full", 3)
        with pytest.raises(openai.RateLimitError, match="queue is full"):
            await client.completions.create(model=MODEL, prompt="a")


async def test_an_error_inside_a_stream_is_raised(serve: Serve) -> None:
    async with serve([300, Fail("engine_killed", "the engine died of it")]) as served, served.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="the engine died of it"):
            async for _ in stream:
                pass


async def test_closing_a_stream_cancels_it(serve: Serve) -> None:
    async with serve([300] * 200, step_s=0.005) as served, served.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True, max_tokens=200)
        async for _ in stream:
            break
        await stream.close()
        await served.eventually(lambda: served.service.live == 0)
        assert served.service.cancelled == 1
