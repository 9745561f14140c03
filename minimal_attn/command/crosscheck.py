"""Every kernel of ours against attention in fp64: a short check that an installation computes what it should.

It judges as the benchmark does. The tests of the source tree hold far more cases by the same rule.
"""

import torch

from .. import load
from ..attention import BACKENDS
from ..bench import Run
from ..bench.measure import DTYPE_NAMES, Setting, environment
from ..bench.options import parse_args
from ..bench.tables import console

# (operation, shape, whether it is causal). Several heads: the largest error of a few numbers is a matter of luck.
CHECKS = [("attention", "4,4,96,64", False), ("attention", "2,4,65,128,2,130", True), ("attention", "4,4,50,33", False),
          ("attention", "4,4,40,256", False), ("attention", "2,4,70,64,2,30", True), ("backward", "2,4,40,64,2,70", True),
          ("varlen", "33 + 1 + 66,8,64,4", True), ("window", "2,4,80,64 window 20", False),
          ("window", "2,4,80,64 sinks", True), ("scores", "2,4,40,64 bias", True),
          ("block_masks", "2,4,144,64 masked documents", False)]


def run() -> int:
    """Check, and print the largest errors. The exit code: 0 if all is right, else 1."""
    device, failed = "cuda" if torch.cuda.is_available() else "cpu", False
    if BACKENDS["cuda"].why_not(torch.device(device)) is None:
        load()  # here, for an error of its own
    meta = environment(device, "minimal-attn check", [])
    for op, shape, causal in CHECKS:
        args = parse_args("minimal-attn check", ["--op", op], device, "")
        args.impls = [name for name in args.impls if args.op.impls[name].backend]
        checked = Run(args, device, meta)
        for dtype in DTYPE_NAMES:
            checked.check(Setting(args.op.shape_of(shape), dtype, causal))
        failed |= checked.failed
    console.print("Something is wrong." if failed else "All is right.", style="red" if failed else "green")
    return int(failed)
