"""Running sequences as numpy columns: one row each, and the order of admission beside them.

A step touches whole columns at once, and in Python only what crosses a block boundary, starts or ends: that
is what keeps a step of a thousand sequences below a fifth of a microsecond each. A row given up in a step
is not handed out again in it, so the engine may still read it; hence twice as many rows as places.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from kvyard.core.loops import compact
from kvyard.core.plan import BoolArray, IntArray, Limits, TokenArray
from kvyard.core.sequence import IN_ROW, NO_ROW, SequenceState

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cells:
    """The columns for single values: a memoryview takes one in less than half of the time that numpy needs."""

    id: memoryview[int]
    arrival: memoryview[int]
    arrived: memoryview[float]
    priority: memoryview[int]
    prompt_len: memoryview[int]
    total: memoryview[int]
    computed: memoryview[int]
    limit: memoryview[int]
    capacity: memoryview[int]
    granted: memoryview[int]
    placed_step: memoryview[int]
    live: memoryview[bool]
    prompt: memoryview[bool]

    @classmethod
    def of(cls, columns: RowColumns) -> Cells:
        """Those of these columns."""
        return cls(*(getattr(columns, each.name).data for each in fields(cls)))


class RowColumns:
    """The columns, the block tables and the token contents, all indexed by row."""

    def __init__(self, limits: Limits) -> None:
        rows = 2 * limits.max_running
        width = -(-limits.max_model_len // limits.block_size)
        self.id, self.arrival, self.priority, self.prompt_len = (np.zeros(rows, np.int64) for _ in range(4))
        self.arrived: FloatArray = np.zeros(rows)
        self.total, self.computed, self.limit = (np.zeros(rows, np.int64) for _ in range(3))
        self.capacity: IntArray = np.zeros(rows, np.int64)
        """Tokens that the row's blocks hold."""
        self.granted: IntArray = np.zeros(rows, np.int64)
        """Tokens placed in this step."""
        self.placed_step: IntArray = np.zeros(rows, np.int64)
        """The last step that placed it, or the step that admitted it."""
        self.live: BoolArray = np.zeros(rows, np.bool_)
        self.prompt: BoolArray = np.zeros(rows, np.bool_)
        """Its prompt, or the prefix it has to compute again, is not wholly computed."""
        # Zeroed pages are not there until they are written, so these cost what is used of them.
        self.tables: TokenArray = np.zeros((rows, width), np.int32)
        self.tokens: TokenArray = np.zeros((rows, limits.max_model_len), np.int32)
        self._raw, self._row_bytes = self.tokens.reshape(-1).data.cast("B"), self.tokens.strides[0]
        """`tokens` for what comes as bytes: no array is made of it then."""
        self.owner: list[SequenceState | None] = [None] * rows
        self.order: IntArray = np.zeros(0, np.int64)
        """Rows in the order of admission."""
        self.block_size = limits.block_size
        self.cells = Cells.of(self)
        self._line: IntArray = np.zeros(rows, np.int64)
        """`order` is its beginning; what is behind that belongs to nobody."""
        self._vacant = list(range(rows - 1, -1, -1))
        self._given_up: list[int] = []

    @property
    def vacant(self) -> int:
        """Rows that can be taken in this step."""
        return len(self._vacant)

    def open_step(self) -> None:
        """Rows given up before this step may be taken again."""
        self.granted.fill(0)
        self._vacant += self._given_up
        self._given_up.clear()

    def enter(self, seq: SequenceState, blocks: int, computed: int, step: int) -> int:
        """Give `seq` a row for so many blocks, which the caller puts into its table.

        It joins `order` with `append`, so that many can join at once.
        """
        row = seq.row = self._vacant.pop()
        self.owner[row] = seq
        cells = self.cells
        cells.live[row] = cells.prompt[row] = True
        cells.id[row], cells.arrival[row], cells.arrived[row] = seq.id, seq.arrival, seq.arrived
        cells.priority[row], cells.prompt_len[row], cells.limit[row] = seq.priority, seq.prompt_len, seq.limit
        cells.total[row], cells.computed[row] = seq.total, computed
        cells.placed_step[row] = step
        cells.capacity[row] = blocks * self.block_size
        tokens = seq.tokens
        if isinstance(tokens, bytes):
            begin = row * self._row_bytes
            self._raw[begin : begin + len(tokens)] = tokens
            seq.tokens = IN_ROW
        elif tokens is not None:
            self.tokens[row, : seq.total] = tokens
            seq.tokens = IN_ROW
        return row

    def append(self, rows: list[int]) -> None:
        """These rows run from now on, behind the others."""
        if rows:
            count = len(self.order)
            self._line[count : count + len(rows)] = rows
            self.order = self._line[: count + len(rows)]

    def vacate(self, seq: SequenceState, keep_tokens: bool) -> None:
        """Take the row of `seq` back; `order` is mended by the caller, for many at once."""
        row = seq.row
        seq.total = int(self.total[row])
        if seq.tokens is not None and keep_tokens:
            seq.tokens = self.tokens[row, : seq.total].copy()
        self.live[row] = False
        self.prompt[row] = False
        self.owner[row] = None
        self._given_up.append(row)
        seq.row = NO_ROW

    def vacate_all(self, rows: IntArray) -> list[SequenceState]:
        """Take back the rows of sequences that end, out of `order` too; their blocks are given back already."""
        owner, cells, given_up = self.owner, self.cells, rows.tolist()
        gone: list[SequenceState] = []
        for row in given_up:
            seq = owner[row]
            assert seq is not None
            gone.append(seq)
            seq.total, seq.row = cells.total[row], NO_ROW
            owner[row] = None
            cells.live[row] = cells.prompt[row] = False
        self._given_up += given_up
        self.close_ranks()
        return gone

    def close_ranks(self) -> None:
        """Take the rows that are no longer live out of `order`."""
        # A new array: who walks the order while rows leave it still has the old one.
        self._line = np.empty(len(self._line), np.int64)
        self.order = self._line[: compact(self.order, self.live, self._line)]

    def owner_of(self, row: int) -> SequenceState:
        """The sequence in a live row."""
        seq = self.owner[row]
        assert seq is not None
        return seq

    def block_count(self, row: int) -> int:
        """Blocks that the row holds."""
        return int(self.capacity[row]) // self.block_size

    def table(self, row: int) -> list[int]:
        """The blocks that the row holds, in order."""
        blocks: list[int] = self.tables[row, : self.block_count(row)].tolist()
        return blocks
