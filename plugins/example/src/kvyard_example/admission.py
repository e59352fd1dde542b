"""Admission: who comes in, in which order."""

from kvyard.policy import Admission, AdmissionPolicy, OrderKey, PolicyParams, RequestView, Snapshot, live


class ShortestFirst(AdmissionPolicy):
    """The shortest prompt first, but nobody waits for ever: a second of waiting is worth `patience` tokens."""

    api = (1, 0)
    version = "1.0.0"

    class Params(PolicyParams):
        """Changed while running with `kvyard policy set admission patience=...`."""

        patience: float = live(
            50.0, ge=0, unit="tokens per second", doc="What waiting is worth; 0 lets long ones starve."
        )

    params: Params

    def key(self, r: RequestView) -> OrderKey:  # type: ignore[override]  # a method is a callable too
        """Evaluated on arrival only: adding the time of arrival is the same as subtracting the age, for all."""
        return (r.prompt_len + self.params.patience * r.arrived,)

    def admit(self, s: Snapshot) -> Admission:
        """In that order; up to four that do not fit may be passed over."""
        return Admission(s.waiting, skip=4)
