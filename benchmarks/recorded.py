"""Code that write_tables.py and ladder_tables.py share: reading the recorded results, comparing them, writing Markdown.

settings() returns {setting: {impl: row}}, where a row is one measured line of benchmarks/h200/*.json.
"""

import json
import re
import textwrap
from pathlib import Path
from statistics import geometric_mean
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]

SIZE = "head_dim", "causal", "seqlen_q"
SHAPE = "batch_size", "nheads", "seqlen_q", "head_dim"
NAMES = {"cuda:sm90": "sm90", "cuda:sm80": "sm80", "cuda:dmma": "dmma", "cuda:simt": "simt", "torch:flash": "FA2",
         "torch:cudnn": "cuDNN", "torch:efficient": "efficient", "torch:varlen": "varlen_attn",
         "flex": "Flex", "flash_attn_interface": "FA3"}
USUAL = {"deterministic": False, "dropout_p": 0.0}  # also where a row does not have them
PASSES = {"forward": "forward pass", "step": "training step"}  # of a whole model


# Reading.

def record(name):
    return json.loads((ROOT / "benchmarks/h200" / f"{name}.json").read_text())


def is_recorded(name):
    """Whether there is such a record. A block of one that is not there yet is empty."""
    return (ROOT / "benchmarks/h200" / f"{name}.json").exists()


def gpu_record():
    """(what is the same for all parts, {name: what a test handed over}) of the tests that ran on a GPU."""
    suites = [ElementTree.parse(file).getroot()[0] for file in sorted((ROOT / "tests/gpu_record").glob("*.xml"))]
    machine = {x.get("name"): x.get("value") for x in suites[0].find("properties")}
    for outcome in ("tests", "skipped", "time"):
        machine[outcome] = sum(float(suite.get(outcome)) for suite in suites)
    handed_over = {x.get("name"): x.get("value") for suite in suites for x in suite.iterfind("testcase//property")}
    return machine, handed_over


def settings(name, *keys, **only):
    """{values of keys: {impl: row}} of the rows of a record that were measured and have the values `only`, and those of
    USUAL where keys and `only` name no others."""
    found, only = {}, {key: value for key, value in USUAL.items() if key not in keys} | only
    for row in record(name)["rows"]:
        row = USUAL | row
        if row["ms"] and all(row[key] == value for key, value in only.items()):
            found.setdefault(tuple(hashable(row[key]) for key in keys), {})[row["impl"]] = row
    return found


def hashable(value):
    return tuple(value) if isinstance(value, list) else value


def rounds(name):
    """How many rounds a record has: one, if its command names no number."""
    found = re.search(r"--rounds (\d+)", record(name)["meta"]["command"])
    return found[1] if found else "1"


# Comparing rows.

def ratio(rows, ours, peer):
    """The speed of ours divided by that of peer."""
    return rows[peer]["ms"] / rows[ours]["ms"]


def ratios(rows_of, ours, peer):
    """{setting: ratio} of the settings that have both."""
    return {setting: ratio(rows, ours, peer) for setting, rows in rows_of.items() if ours in rows and peer in rows}


def speed_in_step(row):
    """The speed of attention within a decode step, over its speed alone, in a row of serving.json."""
    return row["attention_us"] / (row["step_us"] - row["without_attention_us"])


def mean(values):
    return f"{geometric_mean(values.values()):.2f}"


def span(values):
    return f"{min(values.values()):.2f} to {max(values.values()):.2f}"


def largest_error(rows_of, ours, peer):
    """The largest error of ours, as a multiple of that of peer in the same setting."""
    return max(rows[ours]["max_err"] / rows[peer]["max_err"] for rows in rows_of.values())


def peers_elsewhere(name="rows"):
    """{setting: {peer: TFLOP/s}} of peers.json, measured on another H200. name: "rows" of the forward pass, or
    "backward"."""
    return {tuple(row[key] for key in ("head_dim", "causal", "seqlen")): {peer: row[peer] for peer in row if row[peer]}
            for row in json.loads((ROOT / "benchmarks/peers.json").read_text())[name]}


# Writing Markdown.

def paragraph(text):
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False) + "\n"


def bullet(text):
    return textwrap.fill(" ".join(text.split()), 120, initial_indent="- ", subsequent_indent="  ",
                         break_on_hyphens=False)


def table(headings, rows):
    """Columns of numbers are aligned on the right."""
    heading, *lines = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    aligned = ("---:" if all(re.fullmatch(r"[\d.–]*", cell) for cell in column) else "---" for column in zip(*rows))
    return "\n".join([heading, f"|{'|'.join(aligned)}|", *lines]) + "\n"


def tflops(rows, impls):
    return [f"{rows[impl]['tflops']:.0f}" if impl in rows else "–" for impl in impls]


def names(impls):
    return [NAMES.get(impl, impl) for impl in impls]


def speeds(rows_of, impls, pairs, head=("head_dim", "causal", "S")):
    """A table with a line for each setting: TFLOP/s of impls, then the ratios of the speeds of pairs."""
    cells = [[*("yes" if x is True else "no" if x is False else str(x) for x in setting), *tflops(rows, impls),
              *(f"{ratio(rows, *pair):.2f}" for pair in pairs)] for setting, rows in rows_of.items()]
    return table([*head, *names(impls), *(" / ".join(names(pair)) for pair in pairs)], cells)


def by_size(rows_of):
    return dict(sorted(rows_of.items()))
