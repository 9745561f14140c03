"""Build the wheel: one file for every Python from 3.10 and every torch from 2.11 on, with the kernels for GPUs, the CPU
build and the sources. Users need no compiler.

    make wheel                                   # dist/minimal_attn-...-py3-none-manylinux_..._x86_64.whl
    python tools/build_wheel.py --cpu --out DIR  # without the kernels for GPUs, in a few minutes

The machine needs nvcc of CUDA 13, g++ 11 or newer, and torch 2.11 or newer, whose build need not be one for CUDA. The
objects stay in build/wheel, where ninja finds them up to date. Read next: ../csrc/binding/stable.cpp, the library.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from minimal_attn import _build, stable  # noqa: E402

# torch looks for it only where it is a build for CUDA itself.
CUDA_HOME = os.environ.get("CUDA_HOME") or cpp_extension.CUDA_HOME or "/usr/local/cuda"
# These files make the binding for one torch. The wheel's is in stable.cpp.
OTHER_BINDING = {"main.cpp", "autograd.cpp", "fast_path.cpp", "sdpa_override.cpp"}
STABLE_ABI = "0x020B000000000000"  # of torch 2.11, as torch/csrc/stable/version.h writes it
ARCHS = ("compute_75,code=sm_75", "compute_80,code=[sm_80,compute_80]", "compute_90a,code=sm_90a")
MAX_BYTES = 15_000_000
PACKED = "csrc", "minimal_attn", "triton_ref", "setup.py", "pyproject.toml", "README.md", "LICENSE"

NINJA = """\
cpp = {cxx} {cflags}
cu = {nvcc} {nvccflags}
rule compile
  command = $compiler -MD -MF $out.d -c $in -o $out
  deps = gcc
  depfile = $out.d
rule link
  command = {cxx} -shared $in {ldflags} -o $out
"""


def ninja_file(folder, cuda, made):
    """How ninja builds the library in `folder`. made: objects that are there, by the name of their source."""
    recipe, hidden = _build.recipe(), ["-fPIC", "-fvisibility=hidden"]
    include = [f"-I{path}" for path in recipe["extra_include_paths"]]
    cflags = [*(flag for flag in recipe["extra_cflags"] if not flag.startswith("-DMINIMAL_ATTN_")), *hidden, *include,
              f"-isystem {torch.__path__[0]}/include", "-DMINIMAL_ATTN_STABLE=1", f"-DMINIMAL_ATTN_CUDA={int(cuda)}",
              f"-DTORCH_TARGET_VERSION={STABLE_ABI}"]
    nvccflags = [*recipe["extra_cuda_cflags"], *include, "--compress-mode=size", f"-Xcompiler={','.join(hidden)}",
                 *(f"-gencode=arch={arch}" for arch in ARCHS)]
    # libtorch.so is there for what it links itself: libtorch_cuda.so, if torch is a build for CUDA. See stable.h.
    ldflags = [f"-L{torch.__path__[0]}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed",
               f"-Wl,--version-script={folder}/exports", *recipe["extra_ldflags"]]
    if cuda:
        ldflags += [f"-L{CUDA_HOME}/lib64", f"-L{CUDA_HOME}/lib", "-lcudart_static", "-ldl", "-lrt"]
    text = NINJA.format(cflags=" ".join(cflags), nvccflags=" ".join(nvccflags), ldflags=" ".join(ldflags),
                        cxx=os.environ.get("CXX", "g++"), nvcc=f"{CUDA_HOME}/bin/nvcc")
    objects = [str(made[name]) for name in sorted(made)]
    for source in sorted(_build.CSRC.rglob("*.c*")):
        if source.name in OTHER_BINDING or source.name in made or source.suffix not in (".cpp", ".cu")[:1 + cuda]:
            continue
        objects.append(f"{source.stem}.o")
        digest = f" -DMINIMAL_ATTN_DIGEST={_build.source_digest(_build.CSRC)}" * (source.name == "stable.cpp")
        text += f"build {objects[-1]}: compile {source}\n  compiler = ${source.suffix[1:]}{digest}\n"
    return text + f"build {_build.WHEEL.name}: link {' '.join(objects)} | exports\n"


def compile_library(folder, cuda=True, made={}):
    """The library in `folder`, compiled as far as it is not up to date there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "exports").write_text("{ global: minimal_attn_*; local: *; };\n")
    (folder / "build.ninja").write_text(ninja_file(folder, cuda, made))
    subprocess.run(["ninja", "-C", folder], check=True, env=os.environ | {"PATH": _build.environment()["PATH"]})
    return folder / _build.WHEEL.name


def pack(library, out):
    """A wheel of the package and `library`, under the tag of this machine."""
    with tempfile.TemporaryDirectory() as folder:  # links to the sources, for setuptools leaves files beside them
        for name in PACKED:
            Path(folder, name).symlink_to(ROOT / name)
        backend = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
        said = subprocess.check_output([sys.executable, "-c", backend], cwd=folder, text=True,
                                       env=os.environ | {"MINIMAL_ATTN_STABLE": str(library)})
    return Path(out, said.split()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="leave out the kernels for GPUs")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for the wheel")
    args = parser.parse_args()
    nvcc = shutil.which("nvcc", path=f"{CUDA_HOME}/bin")
    version = subprocess.check_output([nvcc, "--version"], text=True) if nvcc else ""
    if not args.cpu and f"release {stable.CUDA}." not in version:
        sys.exit(f"the wheel needs nvcc of CUDA {stable.CUDA}, and there is none in {CUDA_HOME}/bin: install the "
                 "toolkit, or set CUDA_HOME")
    args.out.mkdir(parents=True, exist_ok=True)
    library = compile_library(ROOT / "build" / ("wheel_cpu" if args.cpu else "wheel"), cuda=not args.cpu)
    with tempfile.TemporaryDirectory() as folder:
        # auditwheel finds the tag by the symbols. It copies nothing and needs no patcher: torch brings its libraries.
        subprocess.run([sys.executable, "-m", "auditwheel", "repair", "--patcher=none", "--exclude=libtorch*.so",
                        f"--wheel-dir={folder}/tagged", pack(library, folder)], check=True)
        wheel = Path(shutil.copy(*Path(folder, "tagged").glob("*.whl"), args.out))
    size = wheel.stat().st_size
    print(f"{wheel}: {size / 1e6:.1f} MB")
    if size > MAX_BYTES:
        sys.exit(f"a wheel must not exceed {MAX_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
