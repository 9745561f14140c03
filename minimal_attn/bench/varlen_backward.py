"""Benchmark of the backward pass of packed batches: dq, dk and dv, and those of dense batches beside them.

Read next: window.py; measure.py.
"""

from . import attention, backward, varlen
from .backward import DTYPES, backward_of, impls_of  # noqa: F401: as options.py asks
from .varlen import BASELINE, DEFAULT_SHAPES, ROW, SHAPES, Shape, shape_of  # noqa: F401

TITLE = "Attention backward pass of packed batches"
DEFAULTS = varlen.DEFAULTS

PACKED = impls_of(backward_of, varlen.PACKED)
IMPLS = backward.IMPLS | PACKED
PROFILES = {name: (f"{heading}, backward", backward_of(forward))
            for name, (heading, forward) in varlen.PROFILES.items()}


class Case(backward.Case, varlen.Case):
    """Inputs of a packed batch, their gradients in fp64, and the error that each of these allows."""

    impls = PACKED
    op = "varlen_backward"
    columns = ROW


CASES = {Shape: Case, attention.Shape: backward.Case}
