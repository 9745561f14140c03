"""Digests of what a GPU runs, by which a record made on a GPU stays valid while its code is the same.

A source of csrc has two: one of its tokens, without comments and names of files, and one of the code that comes out of
it. The code is each kernel's machine code, and the host's object code beside it, since launchers choose tiles and
strides. Names of symbols, line tables and texts are left out, so that a renamed struct or a moved file changes nothing.
Triton's kernels are compiled on the GPU's machine. Their functions are digested after parsing, without docstrings.

`python tests/code_digest.py` says what differs from the record; with --write, it writes this part of the record anew.
"""

import argparse
import ast
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC, TRITON_REF = ROOT / "csrc", ROOT / "triton_ref"
RECORD = Path(__file__).parent / "gpu_record" / "code.json"

# Sources for the CPU alone, and the wheel's binding, which test_wheel.py compares.
NOT_RECORDED = "*_host.cpp", "stable.cpp"
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/|\s+|\w+|.', re.DOTALL)


def sha(*parts):
    digest = hashlib.sha256()
    for part in parts:
        part = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


# Tokens.

def sources(csrc=CSRC):
    """The sources of the library, each compiled by itself."""
    found = [file for pattern in ("*.cu", "*.cpp") for file in csrc.rglob(pattern)]
    return sorted(file for file in found if not any(map(file.match, NOT_RECORDED)))


def tokens(source, csrc=CSRC):
    """The digest of the tokens of a source and of all that it includes from csrc."""
    return sha(*_tokens(source, csrc, {source}))


def _tokens(file, csrc, seen):
    for part in _parts(file.read_text()):
        if isinstance(part, list):
            yield from part
            continue
        path = next(folder / part for folder in (file.parent, csrc) if (folder / part).exists()).resolve()
        if path not in seen:
            seen.add(path)
            yield from _tokens(path, csrc, seen)


@functools.cache
def _parts(text):
    """The names of what a text includes from csrc, and between them lists of tokens."""
    parts = re.split(r"^ *#include \"([^\"]*)\"", text, flags=re.MULTILINE)
    return [part if i % 2 else [x for x in TOKEN.findall(part) if not x.isspace() and x[:2] not in ("//", "/*")]
            for i, part in enumerate(parts)]


def functions(triton_ref=TRITON_REF):
    """{name: digest} of what triton_ref defines: functions, classes, constants and other names of what it imports."""
    found = {}
    for file in sorted(triton_ref.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in (x for x in node.names if x.asname):
                    found.setdefault(alias.asname, []).append(sha(alias.name))
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr)):  # a docstring is an Expr
                continue
            for inner in ast.walk(node):
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:]
            found.setdefault(getattr(node, "name", None) or ast.unparse(node).split("=")[0].strip(), []).append(
                sha(_dump(node)))
    return {name: sha(*sorted(digests)) for name, digests in sorted(found.items())}


def _dump(node):
    """ast.dump, alike for every Python from 3.11 on."""
    if isinstance(node, ast.AST):
        return type(node).__name__, *((name, _dump(x)) for name, x in ast.iter_fields(node) if x not in (None, []))
    return [_dump(x) for x in node] if isinstance(node, list) else repr(node)


# Code.

def code(source, csrc=CSRC):
    """{"host": digest, "kernels": [digests]} of a source, compiled as it is shipped, for Hopper."""
    from minimal_attn._build import recipe

    flags = recipe()
    with tempfile.TemporaryDirectory() as folder:
        object_file = Path(folder) / "source.o"
        if source.suffix == ".cu":
            command = [nvcc(), *flags["extra_cuda_cflags"], "-gencode=arch=compute_90a,code=sm_90a", f"-I{csrc}"]
        else:
            # torch's macros keep the numbers of their lines.
            command = [os.environ.get("CXX", "c++"), *torch_flags(), *host_flags(), f"-I{csrc}", "-w", "-D__LINE__=0"]
        subprocess.run([*command, "-c", source, "-o", object_file], check=True, timeout=600)
        kernels = kernels_of(object_file, Path(folder)) if source.suffix == ".cu" else {}
        return {"host": host_code(object_file, kernels), "kernels": sorted(kernels.values())}


def host_flags():
    """The flags of a build with CUDA, also where torch has none, without the version of torch."""
    from minimal_attn._build import recipe

    return [*(x for x in recipe()["extra_cflags"] if "MINIMAL_ATTN_" not in x), "-DMINIMAL_ATTN_CUDA=1"]


def torch_flags():
    from torch.utils.cpp_extension import include_paths

    return ["-DTORCH_EXTENSION_NAME=minimal_attn_C", "-DTORCH_API_INCLUDE_EXTENSION_H", "-fPIC",
            *(f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include")))]


def nvcc():
    from torch.utils.cpp_extension import CUDA_HOME

    return shutil.which("nvcc", path=os.pathsep.join([os.environ["PATH"], f"{CUDA_HOME}/bin"]))


def cuobjdump():
    """The toolkit's, or the one that Triton brings along."""
    import importlib.util

    triton = importlib.util.find_spec("triton")
    folders = [f"{folder}/backends/nvidia/bin" for folder in triton.submodule_search_locations] if triton else []
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *folders]))


def kernels_of(object_file, folder):
    """{mangled name: digest} of the kernels in an object or library: instructions, constants, registers and sizes."""
    from elftools.elf.elffile import ELFFile

    subprocess.run([cuobjdump(), "-xelf", "all", object_file], cwd=folder, check=True, capture_output=True, timeout=60)
    found = {}
    for cubin in folder.glob("*.cubin"):
        with cubin.open("rb") as f:
            sections = {section.name: section for section in ELFFile(f).iter_sections()}
            for name in (x.removeprefix(".text.") for x in sections if x.startswith(".text.")):
                parts = []
                for kind in (".text", ".nv.constant0", ".nv.constant2", ".nv.constant4", ".nv.shared", ".nv.info"):
                    if section := sections.get(f"{kind}.{name}"):
                        registers = section["sh_info"] >> 24 if kind == ".text" else 0
                        data = b"" if section["sh_type"] == "SHT_NOBITS" else section.data()
                        parts += [kind, registers, section["sh_size"], data]
                found[name] = sha(*parts)
        cubin.unlink()
    return found


def host_code(object_file, kernels):
    """The digest of an object's code and data. A function from elsewhere counts by its name without parameters, other
    symbols of C++ by the order in which they are first named, a kernel by its digest, and a text not at all."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.relocation import RelocationSection

    digest, names = hashlib.sha256(), {}
    with open(object_file, "rb") as f:
        elf = ELFFile(f)
        relocations = {section["sh_info"]: section for section in elf.iter_sections()
                       if isinstance(section, RelocationSection)}
        symbols = elf.get_section_by_name(".symtab")
        outer = [symbol.name for symbol in symbols.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF"]
        demangled = subprocess.run(["c++filt", "-p", *outer], capture_output=True, text=True, check=True, timeout=30)
        outer = dict(zip(outer, demangled.stdout.splitlines()))

        def is_code(section):
            return (section["sh_flags"] & 2 and section["sh_type"] == "SHT_PROGBITS"
                    and not re.match(r"\.(nv|__nv|eh_frame|rodata.*\.str)", section.name))

        def named(symbol, addend):
            if symbol["st_info"]["type"] == "STT_SECTION":
                name = elf.get_section(symbol["st_shndx"]).name
                if ".str" in name:
                    return "text", 0
            else:
                name = symbol.name
            if name in kernels:
                return kernels[name], addend
            if symbol["st_shndx"] == "SHN_UNDEF":
                return outer[name], addend
            if symbol["st_info"]["type"] == "STT_SECTION" or re.match(r"\.|_Z|_GLOBAL__", name):
                return names.setdefault(name, len(names)), addend
            return re.sub(r"_[0-9a-f]{8}_.*", "", name), addend  # some of nvcc's hold the name of the source

        for i, section in enumerate(elf.iter_sections()):
            if not is_code(section):
                continue
            digest.update(sha(section["sh_flags"], section.data()).encode())
            for relocation in relocations[i].iter_relocations() if i in relocations else ():
                symbol = symbols.get_symbol(relocation["r_info_sym"])
                digest.update(sha(relocation["r_offset"], relocation["r_info_type"],
                                  *named(symbol, relocation["r_addend"])).encode())
    return digest.hexdigest()[:24]


@functools.cache
def compilers():
    """All that code() depends on beside the source."""
    import torch

    from minimal_attn._build import recipe

    def version(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout

    return {"flags": sha(host_flags(), recipe()["extra_cuda_cflags"]),
            "nvcc": re.search(r"V[\d.]+", version(nvcc(), "--version"))[0],
            "c++": version(os.environ.get("CXX", "c++"), "-dumpfullversion").strip(), "torch": torch.__version__}


# The record.

def all_tokens():
    """The digest of all sources that a GPU's machine runs, of which a record is made there."""
    return sha(*sorted(tokens(source) for source in sources()), *functions().items())


def kernels_of_library():
    """The digest of the kernels in the library that this process runs."""
    from minimal_attn import _build

    with tempfile.TemporaryDirectory() as folder:
        return sha(*sorted(kernels_of(_build.load().__file__, Path(folder)).values()))


def changed(record):
    """(sources of csrc, names in triton_ref) whose tokens and functions are not those of the record."""
    known = {entry["tokens"] for entry in record["csrc"].values()}
    ours = functions()
    return ([source for source in sources() if tokens(source) not in known],
            sorted(name for name in {*ours, *record["triton"]} if ours.get(name) != record["triton"].get(name)))


def recorded_kernels(record):
    """The digest of all kernels of the record's library."""
    return sha(*sorted(kernel for entry in record["csrc"].values() for kernel in entry["kernels"]))


def code_of(files):
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:  # nvcc itself uses two cores
        return dict(zip(files, pool.map(code, files)))


def differences(record):
    """In words, what runs on a GPU and is not in the record."""
    (files, names), theirs, ours = changed(record), record["compilers"], compilers()
    found = [f"triton_ref: {name}" for name in names]
    files = files if theirs["flags"] == ours["flags"] else sources()
    if files and theirs | {"flags": ours["flags"]} != ours:
        return [*found, *(f"{file.name}: its tokens, and {ours} cannot compare its code with that of {theirs}"
                          for file in files)]
    hosts = {entry["host"] for entry in record["csrc"].values()}
    kernels = {kernel for entry in record["csrc"].values() for kernel in entry["kernels"]}
    for file, its in code_of(files).items():
        new = sum(kernel not in kernels for kernel in its["kernels"])
        if new:
            found.append(f"{file.name}: {new} of {len(its['kernels'])} kernels")
        if its["host"] not in hosts:
            found.append(f"{file.name}: the code of its host")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if not arguments.write:
        sys.exit("\n".join(differences(json.loads(RECORD.read_text()))))
    old = json.loads(RECORD.read_text())
    known = {entry["tokens"]: entry for entry in old["csrc"].values()} if old["compilers"] == compilers() else {}
    new = code_of([file for file in sources() if tokens(file) not in known])
    csrc = {file.name: known.get(tokens(file), {}) | {"tokens": tokens(file)} | new.get(file, {}) for file in sources()}
    # The record holds where only names and comments have changed: runs with other tokens are of the same code.
    is_same = old["triton"] == functions() and all(
        {str(entry[part]) for entry in old["csrc"].values()} == {str(entry[part]) for entry in csrc.values()}
        for part in ("host", "kernels"))
    before = {"tokens": old["tokens"], "kernels": recorded_kernels(old)}
    record = {"compilers": compilers(), "tokens": sorted({*(old["tokens"] if is_same else []), all_tokens()}),
              "triton": functions(), "before": old.get("before", before) if is_same else before, "csrc": csrc}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
