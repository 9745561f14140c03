"""The functions of flash_attn.flash_attn_interface of flash-attn 2 that we have, under its names.

For code that imports flash-attn by these names. Read next: bert_padding.py; as_flash_attn.py, which makes
`import flash_attn` find both.
"""

from torch import Tensor

from .flash_attn import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
                         flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func)
from .lengths import NO_WINDOW

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
PRIVATE = ("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward",
           "_wrapped_flash_attn_forward", "_wrapped_flash_attn_backward")


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                            v: Tensor | None = None, rotary_cos: Tensor | None = None,
                            rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
                            cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
                            block_table: Tensor | None = None, softmax_scale: float | None = None,
                            causal: bool = False, window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> Tensor:
    """Not served yet. The name exists because transformers imports it together with the others.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("flash_attn_with_kvcache is not supported yet; flash_attn_func takes the keys and values "
                              "of a cache, and flash_attn_varlen_func takes seqused_k, the length of each sample")


def __getattr__(name):
    """A private function of flash-attn that other libraries import, but that is not served. It raises when called."""
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"{name} is a private function of flash-attn, which minimal_attn does not serve")

    return refuse
