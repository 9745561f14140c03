"""Checks that every entry point makes before any launch. They are in one place, so that all backends refuse the same
input alike.

Each error names the argument, what was given and what is allowed. Read next: lengths.py, the checks of lengths and
windows.
"""

import numbers
import reprlib

import torch
from torch.autograd import forward_ad

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of csrc
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
TWIN_DTYPES = KERNEL_DTYPES + FP8_DTYPES  # of triton_ref
MAX_HEAD_DIM = 256
# Kernels count rows in 32 bits and round lengths up to whole tiles.
MAX_SEQLEN = 2**31 - 257
MAX_SIZE = 2**31 - 2**16
# Half of a multiprocessor's registers for sums, half for what feeds them.
MAX_TILE = 2**15  # elements; fp32 products need four times the registers
# Up to this magnitude sm_scale · log2(e), with which kernels take powers of two, is finite in fp32.
MAX_SCALE = 23586 * 10**34  # an int, since torch.compile(dynamic=True) makes symbols of floats, and compiles twice


def out_dtype(dtype):
    """The dtype of the result: that of the inputs, and bfloat16 of fp8, which would round it too far."""
    return torch.bfloat16 if dtype in FP8_DTYPES else dtype


def sum_dtype(dtype):
    """The dtype of sums, and so of lse and sinks."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_like(x, dtype=None):
    """x's shape and order of dimensions, the last one contiguous, to be written; as new_like in
    csrc/ops/forward.h."""
    like = torch.empty_like(x, dtype=dtype)
    # x may overlap itself, as sliding windows do.
    return like if is_known(like.stride(-1) == 1) else torch.empty(x.shape, dtype=like.dtype, device=x.device)


def empty_outputs(q, v):
    """out like q, in bfloat16 if q is fp8 and with v's head_dim, and lse (B, H, Sq) in fp32, fp64 if q is, to be
    written."""
    head_dim = v.shape[-1]
    # Another head_dim: q's order of dimensions, without gaps.
    like = q if is_known(q.shape[-1] == head_dim) else q[..., :1].expand(*q.shape[:-1], head_dim)
    return empty_like(like, out_dtype(q.dtype)), q.new_empty(q.shape[:3], dtype=sum_dtype(q.dtype))


def holds(condition):
    """Whether a condition on sizes that a call relies on holds. While torch traces, sizes may be symbols: then a guard
    sees to it, and where only data will tell, an assertion in the graph does."""
    if not _may_be_symbol(condition):
        return bool(condition)  # of a size in torch.jit.trace, a tensor
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # takes most of a second

    if not guard_or_true(condition):
        return False
    torch._check(condition)
    return True


def is_known(condition):
    """Whether a condition on sizes is sure to hold. While torch traces, it has to hold for all values that the sizes
    may have, and no guard is made."""
    if not _may_be_symbol(condition):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def is_static(size):
    """Whether a size is a number, and no symbol of a trace."""
    if not _may_be_symbol(size):
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(size)


def _may_be_symbol(x):
    # To Dynamo, symbols are ints and bools. The type is compared first, since a call asks a few dozen times.
    return torch.compiler.is_compiling() or type(x) is not bool and isinstance(x, (torch.SymBool, torch.SymInt))


def smaller(size, other):
    """min(size, other), which makes no guard while torch traces."""
    if is_known(size <= other):
        return size
    return other if is_known(other <= size) else torch.sym_min(size, other)


def larger(size, other):
    """max(size, other), which makes no guard while torch traces."""
    if is_known(size >= other):
        return size
    return other if is_known(other >= size) else torch.sym_max(size, other)


def same_sizes(shape, other):
    """Whether two shapes are the same, where each size holds."""
    return len(shape) == len(other) and all(holds(m == n) for m, n in zip(shape, other))


def broadcasts(shape, other):
    """Whether a tensor of this shape broadcasts to the other one, which has no fewer dimensions."""
    return len(shape) <= len(other) and all(is_known(n == 1) or holds(n == size)
                                            for n, size in zip(shape[::-1], other[::-1]))


def is_over(size, limit):
    """Whether a size is over a limit. Under torch.export no guard is made, and only a size that is sure to be over it
    counts: export refuses guards that the range declared for a dimension does not imply."""
    return is_known(size > limit) if torch.compiler.is_exporting() else not holds(size <= limit)


def is_eager(*tensors):
    """Whether nothing traces, transforms or watches operations on these tensors, or None, and they are what they seem:
    a kernel may then be launched without the dispatcher, whose Python operators take 15 µs and more."""
    return (not torch.compiler.is_compiling() and not torch.jit.is_tracing()
            and not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack()
            and not is_transformed() and not torch.autograd._profiler_enabled()
            and all(x is None or type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta and not x.is_neg()
                    and not x._is_zerotensor() and not torch._C._functorch.is_legacy_batchedtensor(x)
                    for x in tensors))


def is_int(x):
    """Whether x is an int to its callers: also numpy's, but no bool and no tensor."""
    # isinstance first: Dynamo, for which an int may be a symbol, does not take hasattr.
    return (isinstance(x, int) or hasattr(x, "__index__")) and not isinstance(x, (bool, torch.Tensor))


def can_read(x):
    """Whether the host may read x: nothing traces or watches, and no CUDA graph is captured, which would fail."""
    return is_eager(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


class _Shown(reprlib.Repr):
    """repr, cut short. A tensor is shown by its dtype and shape: its values would fill the screen."""

    def repr1(self, x, level):
        if not isinstance(x, torch.Tensor):
            return super().repr1(x, level)
        # A nested tensor raises when it is asked for its shape.
        return "a nested tensor" if x.is_nested else f"a {x.dtype} tensor of shape {tuple(x.shape)}"


shown = _Shown().repr  # what an error says of a wrong argument


def reworded(error, text):
    """An error of the same type that says `text`. It is a new one, since Dynamo traces no assignment to error.args."""
    return type(error)(text)


# Subclasses with a __torch_dispatch__ that are served: those of tracing, and what collectives give, which waits where
# it is first used.
DISPATCHED = ("FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor")


def is_causal_bias(x):
    """Whether x is a CausalBias, whose memory holds nothing. Its module, which imports Dynamo, is not imported here."""
    return type(x) not in (torch.Tensor, torch.nn.Parameter, type(None)) and any(
        base.__module__ == "torch.nn.attention.bias" for base in type(x).__mro__)


def check_tensor(name, x):
    """TypeError unless x is a dense tensor whose memory is its value. So it is in subclasses that leave
    __torch_dispatch__ alone, as parameters do, but for CausalBias."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got {shown(x)}: torch.nested.to_padded_tensor makes it dense")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout}")
    if type(x) in (torch.Tensor, torch.nn.Parameter) or (
            type(x).__name__ in DISPATCHED and type(x).__module__.startswith("torch.")):
        return
    if is_causal_bias(x) or type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        instead = ": x.to_local() gives that of this rank" if type(x).__name__ == "DTensor" else ""
        raise TypeError(f"{name} must be a plain tensor, got {type(x).__name__}, a subclass whose memory is not its "
                        f"value{instead}")


def check_options(causal, sm_scale, name="sm_scale", *, deterministic=False):
    """TypeError unless causal and deterministic are bools and sm_scale, which the caller calls `name`, None or one real
    number; ValueError unless that is finite and at most MAX_SCALE in magnitude."""
    if isinstance(causal, torch.Tensor):
        raise TypeError(f"causal must be a bool, got {shown(causal)}; the fourth argument of flash_attention is "
                        "causal, and masks are called attn_bias there")
    for option, value in (("causal", causal), ("deterministic", deterministic)):
        if not isinstance(value, bool):
            raise TypeError(f"{option} must be a bool, got {shown(value)}")
    is_number = isinstance(sm_scale, (numbers.Real, torch.SymFloat)) and not isinstance(sm_scale, bool)
    is_scalar = isinstance(sm_scale, torch.Tensor) and sm_scale.numel() == 1 and not sm_scale.is_complex()
    if not (sm_scale is None or is_number or is_scalar):
        raise TypeError(f"{name} must be None or one real number, got {shown(sm_scale)}")
    if sm_scale is not None and not -MAX_SCALE <= sm_scale <= MAX_SCALE:
        raise ValueError(f"{name} must be finite and at most {MAX_SCALE:g} in magnitude, got {shown(sm_scale)}")


def check_dropout_p(dropout_p, name="dropout_p"):
    """dropout_p, which the caller calls `name`, as a float; TypeError unless it is a number, ValueError unless it is in
    [0, 1]."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real):
        raise TypeError(f"{name} must be a number, got {shown(dropout_p)}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {dropout_p}")
    return float(dropout_p)


def check_dropout_seed(dropout_seed, q, num_samples):
    """dropout_seed, or one that torch draws if it is None, on q's device so that a CUDA graph draws anew each time.

    TypeError for what is no dense int64 tensor, ValueError unless it is on q's device and of one element, or has behind
    it the four origins of each of so many samples. Those on the CPU are checked: a multiple of 16, one of 2, and all at
    least 0. A num_samples of None: no origins.
    """
    if dropout_seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    # Not a number: a CUDA graph would keep its value, and torch.compile would compile anew for each.
    wanted = f"dropout_seed must be one int64 in a tensor on q's device: torch.tensor([5], device='{q.device}')"
    if not isinstance(dropout_seed, torch.Tensor):
        raise TypeError(f"{wanted}, got {shown(dropout_seed)}")
    check_tensor("dropout_seed", dropout_seed)
    got = f"got {dropout_seed.dtype} of shape {tuple(dropout_seed.shape)} on {dropout_seed.device}"
    if dropout_seed.dtype != torch.int64:
        raise TypeError(f"{wanted}, {got}")
    sizes = (1,) if num_samples is None else (1, 1 + 4 * num_samples)
    is_of_size = is_known(dropout_seed.numel() == 1) or holds(dropout_seed.numel() == sizes[-1])
    if dropout_seed.device != q.device or not is_of_size:
        with_origins = f", or of shape ({sizes[1]},), with the four origins of each sample" if sizes[1:] else ""
        raise ValueError(f"{wanted}{with_origins}, {got}")
    if can_read(dropout_seed) and not dropout_seed.is_cuda and dropout_seed.numel() > 1:
        for row, key, head, sample in dropout_seed.reshape(-1)[1:].view(-1, 4).tolist():
            if row % 16 or key % 16 or min(row, key, head, sample) < 0:
                raise ValueError("the origins in dropout_seed are the first row and the first key, multiples of 16, "
                                 f"head and sample, all at least 0, got {[row, key, head, sample]}")
    return dropout_seed.contiguous()


def autocast(q, *others):
    """q and others, under torch.autocast in its dtype for q's device, as scaled_dot_product_attention gets them there.

    float64 and bool stay, as with torch; so does float8, whose values mean nothing without their descales, and all that
    the checks will refuse.
    """
    # is_meta: torch raises for devices that know no autocast.
    if not isinstance(q, torch.Tensor) or q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return q, *others
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in KERNEL_DTYPES
                 and not is_causal_bias(x) else x for x in (q, *others))


def check_alike(dtypes, **tensors):
    """TypeError unless these are dense tensors of one of the dtypes; ValueError unless they are on one device."""
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.dtype not in dtypes:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            is_fp8 = x.dtype in FP8_DTYPES
            elsewhere = "; flash_attention takes float8 with backend='triton' or 'reference'" if is_fp8 else ""
            raise TypeError(f"Unsupported dtype: {name} is {x.dtype}, allowed are {allowed}{elsewhere}")
    first, *others = tensors
    names = f"{', '.join([first, *others[:-1]])} and {others[-1]}"
    if any(tensors[name].dtype != tensors[first].dtype for name in others):
        raise TypeError("dtypes must match: " + ", ".join(f"{name} is {x.dtype}" for name, x in tensors.items()))
    if any(tensors[name].device != tensors[first].device for name in others):
        found = ", ".join(f"{name} on {tensors[name].device}" for name in others)
        raise ValueError(f"{names} must be on the same device: {first} is on {tensors[first].device}, {found}")


def check_heads(shapes, q, k, v, names=("q", "k", "v")):
    """ValueError unless the heads and head dimensions of three tensors fit together, of 4 dimensions or of 3, without
    heads. names is what the caller calls them, and shapes what an error says of them."""
    name_q, name_k, name_v = names
    for head_dim in (q.shape[-1], v.shape[-1]):
        if is_known(head_dim < 1) or is_over(head_dim, MAX_HEAD_DIM):
            raise ValueError(f"Unsupported head_dim {head_dim}: 1 to {MAX_HEAD_DIM} is supported")
    if not same_sizes(k.shape[:-1], v.shape[:-1]):
        raise ValueError(f"{name_k} and {name_v} must have the same shape, but for the head_dim of {name_v}: {shapes}")
    if not holds(q.shape[-1] == k.shape[-1]):
        raise ValueError(f"{name_q} and {name_k} must have the same head_dim: {shapes}")
    if q.ndim == 4 and (is_known(k.shape[1] == 0) or not holds(q.shape[1] % k.shape[1] == 0)):
        raise ValueError(f"the number of query heads must be a multiple of the number of key/value heads: {shapes}")


def check_qkv(q, k, v, dtypes):
    """Raise unless q (B, H, Sq, D) or (B·H, Sq, D), k and v (B, Hk, Sk, D) or (B·H, Sk, D) fit together.

    v may have another head_dim. TypeError for what is no dense tensor of an allowed dtype, ValueError for everything
    else.
    """
    check_alike(dtypes, q=q, k=k, v=v)
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
        raise ValueError(f"Expected 3D or 4D tensors, all alike: q has {q.ndim}, k {k.ndim}, v {v.ndim} dimensions")
    shapes = f"q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}"
    check_heads(shapes, q, k, v)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q, k and v must have the same batch size: {shapes}")
    check_sizes(q, k.shape[-2], shapes)


def check_sizes(q, seqlen_k, shapes):
    """ValueError unless kernels can count the heads, and the rows and keys of a sample together, in 32 bits."""
    if any(is_over(n, MAX_SEQLEN) for n in (*q.shape[1:-2], q.shape[-2] + seqlen_k)):
        raise ValueError(f"heads go up to {MAX_SEQLEN}, and so do rows and keys together: {shapes}")


def check_sinks(sinks, q, name="sinks"):
    """None, or sinks, which the caller calls `name`, in the dtype of sums and contiguous.

    TypeError for what is no dense tensor of a float dtype, ValueError unless it is (H,) on q's device.
    """
    if sinks is None:
        return None
    check_tensor(name, sinks)
    allowed = (torch.float64,) if q.dtype == torch.float64 else KERNEL_DTYPES
    if sinks.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"Unsupported dtype: {name} is {sinks.dtype}, allowed for q in {q.dtype} are {names}")
    shape = (q.shape[1] if q.ndim == 4 else 1,)
    if not same_sizes(sinks.shape, shape):
        raise ValueError(f"{name} must have shape {shape}, one for each query head, got {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise ValueError(f"{name} must be on the same device as q ({q.device}), got {sinks.device}")
    return sinks.to(sum_dtype(q.dtype)).contiguous()


def check_matmul(a, b, block_m, block_n, block_k):
    """Raise unless a (M, K) and b (K, N) can be multiplied, in tiles of the blocks that are not None.

    TypeError for what is no dense tensor of an allowed dtype, ValueError for everything else.
    """
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x)
        if x.dtype not in KERNEL_DTYPES:
            raise TypeError(f"Unsupported dtype: {name} is {x.dtype}, allowed are float32, float16, bfloat16")
    if a.dtype != b.dtype:
        raise TypeError(f"dtypes must match: a is {a.dtype}, b is {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"a and b must be on the same device: a is on {a.device}, b on {b.device}")
    if a.is_meta:
        raise ValueError("CUDA tensors required: a and b must hold values, and tensors on the device meta have none")
    if not a.ndim == b.ndim == 2:
        raise ValueError(f"Expected 2D tensors: a has {a.ndim}, b {b.ndim} dimensions")
    if not holds(a.shape[1] == b.shape[0]):
        raise ValueError(f"Incompatible dimensions: a is {tuple(a.shape)}, b is {tuple(b.shape)}, and a.shape[1] must "
                         "be b.shape[0]")
    if any(is_over(size, MAX_SIZE) for size in (*a.shape, *b.shape)):
        raise ValueError(f"sizes go up to {MAX_SIZE}: a is {tuple(a.shape)}, b is {tuple(b.shape)}")
    for name, block, size in (("block_m", block_m, a.shape[0]), ("block_n", block_n, b.shape[1]),
                              ("block_k", block_k, a.shape[1])):
        if block is None:
            continue
        if type(block) is not int or block < 16 or block & (block - 1):
            raise ValueError(f"{name} must be a power of two and at least 16, got {shown(block)}")
        limit = max(16, (size + 15) // 16 * 16)
        if block > limit:
            raise ValueError(f"{name} must not exceed {limit}, the dimension {size} rounded up to a multiple of 16, "
                             f"got {block}")
    if None not in (block_m, block_n, block_k):
        check_tile(a.dtype, block_m=block_m, block_n=block_n)
        check_tile(a.dtype, block_m=block_m, block_k=block_k)
        check_tile(a.dtype, block_n=block_n, block_k=block_k)


def check_tile(dtype, **blocks):
    """ValueError if a tile of two blocks is more than registers hold, and more than a compiler is done with in time."""
    (name1, block1), (name2, block2) = blocks.items()
    limit = MAX_TILE // (4 if dtype == torch.float32 else 1)
    if block1 * block2 > limit:
        raise ValueError(f"{name1} times {name2} must not exceed {limit} in {dtype}, got {block1} and {block2}")


def wants_gradient(x):
    """Whether x takes part in a graph for the backward pass."""
    return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


def is_transformed():
    """Whether a transform of torch.func, such as grad or vmap, is at work, while nothing traces."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def check_no_derivative(what, instead, forward_instead=None, *, has_backward=False, **tensors):
    """NotImplementedError if a caller wants a derivative that `what` does not have.

    instead: a function that has it. forward_instead: one that has it in forward mode, if that is another. has_backward:
    only the forward mode is missing.
    """
    for name, x in tensors.items():
        if wants_gradient(x) and not has_backward:
            raise NotImplementedError(f"{what} has no backward pass yet, but {name} requires grad: call it under "
                                      f"torch.no_grad(), or use {instead}")
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{what} has no forward-mode derivative, but {name} has a tangent: use "
                                      f"{forward_instead or instead}")


def check_fp8(q):
    """RuntimeError if q is fp8 and its GPU has no tensor cores for that."""
    if q.dtype in FP8_DTYPES and q.is_cuda and torch.version.cuda:
        if torch.cuda.get_device_capability(q.device) < (8, 9):
            raise RuntimeError(f"{q.dtype} needs a GPU with fp8 tensor cores, that is from compute capability 8.9 on; "
                               f"{torch.cuda.get_device_name(q.device)} has none")


def check_descales(descales, q, k, lengths):
    """The three of q, k and v, by their names, as contiguous tensors or None; each a float32 (B, Hk) on q's device.
    B is the number of samples in a packed batch too. lengths is checked.

    TypeError for what is none, ValueError for everything else, and for any with inputs that are not fp8.
    """
    for name, descale in descales.items():
        if descale is None:
            continue
        check_tensor(name, descale)
        if q.dtype not in FP8_DTYPES:
            raise ValueError(f"{name} is for float8 inputs, and q is {q.dtype}")
        if descale.dtype != torch.float32:
            raise TypeError(f"Unsupported dtype: {name} is {descale.dtype}, allowed is float32")
        batch_size = lengths.num_samples(q)
        shape = (batch_size, k.shape[1] if k.ndim == 4 else 1)
        if not same_sizes(descale.shape, shape):
            raise ValueError(f"{name} must have shape {shape}, (batch size, key/value heads), got "
                             f"{tuple(descale.shape)}")
        if descale.device != q.device:
            raise ValueError(f"{name} must be on the same device as q ({q.device}), got {descale.device}")
    return tuple(x if x is None else x.contiguous() for x in descales.values())
