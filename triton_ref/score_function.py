"""score_mod in the kernels of both passes: Triton functions of the graph that minimal_attn/score_function.py reads.

The source of a graph is three functions: of the score, of its derivative by the score, and one that adds the gradients
of captured tensors up. It has no file: linecache, where Python and Triton look for sources, has its lines. Kernels get
the functions as arguments that are compiled in. Numbers are a part of the source, and captured tensors are read.
"""

import functools
import hashlib
import linecache
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITCallable

from minimal_attn._build import TRITON_REF, source_digest
from minimal_attn.score_function import read
from minimal_attn.score_graph import TRITON

from .launching import INTERPRETING
from .scores import tanh


class Functions(NamedTuple):
    """The functions of a source, as a kernel has them compiled in."""
    changed: JITCallable
    derivative: JITCallable
    add_gradients: JITCallable


class Compiled(NamedTuple):
    """A score_mod for the kernels: Options.score_mod of this folder."""
    functions: Functions
    captured: tuple  # tensors, contiguous
    source: str
    bytes_of_scores: int  # that are read for each score
    gradients: tuple | None = None  # what add_gradient adds to, of each captured tensor, or None; None without any


@triton.jit
def floor_div(x, y):
    """x // y rounded down, as in Python; Triton rounds to 0."""
    quotient = x // y
    return quotient - ((quotient * y != x) & ((x < 0) != (y < 0))).to(tl.int32)


@triton.jit
def remainder(x, y):
    """x % y with the sign of y, as in Python."""
    return x - floor_div(x, y) * y


@triton.jit
def place(i, size):
    """Where index i is in a dimension: from the end if it is negative. What is out of range is clamped."""
    i = tl.where(i < 0, i + size, i)
    return tl.maximum(tl.minimum(i, size - 1), 0).to(tl.int64)


@triton.jit
def load_float(x, at):
    return tl.load(x + at).to(tl.float32)


@triton.jit
def load_int(x, at):
    value = tl.load(x + at)
    if value.dtype.primitive_bitwidth < 32:
        value = value.to(tl.int32)
    return value


@triton.jit
def load_bool(x, at):
    return tl.load(x + at) != 0


@triton.jit
def add_gradient(dx, at, ds, derivative, kAxes: tl.constexpr):
    """dx += ds · derivative at places that depend on nothing (kAxes 0), on rows (1), on keys (2) or on both (3). ds:
    [rows, keys]. It is 0 where a key is hidden, also if the derivative is not finite there.

    dx is fp32, or for sums that are the same in any order int32 and then int64, as of fixed_point: whole numbers."""
    terms = tl.where(ds == 0, 0.0, ds * derivative)
    if kAxes == 0:
        terms = tl.sum(tl.sum(terms, 1), 0)
    elif kAxes < 3:
        terms = tl.sum(terms, 2 - kAxes, keep_dims=True)
    if dx.dtype.element_ty == tl.float32:
        tl.atomic_add(dx + at, terms, mask=terms != 0, sem="relaxed")
    elif dx.dtype.element_ty == tl.int32:  # numbers above 0 are in the order of their bits
        largest = tl.where(terms == terms, tl.abs(terms), float("inf"))
        if kAxes > 0:
            largest = tl.max(tl.max(largest, 1), 0)
        tl.atomic_max(dx, largest.to(tl.int32, bitcast=True), sem="relaxed")
    else:
        scaled = terms.to(tl.float64) * tl.load(dx).to(tl.float64, bitcast=True)
        tl.atomic_add(dx + 1 + at, scaled.to(tl.int64), mask=terms != 0, sem="relaxed")


def fixed_point(largest, like, num_terms):
    """An int64 tensor to add gradients of `like` to. The first element has the bits of an fp64 scale, with which
    num_terms terms overflow nowhere. largest: int32 of one element, the bits of the largest term in fp32."""
    _, exponent = torch.frexp(largest.view(torch.float32))
    scale = torch.exp2(62 - exponent.double().clamp(-150, 128) - math.ceil(math.log2(num_terms)))
    return torch.cat((scale.view(torch.int64), like.new_zeros(like.numel(), dtype=torch.int64)))


def floating(dx, largest, like):
    """The gradient in like's shape, of fixed_point's tensor; NaN if a term was not finite."""
    sums = dx[1:].double() / dx[:1].view(torch.float64)
    return torch.where(largest.view(torch.float32).isfinite(), sums, math.nan).to(like.dtype).view(like.shape)


HELPERS = {x.__name__: x for x in (floor_div, remainder, place, load_float, load_int, load_bool, add_gradient, tanh)}
PARAMETERS = "score, b, h, q_idx, kv_idx, captured, sizes"


@functools.lru_cache(maxsize=256)
def _source(graph, root):
    """The source of the three functions."""
    derivatives = graph.derivatives(root)
    text = ""
    for name, value in ("changed", root), ("derivative", derivatives.pop(0)):
        lines, (result,), _ = graph.printed(TRITON, [value])
        of_all = "" if graph[value].axes == 3 else " + tl.zeros_like(score)"
        text += f"@triton.jit\ndef {name}({PARAMETERS}):\n{lines}    return {result}{of_all}\n\n\n"
    loads = list(derivatives)
    lines, results, places = graph.printed(TRITON, [*derivatives.values(), *loads])
    for load, result in zip(loads, results):
        axes = functools.reduce(int.__or__, (graph[i].axes for i in graph[load].args), 0)
        dx = f"gradients[{graph[load].value}]"
        lines += f"    if {dx} is not None:\n        add_gradient({dx}, {places[load]}, ds, {result}, {axes})\n"
    return f"{text}@triton.jit\ndef add_gradients(ds, {PARAMETERS}, gradients):\n{lines or '    pass'}\n"


_sources = functools.cache(lambda: source_digest(TRITON_REF))


@functools.lru_cache(maxsize=256)
def _compiled(source):
    """The functions of a source."""
    digest = hashlib.sha256((source + _sources()).encode()).hexdigest()[:16]
    name, source = f"<score_mod {digest}>", source.replace("def ", f"def f{digest}_")
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    scope = {"__name__": __name__, "triton": triton, "tl": tl, **HELPERS}
    exec(compile(source, name, "exec"), scope)
    # Names of their own, since these are all that a kernel's file in Triton's cache is found by.
    return Functions(*(scope[f"f{digest}_{role}"] for role in Functions._fields))


def compiled(score_mod, q):
    """The Compiled of a function, for q. Gradients go through it to what the function captures.

    Raises: as minimal_attn.score_function.read. ValueError: a captured tensor on another device.
    """
    graph, root, captured = read(score_mod)
    for x in captured:
        if x.device != q.device:
            raise ValueError(f"tensors that score_mod captures must be on {q.device}, as q is, got one of shape "
                             f"{tuple(x.shape)} on {x.device}")
    captured = (x.contiguous() for x in captured)
    captured = (x.view(torch.uint8) if x.dtype == torch.bool else x for x in captured)
    if INTERPRETING:  # see launching.py
        captured = (x.float() if x.dtype == torch.bfloat16 else x for x in captured)
    captured, source = tuple(captured), _source(graph, root)
    of_each = sum(captured[x.value].itemsize for x in graph.nodes if x.op == "load" and x.axes == 3)
    return Compiled(_compiled(source), captured, source, of_each)
