"""The table of operations, and the options of a run, each of which is checked before any work starts."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from .. import triton_matmul
from .caches import APPEND, DECODE, MIXED, Append, Decode, Mixed
from .cases import Build, Case, Matmul, Sizes, count, fail, ints, shape_of
from .impls import HALVES, IMPLS, MASKED, SCORES, backward_of, flex, step_of
from .masks import BUILDERS, MASKS
from .measure import DTYPE_NAMES, FP8_DTYPE_NAMES, Impl

CAUSALS = {"no": (False,), "yes": (True,), "both": (False, True)}
SEQLENS = {"cuda": "64,128,256,512,1024,2048,4096", "cpu": "32,64,128"}  # Triton's interpreter is slow


class Op(NamedTuple):
    title: str
    shapes: dict  # {device: texts of the default shapes}; on a CPU they are small, as Triton's interpreter is slow
    case: type = Case
    more: str = ""  # a regular expression for what stands behind the sizes of a shape, or "packed"
    impls: dict = IMPLS  # of which a run has those that serve a kind of its default shapes
    default_impls: tuple | None = None  # all of impls if None
    dtypes: tuple = DTYPE_NAMES
    default_dtypes: str = "bfloat16"
    default_causal: str | None = "no"  # None: there is no choice
    seqlens: dict | None = None
    baseline: str = "manual"  # of the speed-ups
    rate: str = "tflops"  # the column that tables and pictures show
    gradients: Callable | None = None  # backward_of or step_of
    row: str | None = None  # the op of rows, if it is not that of their shapes

    def shape_of(self, text):
        """The shape that a text names."""
        if issubclass(self.case, Matmul):
            return Sizes(ints(text.split(","), len(self.case.columns)))
        shape = shape_of(text, self.more)
        if self.case in (Append, Mixed) and shape.seqlen_q != 1:
            fail("Sq must be 1: one new token of each sample")
        if shape.kind in MASKED and shape.seqlen_q != shape.seqlen_k:
            fail("Sq must be Sk")
        return shape


OURS = "cuda:sm90", "cuda:sm80", "cuda:host", "triton"
# B, H, D, Hk and Sk of caches, in the order of their bytes.
CACHES = ["1,32,1,128,8,1024", "1,32,1,128,8,8192", "8,32,1,128,8,8192", "64,32,1,128,1,8192", "1,32,1,128,8,131072",
          "128,32,1,128,8,1024", "32,32,1,128,8,8192", "64,32,1,128,8,4096", "16,64,1,128,8,32768",
          "16,32,1,128,32,8192"]
GRADIENTS = {name: impl for name, impl in IMPLS.items() if name != "cuda:dmma"}  # its backward pass is that of simt

ATTENTION = Op("Attention forward pass", dict.fromkeys(("cuda", "cpu"), ["16,12,64,64"]), seqlens=SEQLENS,
               more=r"(v [1-9]\d*)?", default_impls=tuple(name for name in IMPLS if name != "cuda"),
               dtypes=DTYPE_NAMES + FP8_DTYPE_NAMES, default_dtypes="float32")
BACKWARD = ATTENTION._replace(title="Attention backward pass", impls=GRADIENTS, dtypes=DTYPE_NAMES,
                              gradients=backward_of)
VARLEN = Op("Attention of packed batches", {
    # Packed batches of 16 query heads and 4 key heads, then dense ones of about as many tokens.
    "cuda": ["16 of 64..4096,16,128,4", "32 x 512,16,128,4", "8192 + 64 x 128,16,128,4",
             "18,16,2048,128,4,2048", "32,16,512,128,4,512", "2,16,8192,128,4,8192"],
    "cpu": ["64 + 2 x 32 + 7,4,64,2", "2,4,64,64,2,64"]}, more="packed",
    default_impls=(*OURS, "torch:varlen", "torch:cudnn", "torch:flash"), default_causal="both", baseline="torch:varlen")
DECODING = Op("Attention to caches", {
    "cuda": [*(size + page for size in CACHES for page in ("", " page 16", " page 64", " page 128")),
             "8,32,1,128,8,8192 page 1", "8,32,1,128,8,8192 page 8",
             *(f"8,32,{tokens},128,8,8192" for tokens in (2, 4, 8, 16)), "32,32,1,128,8,8192 drawn",
             "8,32,1,128,8,1024", "16,32,1,128,32,4096",
             *(f"{size} warm" for size in ("8,32,1,128,8,1024", "32,32,1,128,8,2048", "1,64,1,128,8,131072"))],
    "cpu": ["2,4,1,64,2,64", "2,4,1,64,2,64 page 16", "2,4,3,64,2,64", "2,4,1,64,2,64 page 16 drawn"]},
    Decode, r"(page [1-9]\d*)? ?(drawn|warm)?", DECODE, dtypes=HALVES, default_causal="yes",
    baseline="read", rate="gbps", row="decode")
# FlexAttention is compiled, but not tuned, which would take most of a minute for each mask.
MASKING = Op("Attention with block masks", {
    "cuda": [f"{size} masked {mask}" for size in ("1,16,16384,128", "8,16,2048,64") for mask in MASKS],
    "cpu": [f"2,2,144,16 masked {mask}" for mask in MASKS]}, more=f"masked ({'|'.join(MASKS)})",
    impls=IMPLS | {"flex": Impl(functools.partial(flex, mode=None), ("cuda",), dtypes=HALVES, kinds=MASKED)},
    default_impls=(*OURS, "cuda:from_torch", "cuda:native", "flex"), default_causal=None, baseline="flex",
    row="block_masks")
OPS = {
    "attention": ATTENTION,
    "backward": BACKWARD,
    "forward_backward": BACKWARD._replace(title="Attention forward and backward pass", gradients=step_of),
    "varlen": VARLEN,
    "varlen_backward": VARLEN._replace(title="Attention backward pass of packed batches", impls=GRADIENTS,
                                       gradients=backward_of),
    "window": Op("Attention with sliding windows and sinks", {
        "cuda": ["1,16,16384,128,4,16384 window 512", "1,16,16384,128,4,16384 window 4096", "1,16,16384,128,4,16384",
                 "1,16,16384,128,4,16384 sinks", "8,16,2048,128,4,2048", "8,16,2048,128,4,2048 sinks"],
        "cpu": ["2,4,64,64,2,64 window 16", "2,4,64,64,2,64", "2,4,64,64,2,64 sinks"]},
        more=r"(window \d+|sinks)?", baseline="flex", default_impls=(*OURS, "torch:cudnn", "torch:flash", "flex"),
        default_causal="yes"),  # FlexAttention is tuned for most of a minute for each window
    "scores": Op("Attention with softcap, ALiBi, biases and masks", {
        "cuda": [f"2,16,8192,128 {score}" for score in SCORES], "cpu": [f"2,4,32,16,2,32 {score}" for score in SCORES]},
        more=f"({'|'.join(SCORES)})?", baseline="flex", row="scores",
        default_impls=(*OURS, "torch:cudnn", "torch:flash", "torch:efficient", "flex")),
    "block_masks": MASKING,
    "block_masks_backward": MASKING._replace(title="Attention backward pass with block masks", gradients=backward_of,
                                             row="block_masks_backward"),
    "block_masks_build": Op("Building block masks", {"cuda": ["16384", "131072"], "cpu": ["300"]}, Build,
                            impls=BUILDERS, dtypes=("bool",), default_dtypes="bool", default_causal=None,
                            baseline="torch:compiled", rate="ms", row="block_masks_build"),
    "decode": DECODING,
    "append": DECODING._replace(title="Appending to caches", shapes={
        "cuda": [size + page for size in (CACHES[1], CACHES[6], CACHES[5]) for page in ("", " page 16")],
        "cpu": ["2,4,1,64,2,64", "2,4,1,64,2,64 page 16"]}, case=Append, impls=APPEND, baseline="cuda:attend",
        row="append"),
    "mixed": DECODING._replace(title="Decoding and prefill in one batch", shapes={
        "cuda": [f"32,32,1,128,8,8192 prefill 2048{page}" for page in ("", " page 16")],
        "cpu": [f"2,4,1,64,2,64 prefill 24{page}" for page in ("", " page 16")]}, case=Mixed, impls=MIXED,
        more=r"prefill [1-9]\d*( page [1-9]\d*)?", baseline="cuda:apart", row="mixed"),
    "matmul": Op("Matrix multiplication", {
        "cuda": [*(f"{n},{n},{n}" for n in (512, 1024, 2048, 4096, 8192)), "4096,11008,4096", "16,4096,4096"],
        "cpu": ["64,64,64", "128,128,128", "16,128,96"]}, Matmul,
        impls={"triton": Impl(triton_matmul, backend="triton"), "cublas": Impl(torch.matmul, ("cuda",)),
               "torch": Impl(torch.matmul, ("cpu",))}, default_dtypes="float32", default_causal=None,
        baseline="cublas" if torch.cuda.is_available() else "torch", row="matmul"),
}


def file(*suffixes):
    """Parses the name of a file to be written."""
    return lambda text: text if Path(text).suffix in suffixes and Path(text).parent.is_dir() else fail(
        f"{text!r} is no {' or '.join(suffixes)} file in an existing directory")


def parse_args(program, argv, device, description):
    ops = argparse.ArgumentParser(prog=program, description=description, add_help=False, allow_abbrev=False)
    ops.add_argument("--op", choices=OPS, default="attention", help="what is computed (default: %(default)s)")
    op = OPS[ops.parse_known_args(argv)[0].op]  # the other options depend on it
    kinds = {op.shape_of(text).kind for text in op.shapes[device]}
    impls = [name for name, impl in op.impls.items() if device in impl.devices and kinds & {*impl.kinds}]
    default_impls = [name for name in op.default_impls or impls if name in impls]
    parser = argparse.ArgumentParser(prog=program, description=description, parents=[ops])

    def one_of(*names):
        return lambda text: [x if x in names else fail(f"{x!r} is none of {', '.join(names)}") for x in text.split(",")]

    def shares(text):
        return [float(x) if 0 < float(x) < 1 else fail(f"{x} is not between 0 and 1") for x in text.split(",")]

    add = parser.add_argument
    add("--shape", type=op.shape_of, action="append", metavar="SHAPE", dest="shapes",
        help=f"sizes as in docs/tools.md; may be repeated (default: {'; '.join(op.shapes[device])})")
    add("--dtype", type=one_of(*op.dtypes), default=op.default_dtypes, metavar="DTYPE,...", dest="dtypes",
        help=f"of {', '.join(op.dtypes)} (default: %(default)s)")
    add("--impls", type=one_of(*impls), metavar="NAME,...", default=default_impls,
        help=f"default: {','.join(default_impls)}")
    add("--rounds", type=count, metavar="N", default=1,
        help="time everything N times over and take the median round, to compare settings (default: %(default)s)")
    add("--json", type=file(".json"), metavar="FILE", help="write all rows")
    if op.rate != "ms":
        add("--plot", type=file(".png", ".svg"), action="append", metavar="FILE", default=[], dest="plots",
            help="draw TFLOP/s, or GB/s of caches; may be repeated")
    add("--trace", type=file(".json"), metavar="FILE", help="write a Chrome trace of one call of each")
    add("--profile", action=argparse.BooleanOptionalAction, default=False, help="also print the profiler's tables")
    add("--host-cost", action="store_true", help="also measure the host's time for a small call")
    parser.set_defaults(causal="no", plots=[], seqlens=[], deterministic=False, dropout_p=[])
    if op.default_causal:
        add("--causal", nargs="?", const="yes", default=op.default_causal, choices=CAUSALS,
            help="mask the future (bottom-right aligned); both: with and without (default: %(default)s)")
    if op.seqlens:
        add("--seqlens", type=lambda text: ints(text.split(",") if text else []), metavar="S,S,...",
            default=op.seqlens[device],
            help="sweep the first shape over these lengths, '' for none (default: %(default)s)")
    if op is BACKWARD:
        add("--deterministic", action="store_true", help="time each shape also with deterministic gradients")
        add("--dropout-p", type=shares, metavar="P,P,...", help="time each shape also with dropout")
    args = parser.parse_args(argv)
    args.op, args.causals = op, CAUSALS[args.causal]
    kinds = "", *["deterministic"] * args.deterministic, *(f"dropout {p:g}" for p in args.dropout_p)
    shapes = args.shapes or [op.shape_of(text) for text in op.shapes[device]]
    sweep = [shapes[0]._replace(seqlen_q=x, seqlen_k=x) for x in args.seqlens]
    variants = [shape._replace(more=kind) if kind else shape for shape in shapes for kind in kinds]
    args.shapes, args.swept = list(dict.fromkeys(variants + sweep)), set(sweep) - set(variants)
    if args.host_cost and device == "cpu":
        parser.error("argument --host-cost: needs a GPU")
    if True in args.causals and any(shape.seqlen_q > shape.seqlen_k for shape in args.shapes):
        parser.error("argument --causal: needs Sq <= Sk, otherwise there are rows without a key")
    return args
