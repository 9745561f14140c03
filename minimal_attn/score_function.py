"""FlexAttention's score_mod for kernels: what the source of a function says, as a Graph of score_graph.py.

The function is never run, and none of its text is compiled. Its names are looked up among its defaults, what it closes
over, its globals and the builtins: numbers become a part of the graph, and tensors are read by the kernel.
Read next: score_graph.py; ../triton_ref/score_function.py, which compiles a graph.
"""

import ast
import builtins
import contextlib
import functools
import inspect
import math
import types
from collections import ChainMap
from typing import NamedTuple

import torch

from .checks import check_is, check_tensor, dtype_names, shown
from .score_graph import FLOATS, INPUTS, Fault, Graph

NUMBERS = bool, int, float
INTS = torch.int64, torch.int32  # smaller ones wrap around in torch
CAPTURED_DTYPES = *FLOATS, *INTS, torch.bool
ALLOWED = ("allowed are assignments to names, return, arithmetic, comparisons, & | ^ ~ of bools, abs, torch.where, "
           "minimum, maximum, clamp, tanh, sigmoid, exp, exp2, log, sqrt, sin, cos and pow, numbers, and captured "
           "tensors with a whole number as the index of each dimension; backend='torch' takes what torch.vmap takes")


class Item(NamedTuple):
    """A captured tensor of this name, indexed so far."""
    name: str
    tensor: torch.Tensor
    indices: tuple = ()


BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "mod",
          ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.Pow: "pow"}
COMPARED = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
FUNCTIONS = {getattr(torch, name): name for name in (
    "abs", "clamp", "cos", "exp", "exp2", "log", "maximum", "minimum", "pow", "sigmoid", "sin", "sqrt", "tanh",
    "where")}
FUNCTIONS |= {abs: "abs", torch.logical_and: "and", torch.logical_or: "or", torch.logical_not: "not"}
OF_NUMBERS = {getattr(math, name): name for name in ("exp", "exp2", "log", "sqrt", "tanh", "sin", "cos", "pow")
              if hasattr(math, name)} | {min: "minimum", max: "maximum", float: "to_float", int: "to_int"}
METHODS = {*FUNCTIONS.values()} - {"and", "or", "not", "where"}
CASTS = {"float": "to_float", "double": "to_float", "int": "to_int", "long": "to_int"}
ARITY = {"where": 3, **dict.fromkeys(("maximum", "minimum", "and", "or", "pow"), 2)}  # of others 1
HINTS = {ast.If: "write torch.where", ast.IfExp: "write torch.where", ast.BoolOp: "write & or |", ast.Not: "write ~",
         ast.For: "there are no loops", ast.While: "there are no loops", ast.Slice: "index each dimension",
         ast.AugAssign: "which changes tensors in place, write x = x + y"}


class _Reader:
    """The statements of a function, as nodes of a Graph, which depends on those captured that are used."""

    def __init__(self, definition, file, captured):
        self.graph, self.file, self.captured, self.used = Graph(), file, captured, {}
        names = [arg.arg for arg in (*definition.args.posonlyargs, *definition.args.args)]
        if len(names) - len(definition.args.defaults) != len(INPUTS) or definition.args.vararg or definition.args.kwarg:
            raise TypeError("score_mod must be a function of score, b, h, q_idx and kv_idx, and what follows must have "
                            f"defaults; got one of ({', '.join(names)})")
        self.names = {name: i for i, name in enumerate(names[:len(INPUTS)])}
        body = definition.body if isinstance(definition.body, list) else [ast.Return(definition.body)]
        self.root = self._run(body, definition)

    def _run(self, body, definition):
        for statement in body:
            self.line = getattr(statement, "lineno", definition.lineno)
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self.graph.cast(self.node(statement.value), "float")
            if isinstance(statement, ast.Assign) and [type(x) for x in statement.targets] == [ast.Name]:
                self.names[statement.targets[0].id] = self.value(statement.value)
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                self.refuse(statement)
        raise self.error(definition, "it returns nothing")

    def error(self, node, why):
        text = ast.unparse(node).splitlines()[0]
        return NotImplementedError(f"score_mod cannot be translated for kernels, {self.file}, line "
                                   f"{getattr(node, 'lineno', self.line)}: `{text}`: {why}; {ALLOWED}")

    def refuse(self, node, hint=None):
        hint = hint or HINTS.get(type(node))
        raise self.error(node, f"{type(node).__name__} is not allowed" + (f", {hint}" if hint else ""))

    def node(self, tree):
        """The node of an expression with a value."""
        value = self.value(tree)
        try:
            if isinstance(value, Item):
                return self.graph.load(*value)
            if type(value) is int:
                return value
        except Fault as fault:
            raise self.error(tree, str(fault)) from None
        raise self.error(tree, f"{shown(value)} is no number and no tensor")

    def value(self, tree):
        """A node's number, an Item, or an object that is neither."""
        try:
            return getattr(self, f"of_{type(tree).__name__}", self.refuse)(tree)
        except Fault as fault:
            raise self.error(tree, str(fault)) from None

    def given(self, x, name):
        """A captured object."""
        if isinstance(x, NUMBERS):
            return self.graph.number(x)
        if not isinstance(x, torch.Tensor):
            return x
        called = f"{name}, which score_mod captures,"
        check_tensor(called, x)
        check_is(called, x, x.dtype in CAPTURED_DTYPES, dtype_names(CAPTURED_DTYPES), TypeError)
        return Item(name, x)

    def of_Constant(self, tree):
        return self.graph.number(tree.value) if isinstance(tree.value, NUMBERS) else self.refuse(tree)

    def of_Name(self, tree):
        if tree.id in self.names:
            return self.names[tree.id]
        if tree.id not in self.captured:
            raise Fault(f"{tree.id} is not defined")
        x = self.captured[tree.id]
        self.used[tree.id] = _mark(x), None if isinstance(x, torch.Tensor) else x  # an object that lives keeps its id
        return self.given(x, tree.id)

    def of_Attribute(self, tree):
        base = self.value(tree.value)
        if base is not math and base is not torch or not hasattr(base, tree.attr):
            self.refuse(tree, "assign what it is to a name outside of the function")
        return self.given(getattr(base, tree.attr), tree.attr)

    def of_Subscript(self, tree):
        base = self.value(tree.value)
        if not isinstance(base, Item):
            self.refuse(tree, "only captured tensors have indices")
        parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        return base._replace(indices=(*base.indices, *map(self.node, parts)))

    def of_UnaryOp(self, tree):
        if isinstance(tree.op, ast.Not):
            self.refuse(tree, HINTS[ast.Not])
        x = self.node(tree.operand)
        return x if isinstance(tree.op, ast.UAdd) else self.graph("neg" if isinstance(tree.op, ast.USub) else "not", x)

    def of_BinOp(self, tree):
        if type(tree.op) not in BINARY:
            self.refuse(tree)
        return self.applied(BINARY[type(tree.op)], self.node(tree.left), self.node(tree.right))

    def applied(self, name, *nodes):
        return self.graph.power(*nodes) if name == "pow" else self.graph(name, *nodes)

    def of_Compare(self, tree):
        if len(tree.ops) > 1 or type(tree.ops[0]) not in COMPARED:
            self.refuse(tree, "write two comparisons with & between them" if len(tree.ops) > 1 else None)
        return self.graph(COMPARED[type(tree.ops[0])], self.node(tree.left), self.node(tree.comparators[0]))

    def of_Call(self, tree):
        function, args = tree.func, [*tree.args]
        base = self.value(function.value) if isinstance(function, ast.Attribute) else None
        keywords = {x.arg: x.value for x in tree.keywords}
        if isinstance(base, (int, Item)):
            name, args = function.attr, [function.value, *args]
            if name == "to" and len(args) == 2:
                dtype = self.value(args.pop())
                name = "float" if dtype in FLOATS else "int" if dtype in INTS else name
            if name in CASTS and len(args) == 1:
                return self.graph(CASTS[name], self.node(args[0]))
            if name not in METHODS:
                self.refuse(tree, f"there is no method {name}")
        else:
            called = self.value(function)
            if called is float and [type(getattr(x, "value", None)) for x in args] == [str]:  # float("inf")
                return self.graph.number(float(args[0].value))
            try:
                name = FUNCTIONS.get(called) or OF_NUMBERS.get(called)
            except TypeError:  # unhashable
                name = None
            if name is None:
                self.refuse(tree, f"{shown(called)} is no function that kernels have")
            if called in OF_NUMBERS:
                nodes = [self.node(x) for x in args]
                if any(self.graph[i].op != "number" for i in nodes):
                    self.refuse(tree, f"it is for numbers alone: write torch.{name}")
        return self.call(tree, name, args, keywords)

    def call(self, tree, name, args, keywords):
        if name == "clamp":
            named = "input", "min", "max"
            if len(args) > len(named) or not keywords.keys() <= {*named[len(args):]}:
                self.refuse(tree, f"it takes {', '.join(named)}")
            args = dict(zip(named, args)) | keywords
            x, low, high = (None if args.get(key) is None or isinstance(args[key], ast.Constant)
                            and args[key].value is None else self.node(args[key]) for key in named)
            for bound, op in ((low, "lt"), (high, "gt")):  # as torch, which gives x the gradient where both are equal
                x = x if bound is None else self.graph("where", self.graph(op, x, bound), bound, x)
            return x
        if keywords:
            self.refuse(tree, "it takes no keywords here")
        if len(args) != ARITY.get(name, 1):
            self.refuse(tree, f"it takes {ARITY.get(name, 1)} arguments")
        return self.applied(name, *map(self.node, args))


def _codes(code):
    """A code object and all within it."""
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _codes(x)


def _is_alike(code, other):
    """Whether two code objects do the same. The order of a closure's names may differ between two ways to compile."""
    def values(code):
        return [repr(x) for x in code.co_consts if not isinstance(x, types.CodeType)]

    return (code.co_name, code.co_firstlineno, code.co_names, values(code)) == (
        other.co_name, other.co_firstlineno, other.co_names, values(other)) and len(code.co_code) == len(other.co_code)


@functools.lru_cache(maxsize=256)
def _definition(code):
    """(the syntax tree of a function by its code, the name of its file, a list for _Readers of it)."""
    try:
        lines, _ = inspect.findsource(code)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError) as error:
        raise NotImplementedError("score_mod has no source that could be read, and kernels are made of it: define it "
                                  f"in a file or a notebook; backend='torch' needs none: {error}") from None
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])
            names = tuple(x.arg for x in (*node.args.posonlyargs, *node.args.args))
            if first == code.co_firstlineno and names == code.co_varnames[:code.co_argcount] and (
                    getattr(node, "name", "<lambda>") == code.co_name):
                found[ast.dump(node)] = node
    if not any(_is_alike(code, x) for x in _codes(compile(tree, code.co_filename, "exec", dont_inherit=True))):
        found = {}
    if len(found) != 1:
        what = "several lambdas stand" if found else "its source has changed, or does not stand"
        raise NotImplementedError(f"score_mod cannot be read: {what} in line {code.co_firstlineno} of "
                                  f"{code.co_filename}; give it a line of its own")
    return *found.values(), code.co_filename, []


def _captured(function):
    """The objects that names in a function stand for, but for its own names."""
    defaults, code, cells = function.__defaults__ or (), function.__code__, {}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not assigned yet
            cells[name] = cell.cell_contents
    named = dict(zip(code.co_varnames[code.co_argcount - len(defaults):], defaults))
    return ChainMap(named, function.__kwdefaults__ or {}, cells, function.__globals__, vars(builtins))


def _mark(x):
    """All of a captured object that a graph depends on."""
    if isinstance(x, torch.Tensor):
        return type(x), x.layout, x.is_nested, x.dtype, x.ndim
    return type(x), repr(x) if isinstance(x, NUMBERS) else id(x)


def read(function):
    """(graph, root, tensors) of a function of a score: a Graph, which is made once, the node of its result, and the
    tensors that it captures, in the graph's order. NotImplementedError for what a kernel cannot have, with its line."""
    check_is("score_mod", function, isinstance(function, types.FunctionType),
             "a plain function of Python where kernels serve it (backend='torch' takes any callable)", TypeError)
    definition, file, known = _definition(function.__code__)
    captured = _captured(function)
    reader = next((reader for reader in known if all(name in captured and _mark(captured[name]) == mark
                                                     for name, (mark, _) in reader.used.items())), None)
    if reader is None:
        reader = _Reader(definition, file, captured)
        reader.captured = None  # tensors need not stay
        known[:] = [*known[-255:], reader]
    tensors = tuple(captured[name] for name in reader.graph.captured)
    for name, x in zip(reader.graph.captured, tensors):
        check_is(f"{name}, which score_mod captures,", x, x.numel() > 0, "a tensor with elements")
    return reader.graph, reader.root, tensors
