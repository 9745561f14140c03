"""What every entry point checks before any launch, in one place, so that all backends refuse the same input alike.

Each error names the argument, what was given and what is allowed. Read next: interface.py.
"""

import torch

MAX_HEAD_DIM = 256
# Kernels count rows in 32 bits and round lengths up to whole tiles.
MAX_SEQLEN = 2**31 - 257


def check_qkv(q, k, v, dtypes):
    """Raise unless q (B, H, Sq, D) or (B·H, Sq, D), k and v (B, Hk, Sk, D) or (B·H, Sk, D) fit together.

    TypeError for dtypes, ValueError for everything else.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in dtypes:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise TypeError(f"Unsupported dtype: {name} is {x.dtype}, allowed are {allowed}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"dtypes must match: q is {q.dtype}, k is {k.dtype}, v is {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on the same device: q is on {q.device}, k on {k.device}, v on {v.device}")
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
        raise ValueError(f"Expected 3D or 4D tensors, all alike: q has {q.ndim}, k {k.ndim}, v {v.ndim} dimensions")
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"Unsupported head_dim {q.shape[-1]}: 1 to {MAX_HEAD_DIM} is supported")
    shapes = f"q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}"
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape: {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k and v must have the same head_dim: {shapes}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q, k and v must have the same batch size: {shapes}")
    if q.ndim == 4 and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(f"the number of query heads must be a multiple of the number of key/value heads: {shapes}")
    if max(q.shape[1:-1] + k.shape[1:-1]) > MAX_SEQLEN:
        raise ValueError(f"heads and sequence lengths go up to {MAX_SEQLEN}: {shapes}")


def check_seq_lens(seq_lens, q, k):
    """seq_lens as an int32 tensor of shape (q.shape[0],) on q's device, or None; ValueError unless it fits q and k.

    Values are checked at once for a list or a CPU tensor. For a GPU tensor that takes one small read, which is skipped
    while a CUDA graph is captured or torch.compile traces; the kernels clamp, so a bad value never reads out of bounds.
    """
    if seq_lens is None:
        return None
    seqlen = q.shape[-2]
    if seqlen != k.shape[-2]:
        raise ValueError(f"seq_lens needs equal lengths of q and k, got seqlen_q {seqlen} and seqlen_k {k.shape[-2]}")
    if isinstance(seq_lens, (list, tuple)):
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in seq_lens):
            raise ValueError(f"seq_lens must hold integers, got {seq_lens}")
        if any(not 0 < n <= seqlen for n in seq_lens):
            raise ValueError(f"seq_lens must be in 1..{seqlen}, got {list(seq_lens)}")
        seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
    elif not isinstance(seq_lens, torch.Tensor) or seq_lens.dtype not in (torch.int32, torch.int64):
        got = seq_lens.dtype if isinstance(seq_lens, torch.Tensor) else type(seq_lens).__name__
        raise ValueError(f"seq_lens must be a list or an int32 or int64 tensor, got {got}")
    elif seq_lens.device != q.device and seq_lens.device.type != "cpu":
        raise ValueError(f"seq_lens must be on the same device as q ({q.device}) or on the CPU, got {seq_lens.device}")
    batch_size = 1 if q.ndim == 3 else q.shape[0]
    if seq_lens.shape != (batch_size,):
        why = "one value for all of a 3D q" if q.ndim == 3 else "one value a sample"
        raise ValueError(f"seq_lens must have shape ({batch_size},), {why}, got {tuple(seq_lens.shape)}")
    if _can_read(seq_lens) and seq_lens.numel():
        low, high = torch.stack(seq_lens.aminmax()).tolist()
        if low < 1 or high > seqlen:
            raise ValueError(f"seq_lens must be in 1..{seqlen}, got values from {low} to {high}")
    # Outside 0..2^31 only where the values could not be read: keep the wrap to 32 bits from making such a value valid.
    seq_lens = seq_lens.clamp(0, seqlen).to(device=q.device, dtype=torch.int32)
    return seq_lens.expand(q.shape[0]).contiguous()


def _can_read(x):
    if torch.compiler.is_compiling():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
