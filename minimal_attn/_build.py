"""Builds and loads csrc/: where the sources are, which flags they get, and how the extension enters the process.

load() is the one way in. It returns the library the process already has; else the minimal_attn._C that was built at
installation; else it compiles csrc into torch's extensions directory, where later processes find it up to date.
setup.py takes its sources and flags from here. Next: csrc/main.cpp, the ops; interface.py, which calls them.
"""
import contextlib
import hashlib
import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
import threading
import time
from pathlib import Path

import torch
from filelock import FileLock, Timeout

NAME = "minimal_attn_C"  # compiled on first use
PREBUILT = "minimal_attn._C"  # built at installation

PACKAGE = Path(__file__).resolve().parent
CSRC = PACKAGE / "csrc" if (PACKAGE / "csrc").is_dir() else PACKAGE.parent / "csrc"  # installed, or a source tree
TRITON_REF = PACKAGE.parent / "triton_ref"

# With no TORCH_CUDA_ARCH_LIST and no GPU to ask: Turing, Ampere (8.6 and 8.9 run its code), Hopper, the two Blackwells
# (nvcc knows them from 12.8 on) and PTX for whatever follows.
DEFAULT_ARCHS = "7.5;8.0;9.0a;10.0;12.0+PTX"

_lock = threading.Lock()


def load(verbose=False):
    """The extension module; importing it registers torch.ops.minimal_attn. Compiles csrc if it has to, and says so."""
    with _lock:
        if NAME not in sys.modules:  # one for the process, even where this file was imported twice
            sys.modules[NAME] = _adopted() or _prebuilt() or _compiled(verbose)
        return sys.modules[NAME]


@torch.compiler.assume_constant_result  # torch.compile would trace into the search for a compiler
def why_not():
    """Why load() would fail here, in words, or None. Cheap: it compiles and loads nothing."""
    if _registered() or importlib.util.find_spec(PREBUILT):
        return None
    return cannot_build()


def cannot_build():
    """What is missing to compile csrc, in words, or None."""
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        return f"no C++ compiler: {compiler} is not on PATH (install g++, or set CXX)"
    if not shutil.which("ninja", path=environment()["PATH"]):
        return "no ninja on PATH (pip install ninja)"
    if torch.version.cuda:
        from torch.utils.cpp_extension import CUDA_HOME

        if not CUDA_HOME or not shutil.which("nvcc", path=f"{CUDA_HOME}/bin"):
            return f"torch {torch.__version__} needs nvcc of the CUDA toolkit {torch.version.cuda}, and there is none" \
                f" in {CUDA_HOME}/bin (install it, or set CUDA_HOME)"
    return None


def recipe():
    """Sources and flags, as torch.utils.cpp_extension.load names them."""
    cuda = torch.version.cuda is not None
    sources = [CSRC / "main.cpp", CSRC / "flash_host.cpp", *(sorted(CSRC.glob("*.cu")) if cuda else [])]
    return {
        "sources": [str(source) for source in sources],
        # C++20 for std::barrier. MINIMAL_ATTN_TORCH is read by nobody: ninja rebuilds when a flag changes, but does
        # not watch torch's headers, so that an upgrade of torch in place would go unnoticed.
        "extra_cflags": ["-O3", "-std=c++20", "-pthread", "-Wno-unknown-pragmas", *fused_multiply_add(),
                         f"-DMINIMAL_ATTN_TORCH={torch.__version__}",
                         *(["-DMINIMAL_ATTN_CUDA"] if cuda else [])],
        # No --use_fast_math: fp32 means fp32, and a kernel that wants a fast intrinsic calls it by name.
        "extra_cuda_cflags": ["-O3", "-std=c++20", "-lineinfo", "-Xptxas=-warn-spills"],
        "extra_ldflags": ["-pthread"],
    }


def fused_multiply_add():
    """Flags that let the host build of flash.cu round a multiply-add once, as a GPU does."""
    x86_with_fma = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    return ["-ffp-contract=fast", *(["-march=x86-64-v3"] if x86_with_fma else [])]


def cuda_archs():
    """TORCH_CUDA_ARCH_LIST in torch's notation, with Hopper's own instructions (9.0a) wherever it says 9.0."""
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace("Hopper", "9.0+PTX")
    if wanted in ("", "native"):
        visible = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
        wanted = ";".join(f"{major}.{minor}" for major, minor in visible) or DEFAULT_ARCHS
    # The PTX of 9.0a runs on Hopper alone, so the PTX of 8.0 stands in for what is newer.
    hopper = {"9.0": ["9.0a"], "9.0+PTX": ["8.0+PTX", "9.0a"]}
    archs = [arch for word in re.split("[ ;]+", wanted.strip(" ;")) for arch in hopper.get(word, [word])]
    return ";".join(dict.fromkeys(archs))


def environment():
    """What a build needs in os.environ: ninja beside a Python that was called by its path, and the list of GPUs."""
    env = {"PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])}
    if torch.version.cuda:
        env["TORCH_CUDA_ARCH_LIST"] = cuda_archs()
    return env


def source_digest():
    """sha256 of csrc/ and triton_ref/, names and contents: says which sources a recorded result belongs to."""
    digest = hashlib.sha256()
    for root in (CSRC, TRITON_REF):
        for file in sorted(root.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(file.relative_to(root.parent).as_posix().encode() + b"\0")
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _registered():
    return hasattr(torch.ops.minimal_attn, "flash_forward")


def _adopted():
    """The library that came in another way (torch.ops.load_library): TORCH_LIBRARY allows no second one."""
    if not _registered() or PREBUILT in sys.modules:
        return None
    for file in map(Path, torch.ops.loaded_libraries):
        name = file.name.split(".")[0]
        if name == NAME or (file.parent.name, name) == ("minimal_attn", "_C"):
            spec = importlib.util.spec_from_file_location(name, file)  # the file is mapped already: nothing runs twice
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise RuntimeError("the ops of minimal_attn are already registered in this process, by a library that load() does "
                       "not know; a process can hold only one")


def _prebuilt():
    """minimal_attn._C, or None if it was never built."""
    rebuild = "Rebuild it (pip install --no-build-isolation --no-deps --force-reinstall . in the source tree), or " \
        "delete it and csrc is compiled on first use."
    try:
        module = importlib.import_module(PREBUILT)
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        raise RuntimeError(f"{PREBUILT} was built for another torch and does not load into torch {torch.__version__}: "
                           f"{error}. {rebuild}") from error
    # C++ promises nothing from one release to the next; 2.13.0+cpu and 2.13.0+cu130 are one release.
    if module.torch_version != re.match(r"\d+\.\d+\.\d+", torch.__version__)[0]:
        raise RuntimeError(f"{module.__file__} was built for torch {module.torch_version}, and this is torch "
                           f"{torch.__version__}. {rebuild}")
    return module


def _compiled(verbose):
    """csrc through torch's JIT, which runs ninja and so compiles what changed. Speaks up only if that takes time."""
    if reason := cannot_build():
        raise RuntimeError(f"cannot compile minimal_attn's csrc: {reason}. backend=\"triton\" and backend=\"torch\" "
                           "need no compiler.")
    from torch.utils import cpp_extension

    env = environment()
    archs = env.get("TORCH_CUDA_ARCH_LIST")
    target = "sm_" + archs.replace(".", "").replace(";", ", sm_") if archs else "cpu host"
    directory = Path(cpp_extension._get_build_directory(NAME, verbose))
    start = time.monotonic()
    notice = threading.Timer(1, _say, [f"compiling csrc for {target}..."])
    notice.start()
    try:
        with _turn(directory), _environ(env):
            module = cpp_extension.load(NAME, build_directory=str(directory), verbose=verbose, **recipe())
    finally:
        notice.cancel()
    if (seconds := time.monotonic() - start) > 1:
        _say(f"csrc is ready after {seconds:.1f} s")
    return module


@contextlib.contextmanager
def _turn(directory):
    """This process's turn to build. torch marks a build by a file that one killed leaves behind, and would wait for
    its end for ever; our own lock ends with its process, and under it that file should not be there."""
    limit = float(os.environ.get("MINIMAL_ATTN_BUILD_TIMEOUT", 600))
    deadline = time.monotonic() + limit
    ours, torchs = directory / "minimal_attn.lock", directory / "lock"
    try:
        lock = FileLock(ours).acquire(timeout=limit)
    except Timeout:
        raise RuntimeError(f"another process has been building minimal_attn for {limit:g} s and holds {ours}; let it "
                           "finish or end it (MINIMAL_ATTN_BUILD_TIMEOUT sets the seconds to wait)") from None
    with lock:
        while torchs.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{torchs} has been there for {limit:g} s: a build that was killed leaves it "
                                   "behind. Delete it if no build is running.")
            time.sleep(0.1)
        yield


@contextlib.contextmanager
def _environ(values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _say(text):
    print(f"minimal_attn: {text}", file=sys.stderr, flush=True)
