"""Writes the tables of docs/*.md from the code: `python docs/tables.py` (a test compares)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from kvyard.cli.app import build
from kvyard.cli.commands import usage_word
from kvyard.cli.errors import STATUSES
from kvyard.control.schema import METHODS
from kvyard.front.events import FIELDS, KINDS
from kvyard.front.metrics import Metrics
from kvyard.front.settings import PREFIX, Settings
from kvyard.policy.base import Kind
from kvyard.policy.faults import CODES
from kvyard.policy.registry import list_policies, load, load_discipline

DOCS = Path(__file__).parent
LIST = "<!-- table: {name} -->"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def methods() -> str:
    rows = [
        [
            f"`{method.name}`",
            method.role,
            "; ".join(f"`{name}`: {text}" for name, text in method.params.items()) or "none",
            method.result,
            method.doc,
        ]
        for method in METHODS
    ]
    return _table(["method", "role", "parameters", "result", "what it does"], rows)


def settings() -> str:
    rows = []
    for row in Settings().describe():
        default = "auto" if row["value"] is None or row["name"] == "socket" else row["value"]
        text = str(default).lower() if isinstance(default, bool) else str(default)
        name = row["name"]
        flag = f"--{name.replace('_', '-')}"
        rows.append([f"`{name}`", f"`{flag}`", f"`{PREFIX}{name.upper()}`", text, row["change"], row["doc"]])
    return _table(["setting", "flag", "variable", "default", "change", "what it is"], rows)


def series() -> str:
    rows = []
    for metric in Metrics("m").registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels: dict[str, dict[str, None]] = {}
        for sample in metric.samples:
            for label, value in sample.labels.items():
                if label not in ("model_name", "le", "engine"):
                    labels.setdefault(label, {})[value] = None
        words = []
        for label, values in labels.items():
            info = metric.name.endswith("_info")
            words.append(f"`{label}`" if info else f"`{label}`: {', '.join(values)}")
        rows.append([f"`{name}`", metric.type, "; ".join(words), metric.documentation])
    return _table(["series", "type", "labels", "what it counts"], rows)


def event_kinds() -> str:
    rows = [[f"`{kind}`", text, ", ".join(f"`{name}`" for name in FIELDS[kind])] for kind, text in KINDS.items()]
    return _table(["kind", "meaning", "may have"], rows)


def statuses() -> str:
    return _table(["status", "meaning"], [[str(status), text] for status, text in STATUSES.items()])


def commands() -> str:
    """Every command with its flags, from the parser itself."""
    import typer

    root = typer.main.get_command(build())
    rows: list[list[str]] = []
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        for path, leaf in _leaves(name, command):
            flags = [max(p.opts, key=len) for p in leaf.params if p.param_type_name == "option" and p.name != "help"]
            words = [usage_word(p) for p in leaf.params if p.param_type_name == "argument"]
            if path == "serve":
                flags = ["--config", "a flag per setting (configuration.md)"]
            doc = (leaf.help or "").strip().partition("\n\n")[0]
            rows.append(
                [
                    f"`kvyard {' '.join([path, *words])}`",
                    doc,
                    ", ".join(f"`{f}`" if f[0] == "-" else f for f in flags),
                ]
            )
    return _table(["command", "what it does", "flags"], rows)


def _leaves(name: str, command: object) -> list[tuple[str, object]]:
    children = getattr(command, "commands", None)
    if not children:
        return [(name, command)]
    return [leaf for key, child in children.items() for leaf in _leaves(f"{name} {key}", child)]


def exit_codes() -> str:
    return _table(["code", "meaning"], [[f"`{code}`", text] for code, text in CODES.items()])


def policies() -> str:
    rows = [
        [item.kind, f"`{item.name}`", item.doc.partition("\n\n")[0]]
        for item in list_policies().policies
        if item.distribution == "kvyard" and item.kind != "discipline"
    ]
    return _table(["kind", "name", "what it does"], rows)


def disciplines() -> str:
    rows = []
    for item in list_policies().policies:
        if item.distribution == "kvyard" and item.kind == "discipline":
            bundle = load_discipline(item.name)
            parts = [f"{kind} `{name}`{_values(params)}" for kind, (name, params) in bundle.parts.items()]
            rows.append([f"`{item.name}`", bundle.doc.partition("\n\n")[0], "; ".join(parts)])
    return _table(["discipline", "what it is", "its parts"], rows)


def _values(params: Mapping[str, object]) -> str:
    return f" ({', '.join(f'{name}={_value(value)}' for name, value in params.items())})" if params else ""


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parameters() -> str:
    rows = []
    for item in list_policies().policies:
        if item.distribution != "kvyard" or item.kind == "discipline":
            continue
        for row in load(cast("Kind", item.kind), item.name).policy.params.describe():
            boolean = isinstance(row["default"], bool)
            choices = ["true", "false"] if boolean else row["choices"]
            bounds = ", ".join(map(str, choices)) if choices else _range(row["ge"], row["le"])
            unit = f"{row['unit']}. " if row["unit"] else ""
            rows.append(
                [
                    f"{item.kind} `{item.name}`",
                    f"`{row['name']}`",
                    _value(row["default"]),
                    bounds,
                    row["change"],
                    unit + row["doc"],
                ]
            )
    return _table(["policy", "parameter", "default", "values", "change", "what it is"], rows)


def _range(low: object, high: object) -> str:
    return " ".join(f"{word} {bound}" for word, bound in (("from", low), ("to", high)) if bound is not None)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "control.md": {"methods": methods, "events": event_kinds},
    "configuration.md": {"settings": settings},
    "metrics.md": {"series": series},
    "policies.md": {"disciplines": disciplines, "policies": policies, "parameters": parameters, "codes": exit_codes},
    "cli.md": {"commands": commands, "statuses": statuses},
}


def rendered(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """The page with every table between its two marks made anew."""
    for name, make in tables.items():
        mark = LIST.format(name=name)
        before, found, rest = text.partition(mark + "\n")
        if not found:
            raise ValueError(f"no mark {mark}")
        _, _, after = rest.partition("<!-- end -->")
        text = f"{before}{mark}\n{make()}\n<!-- end -->{after}"
    return text


def main() -> None:
    for page, tables in TABLES.items():
        path = DOCS / page
        path.write_text(rendered(path.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
