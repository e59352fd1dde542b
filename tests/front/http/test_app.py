"""The small endpoints, and everything that is not there."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from kvyard.front.http.settings import HttpSettings
from kvyard.front.text.support import TextSupport

from tests.front.http.conftest import MODEL, Serve


async def test_health_is_the_fronts_and_ready_the_engines(serve: Serve) -> None:
    async with serve(ready=False, not_ready_reason="the engine is starting") as served:
        assert (await served.http.get("/health")).json() == {"status": "ok"}
        answer = await served.http.get("/ready")
        assert (answer.status_code, answer.json()) == (503, {"ready": False, "reason": "the engine is starting"})
        served.service.ready = True
        answer = await served.http.get("/ready")
        assert (answer.status_code, answer.json()) == (200, {"ready": True, "reason": ""})


async def test_models(serve: Serve) -> None:
    async with serve() as served:
        model = {
            "id": "smollm2-135m",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "kvyard",
            "max_model_len": 256,
        }
        assert (await served.http.get("/v1/models")).json() == {"object": "list", "data": [model]}
        assert (await served.http.get("/v1/models/smollm2-135m")).json() == model
        answer = await served.http.get("/v1/models/org/other")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_metrics_and_version(serve: Serve) -> None:
    async with serve() as served:
        answer = await served.http.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "kvyard_up 1" in answer.text
        assert (await served.http.get("/version")).json() == {"version": "9.9.9"}


async def test_tokenize_and_back(serve: Serve) -> None:
    async with serve() as served:
        text = "Hello, Zürich 🙂"
        body = (await served.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert body["tokens"] == served.text.tokenizer.encode(text)
        assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 256)
        assert len(body["token_strs"]) == body["count"]
        assert (await served.http.post("/detokenize", json={"tokens": body["tokens"]})).json() == {"prompt": text}


async def test_tokenize_a_conversation(serve: Serve) -> None:
    async with serve() as served:
        messages = [{"role": "user", "content": "Hi"}]
        tokens = (await served.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
        assert served.text.tokenizer.decode(tokens).endswith(
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "word " * 800_000}),
        ("/detokenize", {"tokens": [49_152]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {}),
    ],
)
async def test_bad_requests_to_them(serve: Serve, path: str, body: dict[str, Any]) -> None:
    async with serve() as served:
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings"])
async def test_endpoints_that_are_not_there_yet_say_so(serve: Serve, path: str) -> None:
    async with serve() as served:
        answer = await served.http.post(path, json={"input": "x"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_endpoint"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)])
async def test_other_paths_and_methods_have_the_same_shape(serve: Serve, method: str, path: str, status: int) -> None:
    async with serve() as served:
        answer = await served.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_cors_is_off(serve: Serve) -> None:
    async with serve() as served:
        headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
        answer = await served.http.options("/v1/completions", headers=headers)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_the_description_names_every_route_and_resolves(serve: Serve) -> None:
    async with serve() as served:
        document = (await served.http.get("/openapi.json")).json()
        assert document["openapi"] == "3.1.0"
        assert {
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/models",
            "/v1/models/{model}",
            "/tokenize",
            "/detokenize",
            "/health",
            "/ready",
            "/metrics",
            "/version",
        } <= document["paths"].keys()
        schemas = document["components"]["schemas"]
        for name in _references(document):
            assert name in schemas
        for path, chunk in (("/v1/completions", "Completion"), ("/v1/chat/completions", "ChatChunk")):
            event = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
            assert _references(event) == {chunk, "ErrorResponse"}
            assert {"408", "413", "429", "503"} <= document["paths"][path]["post"]["responses"].keys()
        temperature = schemas["CompletionRequest"]["properties"]["temperature"]
        assert temperature["anyOf"][0]["minimum"] == 0
        assert schemas["CompletionRequest"]["required"] == ["prompt"]


def _references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"].rsplit("/", 1)[1]} if "$ref" in node else set()
        return own.union(*(_references(each) for each in node.values()))
    if isinstance(node, list):
        return set().union(*(_references(each) for each in node))
    return set()


async def test_answers_match_the_description(serve: Serve) -> None:
    from kvyard.front.http import answers

    async with serve(" a b c") as served:
        whole = await served.complete(logprobs=2, return_token_ids=True, prompt_logprobs=1)
        completion = msgspec.json.decode(whole.content, type=answers.Completion)
        assert msgspec.json.decode(msgspec.json.encode(completion)) == whole.json(), "there is more than described"
        chat = await served.chat(logprobs=True, top_logprobs=2, max_tokens=3, return_token_ids=True)
        answer = msgspec.json.decode(chat.content, type=answers.ChatCompletion)
        assert msgspec.json.decode(msgspec.json.encode(answer)) == chat.json()


async def test_CAPACITY_06_a_burst_is_counted_before_it_is_tokenized(serve: Serve, support: TextSupport) -> None:
    encoded: list[str] = []

    class Counting(TextSupport):
        async def encode(self, text: str, **options: Any) -> list[int]:  # noqa: ANN401 - passed on
            encoded.append(text)
            await asyncio.sleep(0.1)  # long enough for the whole burst to arrive
            return await support.encode(text, **options)

    counting = object.__new__(Counting)
    counting.__dict__.update(support.__dict__)
    async with serve(" a", text=counting, most=8, max_model_len=100_000) as served:
        bodies = [{"prompt": f"{at} " + "word " * 4000, "max_tokens": 2} for at in range(64)]
        answers = await asyncio.gather(*(served.http.post("/v1/completions", json=body) for body in bodies))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 8 + [429] * 56
        assert len(encoded) == 8
        assert all(answer.headers["retry-after"] for answer in answers if answer.status_code == 429)
        # And every place was given back.
        assert {(await served.complete()).status_code for _ in range(9)} == {200}


@pytest.mark.parametrize(
    "wrong", [{"min_tokens": 5}, {"max_tokens": 1000}, {"prompt": [10**6]}, {"prompt": [[1], [2] * 999]}]
)
async def test_CAPACITY_06_a_refused_request_gives_its_place_back(serve: Serve, wrong: dict[str, object]) -> None:
    async with serve(" a", most=2) as served:
        for _ in range(3):
            assert (await served.complete(**{"max_tokens": 2, **wrong})).status_code == 400
        assert (await served.complete()).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5] * 101}),
        ("/v1/completions", {"prompt": [5] * 60, "max_tokens": 41}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}),
    ],
)
async def test_CAPACITY_06_what_can_never_fit_is_not_told_to_come_back(
    serve: Serve, path: str, body: dict[str, object]
) -> None:
    async with serve(" a", most=0, max_model_len=100) as served:
        assert (await served.complete(max_tokens=2)).status_code == 429, "the queue is full"
        answer = await served.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "max_model_len" in answer.json()["error"]["message"]


async def test_what_the_small_endpoints_refuse_is_counted(serve: Serve) -> None:
    settings = HttpSettings(MODEL, max_body_bytes=1000)
    async with serve(settings=settings) as served:
        http = served.http
        answers = [
            await http.get("/nothing"),
            await http.delete("/v1/completions"),
            await http.post("/v1/embeddings", json={}),
            await http.get("/v1/models/other"),
            await http.post("/tokenize", json={"prompt": "x" * 1000}),
            await http.post("/detokenize", json={"tokens": [-1]}),
            await http.post("/v1/completions", json={"prompt": "x" * 1000}),
        ]
        codes = [answer.json()["error"]["code"] for answer in answers]
        assert codes == [
            "not_found", "method_not_allowed", "unsupported_endpoint", "model_not_found", "body_too_large",
            "invalid_value", "body_too_large",
        ]  # fmt: skip
        assert served.observer.refusals == codes
        await http.get("/ready")
        await http.get("/metrics")
        assert len(served.observer.refusals) == len(codes)
