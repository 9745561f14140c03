"""torch.nn.attention.flex_attention's flex_attention, by its signature, over flash_attention with a block mask and a
score_mod."""

from collections.abc import Callable

from torch import Tensor

from ..attention import attend
from ..block_mask import BlockMask
from ..checks import NO_WINDOW, check_apart, check_is, check_layout, check_number, check_shapes, holds, is_known
from ..options import Options

NAMES = {"q": "query", "k": "key", "v": "value", "sm_scale": "scale"}


def flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | None = None,
                   block_mask: BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
                   return_lse: bool = False, kernel_options: dict | None = None, *, return_aux=None,
                   backend: str = "auto") -> Tensor | tuple:
    """softmax(scale · Q Kᵀ) V where block_mask lets rows see keys, a drop-in for torch.nn.attention.flex_attention's
    flex_attention (Dong et al., Flex Attention, 2024). It needs no torch.compile.

    Args:
        query: (B, H, Sq, D); key: (B, Hk, Sk, D); value: (B, Hk, Sk, Dv). With a block_mask, the last two may have one
            sample for all. Dtypes and head dimensions are those of flash_attention.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, as of flash_attention.
        block_mask: of minimal_attn.create_block_mask, or torch's, for Sq rows and Sk keys; None: rows see all keys.
        scale: factor of the scores; 1/sqrt(D) if None.
        enable_gqa: H may be a multiple of Hk, and query head h reads key head h // (H // Hk). Otherwise H is Hk.
        return_lse: also return lse.
        kernel_options: not read, since they are for the kernels of torch.
        return_aux: torch's AuxRequest of lse and max_scores, in the place of return_lse.
        backend: of flash_attention.

    Returns:
        (B, H, Sq, Dv) in query's dtype. Rows that see no key are 0. With return_lse a tuple with lse (B, H, Sq), in
        fp32 (fp64 for fp64 inputs), natural log, and -inf in such rows. With return_aux a tuple with torch's AuxOutput,
        in which max_scores is like lse.

    Raises:
        As flash_attention. TypeError: return_aux of another type. ValueError: return_lse together with return_aux.
    """
    if return_aux is not None:
        check_apart("return_aux", return_lse=return_lse)
        check_is("return_aux", return_aux, hasattr(return_aux, "max_scores"), "None or torch's AuxRequest", TypeError)
    check_number("enable_gqa", enable_gqa)
    check_layout("(B, H, S, D)", query=query, key=key, value=value)
    check_shapes(enable_gqa or holds(query.shape[1] == key.shape[1]), "query and key must have the same number of "
                 "heads, unless enable_gqa=True", query=query, key=key)
    if block_mask is not None:
        key, value = (x.expand(query.shape[0], -1, -1, -1) if is_known(x.shape[0] == 1) else x for x in (key, value))
    has_lse, has_max = (return_lse, False) if return_aux is None else (return_aux.lse, return_aux.max_scores)
    given = Options(mask_units=block_mask, softmax_scale=scale, return_lse=has_lse, return_max_logits=has_max,
                    score_mod=score_mod)
    result = attend(query, key, value, given, False, NO_WINDOW, backend, names=NAMES)
    if return_aux is None:
        return result
    from torch.nn.attention.flex_attention import AuxOutput  # imported before, with AuxRequest

    out, *more = result if isinstance(result, tuple) else (result,)
    return out, AuxOutput(more[0] if has_lse else None, more[-1] if has_max else None)
