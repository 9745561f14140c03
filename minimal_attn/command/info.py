"""The command `info`: GPU, versions, backends, kernels by input, and where builds are kept. It compiles nothing."""

import importlib.util
import platform
from pathlib import Path

import torch
from torch.utils import collect_env

from .. import _build
from ..attention import BACKENDS
from ..checks import FP8_DTYPES, KERNEL_DTYPES
from ..toolkit.gpu import print_gpu_info, supports_fp8
from ..toolkit.selector import get_attention_config

HEAD_DIMS = (64, 128, 256, 100)  # the last one is not a multiple of 8


def driver_version() -> str | None:
    """Version of NVIDIA's driver. None where there is no driver."""
    return collect_env.get_nvidia_driver_version(collect_env.run)


def triton_version() -> str | None:
    """None where Triton cannot be imported."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def library() -> Path | None:
    """The build of csrc that load() would take up, if there is one; it compiles what has changed since."""
    if prebuilt := importlib.util.find_spec(_build.PREBUILT):
        return Path(prebuilt.origin)
    if _build.WHEEL.exists():
        return _build.WHEEL
    jit = _build.build_directory() / f"{_build.NAME}.so"
    return jit if jit.exists() else None


def print_info() -> None:
    """Print all facts as plain text."""
    from .. import __version__

    print(f"minimal_attn:        {__version__}, in {_build.PACKAGE}")
    print(f"Versions:            Python {platform.python_version()}, torch {torch.__version__}, Triton "
          f"{triton_version() or 'none'}, CUDA {torch.version.cuda or 'none'}, driver {driver_version() or 'none'}\n")
    if not torch.cuda.is_available():
        print("GPU:                 none")
    for device_id in range(torch.cuda.device_count()):
        print_gpu_info(device_id)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("\nBackends")
    for name, backend in BACKENDS.items():
        print(f"  {name:<18} {backend.why_not(device) or 'ready'}")

    built = library()
    where = "GPU" if device.type == "cuda" else "CPU"
    print(f"\n{f'Tensors on the {where}':<20} " + "".join(f"{f'head_dim {d}':<14}" for d in HEAD_DIMS).rstrip())
    for dtype in KERNEL_DTYPES + FP8_DTYPES * supports_fp8():
        name = str(dtype).removeprefix("torch.")
        print(f"  {name:<18} " + "".join(f"{_serves(dtype, d, built):<14}" for d in HEAD_DIMS).rstrip())

    print("\nPlaces")
    print(f"  csrc               {built or f'{_build.build_directory()}, on first use'}")
    try:
        from triton_ref.autotune import cache_dir

        print(f"  Triton's choices   {cache_dir()}")
    except ImportError as error:
        print(f"  Triton's choices   none: {error}")


def _serves(dtype, head_dim, built):
    """Name of the backend that "auto" takes, with its kernel if that is known without a build."""
    if dtype in KERNEL_DTYPES and torch.cuda.is_available() and not built and _build.why_not(on_gpu=True) is None:
        return "cuda"
    config = get_attention_config(head_dim, dtype)
    return f"cuda:{config['kernel']}" if config["backend"] == "cuda" else config["backend"]
