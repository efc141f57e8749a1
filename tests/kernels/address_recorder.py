"""Run a kernel's program far beyond what fits in memory and record its addresses.

The interpreter computes addresses exactly as in the kernel, in its integer widths.
Here they are only recorded: memory outside a tensor that was declared real is never
read or written.
"""

from __future__ import annotations

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


class AddressRecorder:
    """Replaces memory while a kernel runs under the interpreter.

    Args:
        monkeypatch: Of the test.
        real: Tensors that may be read and written.
        program: Program ids to run as, one per axis of the grid (launch a grid of 1).
    """

    def __init__(self, monkeypatch, real, program):
        self.touched = []
        self._ranges = [
            (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in real
        ]
        load, store = (
            InterpreterBuilder.create_masked_load,
            InterpreterBuilder.create_masked_store,
        )

        def fake_load(builder, ptrs, mask, other, *args):
            if self._note(ptrs, mask):
                return load(builder, ptrs, mask, other, *args)
            dtype = interpreter._get_np_dtype(ptrs.get_element_ty())
            return TensorHandle(np.zeros(ptrs.data.shape, dtype), ptrs.get_element_ty())

        def fake_store(builder, ptrs, value, mask, *args):
            if self._note(ptrs, mask):
                return store(builder, ptrs, value, mask, *args)
            return None

        def program_id(builder, axis):
            return TensorHandle(
                np.array([program[axis]], np.int32), interpreter.tl.int32
            )

        for name, fake in (
            ("create_masked_load", fake_load),
            ("create_masked_store", fake_store),
            ("create_get_program_id", program_id),
        ):
            monkeypatch.setattr(InterpreterBuilder, name, fake)

    def _note(self, ptrs, mask):
        """Return whether all addresses are real; record the others."""
        shape = np.broadcast_shapes(ptrs.data.shape, mask.data.shape)
        used = np.broadcast_to(ptrs.data, shape)[np.broadcast_to(mask.data, shape)]
        if not used.size:
            return False
        low, high = int(used.min()), int(used.max())
        if any(first <= low and high < end for first, end in self._ranges):
            return True
        self.touched.append(np.unique(used))
        return False

    @property
    def addresses(self):
        """Return all addresses outside the real tensors."""
        return set(np.concatenate(self.touched).astype(np.int64).tolist())


def span(anchor, offsets):
    """Return addresses of elements at `offsets` from a tensor's start."""
    return {anchor.data_ptr() + anchor.element_size() * int(i) for i in offsets}
