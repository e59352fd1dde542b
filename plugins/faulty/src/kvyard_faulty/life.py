"""Fails on the way in, or when it is asked for its state."""

from collections.abc import Sequence

from kvyard.policy import Admission, AdmissionPolicy, PolicyState, RequestView, Snapshot


class FailsInConstruction(AdmissionPolicy):
    """Fails when it is made."""

    api = (1, 0)

    def __init__(self) -> None:
        raise OSError("no such table")


class FailsInAdopt(AdmissionPolicy):
    """Fails when it is shown the live requests."""

    api = (1, 0)

    def adopt(self, views: Sequence[RequestView]) -> None:
        raise KeyError(views[0].id)


class FailsInExport(AdmissionPolicy):
    """Fails when it is asked for its state."""

    api = (1, 0)

    def admit(self, s: Snapshot) -> Admission:
        return Admission(s.waiting)

    def export_state(self) -> PolicyState | None:
        raise RuntimeError("nothing to tell")
