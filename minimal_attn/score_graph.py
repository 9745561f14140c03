"""A function of a score as a graph of its operations, which torch can evaluate, differentiated and printed.

Nodes that are alike are one node, so that nothing is computed twice. The derivative is made of nodes of the same graph,
in one sweep from the result back. TRITON is the table by which a graph is printed for a kernel.
score_function.py makes the graph of the source of a function.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .checks import is_int, shown

INPUTS = "score", "b", "h", "q_idx", "kv_idx"
KINDS = "bool", "int", "float"
FLOATS = torch.float32, torch.float16, torch.bfloat16, torch.float64


class Fault(Exception):
    """A fault of an operation; score_function.py says where it stands."""


class Op(NamedTuple):
    """An operation: torch's function of it, the kind that its arguments are made ("number": float if one of them is,
    else int), the kind of the result, if another, and the derivative: (graph, dy, y, *arguments) -> theirs."""
    function: Callable
    takes: str
    gives: str | None = None
    derivative: Callable | None = None


def _shared(g, dy, x, y):
    """dy for the larger one of x and y, and half of it for each where they are equal, as torch shares it."""
    half, zero = g("mul", dy, g.number(0.5)), g.number(0.0)
    return tuple(g("where", g("gt", *pair), dy, g("where", g("lt", *pair), zero, half)) for pair in ((x, y), (y, x)))


OPS = {
    "add": Op(torch.add, "number", None, lambda g, dy, y, a, b: (dy, dy)),
    "sub": Op(torch.sub, "number", None, lambda g, dy, y, a, b: (dy, g("neg", dy))),
    "mul": Op(torch.mul, "number", None, lambda g, dy, y, a, b: (g("mul", dy, b), g("mul", dy, a))),
    "neg": Op(torch.neg, "number", None, lambda g, dy, y, a: (g("neg", dy),)),
    "abs": Op(torch.abs, "number", None, lambda g, dy, y, a: (g("mul", dy, g("where", g("gt", a, g.number(0)), g.number(
        1.0), g("where", g("lt", a, g.number(0)), g.number(-1.0), g.number(0.0)))),)),
    "maximum": Op(torch.maximum, "number", None, lambda g, dy, y, a, b: _shared(g, dy, a, b)),
    "minimum": Op(torch.minimum, "number", None, lambda g, dy, y, a, b: _shared(g, dy, b, a)),
    "div": Op(torch.div, "float", None, lambda g, dy, y, a, b: (
        g("div", dy, b), g("neg", g("mul", g("div", dy, b), y)))),
    "floordiv": Op(torch.floor_divide, "int"), "mod": Op(torch.remainder, "int"),
    "exp": Op(torch.exp, "float", None, lambda g, dy, y, a: (g("mul", dy, y),)),
    "exp2": Op(torch.exp2, "float", None, lambda g, dy, y, a: (g("mul", dy, g("mul", y, g.number(math.log(2)))),)),
    "log": Op(torch.log, "float", None, lambda g, dy, y, a: (g("div", dy, a),)),
    "sqrt": Op(torch.sqrt, "float", None, lambda g, dy, y, a: (g("div", g("mul", dy, g.number(0.5)), y),)),
    "tanh": Op(torch.tanh, "float", None, lambda g, dy, y, a: (
        g("mul", dy, g("sub", g.number(1.0), g("mul", y, y))),)),
    "sigmoid": Op(torch.sigmoid, "float", None, lambda g, dy, y, a: (
        g("mul", dy, g("mul", y, g("sub", g.number(1.0), y))),)),
    "sin": Op(torch.sin, "float", None, lambda g, dy, y, a: (g("mul", dy, g("cos", a)),)),
    "cos": Op(torch.cos, "float", None, lambda g, dy, y, a: (g("neg", g("mul", dy, g("sin", a))),)),
    **{name: Op(getattr(torch, name), "number", "bool") for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{name: Op(getattr(torch, f"logical_{name}"), "bool") for name in ("and", "or", "xor", "not")},
    "where": Op(torch.where, "number", None, lambda g, dy, y, c, a, b: (
        None, g("where", c, dy, g.number(0.0)), g("where", c, g.number(0.0), dy))),
    "to_float": Op(torch.Tensor.double, "any", "float"), "to_int": Op(torch.Tensor.long, "any", "int"),
}


def _number_in_python(x):
    return repr(x) if isinstance(x, (bool, int)) or math.isfinite(x) else f'float("{x}")'


# Operations, numbers, elements of tensors, their places in them, and a line of a function, as a language writes them.
# Functions without a prefix are helpers of ../triton_ref/score_function.py.
TRITON = {op: f"{{}} {sign} {{}}" for op, sign in dict(
    add="+", sub="-", mul="*", div="/", lt="<", le="<=", gt=">", ge=">=", eq="==", ne="!=", xor="^").items()} | {
    "neg": "-{}", "tanh": "tanh({})", "floordiv": "floor_div({}, {})", "mod": "remainder({}, {})",
    "load": "load_{}(captured[{}], {})", "place": "place({}, sizes[{}][{}])",
    "next": "({}) * sizes[{}][{}] + {}"}
TRITON |= {op: f"tl.{op}({{}})" for op in ("abs", "exp", "exp2", "log", "sqrt", "sin", "cos")} | {
    "and": "{} & {}", "or": "{} | {}", "not": "{} == 0", "where": "tl.where({}, {}, {})",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{}))", "maximum": "tl.maximum({}, {})", "minimum": "tl.minimum({}, {})",
    "to_float": "tl.cast({}, tl.float32)", "to_int": "tl.cast({}, tl.int32)", "number": _number_in_python,
    "line": "    {} = {}\n"}


class Node(NamedTuple):
    """args: numbers of nodes before it. value: that of a "number", the name of an "input", which tensor a "load" reads.
    axes: 1 if it depends on the row, 2 on the key, 3 on both."""
    op: str
    args: tuple
    value: Any
    kind: str
    axes: int


class Graph:
    """The operations of a function, each behind its arguments. graph(op, *nodes) is the node of an operation."""

    def __init__(self):
        self.nodes, self.captured, self._known = [], [], {}  # captured: the names of tensors
        for name, kind, axes in zip(INPUTS, ("float", *["int"] * 4), (3, 0, 0, 1, 2)):
            self.node("input", (), name, kind, axes)

    def __getitem__(self, i):
        return self.nodes[i]

    def node(self, op, args, value, kind, axes=0):
        for i in args:
            axes |= self[i].axes
        key = op, args, repr(value), kind  # 0, 0.0, -0.0 and False are equal
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(Node(op, args, value, kind, axes))
        return self._known[key]

    def number(self, x):
        kind = bool if isinstance(x, bool) else int if is_int(x) else float
        if kind is int and not -2**63 < x < 2**63:
            raise Fault(f"{x} is no number of 64 bits")
        return self.node("number", (), kind(x), kind.__name__)  # numpy's float64 is a float, too

    def is_number(self, i, x):
        return self[i].op == "number" and self[i].kind == "float" and self[i].value == x

    def load(self, name, tensor, indices):
        """The element of a captured tensor of this name."""
        if len(indices) != tensor.ndim:
            raise Fault(f"{name}, {shown(tensor)}, needs {tensor.ndim} indices and has {len(indices)}")
        self.captured += [name] * (name not in self.captured)
        kind = "float" if tensor.dtype in FLOATS else "bool" if tensor.dtype == torch.bool else "int"
        return self.node("load", tuple(self.cast(i, "int") for i in indices), self.captured.index(name), kind)

    def cast(self, i, kind):
        """Node i as of a kind that holds all its values."""
        if self[i].kind == kind or kind == "any":
            return i
        if KINDS.index(self[i].kind) > KINDS.index(kind):
            is_what = "a float" if self[i].kind == "float" else "a whole number"
            raise Fault(f"{is_what} stands where only {'a bool' if kind == 'bool' else 'whole numbers'} may")
        return self(f"to_{kind}", i)

    def __call__(self, op, *args):
        if op == f"to_{self[args[0]].kind}":
            return args[0]
        rule, condition = OPS[op], ()
        takes = rule.takes
        if op == "where":
            condition, args = (self.cast(args[0], "bool"),), args[1:]
        if takes == "number":
            lowest = () if op == "where" else ("int",)
            takes = max(*lowest, *(self[i].kind for i in args), key=KINDS.index)
            if op in ("add", "sub", "neg") and all(self[i].kind == "bool" for i in args):
                raise Fault("a bool stands where a number must: write | or .int()")
        args = *condition, *(self.cast(i, takes) for i in args)
        kind = rule.gives or takes
        if all(self[i].op == "number" for i in args):
            dtypes = dict(zip(KINDS, (torch.bool, torch.int64, torch.float64)))
            values = (torch.tensor(self[i].value, dtype=dtypes[self[i].kind], device="cpu") for i in args)
            return self.number(rule.function(*values).item())
        if op in ("add", "mul"):
            neutral = float(op == "mul")
            for x, y in (args, args[::-1]):
                if self.is_number(x, neutral):
                    return y
                if op == "mul" and self.is_number(x, 0):  # of a derivative
                    return x
        if op == "where" and args[1] == args[2]:
            return args[1]
        return self.node(op, args, None, kind)

    def power(self, x, y):
        if self[y].kind == "float":
            x = self.cast(x, "float")
        base, exponent = self[x], self[y]
        if base.op == exponent.op == "number":
            return self.number(base.value ** exponent.value)
        if exponent.op == "number" and (exponent.value == 0.5 or exponent.value == -0.5):
            root = self("sqrt", x)
            return root if exponent.value > 0 else self("div", self.number(1.0), root)
        if exponent.op == "number" and exponent.value == int(exponent.value) and abs(exponent.value) <= 8:
            n = int(exponent.value)
            one = self.number(1.0 if "float" in (base.kind, exponent.kind) or n < 0 else 1)
            product = functools.reduce(lambda product, _: self("mul", product, x), range(1, abs(n)), x) if n else one
            return product if n >= 0 else self("div", one, product)
        if base.op == "number" and base.value > 0:
            return self("exp2", self("mul", self.number(math.log2(base.value)), y))
        raise Fault("the exponent of a power must be a whole number from -8 to 8, 0.5 or -0.5, or the base a number "
                     "above 0")

    def reached(self, roots):
        """The numbers of nodes that these are made of, and theirs, each behind its arguments."""
        found, todo = set(), list(roots)
        while todo:
            if (i := todo.pop()) not in found:
                found.add(i)
                todo += self[i].args
        return sorted(found)

    def derivatives(self, root):
        """{node: that of the derivative of root by it}, of the score, node 0, and of each load of a float."""
        reached = self.reached([root])
        by = [0, *(i for i in reached if self[i].op == "load" and self[i].kind == "float")]
        sums = {root: self.number(1.0)}
        for i in reversed(reached):
            node, rule = self[i], OPS.get(self[i].op)
            if i not in sums or rule is None or rule.derivative is None or node.kind != "float":
                continue
            for x, dx in zip(node.args, rule.derivative(self, sums[i], i, *node.args)):
                if dx is not None and self[x].kind == "float":
                    sums[x] = self("add", sums[x], dx) if x in sums else dx
        return {i: sums.get(i, self.number(0.0)) for i in by}

    def evaluate(self, root, captured, *inputs):
        """The value of a node by torch's operations. captured: tensors; inputs: those of INPUTS, which broadcast."""
        dtype, values = inputs[0].dtype, dict(enumerate(inputs))
        for i in self.reached([root]):
            node = self[i]
            args = [values[x] for x in node.args]
            if node.op == "number":
                values[i] = torch.tensor(node.value, dtype=dtype if node.kind == "float" else None,
                                         device=inputs[0].device)
            elif node.op == "load":
                values[i] = captured[node.value][tuple(args)]
                values[i] = values[i].to(dtype) if node.kind == "float" else values[i]
            elif node.op == "to_float":
                values[i] = args[0].to(dtype)
            elif node.op != "input":
                values[i] = OPS[node.op].function(*args)
        return values[root]

    def printed(self, language, roots):
        """(lines of a function, what stands for each root in it, and for the place of each load in its tensor)."""
        text, lines, places = {}, "", {}
        for i in self.reached(roots):
            node = self[i]
            args = [text[x] for x in node.args]
            if node.op in ("input", "number"):
                text[i] = node.value if node.op == "input" else language["number"](node.value)
                continue
            if node.op == "load":
                place = ""
                for dim, arg in enumerate(args):  # of a contiguous tensor
                    index = language["place"].format(arg, node.value, dim)
                    place = language["next"].format(place, node.value, dim, index) if dim else index
                places[i] = f"at{i}"
                lines += language["line"].format(places[i], place or "0")
                expression = language["load"].format(node.kind, node.value, places[i])
            else:
                expression = language[node.op].format(*args)
            text[i] = f"x{i}"
            lines += language["line"].format(text[i], expression)
        return lines, [text[i] for i in roots], places
