"""Settings of the daemon: TOML files, KVYARD_... variables and flags, in rising priority.

Every field has a sentence of documentation, says whether it is live or needs a restart, and each value
knows where it came from (`kvyard config show --origin`). The object is frozen: a reload makes a new one,
so no reader ever sees half a change.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from kvyard.control.paths import config_files, default_socket
from kvyard.control.regular_file import read_text

Change = Literal["live", "restart"]
PREFIX = "KVYARD_"
OTHER_VARIABLES = {"KVYARD_CONFIG", "KVYARD_CACHE_DIR", "KVYARD_TRACEBACK"}
"""Variables with the prefix that are no settings; those of tests begin with KVYARD_TEST_."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
SOCKET_PATH_LIMIT = 107
"""Bytes of a Unix socket's path on Linux, without the final NUL."""


class SettingsError(Exception):
    """One or more values were refused; each line names the setting, the value, its origin and the reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _setting(default: object, doc: str, change: Change = "restart", **limits: Any) -> Any:  # noqa: ANN401 - as Field
    return Field(default=default, description=doc, json_schema_extra={"change": change}, **limits)


def _or_none(value: object) -> object:
    # TOML has no null, and a variable is always text: `auto` says "as if it were not set" in both.
    return None if isinstance(value, str) and value.strip().lower() in ("auto", "none", "") else value


def _expanded(value: object) -> object:
    return Path(value).expanduser() if isinstance(value, str | Path) else value


def _joined(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _origins(value: str) -> str:
    """Origins as browsers send them, so that a comparison of texts is enough."""
    origins = [origin.strip() for origin in value.split(",") if origin.strip()]
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin!r} is no origin; one looks like https://chat.example.org or http://localhost:3000"
            )
    return ",".join(origins)


Count = Annotated[int, Field(ge=1)]
OptionalCount = Annotated[Count | None, BeforeValidator(_or_none)]
OptionalText = Annotated[str | None, BeforeValidator(_or_none)]
UserPath = Annotated[Path, BeforeValidator(_expanded)]
OptionalPath = Annotated[Path | None, BeforeValidator(_expanded), BeforeValidator(_or_none)]
Origins = Annotated[str, BeforeValidator(_joined), AfterValidator(_origins)]


class Settings(BaseSettings):
    """What one daemon runs with. Make it with `load_settings`; keywords alone are for tests."""

    model_config = SettingsConfigDict(
        frozen=True, env_prefix=PREFIX, extra="forbid", env_ignore_empty=True, allow_inf_nan=False
    )

    model: str = _setting("smollm2-135m", "Model to serve: a name of `kvyard model list`, a GGUF file or a folder.")
    served_model_name: OptionalText = _setting(
        None, "Id that clients use for the model; by default the model's name or its file's."
    )
    model_dir: OptionalPath = _setting(
        None, "Folder of pulled models; by default $XDG_DATA_HOME/kvyard/models (~/.local/share/kvyard/models)."
    )
    host: str = _setting("127.0.0.1", "Address that the HTTP API listens on.", min_length=1)
    port: int = _setting(8000, "TCP port of the HTTP API; 0 takes a free one.", ge=0, le=65535)
    api_key_file: OptionalPath = _setting(
        None, "File of API keys, one hash a line (`kvyard key new`); without one everybody may use the API.", "live"
    )
    cors_origins: Origins = _setting(
        "", "Origins, separated by commas, whose pages may call the API from a browser; * is all, empty is none."
    )
    client_buffer_kib: int = _setting(
        4096, "A client that is more than this behind its stream is cut off, in KiB.", ge=64, le=1 << 20
    )
    socket: UserPath = Field(
        default_factory=default_socket,
        description="Control socket; by default $XDG_RUNTIME_DIR/kvyard/kvyard.sock, for root "
        "/run/kvyard/kvyard.sock, else /tmp/kvyard-UID/kvyard.sock.",
        json_schema_extra={"change": "restart"},
    )
    operator_group: OptionalText = _setting(
        None, "Unix group that may open the control socket as operator; others of the socket's group only view."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "Type of activations and KV: auto takes what suits the device and the model."
    )
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "Device; auto takes the GPU where there is one.")
    deterministic: bool = _setting(
        False, "The tokens of a request are those of its solo run, bit for bit in the logits; slower."
    )
    kv_blocks: OptionalCount = _setting(None, "Blocks of the KV pool; auto sizes it from free memory.")
    block_size: int = _setting(16, "Tokens per KV block.", ge=1, le=1024)
    max_running: Count = _setting(
        256,
        "Most sequences that run at once. Live up to its value at the start; after lowering it what runs goes on, "
        "and nobody comes in until fewer run.",
        "live",
    )
    max_step_tokens: Count = _setting(512, "Token budget of a step, decodes and prompt chunks together.")
    max_model_len: Annotated[Annotated[int, Field(ge=2)] | None, BeforeValidator(_or_none)] = _setting(
        None, "Most tokens of a sequence, prompt and output; auto takes the model's own limit."
    )
    max_waiting: Count = _setting(2048, "Sequences that may wait; more are refused with 429.", "live")
    max_waiting_tokens: Count = _setting(4_000_000, "Prompt tokens that may wait; more are refused with 429.", "live")
    prefix_cache: bool = _setting(False, "Reuse the KV of prompts that begin alike.")
    prefix_cache_isolation: Literal["none", "tenant"] = _setting(
        "tenant",
        "Who shares prefixes: the requests of one tenant, or (none) all. A request's cache_salt separates in both.",
    )
    swap_blocks: int = _setting(0, "Blocks of the host pool for preemption by swap; 0 is always recompute.", ge=0)
    discipline: str = _setting("kvyard", "Discipline in charge at the start; see `kvyard policy list`.", min_length=1)
    step_timeout_s: float = _setting(
        120.0, "Seconds that one step may take before the engine counts as hanging and is replaced.", ge=1, le=86400
    )
    drain_timeout_s: float = _setting(
        30.0, "Seconds that running requests get to finish after SIGTERM or `kvyard drain`.", "live", ge=0, le=86400
    )
    retention_s: float = _setting(600.0, "Seconds of step records that are kept.", ge=1, le=86400)
    retention_mib: int = _setting(64, "Most memory of the kept step records, in MiB.", ge=1, le=65536)
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Least level that is logged.", "live")
    log_format: Literal["auto", "text", "json"] = _setting(
        "auto", "Form of the log on standard error; auto is text on a terminal and JSON elsewhere."
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("socket")
    @classmethod
    def _fits(cls, path: Path) -> Path:
        if len(str(path).encode()) > SOCKET_PATH_LIMIT:
            raise ValueError(f"a socket's path has at most {SOCKET_PATH_LIMIT} bytes")
        return path

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keywords alone: `load_settings` evaluates the other sources one by one, to know the origins."""
        return (init_settings,)

    def origin(self, name: str) -> str:
        """Where a value came from: `default`, `file PATH`, `environment KVYARD_...` or `flag --...`."""
        return self._origins.get(name, "default")

    def describe(self) -> list[dict[str, Any]]:
        """One dictionary per setting, of JSON values: name, value, default, origin, change, doc."""
        return [
            {
                "name": name,
                "value": _plain(getattr(self, name)),
                "default": _plain(info.get_default(call_default_factory=True, validated_data={})),
                "origin": self.origin(name),
                "change": change_of(info),
                "doc": info.description or "",
            }
            for name, info in type(self).model_fields.items()
        ]


def change_of(info: FieldInfo) -> Change:
    """Whether a setting is live (a reload is enough) or needs a restart."""
    return cast(Change, cast("dict[str, Any]", info.json_schema_extra)["change"])


@dataclass(frozen=True, slots=True)
class Difference:
    """Names of settings that differ between two objects, by what a change needs."""

    live: list[str]
    restart: list[str]


def compare(old: Settings, new: Settings) -> Difference:
    """What a reload would change at once, and what stays as it is until a restart."""
    changed = [name for name in Settings.model_fields if getattr(old, name) != getattr(new, name)]
    live = [name for name in changed if change_of(Settings.model_fields[name]) == "live"]
    return Difference(live, [name for name in changed if name not in live])


def load_settings(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Settings from files, environment and flags (by setting name; None is not given).

    `config` replaces the default files. Raises SettingsError with every problem found.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    for path in config_files(config):
        for name, value in _read_file(path, problems).items():
            values[name], origins[name] = value, f"file {path}"
    for name, value in EnvSettingsSource(Settings)().items():
        values[name], origins[name] = value, f"environment {PREFIX}{name.upper()}"
    for name, value in (flags or {}).items():
        if value is not None:
            values[name], origins[name] = value, f"flag --{name.replace('_', '-')}"
    return _build(values, origins, problems)


def check_file(path: Path) -> list[str]:
    """Problems of one TOML file by itself; empty when it is good."""
    problems: list[str] = []
    values = _read_file(path, problems)
    try:
        _build(values, dict.fromkeys(values, f"file {path}"), problems)
    except SettingsError as error:
        return error.problems
    return []


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Names that begin with KVYARD_ and are no setting, most likely typing errors."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | OTHER_VARIABLES
    return sorted(
        name
        for name in environ
        if name.startswith(PREFIX) and name not in known and not name.startswith(f"{PREFIX}TEST_")
    )


def check_variables(environ: Mapping[str, str]) -> list[str]:
    """A problem for each of `unknown_variables`."""
    known = sorted({PREFIX + name.upper() for name in Settings.model_fields} | OTHER_VARIABLES)
    return [
        f"{name} (environment): there is no such setting{_guess(name, known)}" for name in unknown_variables(environ)
    ]


def _build(values: dict[str, Any], origins: dict[str, str], problems: list[str]) -> Settings:
    try:
        settings = Settings(**values)
    except ValidationError as error:
        problems += [_explain(dict(item), values, origins) for item in error.errors()]
    if problems:
        raise SettingsError(problems)
    settings._origins.update(origins)
    return settings


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(read_text(path))
    except OSError as error:
        problems.append(f"cannot read the configuration {path}: {error.strerror or error}")
        return {}
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        problems.append(f"the configuration {path} is not valid TOML: {error}")
        return {}
    for name in [name for name in values if name not in Settings.model_fields]:
        del values[name]
        guess = _guess(name.replace("-", "_").lower(), Settings.model_fields)
        problems.append(f"{name} (file {path}): there is no such setting{guess}")
    return values


def _guess(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "; `kvyard config show` lists them all"


def _explain(item: dict[str, Any], values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    name = str(item["loc"][0]) if item["loc"] else "settings"
    reason = str(item["msg"]).removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    return f"{name} = {values.get(name)!r} ({origins.get(name, 'default')}): {reason}"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
