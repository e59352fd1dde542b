"""API keys in front of the API: who comes in, as whom, and what the others are told."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
import structlog.testing
from kvyard.front.http.authentication import OPEN
from kvyard.front.http.settings import HttpSettings
from kvyard.front.keys import KeyRing, make_key

from tests.front.http.conftest import MODEL, Serve

PATHS = ["/v1/models", f"/v1/models/{MODEL}", "/metrics", "/version", "/openapi.json", "/nowhere"]
POSTS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]


@pytest.fixture
def secrets(tmp_path: Path) -> tuple[KeyRing, str, str]:
    """A ring of two keys: ann's for the tenant blue, bob's for himself."""
    ann, ann_key = make_key("ann", "blue")
    bob, bob_key = make_key("bob")
    file = tmp_path / "keys"
    file.write_text(f"# who\n{ann_key.line}\n\n{bob_key.line}\n")
    return KeyRing(file), ann, bob


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def test_without_keys_everybody_may_come_in_whatever_they_show(serve: Serve) -> None:
    async with serve(" a") as served:
        for headers in ({}, bearer("x"), {"authorization": "Basic eA=="}):
            answer = await served.http.post("/v1/completions", json={"prompt": "x", "user": "me"}, headers=headers)
            assert answer.status_code == 200
        assert {job.tenant for job in served.service.jobs} == {"me"}


async def test_the_tenant_is_the_keys_and_not_what_the_request_says(
    serve: Serve, secrets: tuple[KeyRing, str, str]
) -> None:
    keys, ann, bob = secrets
    async with serve(" a", keys=keys) as served:
        for secret in (ann, bob):
            for path, body in (
                ("/v1/completions", {"prompt": "x", "user": "bob"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ):
                assert (await served.http.post(path, json=body, headers=bearer(secret))).status_code == 200
        assert [job.tenant for job in served.service.jobs] == ["blue", "blue", "bob", "bob"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer kv-wrong"},
        {"authorization": "Basic a3YteA=="},
        {"authorization": "Bearer \u00e9".encode("latin-1")},
        {"x-api-key": "kv-wrong"},
    ],
)
async def test_others_get_401_in_openais_shape_everywhere(
    serve: Serve, secrets: tuple[KeyRing, str, str], headers: dict[str, str]
) -> None:
    async with serve(" a", keys=secrets[0]) as served:
        for method, path in [*(("GET", path) for path in PATHS), *(("POST", path) for path in POSTS)]:
            answer = await served.http.request(method, path, headers=headers)
            assert answer.status_code == 401, path
            error = answer.json()["error"]
            assert (error["code"], error["type"], error["param"]) == (
                "invalid_api_key",
                "invalid_request_error",
                None,
            )
            assert answer.headers["www-authenticate"].startswith("Bearer ")
        assert served.service.jobs == []


async def test_two_authorizations_are_none(serve: Serve, secrets: tuple[KeyRing, str, str]) -> None:
    keys, ann, _ = secrets
    async with serve(" a", keys=keys) as served:
        twice = [("authorization", f"Bearer {ann}"), ("authorization", "Bearer other")]
        assert (await served.http.get("/v1/models", headers=twice)).status_code == 401


async def test_probes_need_no_key(serve: Serve, secrets: tuple[KeyRing, str, str]) -> None:
    async with serve(" a", keys=secrets[0]) as served:
        for path in OPEN:
            assert (await served.http.get(path)).status_code == 200


async def test_every_other_path_opens_to_a_key(serve: Serve, secrets: tuple[KeyRing, str, str]) -> None:
    keys, ann, _ = secrets
    async with serve(" a", keys=keys) as served:
        for path in PATHS[:-1]:
            assert (await served.http.get(path, headers={"Authorization": f"bearer   {ann}"})).status_code == 200


async def test_openais_client_raises_its_authentication_error(
    serve: Serve, secrets: tuple[KeyRing, str, str]
) -> None:
    keys, ann, _ = secrets
    async with serve(" a", keys=keys) as served:
        with pytest.raises(openai.AuthenticationError, match="not one of this server's"):
            await served.openai().models.list()
        known = served.openai().with_options(api_key=ann)
        assert (await known.completions.create(model=MODEL, prompt="x")).choices[0].text == " a"


async def test_a_reload_holds_for_the_next_request_of_an_open_connection(serve: Serve, tmp_path: Path) -> None:
    old, old_key = make_key("one")
    new, new_key = make_key("one")
    file = tmp_path / "keys"
    file.write_text(old_key.line)
    keys = KeyRing(file)
    async with serve(" a", keys=keys) as served:
        assert (await served.http.get("/v1/models", headers=bearer(old))).status_code == 200
        file.write_text(new_key.line)
        keys.load(file)
        assert (await served.http.get("/v1/models", headers=bearer(old))).status_code == 401
        assert (await served.http.get("/v1/models", headers=bearer(new))).status_code == 200
        keys.load(None)
        assert (await served.http.get("/v1/models")).status_code == 200


async def test_a_refused_body_is_not_waited_for(serve: Serve, secrets: tuple[KeyRing, str, str]) -> None:
    async with serve(" a", keys=secrets[0]) as served:
        answer = await served.http.post("/v1/completions", content=b"x" * (9 << 20))
        assert answer.status_code == 401
        assert (await served.http.get("/health")).status_code == 200


async def test_no_key_is_ever_logged_and_refusals_are_counted(
    serve: Serve, secrets: tuple[KeyRing, str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    keys, ann, _ = secrets
    with structlog.testing.capture_logs() as lines:
        async with serve(" a", keys=keys) as served:
            await served.http.post("/v1/completions", json={"prompt": "x", "odd": 1}, headers=bearer(ann))
            await served.http.post("/v1/completions", content=b"{", headers=bearer(ann))
            await served.http.get("/v1/models", headers=bearer("kv-wrong-one"))
            assert served.observer.refusals == ["invalid_json", "invalid_api_key"]
    said = json.dumps(lines, default=str) + "".join(capfd.readouterr())
    assert ann not in said
    assert "kv-wrong-one" not in said


class TestBrowsers:
    """Cross-origin requests: none unless the operator names the origin."""

    PAGE = "https://chat.example.org"
    SETTINGS = HttpSettings(MODEL, cors_origins=(PAGE,))
    ASK = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }

    async def test_off_by_default(self, serve: Serve) -> None:
        async with serve(" a") as served:
            asked = await served.http.options("/v1/completions", headers=self.ASK)
            assert asked.status_code == 405
            answer = await served.http.get("/v1/models", headers={"origin": self.PAGE})
            assert not [name for name in [*asked.headers, *answer.headers] if name.startswith("access-control")]

    async def test_a_preflight_needs_no_key(self, serve: Serve, secrets: tuple[KeyRing, str, str]) -> None:
        async with serve(" a", keys=secrets[0], settings=self.SETTINGS) as served:
            asked = await served.http.options("/v1/completions", headers=self.ASK)
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == self.PAGE
            assert "authorization" in asked.headers["access-control-allow-headers"]

    async def test_the_page_may_read_answers_and_refusals(
        self, serve: Serve, secrets: tuple[KeyRing, str, str]
    ) -> None:
        keys, ann, _ = secrets
        async with serve(" a", keys=keys, settings=self.SETTINGS) as served:
            for headers, status in ((bearer(ann), 200), ({}, 401)):
                answer = await served.http.post(
                    "/v1/completions", json={"prompt": "x", "stream": True}, headers={"origin": self.PAGE, **headers}
                )
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] == self.PAGE
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
                assert "access-control-allow-credentials" not in answer.headers

    async def test_other_pages_are_not_told_anything(self, serve: Serve) -> None:
        async with serve(" a", settings=self.SETTINGS) as served:
            foreign = {**self.ASK, "origin": "https://evil.example"}
            asked = await served.http.options("/v1/completions", headers=foreign)
            answer = await served.http.get("/v1/models", headers=foreign)
            assert asked.status_code == 400
            for response in (asked, answer):
                assert "access-control-allow-origin" not in response.headers

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ({"origin": "https://evil.example"}, "origin https://evil.example is not allowed"),
            ({"access-control-request-method": "DELETE"}, "DELETE request from another origin is not allowed"),
        ],
    )
    async def test_a_refused_preflight_has_the_shape_of_all_errors(
        self, serve: Serve, asked: dict[str, str], said: str
    ) -> None:
        async with serve(" a", settings=self.SETTINGS) as served:
            answer = await served.http.options("/v1/completions", headers={**self.ASK, **asked})
            assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
            error = answer.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "cors_refused")
            assert said in error["message"]
            assert served.observer.refusals == ["cors_refused"]
            assert "Origin" in answer.headers["vary"], "a cache must not give it to another page"

    async def test_a_star_lets_all_pages_in(self, serve: Serve) -> None:
        async with serve(" a", settings=HttpSettings(MODEL, cors_origins=("*",))) as served:
            answer = await served.http.get("/v1/models", headers={"origin": "https://any.example"})
            assert answer.headers["access-control-allow-origin"] == "*"
