"""A run of the benchmark for a newcomer: is every implementation right on this machine, and is ours fast?"""

import torch

from .. import __version__
from . import main
from .impls import IMPLS
from .tables import console

# On a GPU large enough to keep all of it busy, on a CPU small enough for Triton's interpreter.
SHAPES = {"cuda": "4,16,2048,128", "cpu": "2,4,96,64"}
LEFT_OUT = "cuda", "flex"  # one repeats another kernel, and torch compiles and tunes the other for most of a minute


def run(with_profile=False):
    """Build, check and time; the exit code: 1 if a result is wrong or one of ours does not serve."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU, as torch sees no GPU"
    console.print(f"minimal_attn {__version__} with torch {torch.__version__} on {where}", soft_wrap=True)
    impls = [name for name, impl in IMPLS.items()
             if device in impl.devices and "dense" in impl.kinds and name not in LEFT_OUT]
    options = ["--shape", SHAPES[device], "--seqlens", "", "--dtype", "bfloat16,float32", "--impls", ",".join(impls)]
    code = main(options + ["--profile"] * with_profile, "minimal-attn demo")
    if device == "cpu":
        console.print("On a CPU, these kernels run to be read and debugged: torch serves calls there.")
    return code
