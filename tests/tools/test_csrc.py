"""The sources of csrc as one reads them: their order, their size, and what stays in which file."""

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = {file.name: file.read_text() for file in CSRC.iterdir() if file.is_file()}
CODE = {name: re.sub(r"//.*", "", source) for name, source in SOURCES.items()}
HOST_SIDE = {"torch_params.h", "ops.cpp", "fast_path.cpp", "kernels.h"}

pytestmark = pytest.mark.cpu


def definitions(lines):
    """Lists of lines, from the one of column 0 that begins a function or struct to the brace that ends it."""
    begin = None
    for i, line in enumerate(lines):
        if re.match(r"(?!namespace\b)\w", line):
            begin = i
        if line.startswith("}") or begin == i and line.endswith("}"):
            if begin is not None:  # otherwise the end of a namespace
                yield lines[begin:i + 1]
            begin = None


def functions(lines):
    """The same of functions alone, those in structs included."""
    for found in definitions(lines):
        if re.match(r"(template <.*> )?struct ", found[0]):
            yield from functions([line[4:] if line.startswith("    ") else "" for line in found[1:-1]])
        else:
            yield found


FUNCTIONS = {name: list(functions([line.rstrip() for line in code.splitlines()])) for name, code in CODE.items()}


def test_reading_order_visits_every_file_once():
    order, name = [], "flash.cu"
    while name in SOURCES and name not in order:
        order.append(name)
        following = re.findall(r"^// Read next: ([^\s,]+?)[.,]?\s", SOURCES[name], re.M)
        assert len(following) == 1, f"{name} names {following}"
        name = following[0]
    assert name.startswith("../minimal_attn/") and (CSRC / name).is_file()
    assert sorted(order) == sorted(SOURCES)


def test_functions_and_lines_are_short():
    for name, source in SOURCES.items():
        kernels = [function for function in FUNCTIONS[name] if function[0].startswith("__global__")]
        assert len(kernels) == CODE[name].count("__global__ void"), name  # functions() finds what there is
        assert [(name, function[0]) for function in FUNCTIONS[name] if len(function) > 120] == []
        assert [(name, line) for line in source.splitlines() if len(line) > 120] == []


def test_only_ops_include_torch():
    including = {name for name, code in CODE.items() if re.search(r"#include <(torch|ATen|c10)/", code)}
    assert including == {"aten.h", "stable.h", "direct.h", "main.cpp", "autograd.cpp", "fast_path.cpp",
                         "sdpa_override.cpp"}


def test_both_bindings_share_the_ops(monkeypatch):
    """The wheel's library has no ATen: what both compile includes torch through aten.h or stable.h alone."""
    monkeypatch.syspath_prepend(CSRC.parent / "tools")
    from build_wheel import OTHER_BINDING

    of_aten = {"aten.h", "direct.h", "main.cpp", "autograd.cpp", "fast_path.cpp", "sdpa_override.cpp"}
    assert {name for name, code in CODE.items() if re.search(r"\b(at|c10|torch)::", code)} == of_aten | {"stable.h"}
    assert OTHER_BINDING == {name for name in of_aten if name.endswith(".cpp")}
    assert {name for name, code in CODE.items() if "MINIMAL_ATTN_STABLE" in code} == {"torch_params.h"}


def test_only_ptx_headers_hold_asm():
    assert {name for name, code in CODE.items() if re.search(r"\basm\b", code)} == {"ptx_sm80.cuh", "ptx_sm90.cuh"}


def test_members_without_address_are_in_shared_memory_alone():
    """nvcc 13 gives what follows an empty [[no_unique_address]] another place on the GPU than on the host. Parameters of
    kernels must not have one. The host never builds SharedMemory."""
    assert {name for name, code in CODE.items() if "no_unique_address" in code} == {"producer_sm90.cuh"}
    assert CODE["producer_sm90.cuh"].count("no_unique_address") == 1


def test_only_sequence_cuh_reads_lengths_on_the_gpu():
    """Kernels ask sequence.cuh. The lengths of the call are for those who count tiles, and for code on the host."""
    readers = {name for name, code in CODE.items() if re.search(r"\b(cu_seqlens|seqused)(_[qk])?\[", code)}
    assert readers == {"sequence.cuh"}
    for name in SOURCES.keys() - HOST_SIDE - {"sequence.cuh", "scheduler.cuh", "flash_bwd_bias.cu"}:
        for function in FUNCTIONS[name]:
            text = "\n".join(function)
            if "__global__" in text or "__device__" in text and "__host__" not in text:
                assert not re.search(r"\bp(arams)?(\.|->)seqlen_[qk]\b", text), (name, function[0])


def test_compare_builds_calls_what_flash_h_declares(monkeypatch):
    caller = CSRC.parent / "benchmarks/compare_builds.cpp"
    monkeypatch.syspath_prepend(caller.parent)
    members = re.search(r"struct Call \{(.*?)\n\};", caller.read_text(), re.S)[1]
    names = re.findall(r"(\w+)[,;]", re.sub(r"//.*", "", members))
    assert names == [name for name, _ in importlib.import_module("compare_builds").Call._fields_]
    subprocess.run([os.environ.get("CXX", "g++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                    f"-I{CSRC}", caller], check=True)
