"""The options of a run. Every one is checked before any work starts. Read next: __init__.py, the run."""

import argparse
import importlib.util
import re
from pathlib import Path

from . import (append, attention, backward, decode, forward_backward, matmul, mixed, scores, varlen, varlen_backward,
               window)

# Each has its shapes, dtypes, implementations and a Case.
OPS = {"attention": attention, "backward": backward, "forward_backward": forward_backward, "varlen": varlen,
       "varlen_backward": varlen_backward, "window": window, "scores": scores, "decode": decode, "append": append,
       "mixed": mixed, "matmul": matmul}

CAUSALS = {"no": (False,), "yes": (True,), "both": (False, True)}


def parse_args(program, argv, device, description):
    ops = argparse.ArgumentParser(prog=program, description=description, add_help=False, allow_abbrev=False)
    ops.add_argument("--op", choices=OPS, default="attention", help="what is computed (default: %(default)s)")
    op = OPS[ops.parse_known_args(argv)[0].op]  # the other options depend on it
    defaults = {"dtypes": "float32", "causal": "no", "impls": op.IMPLS} | getattr(op, "DEFAULTS", {})
    shape_of = getattr(op, "shape_of", lambda text, ints: op.Shape.of(ints(text)))
    impls = [impl for impl in op.IMPLS if device in op.IMPLS[impl].devices]
    default_impls = [impl for impl in defaults["impls"] if impl in impls]

    def fail(message):  # argparse puts the argument's name before it
        raise argparse.ArgumentTypeError(message)

    def ints(text):
        words = text.split(",") if text else []
        return [int(x) if x.isdecimal() and int(x) else fail(f"{x!r} is not a positive integer") for x in words]

    def count(text):
        numbers = ints(text)
        return numbers[0] if len(numbers) == 1 else fail(f"{text!r} is not a positive integer")

    def shape(text):
        try:
            return shape_of(text, ints)
        except ValueError as error:
            fail(f"{text!r}: {error}")

    def shares(text):
        return [float(x) if re.fullmatch(r"0?\.\d*[1-9]\d*", x, re.ASCII) else fail(
            f"{x!r} is not a decimal fraction between 0 and 1, such as 0.1") for x in text.split(",")]

    def dtypes(text):
        return [x if x in op.DTYPES else fail(f"{x!r} is none of {', '.join(op.DTYPES)}") for x in text.split(",")]

    def names(text):
        words = text.split(",")
        return [x if x in impls else fail(f"{x!r} is none of {', '.join(impls)}, which run on {device}") for x in words]

    def file(*suffixes, needs=None):
        def path(text):
            if needs and not importlib.util.find_spec(needs):
                fail(f"needs {needs}: pip install 'minimal_attn[bench]'")
            is_fine = Path(text).suffix in suffixes and Path(text).parent.is_dir()
            return text if is_fine else fail(f"{text!r} is no {' or '.join(suffixes)} file in an existing directory")

        return path

    parser = argparse.ArgumentParser(prog=program, description=description, parents=[ops])
    add = parser.add_argument
    add("--shape", type=shape, action="append", metavar=op.SHAPES.split(" or ")[0], dest="shapes",
        help=f"{op.SHAPES}; may be repeated (default: {' '.join(map(str, op.DEFAULT_SHAPES[device]))})")
    add("--dtype", type=dtypes, default=defaults["dtypes"], metavar="DTYPE,...", dest="dtypes",
        help=f"of {', '.join(op.DTYPES)} (default: %(default)s)")
    add("--impls", type=names, metavar="NAME,...", default=default_impls,
        help=f"default: {','.join(default_impls)}")
    add("--rounds", type=count, metavar="N", default=1,
        help="time everything N times over and take the median round, to compare settings (default: %(default)s)")
    add("--json", type=file(".json"), metavar="FILE", help="write all rows")
    add("--plot", type=file(".png", ".svg", needs="matplotlib"), action="append", metavar="FILE", default=[],
        dest="plots", help="draw TFLOP/s, or GB/s of caches; may be repeated")
    add("--report", type=file(".html", needs="matplotlib"), metavar="FILE", help="write one page with everything")
    add("--trace", type=file(".json"), metavar="FILE", help="write a Chrome trace of one call of each")
    add("--profile", action=argparse.BooleanOptionalAction, default=False, help="also print the profiler's tables")
    if op is not matmul:
        add("--causal", nargs="?", const="yes", default=defaults["causal"], choices=CAUSALS,
            help="mask the future (bottom-right aligned); both: with and without (default: %(default)s)")
    else:
        parser.set_defaults(causal="no")
    if hasattr(op, "DEFAULT_SEQLENS"):
        add("--seqlens", type=ints, metavar="S,S,...", default=op.DEFAULT_SEQLENS[device],
            help="sweep the first shape over these lengths, '' for none (default: %(default)s)")
    else:
        parser.set_defaults(seqlens=[])
    if hasattr(op, "host_cost"):
        add("--host-cost", action="store_true", help="also measure the host's time for a small call")
    else:
        parser.set_defaults(host_cost=False)
    if hasattr(op, "variants"):
        add("--deterministic", action="store_true", help="time each shape also with deterministic gradients")
        add("--dropout-p", type=shares, metavar="P,P,...", default=[], help="time each shape also with dropout")
    args = parser.parse_args(argv)
    args.op, args.shapes, args.causals = op, args.shapes or op.DEFAULT_SHAPES[device], CAUSALS[args.causal]
    if hasattr(op, "variants"):
        args.shapes = op.variants(args.shapes, args.deterministic, args.dropout_p)
    if args.host_cost and device == "cpu":
        parser.error("argument --host-cost: needs a GPU")
    if True in args.causals and any(shape.seqlen_q > shape.seqlen_k for shape in args.shapes):
        parser.error("argument --causal: needs Sq <= Sk, otherwise there are rows without a key")
    return args
