"""README.md and docs/: numbers, links, snippets, quoted code, commands and public names are those of the code."""

import argparse
import importlib.util
import linecache
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

import minimal_attn
from minimal_attn import cli

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import recorded  # noqa: E402
import write_docs  # noqa: E402

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
JOURNAL = sorted(ROOT.glob("benchmarks/journal/*.md"))
API = ROOT / "docs/api.md"
TOKENS = {page: MarkdownIt("commonmark").enable("table").parse(page.read_text())
          for page in (*PAGES, *JOURNAL)}
cpu = pytest.mark.cpu


class Fence(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    comment: str  # the HTML comment in the line before it, or ""

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def fences_of(page):
    before = ""
    for token in TOKENS[page]:
        if token.type == "fence":
            yield Fence(page, token.map[0] + 1, token.info, token.content, before)
        before = token.content.strip() if token.type == "html_block" else ""


def inline_of(page, kind):
    """The tokens of a kind (link_open, image, code_inline) within the text of a page."""
    return [child for token in TOKENS[page] for child in token.children or () if child.type == kind]


def text_of(token):
    return "".join(child.content for child in token.children)


FENCES = [fence for page in PAGES for fence in fences_of(page)]


# Numbers.

@cpu
def test_write_docs_check_finds_nothing_stale(capsys):
    assert write_docs.main(["--check"]) == 0, capsys.readouterr().out


@cpu
def test_quantities(monkeypatch):
    """Rows are paired where all columns are equal but those that both sides name."""
    rows = [dict(zip(("impl", "dtype", "causal", "seqlen_q", "ms", "tflops"), (*x, 10 / x[-1]))) for x in (
        ("a", "bfloat16", False, 8, 1.0), ("a", "bfloat16", True, 16, 2.0), ("a", "float16", True, 16, 4.0),
        ("b", "bfloat16", True, 16, 8.0), ("b", "float16", False, 8, 3.0))]
    monkeypatch.setattr(recorded, "rows_of", lambda name: rows if name == "x" else [])
    for quantity, expected in {"x.a / b": [4], "x.a,dtype=any / b": [4], "x.a,dtype=float16 / b": [],
                               "x.a,dtype=float16 / a,dtype=bfloat16": [0.5], "x.a:tflops,S>=16": [5],
                               "x.a,causal=no / a,causal=yes": [], "x.a:ms,causal=yes / b:ms": [0.25]}.items():
        assert recorded.values(quantity) == expected, quantity
    assert recorded.quoted("span", ".1f", "x.a:ms") == "1.0 to 2.0" and recorded.quoted("count", None, "x.a:ms") == "2"


# Links.

def anchors_of(page):
    """Anchors that a code host gives to headings."""
    slugs = Counter()
    for token, following in zip(TOKENS[page], TOKENS[page][1:]):
        if token.type == "heading_open":
            slug = re.sub(r"[^\w\- ]", "", text_of(following).lower()).replace(" ", "-")
            yield f"{slug}-{slugs[slug]}" if slugs[slug] else slug
            slugs[slug] += 1


@cpu
@pytest.mark.parametrize("page", (*PAGES, *JOURNAL), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = [token.attrs["href"] for token in inline_of(page, "link_open")]
    links += [token.attrs["src"] for token in inline_of(page, "image")]
    assert links or page.name == "packed.md"
    for link in links:
        if not re.match(r"https?://", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target), link


# Snippets.

SNIPPETS = [pytest.param(fence, id=str(fence), marks=[pytest.mark.gpu] * (fence.comment == "<!-- test: gpu -->"))
            for fence in FENCES if fence.language == "python"]


@pytest.mark.parametrize("fence", SNIPPETS)
def test_snippet_runs(fence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    linecache.cache[str(fence)] = len(fence.text), None, fence.text.splitlines(True), str(fence)  # as a file would have
    exec(compile(fence.text, str(fence), "exec"), {"__name__": "__main__"})


@cpu
def test_snippets_for_a_gpu_compile_and_import():
    for fence in (snippet.values[0] for snippet in SNIPPETS if snippet.marks):
        compile(fence.text, str(fence), "exec")
        exec("\n".join(line for line in fence.text.splitlines() if re.match("import|from", line)), {})


@cpu
def test_quoted_code_is_in_its_file():
    """In order and whatever its indentation; a line with … alone stands for lines that are left out."""
    text = (ROOT / "docs/ladder.md").read_text()
    quotes = re.findall(r"^From \[`(\S+?)`\]\(\.\./\S+?\)[^`]*?:\n\n```cpp\n(.*?)```$", text, re.M | re.S)
    assert len(quotes) == text.count("```cpp") > 5
    for file, code in quotes:
        quote, source = (re.sub(r"(?m)^ +", "", lines) for lines in (code, (ROOT / file).read_text()))
        parts = map(re.escape, quote.split("…\n"))
        assert re.search(".*?".join(parts), source, re.S), f"{file} has no longer\n{code}"


# Commands.

class Parsed(Exception):
    """A program has understood its command line."""


def parse_make(words, monkeypatch):
    for variable in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(variable, raising=False)
    python = [] if any(word.startswith("PYTHON=") for word in words) else [f"PYTHON={sys.executable}"]
    done = subprocess.run(["make", "-n", *words, *python], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def parse_minimal_attn(words, monkeypatch):
    def parsed(*args):
        raise Parsed

    for name in ("bench.demo.run", "command.crosscheck.run", "cli.print_info"):
        monkeypatch.setattr(f"minimal_attn.{name}", parsed)
    run_main(cli, words, monkeypatch)


def run_main(module, words, monkeypatch):
    """module.main(words) up to where its options are parsed."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args, **kwargs):
        parse_args(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    with pytest.raises(Parsed):
        module.main(words)


def parse_python(words, monkeypatch):
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file()
    elif words[1:2] == ["minimal_attn"] and words[2:]:
        parse_minimal_attn(words[2:], monkeypatch)
    elif words[2:]:
        run_main(importlib.import_module(words[1]), words[2:], monkeypatch)
    else:
        assert importlib.util.find_spec(f"{words[1]}.__main__")


def parse_pip(words, monkeypatch):
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().split("optional-dep")[1], re.M)
    for of_word in re.findall(r"(?:\.|minimal_attn)\[(.*?)\]", " ".join(words)):
        assert set(of_word.split(",")) <= set(extras)


PROGRAMS = {"make": parse_make, "minimal-attn": parse_minimal_attn, "python": parse_python, "pip": parse_pip,
            # torchrun --nproc-per-node 2 -m MODULE
            "torchrun": lambda words, monkeypatch: run_main(importlib.import_module(words[3]), words[4:], monkeypatch)}


def commands():
    """{command line: where it is}, of fences and of what is quoted in a sentence."""
    found = {}
    for fence in FENCES:
        if fence.language == "bash":
            for line in fence.text.splitlines():
                found.setdefault(shlex.join(shlex.split(line, comments=True)), str(fence))
    for page in PAGES:
        for token in inline_of(page, "code_inline"):
            if re.match(rf"({'|'.join(map(re.escape, PROGRAMS))}) ", token.content):
                found.setdefault(shlex.join(shlex.split(token.content)), page.name)
    return found


@cpu
@pytest.mark.parametrize("command", [pytest.param(line, id=f"{place}-{line}") for line, place in commands().items()])
def test_command_is_understood(command, monkeypatch):
    program, *words = shlex.split(command)
    if program in PROGRAMS:
        PROGRAMS[program](words, monkeypatch)


@cpu
@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("command", [line for line in commands() if line.startswith(("python -m triton_ref", "g++"))])
def test_slow_command_runs(command, tmp_path):
    words = shlex.split(command)
    program = [sys.executable] if words[0] == "python" else ["g++", "-o", str(tmp_path / "a.out")]
    done = subprocess.run([*program, *words[1:]], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# api.md.

@cpu
def test_api_has_every_public_name():
    listed = set(re.findall(r"`(\w+)`", API.read_text().split("## Functions")[1].split("```")[0]))
    assert set(minimal_attn.__all__) <= listed


@cpu
def test_api_has_every_environment_variable():
    sources = [*ROOT.glob("minimal_attn/**/*.py"), *ROOT.glob("triton_ref/*.py"), ROOT / "setup.py"]
    read = {name for file in sources for name in re.findall(r"environ\S*?[(\[]\"(MINIMAL_ATTN_\w+)", file.read_text())}
    assert len(read) >= 4
    assert read <= {token.content.partition("=")[0] for token in inline_of(API, "code_inline")}
