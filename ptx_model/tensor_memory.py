"""Tensor memory of a block: 128 lanes of 512 columns of 4 bytes, allocated in columns, poisoned."""

from typing import Any

import numpy as np

from ptx_model.faults import Fault
from ptx_model.races import Clocks, Past, Shadow

LANES, COLUMNS = 128, 512
_QUARTER = 32  # lanes that one warp of four may touch
_POISON = 0xFFFFDEAD  # NaN as fp32, as two bf16, and its bytes are NaN as e4m3 but one


class TensorMemory:
    """words: uint32 (lanes, columns)."""

    def __init__(self, clocks: Clocks | None, name: str) -> None:
        self._name, self._clocks = name, clocks
        self._allocated: dict[int, int] = {}  # first column -> columns
        self._relinquished = False
        self._words: Any = None
        self._written: Any = None
        self._shadow: Shadow | None = None

    def _make(self) -> None:
        self._words = np.full((LANES, COLUMNS), _POISON, np.uint32)
        self._written = np.zeros((LANES, COLUMNS), bool)
        if self._clocks:
            what = f"tensor memory of {self._name},"
            self._shadow = Shadow(
                self._clocks,
                4 * COLUMNS,
                what,
                lambda cell: f"column {cell % COLUMNS} of lanes {_QUARTER * (cell // COLUMNS)} and on",
            )

    # ---- allocation

    def allocate(self, columns: int) -> int:
        """Return the first of `columns` columns. Fault("tensor memory"): there are not so many, or none may be had."""
        if columns & columns - 1 or not 32 <= columns <= COLUMNS:
            raise Fault("tensor memory", f"an allocation of {columns} columns: it must be a power of two, 32 to 512")
        if self._relinquished:
            raise Fault("tensor memory", "an allocation after relinquish_alloc_permit")
        if self._words is None:
            self._make()
        for first in range(0, COLUMNS - columns + 1, columns):
            if all(first + columns <= f or f + n <= first for f, n in self._allocated.items()):
                self._allocated[first] = columns
                self._words[:, first : first + columns] = _POISON
                self._written[:, first : first + columns] = False
                return first
        raise Fault(
            "tensor memory", f"no {columns} columns are left: {self._allocated} are taken, so alloc waits for ever"
        )

    def free(self, first: int, columns: int) -> None:
        """Fault("tensor memory"): these are not what was allocated."""
        if self._allocated.get(first) != columns:
            raise Fault(
                "tensor memory", f"dealloc of {columns} columns at {first}, but allocated are {self._allocated}"
            )
        del self._allocated[first]

    def relinquish(self) -> None:
        self._relinquished = True

    def check_freed(self) -> None:
        """Fault("tensor memory"): something is still allocated at the end."""
        if self._allocated:
            raise Fault("tensor memory", f"{self._name} ends with columns {self._allocated} allocated")

    def _check(self, first: int, columns: int) -> None:
        if not any(f <= first and first + columns <= f + n for f, n in self._allocated.items()):
            raise Fault(
                "tensor memory", f"columns {first} to {first + columns - 1} are not all allocated: {self._allocated}"
            )

    # ---- access: lanes is a slice or int array, columns int array

    def read(self, lanes: np.ndarray, columns: np.ndarray, by, what: str, strict: bool = True) -> np.ndarray:
        """uint32 (lanes, columns). by: an agent (int) or the Past of asynchronous work. Unwritten: Fault if strict."""
        self._check(int(columns.min()), int(columns.max() - columns.min()) + 1)
        at = np.ix_(lanes, columns)
        if strict and not self._written[at].all():
            lane, column = np.argwhere(~self._written[at])[0]
            raise Fault(
                "unwritten", f"{what} reads tensor memory lane {lanes[lane]}, column {columns[column]}: never written"
            )
        self._note(lanes, columns, by, False)
        return self._words[at]

    def write(self, lanes: np.ndarray, columns: np.ndarray, values: np.ndarray, by) -> None:
        """values: uint32 (lanes, columns)."""
        self._check(int(columns.min()), int(columns.max() - columns.min()) + 1)
        self._note(lanes, columns, by, True)
        at = np.ix_(lanes, columns)
        self._words[at] = values
        self._written[at] = True

    def _note(self, lanes: np.ndarray, columns: np.ndarray, by, write: bool) -> None:
        if self._shadow is None:
            return
        cells = (np.unique(lanes // _QUARTER)[:, None] * COLUMNS + columns[None, :]).reshape(-1)
        if isinstance(by, Past):
            self._shadow.asynchronous(cells, Past(by.agent, by.known, by.known), write)
        else:
            self._shadow.access(cells, 15, np.full(len(cells), by), write)
