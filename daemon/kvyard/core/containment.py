"""What a policy may not do to the process it runs in, as the guard sees it: one object to switch and to ask.

The engine brings a real one (`kvyard.engine.containment`); where nothing but the policy's own decisions is
at stake, as in the simulator, there is none.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Breach(NamedTuple):
    """What a policy did beyond deciding. `code`: `spawned`, `forbidden`, `memory` or `tampered`."""

    code: str
    what: str
    """Continues "the policy ..."."""
    origin: tuple[dict[str, Any], ...] = ()
    """Global names of the functions that did it, innermost first, where that is known."""


class Containment(Protocol):
    """Watches the process while a policy runs in it."""

    active: bool
    """A policy runs at this moment; set by the guard around each call, so it must be a plain attribute."""
    noticed: Breach | None
    """Something forbidden was tried and refused since the last `breach`."""

    def look(self) -> None:
        """Calls begin of which `breach` will tell what they changed."""

    def open(self) -> None:
        """Policy calls begin: limit what they may take. Includes `look`."""

    def close(self) -> None:
        """Policy calls are over: lift the limit."""

    def breach(self, thorough: bool) -> Breach | None:
        """What the call that just ended did to the process, put right again; not `thorough`: the cheap part."""

    def out_of_memory(self) -> Breach | None:
        """A call ended for want of memory: whether it took more than a policy may have.

        What follows has room again, whatever it kept.
        """


class NoContainment:
    """Watches nothing."""

    active = False
    noticed: Breach | None = None

    def look(self) -> None:
        """Do nothing."""

    def open(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def breach(self, thorough: bool) -> Breach | None:
        """Nothing is ever noticed."""
        return None

    def out_of_memory(self) -> Breach | None:
        """Nothing is limited."""
        return None
