"""The library of the wheel: csrc by torch's stable ABI, for many versions of torch, of Python and of GPUs in one file.

Library has what the module of csrc/main.cpp has, so that backends/cuda.py need not know which one it calls. The fast
path and the derivative need more of torch than its stable ABI has, and so are in Python here.
"""

import ctypes
import functools
import math
import platform
import re

import torch
from torch.autograd import forward_ad

from .backends import ops
from .checks import KERNEL_DTYPES, is_aligned, is_eager, is_zero, wants_gradient
from .options import OF_OP, Lengths, Options

TORCH, NEXT_TORCH = (2, 11), (3, 0)  # from which version on, and which one may break the stable ABI
CUDA = "13"
CAPABILITY = (7, 5)  # of the oldest GPU with kernels in the wheel; the driver compiles PTX for those after Hopper
FROM_SOURCES = "install the sources, to be compiled here (pip install --no-build-isolation . in a clone)"


@functools.cache
def why_not(on_gpu=False):
    """Why the wheel cannot serve tensors of the CPU, or of a GPU, in one line that says what to install, or None. Asked
    before the library is loaded, which would end in a missing symbol."""
    version = tuple(map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups()))
    if not TORCH <= version < NEXT_TORCH:
        return f"the wheel of minimal_attn is for torch 2.11 or a newer 2.x, and this is torch {torch.__version__}: " \
            "pip install 'torch>=2.11,<3'"
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return f"the wheel of minimal_attn is for processors with AVX2, and torch finds none here: {FROM_SOURCES}"
    if not on_gpu:
        return None
    if not torch.version.cuda:
        return f"torch {torch.__version__} is a build without CUDA: install a torch for CUDA {CUDA}"
    if torch.version.cuda.split(".")[0] != CUDA:
        return f"the wheel of minimal_attn is for CUDA {CUDA}, and torch {torch.__version__} for CUDA " \
            f"{torch.version.cuda}: install a torch for CUDA {CUDA}, or {FROM_SOURCES}"
    gpus = {torch.cuda.get_device_capability(i): torch.cuda.get_device_name(i)
            for i in range(torch.cuda.device_count())}
    if gpus and max(gpus) < CAPABILITY:
        major, minor = max(gpus)
        return f"minimal_attn needs a GPU of compute capability 7.5 or newer, and the {gpus[major, minor]} has " \
            f"{major}.{minor}: use backend='torch'"
    return None


class Library:
    """The library in `file`, and the ops that it registers."""

    def __init__(self, file):
        self.__file__ = str(file)
        torch.ops.load_library(self.__file__)
        functions = ctypes.PyDLL(self.__file__)  # with the GIL held: they take less time than to let it go
        for name in ("slow_because", "csrc_digest"):
            getattr(functions, f"minimal_attn_{name}").restype = ctypes.c_char_p
        self._slow_because = functions.minimal_attn_slow_because
        self.csrc_digest = functions.minimal_attn_csrc_digest().decode()
        self.has_cuda = bool(functions.minimal_attn_has_cuda())
        self.torch_version = "{}.{}".format(*TORCH)  # the oldest
        self.force_kernel = torch.ops.minimal_attn.force_kernel

    def _with_reason(self, output):
        reason = self._slow_because()
        return *output, reason and reason.decode()

    def flash_forward(self, *inputs):
        """(out, lse, max_logits, why a call in 16 bits does without tensor cores, or None), without autograd."""
        return self._with_reason(_below_autograd(torch.ops.minimal_attn.flash_forward.default, *inputs))

    def differentiable_forward(self, *inputs):
        """flash_forward with its derivative, without torch.library's."""
        return self._with_reason(FlashAttention.apply(*inputs))

    def fast_forward(self, q, k, v, given, causal, window_size, seq_major):
        """As fast_forward of csrc/binding/fast_path.cpp: out, (out, lse), or None if the call is unusual or wrong."""
        is_packed = given.lengths.is_packed
        if not (is_everyday(q, k, v, given, causal, window_size) and (not seq_major or is_packed == (q.ndim == 3))):
            return None
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if needs_grad and given.lengths.may_share_keys:  # packed.py gives samples keys of their own
            return None
        attend = self.differentiable_forward if needs_grad else self.flash_forward
        scale = 1 / math.sqrt(q.shape[-1]) if given.softmax_scale is None else given.softmax_scale
        left, right = (-1 if side is None else side for side in window_size)
        options = given._replace(softmax_scale=scale, window_left=left, window_right=0 if causal else right,
                                 dropout_seed=None)
        if seq_major:
            q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        if seq_major and is_packed:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        try:
            out, lse, *_ = attend(q, k, v, *options[:OF_OP + 1])
        except ValueError:  # the checks in Python say it in the words of the caller
            return None
        if seq_major and is_packed:
            out, lse = out.squeeze(0), lse.squeeze(0)
        out = out.transpose(-3, -2) if seq_major else out
        return (out, lse) if given.return_lse else out

    def which_kernel(self, *inputs):
        """Calls which_kernel of csrc/ops/ops.cpp. None for tensors without memory of their own, such as vmap's."""
        functorch = torch._C._functorch
        if any(functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)
               for x in inputs if isinstance(x, torch.Tensor)):
            return None
        return torch.ops.minimal_attn.which_kernel(*inputs)


# An everyday call leaves all options but these as they are by default.
EVERYDAY = (*Lengths._fields, "sinks", "softmax_scale", "dropout_seed", "deterministic", "autotune", "return_lse")
DEFAULTS = {name: default for name, default in Options._field_defaults.items() if name not in EVERYDAY}


def is_everyday(q, k, v, given, causal, window_size):
    """Whether a call needs nothing but a kernel's launch. The op checks the rest."""
    inputs, softmax_scale = (q, k, v), given.softmax_scale
    return (isinstance(q, torch.Tensor) and q.is_cuda and is_eager(*inputs) and forward_ad._current_level < 0
            and all(not x.is_nested and x.ndim >= 3 and x.stride(-1) == 1 and x.numel() for x in inputs)
            and q.dtype in KERNEL_DTYPES and (q.dtype == torch.float32 or all(map(is_aligned, inputs)))
            and not (torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != q.dtype)
            and isinstance(causal, bool) and (softmax_scale is None or type(softmax_scale) is float)
            and type(window_size) in (tuple, list) and len(window_size) == 2
            and all(side is None or type(side) is int and side >= -1 for side in window_size)
            and all(x is None or is_eager(x) and not wants_gradient(x) for x in given[:5])  # lengths and sinks
            and all((x := getattr(given, name)) is default or is_zero(x) and is_zero(default)
                    for name, default in DEFAULTS.items())
            and isinstance(given.deterministic, bool))


def _below_autograd(op, *inputs):
    """op for tensors that nothing watches: torch.library's kernel for autograd takes 10 µs and more."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*inputs)


def backward(*inputs):
    """Calls the op flash_backward, and makes it deterministic under torch.use_deterministic_algorithms."""
    *others, deterministic, need_dq, need_dkv, need_dsinks, need_dbias = inputs
    op = torch.ops.minimal_attn.flash_backward.default
    inputs = (*others, deterministic or torch.are_deterministic_algorithms_enabled(), need_dq, need_dkv, need_dsinks,
              need_dbias)
    # In grad mode a second derivative may follow, which ops.py refuses.
    return op(*inputs) if torch.is_grad_enabled() or not is_eager(*others[:5]) else _below_autograd(op, *inputs)


class FlashAttention(torch.autograd.Function):
    """flash_forward with its derivative. torch shows the name of this class in errors and profiles."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _below_autograd(torch.ops.minimal_attn.flash_forward.default, *inputs)
        ops.save(ctx, inputs, output)
        return output

    backward = staticmethod(ops.backward_of(backward, "cuda"))
