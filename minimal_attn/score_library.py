"""score_mod for csrc: the CUDA source of a function, as csrc/mods/score_function.cuh takes it.

The graph of score_graph.py is printed as a struct of three functions. Numbers are a part of the source, and captured
tensors are read.
"""

import functools
import math

import torch

from .score_graph import INPUTS

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float64: "double",
         torch.bool: "bool", torch.int32: "int", torch.int64: "int64_t"}
EXACT_IN_FLOAT = 2 ** 22  # of two such numbers, sums and differences are exact in fp32, too


def _number(x):
    if isinstance(x, (bool, int)):
        return repr(x).lower()
    x = torch.tensor(x, dtype=torch.float32).item()
    return "NAN" if math.isnan(x) else f"{'-' * (x < 0)}INFINITY" if math.isinf(x) else f"{x!r}f"


# Operations, numbers, elements of tensors, their places in them, and a line of a function.
CUDA = {op: f"{{}} {sign} {{}}" for op, sign in dict(
    add="+", sub="-", mul="*", lt="<", le="<=", gt=">", ge=">=", eq="==", ne="!=", xor="!=").items()} | {
    "and": "{} && {}", "or": "{} || {}", "not": "!{}", "neg": "-{}", "where": "{} ? {} : {}", "div": "{} / {}",
    "quotient": "quotient({}, {})", "floordiv": "floor_div({}, {})", "mod": "remainder({}, {})",
    "abs": "absolute({})", "to_float": "float({})", "to_int": "int({})", "sqrt": "sqrtf({})", "sin": "sinf({})", "cos": "cosf({})", "number": _number,
    "load": "element<T{1}>(captured[{1}], {2})", "place": "place({}, captured[{}].size[{}])",
    "next": "({}) * captured[{}].size[{}] + {}",
    "line": "        const auto {} = {};\n"}
CUDA |= {op: f"{op}({{}})" for op in ("exp", "exp2", "log", "tanh", "sigmoid")}
CUDA |= {op: f"{op}({{}}, {{}})" for op in ("maximum", "minimum")}


def cheaper(graph, roots):
    """Nodes that cost a kernel less. float(abs(i)) becomes abs(float(i)) where that is exact, since floats of indices
    cost nothing. A quotient that depends on the score becomes an approximation, or a product if it divides by a
    number."""

    @functools.cache
    def is_small(i):  # an index, or a difference of indices and small numbers
        node = graph[i]
        return (node.op == "input" or node.op == "number" and abs(node.value) < EXACT_IN_FLOAT
                or node.op in ("add", "sub", "neg") and all(map(is_small, node.args)))

    @functools.cache
    def is_of_score(i):
        return i == 0 or any(map(is_of_score, graph[i].args))

    @functools.cache
    def rewritten(i):
        node = graph[i]
        args = [rewritten(x) for x in node.args]
        if node.op == "to_float" and graph[args[0]].op == "abs" and is_small(x := graph[args[0]].args[0]):
            return graph("abs", graph("to_float", x))
        if node.op == "div" and is_of_score(i):
            if graph[args[1]].op == "number" and abs(graph[args[1]].value) > 1e-30:
                return graph("mul", args[0], graph.number(1 / graph[args[1]].value))
            return graph.node("quotient", tuple(args), None, node.kind)
        if node.op == "load":
            return graph.node("load", tuple(args), node.value, node.kind)
        return graph(node.op, *args) if args else i

    return [rewritten(i) for i in roots]


def struct(graph, root, dtypes):
    """The struct ScoreMod of a graph. dtypes: those of the captured tensors."""
    derivatives = graph.derivatives(root)
    changed, derivative, *terms = cheaper(graph, [root, derivatives.pop(0), *derivatives.values()])
    loads = cheaper(graph, derivatives)
    lines, results, places = graph.printed(CUDA, [*terms, *loads])
    axes = []
    for load, term, result in zip(loads, terms, results):
        if not graph.is_number(term, 0):
            lines += (f"        add.template operator()<{len(axes)}>(captured[{graph[load].value}].gradient, "
                      f"{places[load]}, ds == 0 ? 0 : ds * {result});\n")
            axes.append(functools.reduce(int.__or__, (graph[i].axes for i in graph[load].args), 0))
    may_be_low = any(x.kind == "float" and (x.op == "load" or x.op == "number" and 1e29 <= abs(x.value) < math.inf)
                     for x in map(graph.__getitem__, graph.reached([root])))
    types = "".join(f"    using T{i} = {TYPES[dtype]};\n" for i, dtype in enumerate(dtypes))
    parameters = "float score, const ScorePlace &at, const Captured *captured"
    names = f"        [[maybe_unused]] const auto [{', '.join(INPUTS[1:])}] = at;\n"

    def function(name, node):
        lines, (result,), _ = graph.printed(CUDA, [node])
        return (f"    static __device__ float {name}({parameters}) {{\n{names}{lines}        return {result};\n    }}\n")

    return f"""struct ScoreMod : ScoreOps {{
    static constexpr int kNumCaptured = {len(dtypes)}, kNumGradients = {len(axes)};
    static constexpr bool kMayBeLow = {str(may_be_low).lower()};
    static __device__ constexpr int axes(int i) {{ return {"".join(f"i == {i} ? {x} : " for i, x in enumerate(axes))}0; }}
{types}{function("changed", changed)}{function("derivative", derivative)}    template <typename Add>
    static __device__ void add_gradients(float ds, {parameters}, Add add) {{
{names}{lines}    }}
}};
"""


def source(graph, root, dtypes, head_dim, has_block_mask):
    """The source of a library for calls with a head_dim up to this one, 64, 128 or 256, and with gradients up to 128."""
    arguments = f"{head_dim}, {str(has_block_mask).lower()}"
    functions = f"""
extern "C" void forward(const AttnParams &p, const Captured *captured) {{
    sm90::flash_forward_function<{arguments}>(with_captured<ScoreMod>(p, captured));
}}
"""
    if head_dim <= 128:
        functions += f"""
extern "C" int64_t backward_workspace(const AttnBackwardParams &p) {{
    return sm90::backward_workspace_function<{arguments}, ScoreMod>(p);
}}
extern "C" void backward(const AttnBackwardParams &p, const Captured *captured) {{
    sm90::flash_backward_function<{arguments}>(with_captured<ScoreMod>(p, captured));
}}
"""
    return ('#include "sm90/mods/function_scores.cuh"\n\nnamespace {\n\n' + struct(graph, root, dtypes)
            + "\n}  // namespace\n" + functions)
