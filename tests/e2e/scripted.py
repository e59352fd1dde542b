"""Requests that get given tokens from a real daemon, and all that the API tells of them in each of its forms."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from typing import Any

import httpx
import pytest
from kvyard.front.text.gguf_tokenizer import convert, tokenizer_folder
from kvyard.front.text.tokenizer import Tokenizer

from tests.e2e.daemon import DaemonProcess, daemon
from tests.e2e.streams import MODEL
from tests.e2e.timing import limit
from tests.engine.tiny import LLAMA, random_tensors, write_folder
from tests.front.text.gguf_files import NORMAL, sentencepiece

Token = bytes | str | int
"""A token by its bytes, a special one by its name, one without text by its id."""
Outputs = Mapping[str, Sequence[Sequence[Token]]]
"""By the name of a request, the output of each of its choices."""

PADDING = 3
"""Rows of the models' embeddings for which there is no token."""
FLAGS = ("--dtype", "float32", "--kv-blocks", "256", "--max-running", "16")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('There is no system in this model.') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('User and assistant take turns.') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


def words_model(folder: Path, default_model: Path) -> Path:
    """Small random weights under the default model's own vocabulary, with two ends and a template that refuses."""
    source = tokenizer_folder(default_model)
    rows = Tokenizer.load(source).vocab_size + PADDING
    _weights(folder, rows, end=2)
    copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    config = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


def pieces_model(folder: Path) -> Path:
    """Small random weights under a SentencePiece vocabulary with a token for each byte, and no template."""
    fields = sentencepiece()
    fields["tokenizer.ggml.tokens"] += ["▁x"]
    fields["tokenizer.ggml.scores"] += [-100.0]
    fields["tokenizer.ggml.token_type"] += [NORMAL]
    _weights(folder, len(fields["tokenizer.ggml.tokens"]) + PADDING, end=2)
    for name, content in convert(fields, "pieces").items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _weights(folder: Path, rows: int, end: int) -> None:
    settings = LLAMA | {
        "vocab_size": rows,
        "eos_token_id": end,
        "num_hidden_layers": 1,
        "max_position_embeddings": 4096,
    }
    write_folder(folder, settings, random_tensors(settings, seed=3))


@dataclass(slots=True)
class Choice:
    """One choice as a client was told of it."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    spelt: list[str] = field(default_factory=list)
    """The text of each entry of the log-probabilities."""
    logprobs: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Of completions alone."""
    raw: list[bytes] = field(default_factory=list)
    """The bytes of each entry; of chats alone."""
    finishes: list[str] = field(default_factory=list)
    stop_reason: int | str | None = None
    chunks: list[tuple[str, list[int]]] = field(default_factory=list)
    """Text and tokens of each chunk of a stream."""

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What is the same in every form."""
        return self.text, self.tokens, self.spelt, self.finishes, self.stop_reason

    def add(self, part: dict[str, Any]) -> None:
        """A choice of an answer, or of a chunk of a stream."""
        assert not self.finishes, "nothing comes behind the end"
        message = part.get("message") or part.get("delta") or part
        text = message.get("content", message.get("text")) or ""
        self.text += text
        self.tokens += part.get("token_ids") or []
        self.chunks.append((text, part.get("token_ids") or []))
        if (told := part.get("logprobs")) is not None:
            self._add_logprobs(told)
        if part["finish_reason"] is not None:
            self.finishes.append(part["finish_reason"])
            self.stop_reason = part["stop_reason"]

    def _add_logprobs(self, told: dict[str, Any]) -> None:
        if "content" in told:
            self.spelt += [entry["token"] for entry in told["content"]]
            self.logprobs += [entry["logprob"] for entry in told["content"]]
            self.raw += [bytes(entry["bytes"]) for entry in told["content"]]
        else:
            self.spelt += told["tokens"]
            self.logprobs += told["token_logprobs"]
            self.offsets += told["text_offset"]


@dataclass(slots=True)
class Answer:
    """The answer to a request in one form."""

    choices: list[Choice]
    usage: dict[str, int]


class Scripted:
    """A daemon with its scripts."""

    def __init__(
        self,
        running: DaemonProcess,
        http: httpx.Client,
        tokenizer: Tokenizer,
        marks: Mapping[str, int],
        *,
        chat: bool,
    ) -> None:
        self.running = running
        self.http = http
        self.tokenizer = tokenizer
        self._marks = marks
        self._chat = chat

    def ask(self, name: str, **fields: Any) -> Choice:  # noqa: ANN401 - any JSON value
        """The only choice of a request."""
        (choice,) = self.ask_all(name, **fields)
        return choice

    def ask_all(self, name: str, **fields: Any) -> list[Choice]:  # noqa: ANN401 - any JSON value
        """The choices of a request, in all forms, which must agree; those of a streamed completion."""
        paths = ["/v1/chat/completions"] if self._chat and "echo" not in fields else []
        found: list[Choice] = []
        for path in (*paths, "/v1/completions"):
            whole, stream = self.whole(path, name, **fields), self.stream(path, name, **fields)
            for one, other in zip(whole.choices, stream.choices, strict=True):
                self._check(one, echo="echo" in fields)
                assert one.outcome == other.outcome
                assert (one.offsets, one.raw) == (other.offsets, other.raw)
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
            assert whole.usage == stream.usage
            assert whole.usage["completion_tokens"] == sum(len(choice.tokens) for choice in whole.choices)
            assert whole.usage["total_tokens"] == whole.usage["prompt_tokens"] + whole.usage["completion_tokens"]
            assert not found or [a.outcome for a in found] == [b.outcome for b in stream.choices]
            found = stream.choices
        return found

    def body(self, path: str, name: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
        """The request of that name."""
        mark = self._marks[name]
        word = self.tokenizer.token_text(mark)
        prompt: dict[str, Any] = {"prompt": f"Once{word}" if self._chat else [mark], "logprobs": 1}
        if "chat" in path:
            messages = [{"role": "user", "content": f"Say{word}"}]
            prompt = {"messages": messages, "logprobs": True, "top_logprobs": 1}
        shown = {"return_token_ids": True, "temperature": 0, "max_tokens": 200}
        return {"model": MODEL, **prompt, **shown, **fields}

    def whole(self, path: str, name: str, **fields: Any) -> Answer:  # noqa: ANN401 - any JSON value
        """The answer at once."""
        reply = self.http.post(path, json=self.body(path, name, **fields))
        assert reply.status_code == 200, reply.text
        answer = strict(reply.text)
        choices = [Choice() for _ in answer["choices"]]
        for choice, part in zip(choices, answer["choices"], strict=True):
            choice.add(part)
        return Answer(choices, answer["usage"])

    def stream(self, path: str, name: str, **fields: Any) -> Answer:  # noqa: ANN401 - any JSON value
        """The answer as a stream, of which every event is looked at."""
        asked = self.body(path, name, stream=True, stream_options={"include_usage": True}, **fields)
        choices = [Choice() for _ in range(fields.get("n", 1))]
        roles = 0
        reply = self.http.post(path, json=asked)
        assert reply.status_code == 200, reply.text
        *events, last = [event for event in reply.content.decode().split("\n\n") if event]
        assert last == "data: [DONE]"
        *parts, end = [strict(event.removeprefix("data: ")) for event in events]
        for part in parts:
            (given,) = part["choices"]
            if "role" in (given.get("delta") or {}):
                roles += 1
                assert given["delta"] == {"role": "assistant", "content": ""}
            choices[given["index"]].add(given)
        assert roles == (len(choices) if "chat" in path else 0)
        assert end["choices"] == []
        return Answer(choices, end["usage"])

    def _check(self, choice: Choice, *, echo: bool) -> None:
        """Whatever was asked: one end, an entry for each token, offsets where the tokens' text is."""
        spell = self.tokenizer.token_text
        assert len(choice.finishes) == 1
        assert choice.spelt[-len(choice.tokens) :] == [spell(token) for token in choice.tokens]
        assert echo or len(choice.spelt) == len(choice.tokens)
        assert all(value is not None and value <= 0 for value in choice.logprobs[1 if echo else 0 :])
        assert not choice.raw or choice.raw == [self.tokenizer.token_bytes(token) for token in choice.tokens]
        assert choice.offsets == sorted(choice.offsets)
        for at, text in zip(choice.offsets, choice.spelt, strict=False):
            shown = choice.text[at : at + len(text)]
            assert shown == text[: len(shown)] or "\ufffd" in text or text.startswith("<|")


def strict(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Parsed JSON, without the constants that are none."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@contextlib.contextmanager
def scripted(
    folder: Path, outputs: Outputs, *, chat: bool, kills: tuple[str, int] | None = None
) -> Iterator[Scripted]:
    """A daemon with the model in `folder` whose named requests get these outputs.

    `kills` names a request that kills the engine, the first time that so many of its tokens have been computed.
    """
    tokenizer = Tokenizer.load(folder)
    ids = {tokenizer.token_bytes(at): at for at in range(tokenizer.vocab_size) if at not in tokenizer.special_ids}
    marks = dict(zip(outputs, _words(tokenizer) if chat else range(*_CONTROLS), strict=False))
    assert len(marks) == len(outputs)

    def spell(token: Token) -> int | None:
        if isinstance(token, int):
            return token
        return ids[token] if isinstance(token, bytes) else tokenizer.token_id(token)

    scripts = [
        {"token": marks[name], "index": index, "tokens": [spell(token) for token in output]}
        for name, outputs_of in outputs.items()
        for index, output in enumerate(outputs_of)
    ]
    env = {"KVYARD_TEST_SCRIPT": json.dumps(scripts)}
    if kills is not None:
        name, computed = kills
        fault = {"point": "sample", "action": "kill", "token": marks[name], "computed": computed}
        env["KVYARD_TEST_FAULTS"] = json.dumps([{**fault, "once": str(folder / "killed")}])
    with (
        daemon(*FLAGS, model=folder, env=env) as running,
        httpx.Client(base_url=running.base, timeout=limit(60), verify=False) as http,
    ):
        yield Scripted(running, http, tokenizer, marks, chat=chat)


_CONTROLS = (3 + 1, 3 + 31)
"""Ids of the SentencePiece vocabulary's first bytes, behind three special tokens."""


def _words(tokenizer: Tokenizer) -> Iterator[int]:
    """Rare words that are one token wherever they stand behind another word."""
    for token in range(40_000, 49_000):
        text = tokenizer.token_text(token)
        if text[0] == " " and text[1:].isalpha() and text.isascii() and tokenizer.encode(text) == [token]:
            yield token
