"""Text that came from outside, made safe for a terminal and measured in its cells.

Names, reasons and error texts come from clients and plugins. They may carry escape sequences, signs of
two cells, marks of none, and emoji joined in ways that terminals draw differently. What leaves here has
no control sequence and one cell width that every terminal agrees on.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from rich.cells import cell_len, set_cell_size

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_MARKS = 2
"""Combining marks kept on one base; more only overprint the neighbouring lines."""

# Whole sequences go first: without them the printable rest of `ESC [ 31 m` would stay on screen.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_PLAIN = re.compile(r"[ -~]*\Z")


@lru_cache(maxsize=4096)
def clean(text: str, limit: int = 4096) -> str:
    """One line without control sequences, joiners and other signs whose width is not agreed on."""
    if _PLAIN.match(text) and len(text) <= limit:
        return text
    text = unicodedata.normalize("NFC", _ESCAPES.sub("", text[:limit]))
    out: list[str] = []
    marks = 0
    for sign in text:
        safe = _safe(sign)
        is_mark = bool(safe) and cell_len(safe) == 0
        marks = marks + 1 if is_mark else 0
        if is_mark and (marks > MAX_MARKS or not out):
            continue
        out.append(safe)
    return "".join(out)


def _safe(sign: str) -> str:
    """The sign itself, a stand-in of the same meaning, or nothing."""
    code = ord(sign)
    if 0x1F1E6 <= code <= 0x1F1FF:  # a pair of these is a flag of two cells in some terminals, of four in others
        return chr(ord("A") + code - 0x1F1E6)
    if 0x1F3FB <= code <= 0x1F3FF or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF:
        return ""
    category = unicodedata.category(sign)
    if sign in "\t\n\r\v\f" or category in ("Zl", "Zp", "Zs"):
        return " "
    if category in ("Cc", "Cf"):  # Cf holds the joiners and the direction marks
        return ""
    if category in ("Cs", "Co", "Cn"):
        return REPLACEMENT
    return sign


@lru_cache(maxsize=4096)
def to_ascii(text: str) -> str:
    """The text in as many cells for a terminal that has ASCII alone; what has no likeness is a question mark."""
    if text.isascii():
        return text
    return "".join(_likeness(sign) for sign in text)


def _likeness(sign: str) -> str:
    width = cell_len(sign)
    plain = {"…": "~", "µ": "u"}.get(sign) or unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
    return plain if len(plain) == width else "?" * width


def cells(text: str) -> int:
    """Cells that the text takes on screen."""
    return cell_len(text)


def fit(text: str, width: int, *, right: bool = False, more: str = "…") -> str:
    """The text in exactly `width` cells: padded, or cut with a sign that something is missing."""
    if width <= 0:
        return ""
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + more if width > 1 else more
    return " " * (width - size) + text if right else text + " " * (width - size)


def wrap(text: str, width: int, most: int) -> list[str]:
    """The text broken at spaces into at most `most` lines of at most `width` cells; the last may be cut."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if cell_len(joined) <= width or not line or len(lines) == most - 1:
            line = joined
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return [fit(one, width).rstrip() if cell_len(one) > width else one for one in lines[:most]]
