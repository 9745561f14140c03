"""The recorded results: rows of benchmarks/h200/*.json, ratios of their speeds, and the numbers that pages quote.

A quantity is written as in `forward.sm90,S>=2048 / cuDNN`: the speed of one implementation over that of another in each
setting that both have. Conditions follow after commas and hold for both sides, but a column that both sides name may
differ: `forward.sm90,dtype=float16 / sm90,dtype=bfloat16`. `sm90:max_err / FA2:max_err` is a ratio of columns, and
`forward.sm90:tflops` a column alone. Only bf16 counts where a record has it and no condition names dtype.
"""

import json
import operator
import re
from functools import cache, reduce
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).parents[1]
NAMES = {"cuda:sm90": "sm90", "cuda:sm80": "sm80", "cuda:dmma": "dmma", "cuda:simt": "simt", "torch:flash": "FA2",
         "torch:cudnn": "cuDNN", "torch:efficient": "efficient", "torch:varlen": "varlen_attn",
         "flex": "Flex", "flash_attn_interface": "FA3", "cuda:native": "native", "cuda:from_torch": "from_torch"}
COLUMNS = {"B": "batch_size", "H": "nheads", "Hk": "nheads_k", "S": "seqlen_q", "D": "head_dim", "page": "page_size"}
SIZE = "head_dim", "causal", "seqlen_q"
MEASURED = {"impl", "ms", "ms_p20", "ms_p80", "us", "tflops", "gbps", "read_gbps", "peak_mb", "max_err", "attention_ms",
            "attention_us", "step_us", "without_attention_us", "within_us", "of_matmul", "matmul_us"}
# The dense length whose speed a packed batch is compared with.
DENSE = {"16 of 64..4096": 2048, "32 x 512": 512, "8192 + 64 x 128": 8192}
OPERATORS = {"=": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le}


@cache
def record(name):
    """The JSON of a record; its meta has the number of rounds."""
    content = json.loads((ROOT / "benchmarks/h200" / f"{name}.json").read_text())
    found = re.search(r"--rounds (\d+)", content["meta"]["command"])
    content["meta"].setdefault("rounds", int(found[1]) if found else 1)
    return content


@cache
def rows_of(name):
    """The measured rows of a record, with the columns and implementations that tables and pages compare by."""
    if name == "peers":
        return peers()
    if name == "both":
        return both_passes()
    if name.startswith("host"):  # the host's time of a call
        return [{"impl": NAMES.get(x, x), "ms": us / 1e3} for x, us in record(name)["meta"]["host_us"].items()]
    rows = [dict(row, impl=NAMES.get(row["impl"], row["impl"])) for row in record(name)["rows"] if row.get("ms", True)]
    if name == "decode":  # the read beside each call is the fastest one of as many bytes in the run
        for row in rows:
            row["mb"] = round(row["ms"] * row["gbps"])
        reads = sorted((row for row in rows if row["impl"] == "read"), key=lambda row: row["ms"])
        for row in reads:
            is_warm = "warm" in row["lengths"]
            fastest = next(x for x in reads if x["mb"] == row["mb"] and ("warm" in x["lengths"]) == is_warm)
            row |= {key: fastest[key] for key in ("ms", "gbps")}
    for row in rows:
        if "window_size" in row:
            row["window_size"] = tuple(row["window_size"])
        if row.get("tflops"):
            row |= {"us": 1e3 * row["ms"], "tokens": row.get("batch_size", 0) * row.get("seqlen_q", 0)}
            if ceiling := record(name)["meta"].get("matmul_tflops", {}).get(row["dtype"]):
                row["of_matmul"] = row["tflops"] / ceiling
                row["matmul_us"] = row["us"] * row["of_matmul"]
        if name.startswith("varlen"):  # a packed batch is as the dense one beside it
            row |= {"batch_size": None, "tokens": None, "seqlen_q": DENSE.get(row.get("lengths"), row["seqlen_q"])}
            row["seqlen_k"] = row["seqlen_q"]
        elif row.get("op") == "decode_step":
            row["within_us"] = row["step_us"] - row["without_attention_us"]
    if name == "forward":
        rows += elsewhere(rows, "best", "cuDNN", "best", "cudnn", "forward")
    if name.endswith("_fa3"):
        rows += elsewhere(rows, "FA4", "FA3", "fa4", "fa3", name.removesuffix("_fa3"))
    found = {"triton": ("Flex", "FA2"), "short": ("cuDNN", "FA2"), "short_backward": ("cuDNN", "FA2"),
             "tiny": ("cuDNN", "FA2"), "forward_fa3": ("cuDNN", "FA3", "FA4"), "backward_fa3": ("cuDNN", "FA3", "FA4")}
    rows += fastest_of(rows, "best", found.get(name, ()))
    return rows + fastest_of(rows, "ours", ("dmma", "simt"))


def of(text):
    """The rows of `record,condition,...`."""
    name, *conditions = text.split(",")
    return chosen(rows_of(name), named_in(conditions))


def named_in(conditions):
    """{column: (operator, value)} of conditions such as `S>=2048`."""
    parts = [re.fullmatch(r"(\w+)(!=|>=|<=|=)(\S+)", x).groups() for x in conditions]
    return {COLUMNS.get(key, key): condition for key, *condition in parts}


def chosen(rows, named):
    for key, (compare, value) in named.items():
        value = {"yes": True, "no": False}.get(value, float(value) if re.fullmatch(r"[\d.]+", value) else value)
        rows = [row for row in rows if value == "any" or key in row and OPERATORS[compare](row[key], value)]
    return rows


def by_setting(rows, *columns):
    """{values of columns: {impl: row}}"""
    found = {}
    for row in rows:
        found.setdefault(tuple(row[x] for x in columns), {})[row["impl"]] = row
    return found


def fastest_of(rows, name, impls):
    """Rows called `name`: in each setting the fastest row of impls."""
    columns = [x for x in rows[0] if x not in MEASURED]
    settings = by_setting([row for row in rows if row["impl"] in impls], *columns).values()
    return [dict(min(rows.values(), key=lambda row: row["ms"]), impl=name) for rows in settings]


def peers():
    """Rows of peers.json, measured on another H200. ms is one over TFLOP/s, for ratios."""
    content, impls = json.loads((ROOT / "benchmarks/peers.json").read_text()), ("cudnn", "fa3", "fa4")
    rows = [{"impl": impl, "pass": which, "head_dim": row["head_dim"], "causal": row["causal"],
             "seqlen_q": row["seqlen"], "ms": 1 / row[impl]}
            for which, key in (("forward", "rows"), ("backward", "backward")) for row in content[key]
            for impl in impls if row.get(impl)]
    return rows + fastest_of(rows, "best", impls)


def elsewhere(rows, name, impl, peer, base, which):
    """Rows called `name`, an estimate: those of impl, as much faster as peer is than base on the other H200."""
    found = by_setting(of(f"peers,pass={which}"), *SIZE)
    pairs = [(row, found.get(tuple(row[x] for x in SIZE), {})) for row in rows
             if row["impl"] == impl and row["dtype"] == "bfloat16"]
    return [dict(row, impl=name, ms=row["ms"] * x[peer]["ms"] / x[base]["ms"]) for row, x in pairs if peer in x]


def both_passes():
    """Rows with the sum of the times of both passes, which were timed apart, up to head_dim 128."""
    forward = by_setting(of("triton,dtype=bfloat16"), *SIZE)
    backward = by_setting(of("backward,tokens=16384"), *SIZE)
    return [dict(zip(SIZE, x), impl=impl, ms=forward[x][impl]["ms"] + row["ms"]) for x, rows in backward.items()
            if x in forward and x[0] <= 128 for impl, row in rows.items() if impl in forward[x]]


def side(text, name, inherited):
    """(name of the record, rows, column or "", {column: condition}) of one side of a quantity."""
    text, *conditions = text.split(",")
    text, _, column = text.partition(":")
    if "." in text:
        name, text = text.split(".")
    named = named_in(conditions)
    rows = [row for row in rows_of(name) if row["impl"] == text]
    default = {"dtype": ("=", "bfloat16")} if any(row.get("dtype") == "bfloat16" for row in rows) else {}
    return name, chosen(rows, default | inherited | named), column, named


def values(quantity):
    """The values of a quantity, one for each setting."""
    first, _, second = (x.strip() for x in quantity.partition(" / "))
    name, rows, column, named = side(first, None, {})
    if not second:
        return [row[column] for row in rows]
    _, others, other_column, also_named = side(second, name, named)
    if not (rows and others):
        return []
    columns = (rows[0].keys() & others[0].keys()) - MEASURED - (named.keys() & also_named.keys())
    found = by_setting(others, *columns)
    pairs = [(row, peer) for row in rows for peer in found.get(tuple(row[x] for x in columns), {}).values()]
    return [row[column] / peer[other_column] if column else peer["ms"] / row["ms"] for row, peer in pairs]


def only(numbers):
    (number,) = numbers
    return number


STATS = {"mean": geometric_mean, "most": max, "count": len, "span": lambda x: (min(x), max(x)),
         "value": only}


def quoted(stat, form, quantity):
    """The text of a number: STAT [FORMAT]: QUANTITY, or meta [FORMAT]: RECORD.KEY[.KEY]."""
    if stat == "meta":
        name, *keys = quantity.split(".")
        return format(reduce(operator.getitem, keys, record(name)["meta"]), form or "")
    found = STATS[stat](values(quantity))
    form = form or ("d" if stat == "count" else ".2f")
    return " to ".join(format(x, form) for x in found) if stat == "span" else format(found, form)


def table(headings, rows):
    """Columns of numbers are aligned on the right."""
    heading, *lines = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    aligned = ("---:" if all(re.fullmatch(r"[\d.–]*", cell) for cell in column) else "---" for column in zip(*rows))
    return "\n".join([heading, f"|{'|'.join(aligned)}|", *lines]) + "\n"
