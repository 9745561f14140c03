"""Builds and loads csrc/: where the sources are, which flags they get, and how the extension enters the process.

load() is the one way in. It returns the library the process already has; else the minimal_attn._C that was built at
installation; else the library of the wheel; else it compiles csrc into a folder of this environment in torch's
extensions directory, where later processes find it. setup.py and tools/build_wheel.py take sources and flags from here.
"""
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock, Timeout

NAME = "minimal_attn_C"  # compiled on first use
PREBUILT = "minimal_attn._C"  # built at installation

PACKAGE = Path(__file__).resolve().parent
CSRC = PACKAGE / "csrc" if (PACKAGE / "csrc").is_dir() else PACKAGE.parent / "csrc"  # installed, or a source tree
WHEEL = PACKAGE / "_stable.so"  # in the wheel that tools/build_wheel.py makes, and nowhere else
TRITON_REF = PACKAGE.parent / "triton_ref"

# With no TORCH_CUDA_ARCH_LIST and no GPU to ask: Turing, Ampere (8.6 and 8.9 run its code), Hopper, the two Blackwells
# (nvcc knows them from 12.8 on) and PTX for whatever follows.
DEFAULT_ARCHS = "7.5;8.0;9.0a;10.0;12.0+PTX"

GPU_KERNELS = ("simt", "sm80", "sm90", "dmma")  # as in csrc/ops/kernels.h

REBUILD = "Rebuild it (pip install --no-build-isolation --no-deps --force-reinstall . in the source tree), or delete " \
    "it and csrc is compiled on first use."

_lock = threading.Lock()


def assume_constant_result(function):
    """torch.compile calls function while it traces, and keeps what it returns. As torch.compiler's decorator of this
    name, which imports torch._dynamo to set one attribute and so makes `import minimal_attn` take a second longer."""
    function._dynamo_marked_constant = True
    return function


def load(verbose: bool = False) -> ModuleType:
    """Load csrc, compiled first if need be, which it says on stderr; verbose: with what the compiler prints.

    Without nvcc it is the host build of flash.cu alone. MINIMAL_ATTN_BUILD_TIMEOUT is how many seconds to wait for the
    build of another process, 600 if it is not set. MINIMAL_ATTN_KERNEL is a kernel to force, as force_kernel does.

    Returns:
        The extension module, one for the process; from the wheel, an object with the same functions. Its ops are
        torch.ops.minimal_attn. Its attribute torch_version names the torch it was built for, or the oldest that the
        wheel serves, and has_cuda says whether it has kernels for GPUs.

    Raises:
        RuntimeError: csrc cannot be built, or what is built serves another torch, other sources or another processor.
        ValueError: MINIMAL_ATTN_KERNEL names no kernel.
    """
    with _lock:
        if NAME not in sys.modules:  # one for the process, even where this file was imported twice
            forced = os.environ.get("MINIMAL_ATTN_KERNEL") or None
            if forced not in (None, *GPU_KERNELS):
                names = ", ".join(map(repr, GPU_KERNELS))
                raise ValueError(f"MINIMAL_ATTN_KERNEL must be unset or one of {names}, got {forced!r}")
            library = _adopted() or _prebuilt() or _of_wheel() or _compiled(verbose)
            if forced is not None:
                library.force_kernel(forced)
            from . import stable  # here, for setup.py takes this file without its package
            from .backends import ops

            ops.register_csrc(stable.backward if isinstance(library, stable.Library) else None)
            sys.modules[NAME] = library
        return sys.modules[NAME]


@assume_constant_result  # torch.compile would trace into the search for a compiler
def why_not(on_gpu=False):
    """Why csrc cannot serve tensors of the CPU, or of a GPU, in words, or None. Compiles nothing."""
    if WHEEL.exists():
        from . import stable

        return stable.why_not(on_gpu)
    if not (_registered() or importlib.util.find_spec(PREBUILT)):
        return cannot_build() or (cannot_build_cuda() if on_gpu else None)
    if on_gpu and not load().has_cuda:  # what is there already
        return f"{load().__file__} was built without CUDA; " + (cannot_build_cuda() or REBUILD)
    return None


def cannot_build():
    """Says in words why csrc cannot be compiled for the CPU. None if it can."""
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        return f"no C++ compiler: {compiler} is not on PATH (install g++, or set CXX)"
    if not shutil.which("ninja", path=environment()["PATH"]):
        return "no ninja on PATH (pip install ninja)"
    return None


def cannot_build_cuda():
    """Says in words why csrc cannot be compiled for GPUs. None if it can."""
    if not torch.version.cuda:
        return f"torch {torch.__version__} is a build without CUDA"
    from torch.utils.cpp_extension import CUDA_HOME

    if not CUDA_HOME or not shutil.which("nvcc", path=f"{CUDA_HOME}/bin"):
        place = f"in {CUDA_HOME}/bin" if CUDA_HOME else "on PATH"
        return f"torch {torch.__version__} needs nvcc of the CUDA toolkit {torch.version.cuda}, and there is none " \
            f"{place} (install it, or set CUDA_HOME)"
    return None


def recipe():
    """Sources and flags, as torch.utils.cpp_extension.load names them. Without nvcc it is the host build alone."""
    cuda = cannot_build_cuda() is None
    has_fma = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    sources = sorted(source for source in CSRC.rglob("*.cpp") if source.name != "stable.cpp")  # the wheel's binding
    sources += sorted(CSRC.rglob("*.cu")) if cuda else []
    return {
        "sources": [str(source) for source in sources],
        "extra_include_paths": [str(CSRC)],  # files of csrc are included by their path in it
        # C++20 for std::barrier. MINIMAL_ATTN_TORCH is read by nobody: ninja rebuilds when a flag changes, but does not
        # watch torch's headers, so that an upgrade of torch in place would go unnoticed. By the flags for FMA the host
        # build of flash.cu rounds a multiply-add once, as a GPU does.
        "extra_cflags": ["-O2", "-std=c++20", "-pthread", "-Wno-unknown-pragmas", "-ffp-contract=fast",
                         *(["-march=x86-64-v3"] if has_fma else []), f"-DMINIMAL_ATTN_TORCH={torch.__version__}",
                         f"-DMINIMAL_ATTN_CUDA={int(cuda)}"],
        # No --use_fast_math: fp32 means fp32, and a kernel that wants a fast intrinsic calls it by name.
        # Compressed, GPU code takes half the space. -split-compile=0 optimizes the kernels of a file on all cores.
        "extra_cuda_cflags": ["-O3", "-std=c++20", "-split-compile=0", "-Xptxas=-warn-spills",
                              "-Xfatbin=-compress-all"],
        "extra_ldflags": ["-pthread", "-s"],  # -s: without the table of symbols, which only a debugger reads
    }


def cuda_archs():
    """TORCH_CUDA_ARCH_LIST in torch's notation, with Hopper's own instructions (9.0a) wherever it says 9.0."""
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace("Hopper", "9.0+PTX").strip(" ;")
    if wanted in ("", "native"):
        visible = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
        wanted = ";".join(f"{major}.{minor}" for major, minor in visible) or DEFAULT_ARCHS
    # The PTX of 9.0a runs on Hopper alone, so the PTX of 8.0 stands in for what is newer.
    hopper = {"9.0": ["9.0a"], "9.0+PTX": ["8.0+PTX", "9.0a"]}
    archs = [arch for word in re.split("[ ;]+", wanted) for arch in hopper.get(word, [word])]
    return ";".join(dict.fromkeys(archs))


def environment():
    """Environment variables for a build: a PATH with ninja, even if Python was called by its path, and the GPUs."""
    env = {"PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])}
    if cannot_build_cuda() is None:
        env["TORCH_CUDA_ARCH_LIST"] = cuda_archs()
    return env


def build_directory():
    """Where csrc is compiled on first use. Its name tells environments apart, so that none recompiles for another: the
    commands hold the paths of csrc and torch. An edited source changes no name, and only its objects are built anew."""
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    archs = environment().get("TORCH_CUDA_ARCH_LIST")
    target = "sm_" + archs.replace(".", "").replace(";", "_") if archs else "cpu"
    paths = hashlib.sha256(f"{CSRC}\n{torch.__file__}".encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return Path(root) / NAME / f"{python}_torch{torch.__version__}_{target}_{paths}"


def source_digest(*roots):
    """sha256 of folders, names and contents; of csrc/ and triton_ref/ it says which sources were timed."""
    digest = hashlib.sha256()
    for root in roots or (CSRC, TRITON_REF):
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
        if file.name == WHEEL.name:
            from . import stable

            return stable.Library(file)
        if name == NAME or (file.parent.name, name) == ("minimal_attn", "_C"):
            spec = importlib.util.spec_from_file_location(name, file)  # the file is mapped already: nothing runs twice
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise RuntimeError("the ops of minimal_attn are already registered in this process, by a library that load() does "
                       "not know; a process can hold only one")


def _prebuilt():
    """minimal_attn._C, or None if it was never built."""
    try:
        module = importlib.import_module(PREBUILT)
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        raise RuntimeError(f"{PREBUILT} was built for another torch and does not load into torch {torch.__version__}: "
                           f"{error}. {REBUILD}") from error
    # C++ promises nothing from one release to the next; 2.13.0+cpu and 2.13.0+cu130 are one release.
    if module.torch_version != re.match(r"\d+\.\d+\.\d+", torch.__version__)[0]:
        raise RuntimeError(f"{module.__file__} was built for torch {module.torch_version}, and this is torch "
                           f"{torch.__version__}. {REBUILD}")
    return _of_these_sources(module)


def _of_wheel():
    """The library of the wheel, or None where there is none."""
    if not WHEEL.exists():
        return None
    from . import stable

    if reason := stable.why_not():
        raise RuntimeError(reason)
    return _of_these_sources(stable.Library(WHEEL))


def _of_these_sources(library):
    if CSRC.is_dir() and getattr(library, "csrc_digest", None) != source_digest(CSRC):
        raise RuntimeError(f"{library.__file__} was built from other sources than those in {CSRC}. {REBUILD}")
    return library


def _compiled(verbose):
    """csrc through torch's JIT, which runs ninja and so compiles what changed. Speaks up only if that takes time."""
    if reason := cannot_build():
        raise RuntimeError(f"cannot compile minimal_attn's csrc: {reason}. backend=\"triton\" and backend=\"torch\" "
                           "need no compiler.")
    from torch.utils import cpp_extension

    env = environment()
    directory, files, start = build_directory(), recipe(), time.time()
    # torch counts a build that failed or was interrupted as done, and would not try again in this process.
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(NAME, None)

    def progress():
        done = sum(file.stat().st_mtime >= start for file in directory.glob("*.o"))
        target = env.get("TORCH_CUDA_ARCH_LIST", "the CPU")
        return f"compiling csrc for {target}: {done} of at most {len(files['sources'])} files"

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (_turn(directory), _verified(directory), _environ(env),
              contextlib.nullcontext() if verbose else _saying(progress)):
            module = cpp_extension.load(NAME, build_directory=str(directory), verbose=verbose, **files)
    except OSError as error:
        raise RuntimeError(f"csrc cannot be built in {directory}: {error}. Set TORCH_EXTENSIONS_DIR to a folder that "
                           "can be written.") from error
    except ImportError as error:
        raise RuntimeError(f"csrc was built in {directory} and does not load: {error}") from error
    if (seconds := time.time() - start) > 1:
        print(f"minimal_attn: csrc is ready after {seconds:.1f} s", file=sys.stderr, flush=True)
    return module


@contextlib.contextmanager
def _verified(directory):
    """Makes ninja build again what it wrongly takes for up to date, since it compares times alone: a library that was
    cut short, and objects of a source that an older file has replaced. A note keeps the digests of both."""
    note, library = directory / "built.json", directory / f"{NAME}.so"
    sources = {str(file): _digest(file) for file in CSRC.rglob("*") if file.is_file()}
    try:
        noted = json.loads(note.read_text())
        is_older = [os.stat(x).st_mtime <= note.stat().st_mtime for x in sources if noted.get(x) != sources[x]]
    except (OSError, ValueError):  # none yet, or cut short itself
        noted, is_older = {}, [True]
    if any(is_older):
        for file in directory.glob("*.o"):
            file.unlink()
    if library.exists() and noted.get("library") != _digest(library):
        library.unlink()
    if is_older:  # noted before the objects change, for the build may be interrupted
        note.write_text(json.dumps(sources))
    yield
    note.write_text(json.dumps({**sources, "library": _digest(library)}))


def _digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def _turn(directory):
    """This process's turn to build. The lock ends with its process. torch before 2.15 marks a build by a file that one
    killed leaves behind, and would wait for its end for ever: under our lock nobody builds, and it goes."""
    limit = float(os.environ.get("MINIMAL_ATTN_BUILD_TIMEOUT", 600))
    ours = directory / "minimal_attn.lock"
    try:
        with _saying(lambda: f"waiting for {ours}, which the build of another process holds"):
            lock = FileLock(ours).acquire(timeout=limit)
    except Timeout:
        raise RuntimeError(f"another process has been building minimal_attn for {limit:g} s and holds {ours}; let it "
                           "finish or end it (MINIMAL_ATTN_BUILD_TIMEOUT sets the seconds to wait)") from None
    with lock:
        (directory / "lock").unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def _saying(text):
    """Say text() on stderr after the first second of what follows, and then every ten."""
    ended = threading.Event()

    def speak():
        pause = 1
        while not ended.wait(pause):
            print("minimal_attn:", text(), file=sys.stderr, flush=True)
            pause = 10

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()


@contextlib.contextmanager
def _environ(values):
    """Not unittest's patch.dict, which at its end leaves other threads without environment for a moment."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
