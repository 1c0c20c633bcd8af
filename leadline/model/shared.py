"""What source layers publish, handed down the stack as a value of the step: nothing of it outlives the step.

The owner of compressed rows and index keys stores them in the cache in every step; a selection and its candidate blocks
are made per step and never stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from leadline.formats.rows import Rows
from leadline.model.step import ActiveRows

# Decoded compressed rows are kept for the layers that reuse a selection while they are at most so many (32 MiB of bf16
# at the released width); beyond it each layer decodes what it reads. Values are equal.
DENSE_ROWS = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAttention:
    """What the layers above a source read.

    Attributes:
        rows: compressed rows, for `selected_idx_TK`.
        selected_idx_TK: int64, -1 = none; ids into `rows`, one line per row of `active`.
        selection_TK: int32 logical row numbers, ascending, -1 padded (what `selected_idx_TK` stands for).
        candidates_TB: int32 candidate blocks, ascending, -1 padded; None = none were chosen below.
        active: the rows of the step that these belong to.
    """

    rows: Rows
    selected_idx_TK: Tensor
    selection_TK: Tensor
    candidates_TB: Tensor | None
    active: ActiveRows

    def narrow(self, active: ActiveRows) -> SharedAttention:
        """The same for fewer rows of the step."""
        idx = active.narrow(self.active)
        if idx is None:
            return self
        return replace(
            self,
            selected_idx_TK=self.selected_idx_TK[idx],
            selection_TK=self.selection_TK[idx],
            candidates_TB=None if self.candidates_TB is None else self.candidates_TB[idx],
            active=active,
        )
