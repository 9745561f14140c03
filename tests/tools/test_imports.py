"""The order of the sources: folders of csrc include those above them, and Python modules import without circles."""

import ast
import graphlib
import importlib.util
import re
from pathlib import Path

import pytest

import minimal_attn

ROOT = Path(__file__).parents[2]
PACKAGES = "minimal_attn", "triton_ref"
FILES = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
         for package in PACKAGES for file in (ROOT / package).rglob("*.py")}

CSRC = ROOT / "csrc"
SOURCES = {file.relative_to(CSRC).as_posix(): file.read_text() for file in CSRC.rglob("*") if file.is_file()}
CODE = {name: re.sub(r"//.*", "", source) for name, source in SOURCES.items()}
INCLUDES = {name: re.findall(r'^#include "(.*)"', source, re.M) for name, source in SOURCES.items()}

# The folders that a folder includes beside itself and flash.h. Each of them stands before it.
BELOW = {"ptx": "", "common": "ptx", "mods": "ptx common", "simt": "common mods", "host": "simt",
         "sm80": "ptx common mods", "sm90": "ptx common mods", "cache": "ptx common mods sm80 sm90",
         "ops": "common", "binding": "ops"}

pytestmark = pytest.mark.cpu


def imports_of(name):
    """The modules of the project that a module imports, at its top, inside a function or by importlib."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[:len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:  # from package import module, or from module import name
                yield from [x for x in (f"{module}.{alias.name}", module) if x in FILES][:1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if isinstance(node.args[0], ast.Constant):
                yield from {importlib.util.resolve_name(node.args[0].value, package)} & FILES.keys()


GRAPH = {name: set(imports_of(name)) for name in FILES}


def test_imports_form_no_circle():
    try:
        order = list(graphlib.TopologicalSorter(GRAPH).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert sorted(order) == sorted(FILES)


def test_imports_of_the_facade_leave_out_triton_ref():
    """minimal_attn imports triton_ref.ops. Only tools that show its tables look inside."""
    users = {name for name, imported in GRAPH.items() if name.startswith("minimal_attn")
             and any(x.startswith("triton_ref") for x in imported)}
    assert users == {"minimal_attn.backends.triton", "minimal_attn.toolkit.selector", "minimal_attn.command.info"}


def test_modules_that_moved_keep_their_names():
    for old, new in minimal_attn._MOVED.items():
        assert importlib.import_module(f"minimal_attn.{old}") is importlib.import_module(f"minimal_attn.{new}")
        assert getattr(minimal_attn, old) is importlib.import_module(f"minimal_attn.{old}")
        assert f"minimal_attn.{new}" in FILES and f"minimal_attn.{old}" not in FILES


# csrc.

def folder_of(name):
    return {"flash.cu": "simt", "main.cpp": "binding"}.get(name, name.split("/")[0])


def test_folders_include_downwards():
    for name, included in INCLUDES.items():
        for path in set(included) - {"flash.h", "flash_bwd.h", "flash_cache.h"}:
            assert path in SOURCES, f"{name} includes {path}, which is no path in csrc"
            assert folder_of(path) in {folder_of(name), *BELOW[folder_of(name)].split()}, f"{name} includes {path}"
    for i, folder in enumerate(BELOW):
        assert {*BELOW[folder].split()} <= {*list(BELOW)[:i]}


def test_no_member_is_without_address():
    """nvcc 13 gives what follows an empty [[no_unique_address]] another place on the GPU than on the host."""
    assert not [name for name, code in CODE.items() if "no_unique_address" in code]
