"""activate: torch's own attention runs on our kernels, through torch's registry of flash attention implementations.

In torch's dispatcher, the functions of aten.py take the place of the CUDA kernels of aten's attention ops. A call that
aten.py does not serve goes to the kernel that was there before. Above them, ../../csrc/binding/sdpa_override.cpp serves
everyday calls without Python. All three of torch's fused kernels are replaced, and torch chooses among them as before.
"""

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Iterator

import torch
from torch.nn.attention import (activate_flash_attention_impl, current_flash_attention_impl,
                                register_flash_attention_impl, restore_flash_attention_impl)

from .. import _build
from .aten import OPS

NAME = "minimal_attn"  # in torch's registry
_lock = threading.RLock()
_kept = deque(maxlen=16 * len(OPS))  # the last kernels: a call in another thread may still be in one that was removed


def activate() -> None:
    """Let torch's own attention of float16 and bfloat16 CUDA tensors run on our kernels, forward and backward.

    This is scaled_dot_product_attention, with masks as well, torch.nn.attention.varlen.varlen_attn, nested tensors and
    torch's context parallelism, eager and compiled. Calls that our kernels do not serve stay with torch's: dropout,
    float32 and all else that docs/integrations.md lists. It is for the whole process, until deactivate. An
    implementation that torch.nn.attention.activate_flash_attention_impl activated before, such as "FA3", is replaced.

    csrc is compiled here if it is not yet. This may initialize CUDA: fork before it, not after it. RuntimeError: csrc
    has no kernels for GPUs here.
    """
    _load()
    with _lock:
        if current_flash_attention_impl() != NAME:
            activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Undo activate, from any thread: later calls run on torch's own kernels.

    Activate and deactivate between two steps, not between a forward pass and its backward pass, and not while other
    threads call attention. CUDA graphs that were captured keep their kernels.
    """
    with _lock:
        if current_flash_attention_impl() == NAME:
            restore_flash_attention_impl()


@contextlib.contextmanager
def activated() -> Iterator[None]:
    """activate within a with statement, for the whole process as well. At its end, what was active before is active."""
    with _lock:
        before = current_flash_attention_impl()
        activate()
    try:
        yield
    finally:
        with _lock:
            if before is None:
                deactivate()
            elif current_flash_attention_impl() != before:
                activate_flash_attention_impl(before)


def _load():
    if (reason := _build.why_not(on_gpu=True)) is not None:
        raise RuntimeError(f"minimal_attn.activate() needs kernels for GPUs: {reason}")
    _build.load()


class _Overrides:
    """The functions of aten.py and csrc/binding/sdpa_override.cpp as the kernels of aten's ops, until remove."""

    def __init__(self, key: str = "CUDA"):
        _load()
        self._library = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():  # torch warns of every kernel that replaces one
            warnings.simplefilter("ignore")
            for name, serve in OPS.items():
                self._library.impl(name, _or_original(serve, name, key), key)
            of_cpp = getattr(_build.load(), "SdpaOverride", None)  # the library of the wheel has none
            self._override = of_cpp and of_cpp(key)
        _kept.extend(torch.library.get_kernel(f"aten::{name}", key) for name in OPS)

    def remove(self) -> None:
        if self._override is not None:
            self._override.remove()
        self._library = None  # its destructor takes the kernels out


def _or_original(serve, name, key):
    original = torch.library.get_kernel(f"aten::{name}", key)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key])

    def kernel(*args, **kwargs):
        with contextlib.suppress(ValueError):
            return serve(*args, **kwargs)
        return original.call_boxed(keys, *args, **kwargs)

    return kernel


register_flash_attention_impl(NAME, register_fn=_Overrides)
