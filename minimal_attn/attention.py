"""The facade: one function, several backends behind it, one table of them.

flash_attention checks its input (checks.py), picks a backend from BACKENDS and calls it on 4D tensors.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.compiler import is_compiling

from .backends import cuda, reference, torch, triton
from .backends.auto import auto_backend
from .block_mask import BlockMask, with_tensors
from .checks import (FP8_DTYPES, KERNEL_DTYPES, NO_WINDOW, OWN, autocast, check_choice, check_dtype,
                     check_max_seqlens, check_no_derivative, check_qkv, checked_options, is_known, is_transformed,
                     wants_gradient)
from .options import Options
from .reference.packed import with_own_keys

BACKENDS = {"cuda": cuda.BACKEND, "triton": triton.BACKEND, "torch": torch.BACKEND, "reference": reference.BACKEND}

# Keywords of scaled_dot_product_attention and flash-attn, and what flash_attention's error says of each.
RENAMED = {"is_causal": "causal", "scale": "sm_scale", "softmax_scale": "sm_scale", "s_aux": "sinks",
           "learnable_sink": "sinks", "attn_mask": "attn_bias", "cu_seqlens": "cu_seqlens_q and cu_seqlens_k",
           "max_seqlen": "max_seqlen_q and max_seqlen_k", "return_softmax_lse": "return_lse"}
OTHER_NAMES = {
    **{name: f"it is called {ours} here" for name, ours in RENAMED.items()},
    "cache_seqlens": "it is called seqused_k here and in attention_with_kvcache",
    "return_attn_probs": "return_lse=True returns lse",
    "enable_gqa": "it is not needed: heads are matched by their numbers",
    "key_padding_mask": "FlashMHA takes it, and unpad_input packs a batch by it",
    **dict.fromkeys(("page_table", "cache_batch_idx"), "attention_with_kvcache takes it"),
    "block_table": "attention_with_kvcache takes it, and calls it page_table",
    "leftpad_k": "attention_with_kvcache takes it, and unpad_input packs a batch whose padding comes first",
    "cache_leftpad": "attention_with_kvcache takes it, and calls it leftpad_k",
}


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, sm_scale: float | None = None,
                    seq_lens: Tensor | Sequence[int] | None = None, *, dropout_p: float = 0,
                    dropout_seed: Tensor | None = None, deterministic: bool = False, return_lse: bool = False,
                    backend: str = "auto", q_descale: Tensor | None = None, k_descale: Tensor | None = None,
                    v_descale: Tensor | None = None, autotune: bool = True,
                    window_size: tuple[int, int] = NO_WINDOW, cu_seqlens_q: Tensor | None = None,
                    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
                    max_seqlen_k: int | Tensor | None = None, seqused_q: Tensor | None = None,
                    seqused_k: Tensor | None = None, sinks: Tensor | None = None, softcap: float = 0,
                    alibi_slopes: Tensor | None = None, attn_bias: Tensor | None = None, attention_chunk: int = 0,
                    return_max_logits: bool = False, block_mask: BlockMask | None = None,
                    score_mod: Callable | None = None, **unknown) -> Tensor | tuple[Tensor, ...]:
    """softmax(sm_scale · Q Kᵀ) V without storing the scores (Dao, FlashAttention-2, 2023).

    q, k and v are read by their strides, in any order of batch, head and sequence, without copies. Copied are a last
    dimension that is not contiguous and, in 16 bits on a GPU, tensors whose head_dim is no multiple of 8 or whose rows
    do not start at multiples of 16 bytes. torch.autocast casts float32, float16 and bfloat16 inputs first; the three
    may then have different dtypes. Gradients have the dtypes of the inputs.

    Args:
        q: (B, H, Sq, D) or (B·H, Sq, D), with D from 1 to 256. float32 (computed in true fp32), float16 or bfloat16.
            float64 with the backends "torch" and "reference", and with "cuda" on the CPU. float8_e4m3fn or float8_e5m2
            with "triton", on GPUs of compute capability 8.9 or higher, and with "reference".
        k, v: (B, Hk, Sk, D) with H a multiple of Hk (query head h reads head h // (H // Hk)), or (B·H, Sk, D). v, and
            then out, may have another head_dim than q and k, also from 1 to 256.
        causal: query row i sees the keys j <= i + Sk - Sq (bottom-right aligned).
        sm_scale: factor of the scores, at most 2.3586e38 in magnitude; 1/sqrt(D) if None.
        seq_lens: valid length of each sample, 1 to S: a list, or an int32 or int64 tensor on q's device or the CPU, of
            shape (B,), or (1,) for 3D input. Needs Sq == Sk. Rows and keys from the length on are padding. One small
            read checks those of a GPU tensor; CUDA graph capture, which takes only GPU tensors, and torch.compile clamp
            lengths out of range instead.
        dropout_p: share in [0, 1] of the normalised probabilities set to 0, rounded to a multiple p of 2**-15; the rest
            is scaled by 1/(1 - p). All backends drop the same elements.
        dropout_seed: int64 tensor of one element on q's device. Which elements are dropped depends only on the seed,
            the sample, the head, the row and the column (dropout.py); 3D input has head 0. If None, torch's generator
            of that device draws a seed. The host never reads it. Ignored if dropout_p is 0. For a part of a larger
            problem, which is to drop what that one would: dropout.seed_with_origins.
        deterministic: gradients that are bitwise the same in every run; torch.use_deterministic_algorithms does the
            same. It matters to "cuda" in 16 bits, which then adds up dq in a fixed order, more slowly, and to "triton",
            which then times nothing. "torch" and "reference" repeat as far as torch's operations do.
        return_lse: also return each row's log-sum-exp, of the scores before dropout.
        return_max_logits: also return each row's largest score, after softcap, ALiBi and attn_bias, without sinks: for
            QK-clip (Kimi Team, Kimi K2, 2025, section 2.1). It has no gradient.
        backend: "cuda" (csrc; on CPU tensors flash.cu compiled for the CPU), "triton", "torch"
            (scaled_dot_product_attention), "reference", or "auto". "auto" takes "torch" for CPU tensors and for
            gradients under a transform of torch.func, "triton" for float8 CUDA tensors, and for other CUDA tensors the
            first of "cuda", "triton" and "torch" that is available.
        q_descale, k_descale, v_descale: for float8 inputs, float32 (B, Hk), also of a packed batch's B samples: factors
            of a key/value head and the query heads that read it, as in FlashAttention-3; 1 if None. Negative: NaN.
        autotune: let "triton" time its tiles once for each GPU and kind of call, and keep the choice on disk. False,
            the environment variable MINIMAL_ATTN_AUTOTUNE=0 and graph capture before a choice take those of a table.
        window_size: (left, right). Query row i sees the keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right, both inclusive, where seqlen_q and seqlen_k are the lengths of its sample;
            -1 or None is no bound. causal=True makes right 0. Blocks of keys outside are skipped. Also a list, an array
            or, but for torch.compile, a tensor of two ints.
        attention_chunk: positions i + seqlen_k - seqlen_q of rows and j of keys are in chunks of so many, and a row
            sees only keys of its own chunk, as in Llama 4; 0 is none. Together with causal and window_size.
        block_mask: which keys each row sees, for any mask at the speed of its visible blocks: of create_block_mask, for
            B or 1 samples, H or 1 heads (for 3D input B·H or 1, and 1), Sq rows and Sk keys, on q's device. Or of
            torch.nn.attention.flex_attention, with a BLOCK_SIZE of multiples of 64: its first call converts it, and
            must not be under torch.compile(fullgraph=True). A row sees a key if all other masks show it, too. What it
            hides must be finite, as with attn_bias. Not for packed batches.
        cu_seqlens_q, cu_seqlens_k: for a packed batch of B samples, whose rows lie one after the other: q is
            (1, H, Tq, D), k and v are (1, Hk, Tk, D). int32 (B + 1,), contiguous, on q's device. Sample b has the rows
            from cu_seqlens_q[b] and the keys from cu_seqlens_k[b] to the next entry. The first entry is 0, the others
            ascend up to at most Tq or Tk. A sample may be empty.
        max_seqlen_q, max_seqlen_k: an int or a tensor of one element, as flash-attn asks for. A tensor is never read.
            Only gradients of packed batches with seqused_k use max_seqlen_k.
        seqused_q, seqused_k: int32 (B,), contiguous, on q's device: how many of its rows and keys, from the first on,
            a sample uses; all if None. May be 0, and in a padded batch Sq and Sk may differ. In a packed batch with
            seqused_k, a sample's keys start at cu_seqlens_k[b] and may also be those of others. For gradients, "cuda"
            and "triton" then copy B · max_seqlen_k keys and values. If it is no int, the host waits for the largest
            length, or B · Tk are copied in a CUDA graph and under torch.compile. An int that is too small is an error
            on the CPU; elsewhere longer samples and their gradients are NaN.
        sinks: (H,), or (1,) for 3D input, float32, float16 or bfloat16, or float64 for float64, on q's device: one more
            score of each row of a query head, in units of sm_scale · QKᵀ. It takes its share of the softmax, and no
            value goes with it (Xiao et al., StreamingLLM, 2023; as in gpt-oss). lse includes it. Differentiable.
        softcap: real number c from 1e-30 to 2.3586e38: a score s = sm_scale · q·k becomes c · tanh(s / c), as in
            Gemma 2. 0 is none. All of what follows, lse and sinks are in units of these scores.
        alibi_slopes: float32 (H,) or (B, H), also of a packed batch's B samples, or (1,) or (B·H, 1) for 3D input, on
            q's device: the score of row i and key j loses slope · |i + seqlen_k - seqlen_q - j|, by the lengths of its
            sample (Press et al., ALiBi, 2022). It has no gradient.
        attn_bias: broadcastable to (B, H, Sq, Sk), of 3D input to (B·H, Sq, Sk), with 1 to 4 dimensions, on q's device.
            bool: a row sees the keys where it is True. Otherwise it is added to the scores, after softcap: of q's
            dtype, or float32 for 16 bits; autocast leaves it as it is. It is read by its strides. -inf hides a key. NaN
            or inf makes its row NaN, unless the key is hidden anyway. k and v must be finite where it hides keys, and
            the gradient of out in rows that it hides wholly. Differentiable, in its own shape. In rows whose largest
            score is far below -1e6, as where finfo.min hides all keys, out is right but gradients are not: lse is too
            coarse for them. Not for packed batches, nor for float8. A causal bias of torch.nn.attention.bias for Sq
            rows and Sk keys is taken too.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, as in torch.nn.attention.flex_attention: a function of one
            score, sm_scale · q·k, and of the numbers of its sample, query head, row and key, which all count from 0 in
            each sample: unlike ALiBi and the causal mask, q_idx is aligned top-left. Masks hide keys after it. In place
            of softcap, alibi_slopes and attn_bias. It may capture tensors on q's device, and those that require grad
            get gradients. "torch" and "reference" run it under torch.vmap, and form all scores. "triton" compiles what
            its source says, of what docs/score_functions.md lists; "cuda" does not serve it. Its value and its
            derivatives must be finite where keys are hidden; -inf hides a key.
        All options can be given together, but for what Raises names. With dropout, sinks, softcap, return_max_logits,
        in 16 bits also with ALiBi or a float32 attn_bias, "torch" forms all scores, as "reference" does.

        Lengths count from a sample's first row and key. Where padding comes first (left padding), unpad_input makes a
        packed batch of q, and of k and v, and pad_input undoes it.

        Rows that a sample does not use give out 0 and lse -inf. Neither they nor keys that no row of a sample uses
        change any result or gradient, even if they are NaN or inf. The values of cu_seqlens and seqused are checked for
        CPU tensors. On a GPU, "cuda" and "triton" do not read them on the host and clamp what is out of range; "torch"
        and "reference" read the largest length, unless a CUDA graph is captured or torch.compile traces. In packed
        batches, a sample's bits of "cuda" and "triton" do not depend on its batch.

    Returns:
        out, of q's shape, with v's head_dim, and q's dtype; bfloat16 for float8, autocast's dtype under torch.autocast.
        With return_lse a tuple (out, lse), lse (B, H, Sq) or (B·H, Sq) in fp32 (fp64 for fp64 inputs), natural log.
        With return_max_logits, max_logits of lse's shape and dtype is the last of the tuple. A row that sees no key has
        out 0, max_logits -inf and lse -inf, or its sink. Empty batches and lengths of 0 give empty or zero
        outputs. NaN or inf in a key or value that a row sees may reach all rows of its sample and head.

    Raises:
        TypeError: an input that is not a dense tensor, an unsupported dtype, dtypes that differ, an argument of the
            wrong type, or an unknown keyword. The error says what torch's and flash-attn's keywords are called here.
        ValueError: a wrong shape, device or value of an argument; alibi_slopes that require grad; seq_lens with
            cu_seqlens or seqused; attn_bias or block_mask with cu_seqlens; attn_bias with float8; softcap, ALiBi or
            attn_bias with score_mod; or a forced kernel that cannot serve the call.
        ModuleNotFoundError: backend="triton" without Triton.
        NotImplementedError: a derivative that the backend does not have. float8 has no gradients with "triton"; "cuda"
            and "triton" have no forward-mode and no second derivatives.
        RuntimeError: the extension cannot be built or loaded, or has no kernel for this GPU.
    """
    if unknown:
        name = next(iter(unknown))
        hint = f"; {OTHER_NAMES[name]}" if name in OTHER_NAMES else ""
        raise TypeError(f"flash_attention() got an unexpected keyword argument {name!r}{hint}")
    if max_seqlen_q is not None or max_seqlen_k is not None:
        check_max_seqlens(max_seqlen_q, max_seqlen_k)
    given = Options._make((  # faster than the constructor
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias, sm_scale, softcap, -1, -1,
        attention_chunk, dropout_p, dropout_seed, return_max_logits, block_mask, None, None, None, deterministic,
        autotune, q_descale, k_descale, v_descale, score_mod, return_lse))
    result = fast_path(q, k, v, given, causal, window_size, backend) if seq_lens is None else None
    if result is not None:
        return result
    return attend(q, k, v, given, causal, window_size, backend, seq_lens, max_seqlen_k)


def fast_path(q, k, v, given, causal, window_size, backend, seq_major=False):
    """The result of an everyday call on CUDA tensors, straight from C++, or None for all others. given: as of attend.
    seq_major: q is (B, Sq, H, D), or (Tq, H, D) with cu_seqlens_q."""
    if is_compiling() or cuda._fast_forward is None or not (backend == "auto" or backend == "cuda"):
        return None
    return cuda._fast_forward(q, k, v, given, causal, window_size, seq_major)


def backend_name(backend, q, *others, options=Options()):
    """The key in BACKENDS that a caller's backend means, or ValueError. others: what else may want a gradient."""
    if backend == "auto":
        return auto_backend(q, *others, options=options)
    return check_choice("backend", backend, ("auto", *BACKENDS))


def attend(q, k, v, given, causal, window_size, backend, seq_lens=None, max_seqlen_k=None, names=OWN):
    """flash_attention without its fast path. given: as of checked_options. names: as in checks.py."""
    q, k, v = autocast(q, k, v)
    check_qkv(q, k, v, names=names)
    name = backend_name(backend, q, k, v, *given.differentiable, options=given)
    chosen = BACKENDS[name]
    check_dtype(q, chosen.dtypes)
    options = checked_options(with_tensors(given, q, k), q, k, causal, window_size, seq_lens, names)
    if (why_not := chosen.why_not(q.device)) is not None:
        raise why_not
    if not chosen.has_forward_mode:  # it has kernels
        is_fp8 = q.dtype in FP8_DTYPES
        if is_transformed() and not is_fp8 and any(map(wants_gradient, (q, k, v, *options.differentiable))):
            raise NotImplementedError(f"backend={name!r} does not support gradients under the transforms of "
                                      "torch.func: use backend='torch' or backend='reference'")
        check_no_derivative(f"backend={name!r}", "backend='reference'" if is_fp8 else "backend='torch'",
                            "backend='reference'", has_backward=not is_fp8, q=q, k=k, v=v, **options.floats)
    if is_3d := q.ndim == 3:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    if is_known(q.numel() == 0) or is_known(k.numel() == 0):
        # Nothing to launch. The reference's empty products leave the outputs in the graph of inputs that require grad.
        out, *more = reference.BACKEND.forward(q, k, v, options)
    else:
        q, k, v = (x if is_known(x.stride(-1) == 1) else x.contiguous() for x in (q, k, v))
        # Kernels, the backends without forward mode, do not add up gradients of keys that samples share.
        if options.lengths.may_share_keys and not chosen.has_forward_mode and any(
                map(wants_gradient, (q, k, v, *options.differentiable))):
            k, v, lengths = with_own_keys(k, v, options.lengths, max_seqlen_k)
            options = options.with_lengths(lengths)
        out, *more = chosen.forward(q, k, v, options)
    result = out, *(more if options.return_lse else more[1:])
    if is_3d:
        result = tuple(x.squeeze(1) for x in result)
    return result if len(result) > 1 else result[0]


def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The classic minimal call: flash_attention(q, k, v) with every default. q, k, v: (B, H, S, D)."""
    return flash_attention(q, k, v)


def which_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, sm_scale: float | None = None,
                 seq_lens: Tensor | Sequence[int] | None = None, dropout_p: float = 0, *,
                 window_size: tuple[int, int] = NO_WINDOW, cu_seqlens_q: Tensor | None = None,
                 cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
                 max_seqlen_k: int | Tensor | None = None, seqused_q: Tensor | None = None,
                 seqused_k: Tensor | None = None, sinks: Tensor | None = None, softcap: float = 0,
                 alibi_slopes: Tensor | None = None, attn_bias: Tensor | None = None, attention_chunk: int = 0,
                 return_max_logits: bool = False, block_mask: BlockMask | None = None) -> str:
    """The name of the kernel in csrc that serves flash_attention(q, k, v, ...) with backend="cuda".

    Arguments and errors are as of flash_attention. force_kernel overrides the choice.

    Returns:
        "sm90" (flash_sm90.cu, Hopper's own instructions): float16 and bfloat16 on GPUs of sm_90, such as H100 and H200.
        "sm80" (flash_sm80.cu, tensor cores): float16 and bfloat16 on other GPUs from Ampere on; on Hopper for options
        of two of these kinds: dropout; softcap, ALiBi and attn_bias; attention_chunk and return_max_logits; block_mask;
        also where rows of q, k or v overlap, where a stride is 2^40 bytes or more, without keys, and for an attn_bias
        of numbers that is float32, or whose rows are not contiguous or do not start at multiples of 16 bytes.
        "dmma" (flash_dmma.cu, fp64 tensor cores): float32, head_dim 33 to 128, GPUs of sm_90, without sinks and options
        of these kinds.
        These three need head_dims, strides and addresses that are multiples of 16 bytes, as copies of 16-bit tensors
        have them. "simt" (flash.cu): everything else on a GPU. "host" (flash.cu compiled for the CPU): CPU tensors.
        Another kernel may compute the gradients. On Hopper, those of calls in 16 bits, also with dropout, are "sm90"'s,
        but "sm80"'s with an attn_bias of numbers, with a bool one or a block_mask beside any other of these options,
        and for a head_dim over 128 with softcap or ALiBi. Those of "dmma" are "simt"'s.
    """
    q, k, v = autocast(q, k, v)
    check_qkv(q, k, v, KERNEL_DTYPES)
    check_max_seqlens(max_seqlen_q, max_seqlen_k)
    given = Options(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias, sm_scale, softcap,
                    attention_chunk=attention_chunk, dropout_p=dropout_p, return_max_logits=return_max_logits,
                    mask_units=block_mask)
    return cuda.kernel_of(q, k, v, checked_options(with_tensors(given, q, k), q, k, causal, window_size, seq_lens))


def available_backends() -> list[str]:
    """The values of flash_attention's backend that work on this machine, besides "auto"."""
    return [name for name, backend in BACKENDS.items() if backend.why_not() is None]


def triton_matmul(a: Tensor, b: Tensor, block_m: int | None = None, block_n: int | None = None,
                  block_k: int | None = None, use_autotune: bool = True) -> Tensor:
    """a @ b in Triton, contiguous (M, N) of a's dtype: inputs are read by their strides without copies, and sums are
    in fp32. The same tile gives the same bits in every run.

    Args:
        a: (M, K), float16, bfloat16, or float32, which is multiplied in true fp32: no TF32, nothing cast to float16.
        b: (K, N), of a's dtype and on a's device. M, N and K may be 0.
        block_m, block_n, block_k: the tile. Powers of two from 16 on that do not exceed M, N and K rounded up to a
            multiple of 16, and the product of any two at most 32768, in float32 8192. None: the tile is chosen here.
        use_autotune: choose by timing a few tiles, once for similar sizes on one kind of GPU (triton_ref/autotune.py).
            False: by a model of the time (triton_ref.matmul.tile_config).

    Raises:
        TypeError, ValueError: as flash_attention; a wrong block. NotImplementedError: a derivative is wanted; there is
        none. ModuleNotFoundError: Triton is not installed.
    """
    return triton.matmul()(a, b, block_m, block_n, block_k, use_autotune)
