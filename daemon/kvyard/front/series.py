"""Counters, gauges and histograms that are cheap to update and to render.

`prometheus_client` renders its own metric objects at about 5 us per sample, which for this daemon would be
4 ms of the event loop at every scrape. Here a sample's text up to the value is made once, so that a scrape
costs about as much as formatting the numbers. A `Series` is an ordinary collector, so a `CollectorRegistry`
of `prometheus_client` takes it as well (the tests compare both texts).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import Metric
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[tuple[str, str], ...]


class Value:
    """A counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Count; what is not positive is left out, because a counter never goes back."""
        if amount > 0:
            self.value += amount


class Histogram:
    """Counts per bucket and the sum; bounds are upper bounds, inclusive."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` as often as `count`; a negative one (clocks that disagree) counts as zero."""
        if not value > 0:
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


@dataclass(slots=True)
class Family:
    """All series of one name. Two families may share cells: an alias under a name that others read."""

    name: str
    kind: Kind
    doc: str
    cells: list[tuple[Labels, Value | Histogram]]
    _lines: list[tuple[list[str], Value | Histogram]] = field(default_factory=list)
    _header: str = ""

    def relabel(self, cells: list[tuple[Labels, Value | Histogram]]) -> None:
        """Replace the cells (an info series whose labels are its content)."""
        self.cells = cells
        self._lines = []

    def render(self) -> Iterator[str]:
        """Lines of the text format, each ending in a newline."""
        if not self._lines:
            self._prepare()
        yield self._header
        for prefixes, cell in self._lines:
            if isinstance(cell, Value):
                yield f"{prefixes[0]}{cell.value}\n"
            else:
                yield from _histogram_lines(prefixes, cell)

    def metric(self) -> Metric:
        """The family as prometheus_client's own type."""
        name = self.name.removesuffix("_total") if self.kind == "counter" else self.name
        metric = Metric(name, self.doc, self.kind)
        for labels, cell in self.cells:
            pairs = dict(labels)
            if isinstance(cell, Value):
                metric.add_sample(self.name, pairs, cell.value)
                continue
            total = 0
            for bound, count in zip([*map(str, cell.bounds), "+Inf"], cell.counts, strict=True):
                total += count
                metric.add_sample(f"{self.name}_bucket", {**pairs, "le": bound}, total)
            metric.add_sample(f"{self.name}_count", pairs, total)
            metric.add_sample(f"{self.name}_sum", pairs, cell.sum)
        return metric

    def _prepare(self) -> None:
        doc = self.doc.replace("\\", r"\\").replace("\n", r"\n")
        self._header = f"# HELP {self.name} {doc}\n# TYPE {self.name} {self.kind}\n"
        for labels, cell in self.cells:
            if isinstance(cell, Value):
                prefixes = [f"{self.name}{_braces(labels)} "]
            else:
                bounds = [*map(str, cell.bounds), "+Inf"]
                prefixes = [f"{self.name}_bucket{_braces((*labels, ('le', bound)))} " for bound in bounds]
                prefixes += [f"{self.name}_count{_braces(labels)} ", f"{self.name}_sum{_braces(labels)} "]
            self._lines.append((prefixes, cell))


class Series(Collector):
    """Every family of one model, in order of declaration."""

    def __init__(self, common: Labels) -> None:
        self.common = common
        self.families: dict[str, Family] = {}

    def value(self, name: str, kind: Kind, doc: str, extra: Labels = ()) -> Value:
        """Declare a series without labels of its own but `extra`."""
        cell = Value()
        self._add(name, kind, doc, [((*self.common, *extra), cell)])
        return cell

    def values(
        self, name: str, kind: Kind, doc: str, label: str, known: Iterable[str], fallback: str = "other"
    ) -> Known:
        """Declare one series per known value of a label, all present from the start."""
        cells = {value: Value() for value in known}
        self._add(name, kind, doc, [((*self.common, (label, value)), cell) for value, cell in cells.items()])
        return Known(cells, fallback)

    def grid(
        self, name: str, kind: Kind, doc: str, labels: tuple[str, str], rows: Iterable[str], known: Iterable[str]
    ) -> dict[str, Known]:
        """Declare one series per pair of known label values; by the first label's value."""
        columns = tuple(known)
        table = {row: Known({value: Value() for value in columns}) for row in rows}
        cells: list[tuple[Labels, Value | Histogram]] = [
            ((*self.common, (labels[0], row), (labels[1], value)), cell)
            for row, line in table.items()
            for value, cell in line.cells.items()
        ]
        self._add(name, kind, doc, cells)
        return table

    def histogram(self, name: str, doc: str, bounds: Sequence[float]) -> Histogram:
        """Declare a histogram without labels of its own."""
        cell = Histogram(bounds)
        self._add(name, "histogram", doc, [(self.common, cell)])
        return cell

    def histograms(
        self, name: str, doc: str, label: str, known: Iterable[str], bounds: Sequence[float]
    ) -> dict[str, Histogram]:
        """Declare one histogram per known value of a label."""
        cells = {value: Histogram(bounds) for value in known}
        self._add(name, "histogram", doc, [((*self.common, (label, value)), cell) for value, cell in cells.items()])
        return cells

    def info(self, name: str, doc: str, labels: dict[str, str], extra: Labels = ()) -> None:
        """Declare or replace a series whose labels are its content; its value is 1."""
        cell = Value()
        cell.value = 1
        cells: list[tuple[Labels, Value | Histogram]] = [((*self.common, *extra, *labels.items()), cell)]
        if name in self.families:
            self.families[name].relabel(cells)
        else:
            self._add(name, "gauge", doc, cells)

    def alias(self, name: str, of: str, extra: Labels = (), words: dict[str, str] | None = None) -> None:
        """Show the cells of a family under another name, with labels added.

        `words` replaces label names and label values that are called otherwise there.
        """
        source = self.families[of]
        other = words or {}
        cells = [
            ((*((other.get(key, key), other.get(value, value)) for key, value in labels), *extra), cell)
            for labels, cell in source.cells
        ]
        self._add(name, source.kind, f"{source.doc} Same as {of}.", cells)

    def render(self) -> bytes:
        """The text format 0.0.4 of all families."""
        return "".join(line for family in self.families.values() for line in family.render()).encode()

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client's registry."""
        return (family.metric() for family in self.families.values())

    def _add(self, name: str, kind: Kind, doc: str, cells: list[tuple[Labels, Value | Histogram]]) -> None:
        if name in self.families:
            raise ValueError(f"the series {name} is declared twice")
        self.families[name] = Family(name, kind, doc, cells)


@dataclass(slots=True)
class Known:
    """Series by the known values of a label; any other value counts as `fallback`, so no client makes new ones."""

    cells: dict[str, Value]
    fallback: str = "other"

    def __getitem__(self, value: str) -> Value:
        return self.cells.get(value) or self.cells[self.fallback]


def _histogram_lines(prefixes: list[str], cell: Histogram) -> Iterator[str]:
    total = 0
    for prefix, count in zip(prefixes, cell.counts, strict=False):  # the last two are count and sum
        total += count
        yield f"{prefix}{total}\n"
    yield f"{prefixes[-2]}{total}\n{prefixes[-1]}{cell.sum}\n"


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
