"""Builds minimal_attn._C where torch can be imported (--no-build-isolation), and fails where csrc cannot be compiled
then. Without torch, or with MINIMAL_ATTN_SOURCES_ONLY=1, the sources are installed as they are, and minimal_attn.load()
compiles them on first use. With MINIMAL_ATTN_STABLE=FILE it packs the library that tools/build_wheel.py has built. The
rest is in pyproject.toml."""
import importlib.util
import os
from pathlib import Path

from setuptools import Distribution, setup


def extension():
    """The arguments of setup() that build minimal_attn._C; none, and a line that says why, for the sources alone."""
    if library := os.environ.get("MINIMAL_ATTN_STABLE"):
        return packed(library)
    if os.environ.get("MINIMAL_ATTN_SOURCES_ONLY") == "1":
        return sources_only("MINIMAL_ATTN_SOURCES_ONLY is 1")
    try:
        import torch
    except ImportError as error:
        return sources_only(f"torch cannot be imported here ({error}); --no-build-isolation lets a build see it")
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    # By its path: importing the package would need all that the package needs.
    spec = importlib.util.spec_from_file_location("_build", Path(__file__).parent / "minimal_attn" / "_build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)

    class Build(BuildExtension):
        def run(self):  # here, since an sdist needs no compiler
            if reason := build.cannot_build():
                raise SystemExit(f"minimal_attn: cannot compile csrc: {reason}. MINIMAL_ATTN_SOURCES_ONLY=1 installs "
                                 "the sources, to be compiled on first use.")
            super().run()

    os.environ.update(build.environment())
    recipe = build.recipe()
    without_cuda = build.cannot_build_cuda()
    if without_cuda and torch.version.cuda:
        print(f"minimal_attn: building for the CPU alone: {without_cuda}")
    # The digest lets a library that is older than the sources beside it be refused.
    digest = f"-DMINIMAL_ATTN_DIGEST={build.source_digest(build.CSRC)}"
    module = (CppExtension if without_cuda else CUDAExtension)(
        build.PREBUILT,
        [os.path.relpath(source) for source in recipe["sources"]],  # an sdist takes no absolute paths
        include_dirs=recipe["extra_include_paths"],
        extra_compile_args={"cxx": [*recipe["extra_cflags"], digest], "nvcc": recipe["extra_cuda_cflags"]},
        extra_link_args=recipe["extra_ldflags"],
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": Build}}


def packed(library):
    """The arguments of setup() for the wheel of tools/build_wheel.py."""
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build_py import build_py

    class Library(Distribution):
        def has_ext_modules(self):
            return True

    class Build(build_py):
        def run(self):
            super().run()
            self.copy_file(library, os.path.join(self.build_lib, "minimal_attn", "_stable.so"))

    class Wheel(bdist_wheel):
        def get_tag(self):
            return "py3", "none", super().get_tag()[2]  # every Python, since the library has nothing of Python's C API

    return {"distclass": Library, "cmdclass": {"build_py": Build, "bdist_wheel": Wheel}}


def sources_only(reason):
    print(f"minimal_attn: installing the sources, to be compiled on first use: {reason}")
    return {}


setup(**extension())
