"""How tones look. The kvyard themes keep blue against orange, which colour-blind people tell apart too;
every meaning also has a shape, so that NO_COLOR loses nothing.
"""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="kvyard-dark",
    primary="#5fa8d3",
    secondary="#7f8ea3",
    accent="#8ecae6",
    success="#56b4e9",
    warning="#e69f00",
    error="#ff6b4a",
    foreground="#d8dee9",
    background="#11151c",
    surface="#161b24",
    panel="#1d2430",
    dark=True,
)
LIGHT = Theme(
    name="kvyard-light",
    primary="#0072b2",
    secondary="#5b6675",
    accent="#00629b",
    success="#0072b2",
    warning="#a35f00",
    error="#b5310f",
    foreground="#1c2430",
    background="#fafafa",
    surface="#f0f2f5",
    panel="#e4e8ee",
    dark=False,
)

TONE_CSS = """
.tone--dim { color: $foreground 60%; }
.tone--strong { color: $foreground; text-style: bold; }
.tone--title { color: $primary; text-style: bold; }
.tone--rule { color: $foreground 25%; }
.tone--good { color: $success; }
.tone--warn { color: $warning; }
.tone--bad { color: $error; text-style: bold; }
.tone--accent { color: $accent; }
.tone--used { color: $primary; }
.tone--cached { color: $secondary; }
.tone--free { color: $foreground 30%; }
.tone--alarm { color: $background; background: $warning; text-style: bold; }
.tone--cursor { background: $primary 30%; text-style: bold; }
"""
