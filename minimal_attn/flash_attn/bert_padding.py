"""The functions of flash_attn.bert_padding of flash-attn 2 that we have: packing a padded batch and back."""

import torch
from torch import Tensor

from ..reference import packed
from ..reference.packed import check_mask, pad_input

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input (T, ...) at the indices int64 or int32 (N,) of its first dimension: (N, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with values (N, ...) at the indices int64 (N,), which differ, and 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor,
                unused_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """minimal_attn.unpad_input, which also keeps the positions of unused_mask (B, S), of the dtypes of attention_mask.

    Returns:
        (packed (T, ...), indices int64 (T,), cu_seqlens int32 (B + 1,), the largest length, seqused int32 (B,)). All
        but seqused count the positions of both masks, and seqused those of attention_mask.
    """
    if unused_mask is None:
        return packed.unpad_input(hidden_states, attention_mask)
    used = check_mask("attention_mask", attention_mask, hidden_states)
    kept = used | check_mask("unused_mask", unused_mask, hidden_states)
    return *packed.unpad_input(hidden_states, kept)[:4], used.sum(1, dtype=torch.int32)


def __getattr__(name):
    """rearrange and repeat of einops, if that is installed: code that uses flash-attn imports them from here."""
    if name in ("rearrange", "repeat"):
        import einops
        return getattr(einops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
