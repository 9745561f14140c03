"""The table of operations, and the options of a run, each of which is checked before any work starts.

Read next: __init__.py, the run.
"""

import argparse
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from .. import triton_matmul
from .caches import APPEND, DECODE, MIXED, Append, Decode, Mixed
from .cases import Case, Matmul, MatmulShape, ints, shape_of
from .impls import HALVES, IMPLS, SCORES, backward_of, step_of
from .measure import DTYPE_NAMES, FP8_DTYPE_NAMES, Impl

DENSE = "B,H,S,D or B,H,Sq,D,Hk,Sk"
PACKED = f"LENGTHS,H,D,Hk or {DENSE}"
CAUSALS = {"no": (False,), "yes": (True,), "both": (False, True)}
SEQLENS = {"cuda": "64,128,256,512,1024,2048,4096", "cpu": "32,64,128"}  # Triton's interpreter is slow


class Op(NamedTuple):
    title: str
    shapes: dict  # {device: texts of the default shapes}; on a CPU they are small, as Triton's interpreter is slow
    case: type = Case
    form: str = DENSE  # of a shape
    more: str = ""  # a regular expression for what stands behind the sizes of a shape, or "packed"
    impls: dict = IMPLS
    default_impls: tuple | None = None  # all of impls if None
    dtypes: tuple = DTYPE_NAMES
    default_dtypes: str = "float32"
    default_causal: str = "no"
    seqlens: dict | None = None
    baseline: str = "manual"  # of the speed-ups
    rate: str = "tflops"  # the column that tables and pictures show
    gradients: Callable | None = None  # backward_of or step_of
    has_host_cost: bool = False
    row: str | None = None  # the op of rows, if it is not that of their shapes

    def shape_of(self, text):
        """The shape that a text names. Raises ValueError."""
        if self.case is Matmul:
            return MatmulShape(*ints(text.split(","), 3))
        shape = shape_of(text, self.more)
        if self.case in (Append, Mixed) and shape.seqlen_q != 1:
            raise ValueError("Sq must be 1: one new token of each sample")
        return shape


def without(*names):
    return {name: impl for name, impl in IMPLS.items() if name not in names}


GRADIENTS = without("torch:varlen", "cuda:dmma")  # whose backward pass is that of simt
OURS = "cuda:sm90", "cuda:sm80", "cuda:host", "triton"
SMALL = {"cuda": ["16,12,64,64"], "cpu": ["16,12,64,64"]}
# Packed batches of 16 query heads and 4 key heads, then dense ones of about as many tokens.
BESIDE = {"cuda": ["16 of 64..4096,16,128,4", "32 x 512,16,128,4", "8192 + 64 x 128,16,128,4",
                   "18,16,2048,128,4,2048", "32,16,512,128,4,512", "2,16,8192,128,4,8192"],
          "cpu": ["64 + 2 x 32 + 7,4,64,2", "2,4,64,64,2,64"]}
# B, H, D, Hk and Sk of caches, in the order of their bytes.
CACHES = ["1,32,1,128,8,1024", "1,32,1,128,8,8192", "8,32,1,128,8,8192", "64,32,1,128,1,8192", "1,32,1,128,8,131072",
          "128,32,1,128,8,1024", "32,32,1,128,8,8192", "64,32,1,128,8,4096", "16,64,1,128,8,32768",
          "16,32,1,128,32,8192"]
OPS = {
    "attention": Op("Attention forward pass", SMALL, impls=without("torch:varlen"),
                    dtypes=DTYPE_NAMES + FP8_DTYPE_NAMES, seqlens=SEQLENS, has_host_cost=True),
    "backward": Op("Attention backward pass", SMALL, impls=GRADIENTS, seqlens=SEQLENS, gradients=backward_of),
    "forward_backward": Op("Attention forward and backward pass", SMALL, impls=GRADIENTS, seqlens=SEQLENS,
                           gradients=step_of, has_host_cost=True),
    "varlen": Op("Attention of packed batches", BESIDE, form=PACKED, more="packed",
                 default_impls=(*OURS, "torch:varlen", "torch:cudnn", "torch:flash"), default_dtypes="bfloat16",
                 default_causal="both", baseline="torch:varlen", has_host_cost=True),
    "varlen_backward": Op("Attention backward pass of packed batches", BESIDE, form=PACKED, more="packed",
                          impls=without("cuda:dmma"), gradients=backward_of, baseline="torch:varlen",
                          default_impls=(*OURS, "torch:varlen", "torch:cudnn", "torch:flash"),
                          default_dtypes="bfloat16", default_causal="both"),
    "window": Op("Attention with sliding windows and sinks", {
        "cuda": ["1,16,16384,128,4,16384 window 512", "1,16,16384,128,4,16384 window 4096", "1,16,16384,128,4,16384",
                 "1,16,16384,128,4,16384 sinks", "8,16,2048,128,4,2048", "8,16,2048,128,4,2048 sinks"],
        "cpu": ["2,4,64,64,2,64 window 16", "2,4,64,64,2,64", "2,4,64,64,2,64 sinks"]},
        form=f"{DENSE}, also with ' window LEFT' or ' sinks' behind it", more=r"(window \d+|sinks)?", baseline="flex",
        impls=without("torch:varlen"), default_impls=(*OURS, "torch:cudnn", "torch:flash", "flex"),
        default_dtypes="bfloat16", default_causal="yes"),  # FlexAttention is tuned for most of a minute for each window
    "scores": Op("Attention with softcap, ALiBi, biases and masks", {
        "cuda": [f"2,16,8192,128 {score}" for score in SCORES], "cpu": [f"2,4,32,16,2,32 {score}" for score in SCORES]},
        form=f"{DENSE}, also with ' softcap', ' alibi', ' bias' or ' mask' behind it", more="(none|softcap|alibi|bias|mask)?",
        impls=without("torch:varlen"), baseline="flex", default_dtypes="bfloat16",
        default_impls=(*OURS, "torch:cudnn", "torch:flash", "torch:efficient", "flex"), row="scores"),
    "decode": Op("Attention to caches", {
        "cuda": [*(size + page for size in CACHES for page in ("", " page 16", " page 64", " page 128")),
                 "8,32,1,128,8,8192 page 1", "8,32,1,128,8,8192 page 8",
                 *(f"8,32,{tokens},128,8,8192" for tokens in (2, 4, 8, 16)), "32,32,1,128,8,8192 drawn"],
        "cpu": ["2,4,1,64,2,64", "2,4,1,64,2,64 page 16", "2,4,3,64,2,64", "2,4,1,64,2,64 page 16 drawn"]}, Decode,
        f"{DENSE}, also with ' page SIZE' or ' drawn' behind it", r"(page [1-9]\d*)? ?(drawn)?", DECODE, None, HALVES, "bfloat16",
        "yes", baseline="read", rate="gbps", row="decode"),  # the mask of several tokens; a single one sees every key
    "append": Op("Appending to caches", {
        "cuda": [size + page for size in (CACHES[1], CACHES[6], CACHES[5]) for page in ("", " page 16")],
        "cpu": ["2,4,1,64,2,64", "2,4,1,64,2,64 page 16"]}, Append,
        "B,H,1,D,Hk,Sk, also with ' page SIZE' or ' drawn' behind it", r"(page [1-9]\d*)? ?(drawn)?", APPEND, None,
        HALVES, "bfloat16", "yes", baseline="cuda:attend", rate="gbps", row="append"),
    "mixed": Op("Decoding and prefill in one batch", {
        "cuda": [f"32,32,1,128,8,8192 prefill 2048{page}" for page in ("", " page 16")],
        "cpu": [f"2,4,1,64,2,64 prefill 24{page}" for page in ("", " page 16")]}, Mixed,
        "B,H,1,D,Hk,Sk prefill TOKENS, also with ' page SIZE' behind it", r"prefill [1-9]\d*( page [1-9]\d*)?", MIXED, None,
        HALVES, "bfloat16", "yes", baseline="cuda:apart", rate="gbps", row="mixed"),
    "matmul": Op("Matrix multiplication", {
        "cuda": [*(f"{n},{n},{n}" for n in (512, 1024, 2048, 4096, 8192)), "4096,11008,4096", "16,4096,4096"],
        "cpu": ["64,64,64", "128,128,128", "16,128,96"]}, Matmul, "M,N,K",
        impls={"triton": Impl(triton_matmul, backend="triton"), "cublas": Impl(torch.matmul, ("cuda",)),
               "torch": Impl(torch.matmul, ("cpu",))},
        baseline="cublas" if torch.cuda.is_available() else "torch", row="matmul"),
}


def parse_args(program, argv, device, description):
    ops = argparse.ArgumentParser(prog=program, description=description, add_help=False, allow_abbrev=False)
    ops.add_argument("--op", choices=OPS, default="attention", help="what is computed (default: %(default)s)")
    op = OPS[ops.parse_known_args(argv)[0].op]  # the other options depend on it
    impls = [name for name, impl in op.impls.items() if device in impl.devices]
    default_impls = [name for name in op.default_impls or impls if name in impls]

    def fail(message):  # argparse puts the argument's name before it
        raise argparse.ArgumentTypeError(message)

    def checked(function):
        def parse(text):
            try:
                return function(text)
            except ValueError as error:
                fail(f"{text!r}: {error}")

        return parse

    def share(text):
        return float(text) if re.fullmatch(r"0?\.\d*[1-9]\d*", text, re.ASCII) else fail(
            f"{text!r} is not a decimal fraction between 0 and 1, such as 0.1")

    def some_of(names, what):
        return lambda text: [x if x in names else fail(f"{x!r} is none of {', '.join(names)}{what}")
                             for x in text.split(",")]

    def file(*suffixes, needs=None):
        def path(text):
            if needs and not importlib.util.find_spec(needs):
                fail(f"needs {needs}: pip install 'minimal_attn[bench]'")
            is_fine = Path(text).suffix in suffixes and Path(text).parent.is_dir()
            return text if is_fine else fail(f"{text!r} is no {' or '.join(suffixes)} file in an existing directory")

        return path

    parser = argparse.ArgumentParser(prog=program, description=description, parents=[ops])
    add = parser.add_argument
    add("--shape", type=checked(op.shape_of), action="append", metavar=op.form.split(" or ")[0], dest="shapes",
        help=f"{op.form}; may be repeated (default: {' '.join(op.shapes[device])})")
    add("--dtype", type=some_of(op.dtypes, ""), default=op.default_dtypes, metavar="DTYPE,...", dest="dtypes",
        help=f"of {', '.join(op.dtypes)} (default: %(default)s)")
    add("--impls", type=some_of(impls, f", which run on {device}"), metavar="NAME,...", default=default_impls,
        help=f"default: {','.join(default_impls)}")
    add("--rounds", type=checked(lambda text: ints([text], 1)[0]), metavar="N", default=1,
        help="time everything N times over and take the median round, to compare settings (default: %(default)s)")
    add("--json", type=file(".json"), metavar="FILE", help="write all rows")
    add("--plot", type=file(".png", ".svg", needs="matplotlib"), action="append", metavar="FILE", default=[],
        dest="plots", help="draw TFLOP/s, or GB/s of caches; may be repeated")
    add("--trace", type=file(".json"), metavar="FILE", help="write a Chrome trace of one call of each")
    add("--profile", action=argparse.BooleanOptionalAction, default=False, help="also print the profiler's tables")
    parser.set_defaults(causal="no", seqlens=[], host_cost=False)
    if op.case is not Matmul:
        add("--causal", nargs="?", const="yes", default=op.default_causal, choices=CAUSALS,
            help="mask the future (bottom-right aligned); both: with and without (default: %(default)s)")
    if op.seqlens:
        add("--seqlens", type=checked(lambda text: ints(text.split(","), *range(1, 99)) if text else []), metavar="S,S,...",
            default=op.seqlens[device], help="sweep the first shape over these lengths, '' for none (default: "
            "%(default)s)")
    if op.has_host_cost:
        add("--host-cost", action="store_true", help="also measure the host's time for a small call")
    if op is OPS["backward"]:
        add("--deterministic", action="store_true", help="time each shape also with deterministic gradients")
        add("--dropout-p", type=lambda text: [share(x) for x in text.split(",")], metavar="P,P,...", default=[],
            help="time each shape also with dropout")
    args = parser.parse_args(argv)
    args.op, args.causals = op, CAUSALS[args.causal]
    args.shapes = args.shapes or [op.shape_of(text) for text in op.shapes[device]]
    if op is OPS["backward"]:
        kinds = "", *["deterministic"] * args.deterministic, *(f"dropout {p:g}" for p in args.dropout_p)
        args.shapes = [shape._replace(more=kind) for shape in args.shapes for kind in kinds]
    if args.host_cost and device == "cpu":
        parser.error("argument --host-cost: needs a GPU")
    if True in args.causals and any(shape.seqlen_q > shape.seqlen_k for shape in args.shapes):
        parser.error("argument --causal: needs Sq <= Sk, otherwise there are rows without a key")
    return args
