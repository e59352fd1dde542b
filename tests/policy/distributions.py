"""Makes distributions for the registry's tests: real dist-info folders and real modules in a folder."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent


def install(
    root: Path,
    distribution: str,
    entry_points: str | bytes,
    *,
    version: str = "1.0",
    modules: dict[str, str] | None = None,
    metadata: bool = True,
) -> None:
    """Put a distribution with these entry points and modules into `root`."""
    info = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    raw = entry_points if isinstance(entry_points, bytes) else dedent(entry_points).encode()
    (info / "entry_points.txt").write_bytes(raw)
    if metadata:
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n\nText: no\n"
        )
    for name, source in (modules or {}).items():
        file = root / Path(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(source))
