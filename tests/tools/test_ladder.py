"""docs/ladder.md: its code is that of the kernels, and its numbers are those of the journal.

test_docs.py has the tests of its form, its links and its recorded numbers.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/ladder.md").read_text()
JOURNAL = (ROOT / "benchmarks/journal.md").read_text()
QUOTE = re.compile(r"^From \[`(\S+?)`\]\(\.\./\S+?\)[^`]*?:\n\n```cpp\n(.*?)```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# A table of steps, and before it the section of the journal that it quotes.
STEPS = re.compile(r"\]\(\.\./benchmarks/journal\.md#([\w-]+)\)\.\n\n((?:\|.*\n)+)")

pytestmark = pytest.mark.cpu


def is_quoted(code, source):
    """Whether the lines of code are in source, in order and whatever their indentation; a line with … alone stands for
    lines that are left out."""
    code, source = ("\n" + "".join(line.strip() + "\n" for line in text.splitlines()) for text in (code, source))
    at = 0
    for lines in code.split("…\n"):
        at = source.find("\n" + lines.lstrip("\n"), at)
        if at < 0:
            return False
    return True


def journal_entries():
    """{anchor of a section: {number of an entry: its text; 0: what stands before the entries}}"""
    parts = re.split(r"^## (.*)\n", JOURNAL, flags=re.MULTILINE)[1:]
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in parts[::2]]
    return {anchor: {int(n): text for n, text in zip([0, *re.findall(r"^(\d+)\. ", part, re.MULTILINE)],
                                                     re.split(r"^\d+\. ", part, flags=re.MULTILINE))}
            for anchor, part in zip(anchors, parts[1::2])}


def step_tables():
    """(anchor of the section, headings, rows) of every table with a column for the journal, as lists of cells."""
    for section, lines in STEPS.findall(TEXT):
        headings, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in lines.splitlines())
        yield section, headings, rows


def test_quoted_code_is_in_its_file():
    quotes = QUOTE.findall(TEXT)
    assert len(quotes) == TEXT.count("```cpp") > 5
    for file, code in quotes:
        assert is_quoted(code, (ROOT / file).read_text()), f"{file} has no longer\n{code}"


@pytest.mark.parametrize("code, expected", [("b\nc\n", True), ("a\n…\n  c\n", True), ("c\n…\na\n", False),
                                            ("b2\n", False)])
def test_is_quoted(code, expected):
    assert is_quoted(code, "a\nb\nc\n") == expected


def test_every_step_table_names_a_section():
    assert len(list(step_tables())) == TEXT.count(" | Journal |\n") == 4


def test_step_tables_quote_the_journal():
    """The journal may have more decimals."""
    entries, seen = journal_entries(), 0
    for section, headings, rows in step_tables():
        for row in rows:
            measured = [cell for cell, heading in zip(row[2:-1], headings[2:]) if heading != "× before"]
            found = NUMBER.findall(entries[section][int(row[-1] or 0)])
            for number in NUMBER.findall(" ".join(measured)):
                assert number in found or number in [f"{float(x):.2f}" for x in found], f"{number} of {row}"
                seen += 1
    assert seen > 50


def test_step_tables_compare_with_the_row_before():
    compared = 0
    for _, headings, rows in step_tables():
        if "× before" not in headings:
            continue
        last = {}
        for step, _, measured, before, _ in rows:
            values = {i: float(x) for i, x in enumerate(measured.split(" / ")) if x != "–"}
            if before:
                expected = " / ".join(f"{values[i] / last[i]:.2f}" if i in values else "–"
                                      for i in range(measured.count("/") + 1))
                assert before == expected, step
                compared += 1
            last |= values
    assert compared > 15


def test_decimals_of_the_text_are_in_the_journal():
    text = re.sub(r"<!-- begin (\w+) -->.*?<!-- end \1 -->|```.*?```|^\|.*?$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    decimals = re.findall(r"\d+\.\d+", text[:text.index("## Further reading")])
    assert len(decimals) > 30
    assert not {number for number in decimals if number not in NUMBER.findall(JOURNAL)}
