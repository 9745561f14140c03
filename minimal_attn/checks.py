"""The checks of all arguments, made once, where a caller's arguments enter, so that all backends refuse alike.

NUMBERS and TENSORS have a row for each argument: what it may be. check_number and check_tensor_of compare an argument
with its row, and one function words each other kind of fault. Each error names the argument as its caller does (`names`
has what a caller calls our arguments, where that is another name), what was given and what is allowed. What is no dense
tensor or of a wrong type or dtype is a TypeError, and everything else a ValueError. Values of tensors are checked where
that needs no wait for a GPU. Kernels clamp all others to what there is.
"""

import itertools
import math
import numbers
import operator
import reprlib
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .options import Lengths, Options

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of csrc
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
TWIN_DTYPES = KERNEL_DTYPES + FP8_DTYPES  # of triton_ref
MAX_HEAD_DIM = 256
# Kernels count rows in 32 bits and round lengths up to whole tiles.
MAX_SEQLEN = 2**31 - 257
MAX_SIZE = 2**31 - 2**16
MAX_SPLITS = 256
NO_WINDOW = (-1, -1)
OWN = {}  # the names of a caller who calls all arguments as we do
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
    """x's shape and order of dimensions, the last one contiguous, to be written. x may overlap itself."""
    like = torch.empty_like(x, dtype=dtype)
    return like if is_known(like.stride(-1) == 1) else torch.empty(x.shape, dtype=like.dtype, device=x.device)


def empty_outputs(q, v):
    """out like q, with v's head_dim, in bfloat16 for fp8, and lse (B, H, Sq), in fp32 or fp64, to be written."""
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


def is_aligned(x):
    """Whether tensor cores can read x of 16 bits as it lies in memory. Its address is not known while torch traces."""
    return (all(holds(n % 8 == 0) for n in (x.shape[-1], *x.stride()[:-1]))
            and (is_compiling() or x.data_ptr() % 16 == 0))


def is_known(condition):
    """Whether a condition holds for all values that sizes may have while torch traces. No guard is made."""
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


def _may_be_symbol(x):  # to Dynamo, symbols are ints and bools
    return is_compiling() or type(x) is not bool and isinstance(x, (torch.SymBool, torch.SymInt))


def same_sizes(shape, other):
    """Whether two shapes are the same, where each size holds."""
    return len(shape) == len(other) and all(holds(m == n) for m, n in zip(shape, other))


def broadcasts(shape, other):
    """Whether a tensor of this shape broadcasts to the other one, which has no fewer dimensions."""
    return len(shape) <= len(other) and all(is_known(n == 1) or holds(n == size)
                                            for n, size in zip(shape[::-1], other[::-1]))


def is_over(size, limit):
    """Whether a size is over a limit. Under torch.export it must be sure to be, since export refuses new guards."""
    return is_known(size > limit) if torch.compiler.is_exporting() else not holds(size <= limit)


def is_eager(*tensors):
    """Whether nothing traces, transforms or watches operations on these tensors, or None, and they are what they seem:
    a kernel may then be launched without the dispatcher, whose Python operators take 15 µs and more."""
    return (not is_compiling() and not torch.jit.is_tracing()
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


_shown = _Shown()
_shown.maxother = 80  # a BlockMask or a class as a whole
shown = _shown.repr  # what an error says of a wrong argument


def dtype_names(dtypes):
    *names, last = (str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
    return f"{', '.join(names)} or {last}" if names else last


# Kinds of faults.

def check_is(name, x, is_it, words, error=ValueError):
    """The error unless x, which its caller calls `name`, is what the words say."""
    if not is_it:
        raise error(f"{name} must be {words}, got {shown(x)}")


def check_range(name, x, low, high=None, whose=""):
    """ValueError unless x is at least low and, where there is a high, at most that."""
    if not holds(x >= low) or high is not None and not holds(x <= high):
        ends = "..".join(f"{n:g}" if n in (MAX_SCALE, -MAX_SCALE) else str(n) for n in (low, high))
        allowed = f"at least {low}" if high is None else f"in {ends}"
        raise ValueError(f"{name} must be {allowed}{whose}, got {shown(x)}")


def check_shapes(fit, words, names=OWN, **tensors):
    """ValueError unless the shapes of these tensors fit together, as the words say."""
    if not fit:
        raise ValueError(f"{words}: " + ", ".join(f"{names.get(name, name)} is {tuple(x.shape)}"
                                                  for name, x in tensors.items()))


def check_layout(layout, names=OWN, sizes=OWN, **tensors):
    """TypeError unless these are dense tensors, ValueError unless they have this layout and these {dimension: size}."""
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.ndim != layout.count(",") + 1 or sizes and any(x.shape[dim] != size for dim, size in sizes.items()):
            function = f"{names['function']}: " if "function" in names else ""
            raise ValueError(f"{function}{name} must be {layout}, got {tuple(x.shape)}")


def check_apart(name, why="", **others):
    """ValueError if one of the others is given beside the argument of this name."""
    for other, x in others.items():
        if x is not None and (isinstance(x, torch.Tensor) or x != 0):
            raise ValueError(f"{name} cannot be given with {other}{why}")


def check_needs(needed, is_given, **others):
    """ValueError if one of the others is given without what it needs."""
    for other, x in others.items():
        if x is not None and not is_given:
            raise ValueError(f"{other} needs {needed}")


def check_both(**pair):
    """ValueError if one of a pair is given without the other one."""
    x, y = pair.values()
    if (x is None) != (y is None):
        raise ValueError(f"{' and '.join(pair)} must both be given, or neither")


# Numbers.

def _is_real(x):
    return isinstance(x, (numbers.Real, torch.SymFloat)) and not isinstance(x, bool)


def _is_scalar(x):
    return isinstance(x, torch.Tensor) and x.numel() == 1 and not x.is_complex()


class Number(NamedTuple):
    """The row of a number: what it must be in words, whether a value is that, and the smallest and largest one."""

    words: str
    is_it: callable
    low: int | None = None
    high: int | None = None


A_BOOL, A_SIZE = Number("a bool", lambda x: isinstance(x, bool)), Number("an int", is_int, 1)
LENGTH, BOUND = A_SIZE._replace(low=0), Number(  # a tensor is never read
    "None, an int or a tensor of one element", lambda x: x is None or is_int(x) or _is_scalar(x), 0)
NUMBERS = {
    **dict.fromkeys(("causal", "deterministic", "return_max_logits", "rotary_interleaved", "is_causal",
                     "enable_gqa"), A_BOOL),
    "sm_scale": Number("None or one real number", lambda x: x is None or _is_real(x) or _is_scalar(x), -MAX_SCALE,
                       MAX_SCALE),
    "dropout_p": Number("a number", _is_real, 0, 1),
    "softcap": Number("a number", _is_real, 0, MAX_SCALE),  # kernels keep it in fp32
    "num_splits": LENGTH._replace(high=MAX_SPLITS),  # 0 leaves it to the kernel
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), BOUND),
    **dict.fromkeys(("attention_chunk", "batch", "seqlen", "num_bits"), LENGTH),
    **dict.fromkeys(("block_size", "embed_dim", "num_heads", "num_heads_k", "B", "H", "Q_LEN", "KV_LEN"), A_SIZE),
}
OPTION_NUMBERS = [name for name in Options._fields if name in NUMBERS]


def check_number(name, x, names=OWN):
    """x, real numbers as a float, if its row in NUMBERS allows its type (else TypeError) and its value (ValueError)."""
    row = NUMBERS[name]
    if row.low == 0 and is_zero(x):
        return x
    called = names.get(name, name)
    if not row.is_it(x):
        instead = "; masks are called attn_bias" if name == "causal" and isinstance(x, torch.Tensor) else ""
        raise TypeError(f"{called} must be {row.words}, got {shown(x)}{instead}")
    if x is None or row.low is None or row is BOUND and isinstance(x, torch.Tensor):
        return x
    check_range(called, x, row.low, row.high)
    return x if is_int(x) else float(x)


def check_max_seqlens(max_seqlen_q, max_seqlen_k, names=OWN):
    """check_number of both, which plain ints need not be."""
    if is_compiling() or not (type(max_seqlen_q) is type(max_seqlen_k) is int and max_seqlen_q >= 0 <= max_seqlen_k):
        check_number("max_seqlen_q", max_seqlen_q, names)
        check_number("max_seqlen_k", max_seqlen_k, names)


def check_choice(what, x, choices):
    """ValueError unless x is one of the choices."""
    if x not in tuple(choices):  # a dict would not take a list as a key
        raise ValueError(f"unknown {what} {shown(x)}: one of {', '.join(map(repr, choices))}")
    return x


# Tensors.

# Subclasses with a __torch_dispatch__ that are served: those of tracing, and what collectives give until it is used.
DISPATCHED = ("FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor")


def is_causal_bias(x):
    """Whether x is a CausalBias, whose memory holds nothing. Its module, which imports Dynamo, is not imported here."""
    return type(x) not in (torch.Tensor, torch.nn.Parameter, type(None)) and any(
        base.__module__ == "torch.nn.attention.bias" for base in type(x).__mro__)


def check_tensor(name, x):
    """TypeError unless x is a dense tensor whose memory is its value. So it is in subclasses that leave
    __torch_dispatch__ alone, as parameters do, but for CausalBias."""
    kind = type(x)
    if not isinstance(x, torch.Tensor):
        wrong = f"a torch.Tensor, got {kind.__name__}"
    elif x.is_nested or x.layout != torch.strided:
        got = f"{shown(x)}: torch.nested.to_padded_tensor makes it dense" if x.is_nested else x.layout
        wrong = f"a dense tensor, got {got}"
    elif kind in (torch.Tensor, torch.nn.Parameter) or (
            kind.__name__ in DISPATCHED and kind.__module__.startswith("torch.")):
        return
    elif is_causal_bias(x) or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        instead = ": x.to_local() gives that of this rank" if kind.__name__ == "DTensor" else ""
        wrong = f"a plain tensor, got {kind.__name__}, a subclass whose memory is not its value{instead}"
    else:
        return
    raise TypeError(f"{name} must be {wrong}")


class Rule(NamedTuple):
    """The row of a tensor: its dtypes, its shapes in letters, and how it lies in memory. A letter that a call gives a
    size for has that size, any other has any. Without dtypes or shapes, the call says what is allowed."""

    dtypes: tuple = ()
    shapes: tuple = ()
    strides: str = ""


CONTIGUOUS, ROWS = ", contiguous", ", its last dimension contiguous"
PER_SAMPLE, BOUNDS = (Rule((torch.int32,), (x,), CONTIGUOUS) for x in (("B",), ("B + 1",)))
DESCALE, ROTARY = Rule((torch.float32,), (("B", "Hk"),)), Rule((), (("S_ro", "rotary_dim / 2"),), CONTIGUOUS)
MASK = Rule((torch.bool, torch.int64, torch.int32, torch.uint8), (("B", "S"),))
TENSORS = {
    **dict.fromkeys(("seqused_q", "seqused_k", "leftpad_k", "cache_batch_idx", "rotary_seqlens"), PER_SAMPLE),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new"), BOUNDS),
    "seq_lens": Rule((torch.int32, torch.int64), (("B",),)),
    "page_table": Rule((torch.int32,), (("B", "max_pages"),), ROWS),
    "sinks": Rule((), (("H",),)),
    "alibi_slopes": Rule((torch.float32,), (("H",), ("B", "H"))),
    **dict.fromkeys(("attn_bias", "tree_mask", "lse_partial"), Rule()),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), DESCALE),
    **dict.fromkeys(("rotary_cos", "rotary_sin"), ROTARY),
    **dict.fromkeys(("attention_mask", "unused_mask", "key_padding_mask"), MASK),
    "dropout_seed": Rule((torch.int64,), (("1 or 1 + 4 B",),)),
    "cu_seqlens": Rule((torch.int32,), (("N + 1",),)),  # of context parallelism
    "tokens": Rule((torch.int64,), (("B", "S"),)),
    "slot_mapping": Rule((torch.int64,), (("T",),), CONTIGUOUS),
    "indices": Rule((torch.int64,)),
    "units": Rule((torch.int32,)), "bits": Rule((torch.int32,), (("P", 2, 128),)),  # of a BlockMask
    "mask": Rule((torch.bool,), (("Sq", "Sk"), ("H", "Sq", "Sk"), ("B", "H", "Sq", "Sk"))),
    "blocks": Rule((torch.bool,), (("B or 1", "H or 1", "rows", "columns"),)),
}


def _has_shape(shape, letters, sizes):
    return len(shape) == len(letters) and all(isinstance(n := sizes.get(x, x), str) or holds(size == n)
                                              for size, x in zip(shape, letters))


def _lies(x, strides):
    if strides == ROWS:
        return is_known(x.shape[-1] <= 1) or holds(x.stride(-1) == 1)
    return not strides or x.is_contiguous()


def _shape_text(letters, sizes):
    """(B, H) = (2, 4), as an error shows a shape."""
    texts = ["(" + ", ".join(map(str, shape)) + ",)"[len(shape) > 1:]
             for shape in (letters, [sizes.get(x, x) for x in letters])]
    return " = ".join(dict.fromkeys(texts))


def check_tensor_of(name, x, device, sizes=OWN, names=OWN, *, dtypes=None, shapes=None):
    """TypeError unless x is a dense tensor with a dtype of its row in TENSORS, ValueError unless it is on the device,
    of one of the shapes and as contiguous. sizes: of the letters. dtypes, shapes (also of numbers): for the row's."""
    rule, called = TENSORS[name], names.get(name, name)
    check_tensor(called, x)
    dtypes, shapes = dtypes or rule.dtypes, shapes or rule.shapes
    is_of_dtype = x.dtype in dtypes
    if (is_of_dtype and x.device == device and _lies(x, rule.strides)
            and (not shapes or any(_has_shape(x.shape, shape, sizes) for shape in shapes))):
        return
    of_shape = f" of shape {' or '.join(_shape_text(shape, sizes) for shape in shapes)}" if shapes else ""
    strides = f" with strides {x.stride()}" if rule.strides else ""
    raise (ValueError if is_of_dtype else TypeError)(
        f"{called} must be {dtype_names(dtypes)}{of_shape}{rule.strides}, on {device}, got {shown(x)}{strides} on "
        f"{x.device}")


def check_alike(dtypes, names=OWN, **tensors):
    """TypeError unless these are dense tensors of one dtype of dtypes; ValueError unless they are on one device."""
    first, x = next(iter(tensors.items()))
    for name, y in tensors.items():
        check_tensor(names.get(name, name), y)
    for name, y in tensors.items():
        if y.dtype != x.dtype:
            raise TypeError("dtypes must match: " + ", ".join(
                f"{names.get(name, name)} is {y.dtype}" for name, y in tensors.items()))
    if dtypes is not None:
        check_dtype(x, dtypes, names.get(first, first))
    for name, y in tensors.items():
        if y.device != x.device:
            raise ValueError("tensors must be on the same device: " + ", ".join(
                f"{names.get(name, name)} is on {y.device}" for name, y in tensors.items()))


def check_dtype(x, dtypes, name="q"):
    """TypeError unless x has one of the dtypes."""
    if x.dtype not in dtypes:
        elsewhere = "; flash_attention takes float8 with backend='triton' or 'reference'"
        raise TypeError(f"Unsupported dtype: {name} is {x.dtype}, allowed is {dtype_names(dtypes)}"
                        f"{elsewhere if x.dtype in FP8_DTYPES else ''}")


# Queries, keys and values.

def autocast(q, *others):
    """q and others, under torch.autocast in its dtype for q's device, as scaled_dot_product_attention gets them there.
    float64 and bool stay, as with torch; so does float8, whose values mean nothing without their descales."""
    # is_meta: torch raises for devices that know no autocast.
    if not isinstance(q, torch.Tensor) or q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return q, *others
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in KERNEL_DTYPES
                 and not is_causal_bias(x) else x for x in (q, *others))


def check_head_dim(head_dim, of=""):
    """ValueError unless kernels take this head_dim. of: whose it is."""
    if is_known(head_dim < 1) or is_over(head_dim, MAX_HEAD_DIM):
        raise ValueError(f"Unsupported head_dim {head_dim}{of}: 1 to {MAX_HEAD_DIM} is supported")


def check_fit(tensors, names=OWN, is_cached=False):
    """ValueError unless the shapes of q, k and v, {name: x}, fit together. A cache is 4D, with samples of its own."""
    q, k, v = tensors.values()
    if not q.ndim == k.ndim == v.ndim or q.ndim != 4 and (is_cached or q.ndim != 3):
        fault = "Expected 4D tensors" if is_cached else "Expected 3D or 4D tensors, all alike"
    elif not same_sizes(k.shape[:-1], v.shape[:-1]):
        fault = "{k} and {v} must have the same shape, but for the head_dim of {v}"
    elif not holds(q.shape[-1] == k.shape[-1]):
        fault = "{q} and {k} must have the same head_dim"
    elif q.ndim == 4 and (is_known(k.shape[1] == 0) or not holds(q.shape[1] % k.shape[1] == 0)):
        fault = "the number of query heads must be a multiple of the number of key/value heads"
    elif not is_cached and q.shape[0] != k.shape[0]:
        fault = "{q}, {k} and {v} must have the same batch size"
    else:
        check_head_dim(q.shape[-1])
        return check_head_dim(v.shape[-1])
    called = dict(zip("qkv", (names.get(name, name) for name in tensors)))
    check_shapes(False, fault.format(**called), names, **tensors)


def check_qkv(q, k, v, dtypes=None, names=OWN):
    """Raise unless q (B, H, Sq, D) or (B·H, Sq, D), k and v (B, Hk, Sk, D) or (B·H, Sk, D) fit together; v may have
    another head_dim. dtypes: None where check_dtype follows."""
    given = {"q": q, "k": k, "v": v}
    check_alike(dtypes, names, **given)
    check_fit(given, names)
    check_sizes(q, k.shape[-2])


def check_sizes(q, seqlen_k):
    """ValueError unless kernels can count the heads, and the rows and keys of a sample together, in 32 bits."""
    if any(is_over(n, MAX_SEQLEN) for n in (*q.shape[1:-2], q.shape[-2] + seqlen_k)):
        check_shapes(False, f"with {seqlen_k} keys, heads go up to {MAX_SEQLEN}, and so do rows and keys together", q=q)


# Windows and lengths.

def check_window_size(window_size):
    """window_size as a tuple of two ints. It may be a tuple or list of ints or Nones, an array or a tensor of ints."""
    pair = window_size
    if isinstance(pair, torch.Tensor):
        check_tensor("window_size", pair)
    if hasattr(pair, "tolist") and not getattr(pair, "is_meta", False):  # an array of numpy has it too
        pair = pair.tolist()
    pair = pair if isinstance(pair, (tuple, list)) else ()
    sides = [-1 if x is None else x.tolist() if isinstance(x, torch.Tensor) else x for x in pair]
    check_is("window_size", window_size, len(sides) == 2 and all(map(is_int, sides)),
             "a pair of ints, (left, right)", TypeError)
    left, right = sides
    check_is("window_size", window_size, left >= -1 <= right, "at least -1 on both sides, and -1 is no bound")
    return min(operator.index(left), MAX_SEQLEN), min(operator.index(right), MAX_SEQLEN)


def check_lengths(lengths, seq_lens, q, k, names=OWN):
    """lengths, or those that seq_lens means, if they fit q and k, which are checked."""
    if seq_lens is not None:
        check_apart("seq_lens", **lengths._asdict())
        seq_lens = check_seq_lens(seq_lens, q, k)
        return Lengths(seqused_q=seq_lens, seqused_k=seq_lens)
    if not lengths.are_given:
        return lengths
    check_both(cu_seqlens_q=lengths.cu_seqlens_q, cu_seqlens_k=lengths.cu_seqlens_k)
    check_shapes(q.ndim == 4 or not lengths.is_packed, "with cu_seqlens_q, q, k and v must be packed, (1, H, T, D)",
                 q=q)
    check_samples(lengths, q, k.shape[-2], names)
    return lengths


def check_samples(lengths, q, total_k, names=OWN):
    """Raise unless lengths fit q and total_k: the keys of each sample, or of all together in a packed batch."""
    if lengths.is_packed:
        name, bounds = names.get("cu_seqlens_q", "cu_seqlens_q"), lengths.cu_seqlens_q
        check_tensor_of("cu_seqlens_q", bounds, q.device, names=names)
        check_is(name, bounds, holds(bounds.shape[0] >= 2), "of shape (B + 1,), with B at least 1")
        if not holds(q.shape[0] == 1):
            check_shapes(False, f"with {name}, {names.get('q', 'q')} must be packed, with all samples one after the "
                         "other and a batch size of 1", names, q=q)
    sizes = {"B": lengths.num_samples(q), "B + 1": lengths.num_samples(q) + 1}
    for name, x in zip(Lengths._fields[1:], lengths[1:]):
        if x is not None:
            check_tensor_of(name, x, q.device, sizes, names)
    if not q.is_cuda and all(x is None or can_read(x) for x in lengths):
        _check_values(*(x if x is None else x.tolist() for x in lengths), q.shape[-2], total_k, names)


def _check_values(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, total_q, total_k, names):
    """ValueError unless the lists, or None, say what lies within total_q rows and total_k keys."""
    for side, bounds, used, total in (("q", cu_seqlens_q, seqused_q, total_q), ("k", cu_seqlens_k, seqused_k, total_k)):
        rooms = [total] * len(used or ())
        if bounds is not None:
            shares_keys, name = side == "k" and used is not None, f"cu_seqlens_{side}"
            if bounds[0] != 0 or not 0 <= min(bounds) <= max(bounds) <= total or (
                    not shares_keys and bounds != sorted(bounds)):
                raise ValueError(f"{names.get(name, name)} must start at 0, ascend and stay within 0..{total}, got "
                                 f"{shown(bounds)}")
            ends = [total] * len(bounds) if shares_keys else bounds[1:]
            rooms = [end - begin for begin, end in zip(bounds, ends)]
        for b, (length, room) in enumerate(zip(used or (), rooms)):
            check_index(f"seqused_{side}", length, room + 1, f"sample {b}", names)


def check_index(name, x, size, whose, names=OWN):
    """ValueError unless x, a value for a sample in the tensor of this name, is in 0..size - 1."""
    if not 0 <= x < size:
        check_range(names.get(name, name), x, 0, size - 1, f" for {whose}")


def check_seq_lens(seq_lens, q, k):
    """seq_lens as an int32 tensor of shape (q.shape[0],) on q's device, if it fits q and k."""
    seqlen = q.shape[-2]
    check_shapes(holds(seqlen == k.shape[-2]), "seq_lens needs equal lengths of q and k", q=q, k=k)

    def check_lengths_in(lengths):
        if any(n <= 0 or not holds(n <= seqlen) for n in lengths):
            raise ValueError(f"seq_lens must be in 1..{seqlen}, got values from {min(lengths)} to {max(lengths)}")

    is_tensor = isinstance(seq_lens, torch.Tensor)
    if not is_tensor:
        try:
            lengths = [operator.index(n) for n in seq_lens]
        except TypeError:
            raise TypeError("seq_lens must be integers, in a list or an int32 or int64 tensor, got "
                            f"{shown(seq_lens)}") from None
        check_lengths_in(lengths)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    device = seq_lens.device if seq_lens.device.type == "cpu" else q.device
    check_tensor_of("seq_lens", seq_lens, device, {"B": 1 if q.ndim == 3 else q.shape[0]})
    if q.is_cuda and is_eager(q) and torch.cuda.is_current_stream_capturing():
        if not seq_lens.is_cuda:
            raise ValueError("seq_lens on the CPU cannot be copied while a CUDA graph is captured: pass a GPU tensor")
    elif is_tensor and can_read(seq_lens) and seq_lens.numel():
        check_lengths_in(torch.stack(seq_lens.aminmax()).tolist())
    # Outside 0..2^31 only where the values could not be read: keep the wrap to 32 bits from making such a value valid.
    seq_lens = seq_lens.clamp(0, seqlen).to(device=q.device, dtype=torch.int32)
    return seq_lens.expand(q.shape[0]).contiguous()


# Options.

def is_top_left(causal_bias, q, k, name="attn_bias"):
    """Whether this CausalBias of torch, which the caller calls `name`, aligns its mask top-left, and not bottom-right.
    ValueError unless it is for the rows of q and the keys of k."""
    shape = causal_bias.seq_len_q, causal_bias.seq_len_kv
    check_is(name, shape, same_sizes(shape, (q.shape[-2], k.shape[-2])),
             f"for {q.shape[-2]} rows and {k.shape[-2]} keys")
    return causal_bias.variant.name == "UPPER_LEFT"


def check_attn_bias(attn_bias, q, k, lengths, name="attn_bias"):
    """None, or attn_bias, which the caller calls `name`, as a view that broadcasts to (B, H, Sq, Sk), of 3D inputs to
    (B·H, 1, Sq, Sk). A CausalBias becomes the mask that it means. ValueError for any with packed batches and fp8."""
    if attn_bias is None:
        return None
    check_apart(name, ": samples of a packed batch have no rows and keys in common", cu_seqlens=lengths.cu_seqlens_q)
    if q.dtype in FP8_DTYPES:
        raise ValueError(f"{name} cannot be given with float8 inputs, and q is {q.dtype}")
    if is_causal_bias(attn_bias):
        diagonal = 0 if is_top_left(attn_bias, q, k, name) else k.shape[-2] - q.shape[-2]
        attn_bias = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(diagonal)
    allowed = (torch.bool, q.dtype, torch.float32) if q.dtype in KERNEL_DTYPES else (torch.bool, q.dtype)
    check_tensor_of("attn_bias", attn_bias, q.device, names={"attn_bias": name}, dtypes=allowed)
    shape = *q.shape[:-1], k.shape[-2]
    check_is(name, attn_bias, attn_bias.ndim > 0 and broadcasts(attn_bias.shape, shape),
             f"of 1 to {len(shape)} dimensions that broadcast to {shape}, (batch size, heads, rows, keys)")
    attn_bias = attn_bias[(None,) * (len(shape) - attn_bias.ndim)]
    return attn_bias if q.ndim == 4 else attn_bias.unsqueeze(1)


def check_dropout_seed(dropout_seed, q, num_samples):
    """dropout_seed, or one that torch draws if it is None, on q's device so that a CUDA graph draws anew each time.
    ValueError unless it has one element, or behind it the four origins of each of num_samples (None: no origins)."""
    if dropout_seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    # Not a number: a CUDA graph would keep its value, and torch.compile would compile anew for each.
    check_tensor("dropout_seed", dropout_seed)
    is_one = num_samples is None or is_known(dropout_seed.numel() == 1)
    check_tensor_of("dropout_seed", dropout_seed.reshape(-1), q.device,
                    {"1 or 1 + 4 B": 1 if is_one else 1 + 4 * num_samples})
    if can_read(dropout_seed) and not dropout_seed.is_cuda and dropout_seed.numel() > 1:
        for origin in dropout_seed.reshape(-1)[1:].view(-1, 4).tolist():
            check_is("each origin in dropout_seed", origin, min(origin) >= 0 == origin[0] % 16 == origin[1] % 16,
                     "the first row and the first key, multiples of 16, head and sample, all at least 0")
    return dropout_seed.contiguous()


def checked_options(given, q, k, causal, window_size, seq_lens=None, names=OWN, is_whole=True):
    """The Options of a call, of those that its caller gave, which are of any type and have no window yet. q and k are
    checked, and so are lengths if not is_whole, when k is a cache."""
    check_number("causal", causal)
    for name in OPTION_NUMBERS:
        check_number(name, getattr(given, name))
    scale = given.softmax_scale
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(check_number("sm_scale", scale, names))
    lengths = check_lengths(given.lengths, seq_lens, q, k, names) if is_whole else given.lengths
    given = given if seq_lens is None else given.with_lengths(lengths)
    left, right = check_window_size(window_size)
    right, bias = 0 if causal else right, given.attn_bias
    if not lengths.are_given:
        if is_whole:  # kernels may be faster without a bound, and these hide nothing
            left = -1 if left >= 0 and is_known(left >= k.shape[-2] - 1) else left
            right = -1 if right > 0 and is_known(right >= q.shape[-2] - 1) else right
        if is_causal_bias(bias):  # a part of the window, unless lengths move it or its bound would be negative
            bound = q.shape[-2] - k.shape[-2] if is_top_left(bias, q, k) else 0  # beyond the bottom-right diagonal
            if bound >= 0:
                right, bias = bound if right < 0 else min(right, bound), None
    dropout_p, softcap = (0.0 if is_zero(x) else float(x) for x in (given.dropout_p, given.softcap))
    # One chunk of all keys hides nothing more than a causal mask.
    is_one_chunk = is_whole and right == 0 and is_known(given.attention_chunk >= k.shape[-2])
    if softcap:  # no global name for 1e-30: torch.compile(dynamic=True) would make a symbol of it
        check_is("softcap", softcap, softcap >= 1e-30, "0 or at least 1e-30, by which kernels divide")

    def tensor(name, dtypes=None):
        """The tensor of this name in given, which fits its row in TENSORS, contiguous; or None."""
        if (x := getattr(given, name)) is None:
            return None
        heads, heads_k = (q.shape[1], k.shape[1]) if q.ndim == 4 else (1, 1)
        sizes = {"B": lengths.num_samples(q), "H": heads, "Hk": heads_k}
        check_tensor_of(name, x, q.device, sizes, names, dtypes=dtypes)
        return x.contiguous()

    if given.score_mod is not None:
        check_is("score_mod", given.score_mod, callable(given.score_mod),
                 "a function of score, b, h, q_idx and kv_idx, or None", TypeError)
        check_apart("score_mod", ": write it into the function", softcap=given.softcap,
                    alibi_slopes=given.alibi_slopes, attn_bias=given.attn_bias)
    sinks = tensor("sinks", (torch.float64,) if q.dtype == torch.float64 else KERNEL_DTYPES)
    if wants_gradient(given.alibi_slopes):
        raise ValueError("alibi_slopes has no gradient, but requires grad: pass alibi_slopes.detach()")
    if not (given.q_descale is given.k_descale is given.v_descale is None) and q.dtype not in FP8_DTYPES:
        raise ValueError(f"q_descale, k_descale and v_descale are for float8 inputs, and q is {q.dtype}")
    return given._replace(
        softmax_scale=scale, softcap=softcap, window_left=left, window_right=right,
        attention_chunk=0 if is_one_chunk else min(operator.index(given.attention_chunk), MAX_SEQLEN),
        sinks=sinks if sinks is None else sinks.to(sum_dtype(q.dtype)), attn_bias=check_attn_bias(bias, q, k, lengths),
        dropout_p=dropout_p,
        dropout_seed=check_dropout_seed(given.dropout_seed, q, lengths.num_samples(q)) if dropout_p else None,
        alibi_slopes=tensor("alibi_slopes"), q_descale=tensor("q_descale"), k_descale=tensor("k_descale"),
        v_descale=tensor("v_descale"))


def is_zero(x):
    """Whether x is a plain 0, which needs no check, unlike False. Defaults are ints, since torch.compile(dynamic=True)
    makes symbols of floats and then compiles twice."""
    return (type(x) is float or type(x) is int) and x == 0


def wants_gradient(x):
    """Whether x takes part in a graph for the backward pass."""
    return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


def is_transformed():
    """Whether a transform of torch.func, such as grad or vmap, is at work, while nothing traces."""
    return not is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def check_no_derivative(what, instead, forward_instead=None, *, has_backward=False, **tensors):
    """NotImplementedError if a caller wants a derivative that `what` does not have; with has_backward, only the forward
    mode is missing. instead: what has it. forward_instead: what has it in forward mode, if that is something else."""
    for name, x in tensors.items():
        if wants_gradient(x) and not has_backward:
            raise NotImplementedError(f"{what} has no backward pass yet, but {name} requires grad: call it under "
                                      f"torch.no_grad(), or use {instead}")
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{what} has no forward-mode derivative, but {name} has a tangent: use "
                                      f"{forward_instead or instead}")


def check_fp8(q):
    """RuntimeError if q is fp8 and its GPU has no tensor cores for that."""
    if (q.dtype in FP8_DTYPES and q.is_cuda and torch.version.cuda
            and torch.cuda.get_device_capability(q.device) < (8, 9)):
        raise RuntimeError(f"{q.dtype} needs a GPU with fp8 tensor cores, that is from compute capability 8.9 on; "
                           f"{torch.cuda.get_device_name(q.device)} has none")


# Matrices.

def check_matmul(a, b, block_m, block_n, block_k):
    """Raise unless a (M, K) and b (K, N) can be multiplied, in tiles of the blocks that are not None."""
    check_alike(KERNEL_DTYPES, a=a, b=b)
    if a.is_meta:
        raise ValueError("CUDA tensors required: a and b must hold values, and tensors on the device meta have none")
    check_shapes(a.ndim == b.ndim == 2 and holds(a.shape[1] == b.shape[0]),
                 "a and b must be 2D, and a.shape[1] must be b.shape[0]", a=a, b=b)
    check_shapes(not any(is_over(size, MAX_SIZE) for size in (*a.shape, *b.shape)), f"sizes go up to {MAX_SIZE}", a=a,
                 b=b)
    blocks = {"block_m": (block_m, a.shape[0]), "block_n": (block_n, b.shape[1]), "block_k": (block_k, a.shape[1])}
    for name, (block, size) in blocks.items():
        if block is None:
            continue
        limit = max(16, (size + 15) // 16 * 16)
        check_is(name, block, type(block) is int and 16 <= block <= limit and not block & (block - 1),
                 f"a power of two from 16 to {limit}, the dimension {size} rounded up to a multiple of 16")
    if None not in (block_m, block_n, block_k):
        check_tile(a.dtype, block_m=block_m, block_n=block_n, block_k=block_k)


def check_tile(dtype, **blocks):
    """ValueError if a tile of two of the blocks is more than registers hold, and than a compiler does in time."""
    limit = MAX_TILE // (4 if dtype == torch.float32 else 1)
    for (name1, block1), (name2, block2) in itertools.combinations(blocks.items(), 2):
        if block1 * block2 > limit:
            raise ValueError(f"{name1} times {name2} must not exceed {limit} in {dtype}, got {block1} and {block2}")
