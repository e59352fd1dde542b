"""Answers of `policy show` as text: parameters as a table, whatever else there is as indented lines."""

from __future__ import annotations

from typing import Any

from kvyard.cli.output import clean, table


def shown_lines(shown: dict[str, Any]) -> list[str]:
    """One policy, or all that are in charge under `policies`."""
    if "policies" not in shown:
        if "parts" in shown:
            return discipline_lines(shown)
        return part_lines(shown) if "params" in shown else outline(shown)
    lines: list[str] = []
    for part in shown["policies"]:
        lines += [*part_lines(part), ""]
    return lines + outline({name: value for name, value in shown.items() if name != "policies"})


def discipline_lines(shown: dict[str, Any]) -> list[str]:
    """A discipline and its parts."""
    lines = [f"discipline {clean(str(shown.get('name', '')))}  ({clean(str(shown.get('distribution', '?')))})"]
    lines += _in_charge(shown)
    lines += [f"  {clean(line.strip())}" for line in str(shown.get("doc", "")).splitlines() if line.strip()]
    for kind, part in shown["parts"].items():
        lines += ["", f"  {clean(kind)} {clean(str(part['name']))}", *_part_parameters(part)]
    return lines


def _part_parameters(part: dict[str, Any]) -> list[str]:
    """Those that the policy declares; of one that cannot be loaded, what the discipline sets, and why."""
    if not part.get("problem"):
        return _parameters(part["parameters"], "    ") or ["    no parameters"]
    given = [f"    {clean(name)}={scalar(value)}" for name, value in part["params"].items()]
    return [*given, f"    ! {clean(str(part['problem']))}"]


def part_lines(part: dict[str, Any]) -> list[str]:
    """A policy and its parameters."""
    known = {"kind", "name", "version", "distribution", "api", "doc", "params", "installed", "in_charge"}
    head = f"{part.get('kind', '')} {part.get('name', '')} {part.get('version', '')}"
    lines = [f"{clean(head)}  ({clean(str(part.get('distribution', '?')))}, API {clean(str(part.get('api', '?')))})"]
    lines += _in_charge(part)
    lines += [f"  {clean(line.strip())}" for line in str(part.get("doc", "")).splitlines() if line.strip()]
    params = part.get("params") or []
    if isinstance(params, list):
        lines += _parameters(params, "  ")
    rest = {name: value for name, value in part.items() if name not in known}
    return lines + ["  " + line for line in outline(rest)]


def _in_charge(shown: dict[str, Any]) -> list[str]:
    word = {True: "in charge", False: "not in charge"}.get(shown.get("in_charge", ""))
    return [f"  {word}"] if word else []


def _parameters(params: list[dict[str, Any]], pad: str) -> list[str]:
    head = ("PARAMETER", "VALUE", "DEFAULT", "ACCEPTS", "CHANGE", "WHAT IT IS")
    return [pad + line for line in table(head, [_param_row(param) for param in params])] if params else []


def _param_row(param: dict[str, Any]) -> tuple[str, ...]:
    doc = " ".join(
        text for text in (str(param.get("doc") or ""), f"({param['unit']})" if param.get("unit") else "") if text
    )
    return (
        str(param.get("name", "")), scalar(param.get("value")), scalar(param.get("default")), _accepts(param),
        str(param.get("change", "")), doc,
    )  # fmt: skip


def _accepts(param: dict[str, Any]) -> str:
    if param.get("choices"):
        return " | ".join(map(str, param["choices"]))
    low, high = param.get("ge"), param.get("le")
    if low is None and high is None:
        return str(param.get("type", ""))
    return f"{'' if low is None else f'{low:g}'}..{'' if high is None else f'{high:g}'}"


def outline(value: object, depth: int = 0) -> list[str]:
    """Nested objects as indented `name: value` lines."""
    pad = "  " * depth
    lines: list[str] = []
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, dict | list) and item:
                lines += [f"{pad}{clean(str(name))}:", *outline(item, depth + 1)]
            else:
                lines.append(f"{pad}{clean(str(name))}: {scalar(item)}")
    elif isinstance(value, list):
        for item in value:
            inner = outline(item, depth + 1)
            lines += [f"{pad}- {inner[0].strip() if inner else ''}", *inner[1:]]
    else:
        lines.append(f"{pad}{scalar(value)}")
    return lines


def scalar(value: object) -> str:
    """A plain value; `-` for nothing."""
    if value is None or value in ([], {}):
        return "-"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else clean(str(value))
