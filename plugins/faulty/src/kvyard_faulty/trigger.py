"""Failing in the middle of a load, not at its beginning."""

from kvyard.policy import Admission, AdmissionPolicy, PolicyParams, Snapshot, live


class Moment(PolicyParams):
    """When the fault happens."""

    running: int = live(8, ge=0, doc="Sequences that run at least.")
    waiting: int = live(12, ge=0, doc="Sequences that wait at least.")


class FaultyAdmission(AdmissionPolicy):
    """First come, first served, until the moment; then `fault` decides."""

    api = (1, 0)
    evicts = True  # so that it is asked although all places are taken

    class Params(Moment):
        """When the fault happens."""

    params: Params

    def admit(self, s: Snapshot) -> Admission:
        if len(s.running) < self.params.running or len(s.waiting) < self.params.waiting:
            return Admission(s.waiting)
        return self.fault(s)

    def fault(self, s: Snapshot) -> Admission:
        """What goes wrong; the answer where that alone is not the end of it."""
        raise NotImplementedError
