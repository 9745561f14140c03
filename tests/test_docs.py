"""Numbers in README.md: the blocks that benchmarks/write_tables.py writes hold what the records say."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import write_tables  # noqa: E402

pytestmark = pytest.mark.cpu


def test_write_tables_check_finds_no_stale_numbers(capsys):
    assert write_tables.main(["--check"]) == 0, capsys.readouterr().out


def test_write_tables_rewrites_a_stale_block(monkeypatch, tmp_path, capsys):
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- begin headline -->\nold\n<!-- end headline -->\nafter\n")
    monkeypatch.setattr(write_tables, "FILES", [file])
    monkeypatch.setattr(write_tables, "ROOT", tmp_path)
    monkeypatch.setitem(write_tables.BLOCKS, "headline", lambda: "new\n")
    assert write_tables.main(["--check"]) == 1 and "old" in file.read_text()
    assert "page.md is stale" in capsys.readouterr().out
    assert write_tables.main([]) == 0
    assert file.read_text() == "before\n<!-- begin headline -->\nnew\n<!-- end headline -->\nafter\n"
    assert write_tables.main(["--check"]) == 0


def test_write_tables_knows_every_block():
    for file in write_tables.FILES:
        begun = re.findall(r"<!-- begin (\w+) -->", file.read_text())
        assert begun and len(begun) == len(write_tables.BLOCK.findall(file.read_text())), f"unpaired block in {file}"
        assert sorted(begun) == sorted(write_tables.BLOCKS)


def test_readme_has_no_placeholder_left():
    assert not re.search(r"^[A-Z]{4,}$|\b(CPU)?TEST(S|MIN|COUNT|ALL)\b", (ROOT / "README.md").read_text(), re.MULTILINE)
