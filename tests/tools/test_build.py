"""How csrc becomes a module: loading, locks, flags, messages for what is missing, and what wheel and sdist hold."""
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest
import torch
from torch.utils import cpp_extension

from cases import in_a_new_process
from minimal_attn import _build

ROOT = Path(__file__).resolve().parents[2]


def import_file(path, name="another_build"):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(code, cwd=ROOT, **env):
    """Runs code in a fresh interpreter and returns the text that it prints."""
    run = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture
def tree(tmp_path):
    """A copy of what an installation reads."""
    for name in ("csrc", "minimal_attn", "triton_ref"):
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "tree")
    return tmp_path / "tree"


# Loading.

def test_threads_share_one_module(monkeypatch):
    assert _build.load() is _build.load()
    calls = []

    def slowly():
        calls.append("once")
        time.sleep(0.2)
        return "module"

    monkeypatch.delitem(sys.modules, _build.NAME)
    monkeypatch.setattr(_build, "_adopted", slowly)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: _build.load(), range(4))) == ["module"] * 4
    assert import_file(_build.__file__).load() == "module"  # a second copy of the loader, the same process
    assert calls == ["once"]


def test_load_adopts_a_library_loaded_by_torch():
    """With its fake kernels."""
    file = _build.load().__file__
    assert python(f"""
import torch
torch.ops.load_library({file!r})
import minimal_attn
from torch._subclasses.fake_tensor import FakeTensorMode
print(minimal_attn.load().__file__)
with FakeTensorMode():
    q = torch.empty(2, 4, 20, 16)
    print(*[tuple(x.shape) for x in torch.ops.minimal_attn.flash_forward(q, q, q, *[None] * 7, 0.25, 0.0, -1, -1, 0)])
""") == f"{file}\n(2, 4, 20, 16) (2, 4, 20) (0,)\n"


def no_build(name, build_directory, **options):
    """In place of cpp_extension.load."""
    (Path(build_directory) / f"{name}.so").touch()
    return "module"


# Builds that went wrong, and what they leave behind.

@pytest.fixture
def small(tmp_path, monkeypatch):
    """A csrc that compiles in a second; small(answer) writes it, and the module has that answer."""
    def write(answer):
        (csrc / "main.cpp").write_text(f"""#include <Python.h>
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{_build.NAME}", nullptr, -1, nullptr}};
PyMODINIT_FUNC PyInit_{_build.NAME}() {{
    PyObject* module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "answer", {answer});
    return module;
}}
""")

    csrc = tmp_path / "csrc"
    csrc.mkdir()
    monkeypatch.setattr(_build, "CSRC", csrc)
    monkeypatch.setattr(_build, "cannot_build_cuda", lambda: "not needed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setitem(sys.modules, _build.NAME, None)  # where the interpreter puts it; so it goes with the test
    del sys.modules[_build.NAME]
    write(1)
    return write


def build_only():
    """Leaves a library as another process would: built, and not in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp_extension, "_import_module_from_library", lambda *args: None)
        _build._compiled(verbose=False)
    return _build.build_directory() / f"{_build.NAME}.so"


def test_failed_build_is_tried_again(small):
    build_only()
    small("no_such_name")
    for _ in range(2):  # neither the older library nor an ImportError
        with pytest.raises(RuntimeError, match="no_such_name.* was not declared"):
            _build._compiled(verbose=False)
    small(2)
    assert _build._compiled(verbose=False).answer == 2


def test_truncated_library_is_linked_again(small):
    library = build_only()
    compiled = library.with_name("main.o").stat().st_mtime_ns
    os.truncate(library, 5000)
    assert _build._compiled(verbose=False).answer == 1
    assert library.with_name("main.o").stat().st_mtime_ns == compiled


def test_source_replaced_by_an_older_file_is_compiled(small):
    build_only()
    small(2)
    os.utime(_build.CSRC / "main.cpp", (0, 0))  # as cp -p or rsync -a leave it
    assert _build._compiled(verbose=False).answer == 2


def test_build_directory_differs_by_environment(monkeypatch):
    monkeypatch.setattr(_build, "environment", lambda: {"TORCH_CUDA_ARCH_LIST": archs})
    archs = "8.0;9.0a"
    folders = {_build.build_directory()}
    assert f"torch{torch.__version__}_sm_80_90a_" in str(folders)
    archs = "12.0+PTX"
    folders.add(_build.build_directory())
    for target, value in ((torch, "__version__"), (torch, "__file__"), (_build, "CSRC")):
        monkeypatch.setattr(target, value, "another")
        folders.add(_build.build_directory())
    monkeypatch.setattr(sys, "version_info", types.SimpleNamespace(major=4, minor=0))
    folders.add(_build.build_directory())
    assert len(folders) == 6


# Locks.

@pytest.fixture
def build_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("MINIMAL_ATTN_BUILD_TIMEOUT", "0.3")
    monkeypatch.setattr(cpp_extension, "load", no_build)
    _build.build_directory().mkdir(parents=True)
    return _build.build_directory()


def test_mark_that_a_killed_build_left_is_no_hindrance(build_dir):
    """torch before 2.15 would wait for the end of the build that this file stands for."""
    (build_dir / "lock").touch()
    assert _build._compiled(verbose=False) == "module"
    assert not (build_dir / "lock").exists()


def test_lock_of_another_build_is_named(build_dir):
    with filelock.FileLock(build_dir / "minimal_attn.lock"), pytest.raises(RuntimeError, match="/minimal_attn.lock"):
        _build._compiled(verbose=False)


# Flags.

@pytest.mark.parametrize("given, gpus, expected", [
    ("9.0;9.0a", [], "9.0a"), ("9.0+PTX", [], "8.0+PTX;9.0a"), ("Hopper", [], "8.0+PTX;9.0a"),
    (" 7.5; 8.6+PTX;", [], "7.5;8.6+PTX"), ("native", [(9, 0), (8, 9), (9, 0)], "8.9;9.0a"),
    ("", [(8, 9)], "8.9"), ("", [], _build.DEFAULT_ARCHS)])
def test_cuda_archs(given, gpus, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", gpus.__getitem__)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    assert _build.cuda_archs() == expected
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", expected)
    assert any("code=sm_" in flag for flag in cpp_extension._get_cuda_arch_flags())  # torch takes what we make


def test_cuda_sources_follow_nvcc(monkeypatch):
    for cuda in (False, True):
        monkeypatch.setattr(_build, "cannot_build_cuda", lambda: None if cuda else "there is no nvcc")
        recipe = _build.recipe()
        assert all(Path(source).is_file() for source in recipe["sources"])
        assert {Path(source).name for source in recipe["sources"]} >= {"main.cpp", "fast_path.cpp", "flash_host.cpp"}
        assert any(source.endswith("flash.cu") for source in recipe["sources"]) == cuda
        assert f"-DMINIMAL_ATTN_CUDA={int(cuda)}" in recipe["extra_cflags"]
        assert f"-DMINIMAL_ATTN_TORCH={torch.__version__}" in recipe["extra_cflags"]  # an upgrade of torch recompiles
        assert ("TORCH_CUDA_ARCH_LIST" in _build.environment()) == cuda


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_built_for_another_gpu(tmp_path):
    other = "7.5" if torch.cuda.get_device_capability() != (7, 5) else "8.0"  # sm_75 has the fewest kernels
    code = ("import torch, minimal_attn; x = torch.ones(1, 1, 4, 16, device='cuda');"
            "minimal_attn.flash_attention(x, x, x, backend='cuda')")
    result = in_a_new_process(code, TORCH_EXTENSIONS_DIR=str(tmp_path), TORCH_CUDA_ARCH_LIST=other)
    assert result.returncode != 0
    for part in ("RuntimeError", torch.cuda.get_device_name(), "this build holds kernels for", "TORCH_CUDA_ARCH_LIST="):
        assert part in result.stderr, result.stderr


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_ptx_of_an_older_gpu(tmp_path):
    """The driver compiles it for this GPU, but there are no tensor cores in it: flash.cu serves."""
    code = ("import torch, minimal_attn; from minimal_attn import flash_attention, which_kernel;"
            "x = torch.ones(1, 1, 4, 16, device='cuda', dtype=torch.half); out = flash_attention(x, x, x);"
            "print(which_kernel(x, x, x), out.eq(1).all().item())")
    result = in_a_new_process(code, TORCH_EXTENSIONS_DIR=str(tmp_path), TORCH_CUDA_ARCH_LIST="7.5+PTX")
    assert result.stdout.split() == ["simt", "True"], result.stderr


# Missing tools.

def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in _build.cannot_build()
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        _build._compiled(verbose=False)


def test_why_not_without_nvcc_refuses_gpus_alone(monkeypatch):
    monkeypatch.setattr(_build, "_registered", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert "nvcc of the CUDA toolkit 13.0" in _build.why_not(on_gpu=True)
    assert _build.why_not() is None and not any(source.endswith(".cu") for source in _build.recipe()["sources"])


@pytest.mark.parametrize("has_cuda", [False, True])
def test_why_not_asks_a_library_that_is_there(has_cuda, monkeypatch):
    """And needs no compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(_build, "_registered", lambda: True)
    monkeypatch.setattr(_build, "load", lambda: types.SimpleNamespace(has_cuda=has_cuda, __file__="_C.so"))
    assert _build.why_not() is None and (_build.why_not(on_gpu=True) is None) == has_cuda


# The module built at installation.

def test_prebuilt_of_another_torch_or_other_sources_is_refused(monkeypatch):
    prebuilt = types.SimpleNamespace(torch_version="1.0.0", __file__="_C.so")
    monkeypatch.setitem(sys.modules, _build.PREBUILT, prebuilt)
    with pytest.raises(RuntimeError, match=r"torch 1\.0\.0"):
        _build._prebuilt()
    prebuilt.torch_version = torch.__version__.split("+")[0]
    prebuilt.csrc_digest = _build.source_digest(_build.CSRC)
    assert _build._prebuilt() is prebuilt
    prebuilt.csrc_digest = "of other sources"
    with pytest.raises(RuntimeError, match="other sources"):
        _build._prebuilt()
    monkeypatch.setattr(_build, "CSRC", Path("/no/such/folder"))  # nothing to compare with
    assert _build._prebuilt() is prebuilt


# Sources and packages.

def test_source_digest(tree):
    def digest():
        return import_file(tree / "minimal_attn" / "_build.py").source_digest()

    seen = {digest()}
    assert seen == {_build.source_digest()}
    for change in (lambda: (tree / "csrc" / "flash.cu").open("a").write("\n"),
                   lambda: (tree / "csrc" / "flash.h").rename(tree / "csrc" / "flash2.h"),
                   lambda: (tree / "triton_ref" / "attention.py").open("a").write("\n"),
                   lambda: (tree / "csrc").rename(tree / "minimal_attn" / "csrc")):
        change()
        seen.add(digest())
    assert len(seen) == 4  # three changes; where csrc lies, in a source tree or installed, is none


def build(kind, tree, out, **env):
    """The path of the wheel or sdist that the build backend makes of `tree`, and what it says meanwhile."""
    said = python(f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))", cwd=tree, **env)
    return out / said.split()[-1], said


@pytest.fixture
def no_torch(tmp_path):
    (tmp_path / "no_torch").mkdir()
    (tmp_path / "no_torch" / "torch.py").write_text("raise ImportError('hidden by the test')")
    return {"PYTHONPATH": str(tmp_path / "no_torch")}


def test_sdist_and_wheel_without_torch_hold_the_sources(tree, tmp_path, no_torch):
    files = {file.relative_to(tree).as_posix() for file in tree.rglob("*") if file.is_file()}
    sdist, _ = build("sdist", tree, tmp_path, **no_torch)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    shutil.unpack_archive(sdist, tmp_path)
    assert names >= files

    wheel, said = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path, **no_torch)
    assert "compiled on first use: torch cannot be imported" in said
    assert wheel.name == "minimal_attn-0.1.0-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= {re.sub("^csrc", "minimal_attn/csrc", file) for file in files if "/" in file}
    assert not any(name.endswith(".so") for name in names)
    scripts = zipfile.ZipFile(wheel).read("minimal_attn-0.1.0.dist-info/entry_points.txt").decode()
    assert scripts.split() == ["[console_scripts]", "minimal-attn", "=", "minimal_attn.cli:main",
                               "[vllm.general_plugins]", "minimal_attn", "=", "minimal_attn.integrations.vllm:register"]


@pytest.mark.slow
def test_wheel_without_a_compiler_fails_or_holds_the_sources(tree, tmp_path):
    backend = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", backend, str(tmp_path)], cwd=tree, capture_output=True, text=True,
                         env=os.environ | {"CXX": "no-such-compiler"})
    assert run.returncode and "MINIMAL_ATTN_SOURCES_ONLY=1" in run.stderr
    wheel, said = build("wheel", tree, tmp_path, CXX="no-such-compiler", MINIMAL_ATTN_SOURCES_ONLY="1")
    assert wheel.name.endswith("-none-any.whl") and "on first use: MINIMAL_ATTN_SOURCES_ONLY is 1" in said


def test_editable_install_reads_the_source_tree(tree, tmp_path):
    wheel, _ = build("editable", tree, tmp_path, MINIMAL_ATTN_SOURCES_ONLY="1")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert python(f"""
import site
site.addsitedir({str(tmp_path / "site")!r})
import minimal_attn, triton_ref
from minimal_attn import _build
print(minimal_attn.__file__, triton_ref.__file__, _build.CSRC)
""", cwd=tmp_path, PYTHONPATH="").split() == [f"{tree}/{x}" for x in (
        "minimal_attn/__init__.py", "triton_ref/__init__.py", "csrc")]


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_wheel_with_torch_holds_the_extension(tree, tmp_path):
    wheel, _ = build("wheel", tree, tmp_path)
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert (site / "minimal_attn" / "csrc" / "flash.cu").is_file()
    shutil.rmtree(tree)
    load = """
import minimal_attn, torch
try:
    module = minimal_attn.load()
except RuntimeError as error:
    exit(print(error))
assert hasattr(torch.ops.minimal_attn, "flash_forward")
print(module.__name__, module.__file__)
"""
    there = dict(cwd=tmp_path, PYTHONPATH=str(site), CXX="no-such-compiler")
    assert python(load, **there).startswith(f"minimal_attn._C {site}/")
    (site / "minimal_attn" / "csrc" / "flash.cu").open("a").write("// edited\n")
    assert "was built from other sources" in python(load, **there)
