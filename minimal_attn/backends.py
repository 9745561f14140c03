"""What the facade and its backends have in common: the options of a call, and what a backend is.

Nothing else of the project is imported here. Read next: cuda.py, twin.py, sdpa.py and reference.py, the backends.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    """What a call asks for beside q, k and v, checked. Every backend gets all of it and takes what it knows."""

    causal: bool
    softmax_scale: float
    seq_lens: Tensor | None = None  # int32 (B,)
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None  # int64, one element; None without dropout
    deterministic: bool = False
    autotune: bool = True
    descales: tuple = (None, None, None)  # of q, k and v in fp8: float32 (B, Hk), contiguous, or None
    return_lse: bool = True  # False: lse may be None

    def of_op(self):
        """The arguments of an op that follow q, k and v, as far as all ops have them."""
        return self.seq_lens, self.softmax_scale, self.causal, self.dropout_p, self.dropout_seed


@dataclass(frozen=True)
class Backend:
    """One implementation behind the facade."""

    # (q, k, v, options) -> (out, lse): checked 4D inputs with a contiguous last dimension.
    forward: Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor | None]]
    dtypes: tuple
    has_forward_mode: bool  # of its derivatives; all backends have those of a backward pass, but for fp8
    # None, or the exception that says why the backend cannot run on a device (None: on any device of this machine).
    why_not: Callable[[torch.device | None], Exception | None]


def warn(text: str) -> None:
    """A warning at the line that called into minimal_attn or triton_ref, whichever of their functions that was."""
    frame, depth = sys._getframe(), 1
    while frame is not None and frame.f_globals.get("__package__") in (__package__, "triton_ref"):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(f"minimal_attn: {text}", stacklevel=depth)
