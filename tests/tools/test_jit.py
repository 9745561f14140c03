"""A build of csrc from nothing, for this GPU, for another one and for an older one.

`make gpu-record` runs this file alone, before all others: it says how long a build takes.
"""

import os
import subprocess
import sys
import time

import pytest
import torch

from conftest import CORES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def run(code, tmp_path, **env):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280,
                          env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), **env})


def test_build_from_nothing(tmp_path, record_property):
    start = time.monotonic()
    result = run("import minimal_attn; print(minimal_attn.load().__file__)", tmp_path)
    seconds = time.monotonic() - start
    assert result.returncode == 0, result.stderr
    library = result.stdout.split()[-1]
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    beside = f" beside {workers} test workers" if workers else ""
    record_property(f"seconds of the JIT build from nothing, {CORES} cores{beside}", round(seconds, 1))
    record_property("MB of the built library", round(os.path.getsize(library) / 1e6, 2))
    assert os.path.getsize(library) <= 12e6
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "libcudart" in needed and "libcuda.so" not in needed  # the driver is looked up when it is needed
    if CORES >= 16:
        assert seconds <= (240 if workers else 75)


def test_built_for_another_gpu(tmp_path):
    other = "7.5" if torch.cuda.get_device_capability() != (7, 5) else "8.0"  # sm_75 has the fewest kernels
    code = ("import torch, minimal_attn; x = torch.ones(1, 1, 4, 16, device='cuda');"
            "minimal_attn.flash_attention(x, x, x, backend='cuda')")
    result = run(code, tmp_path, TORCH_CUDA_ARCH_LIST=other)
    assert result.returncode != 0
    for part in ("RuntimeError", torch.cuda.get_device_name(), "this build holds kernels for", "TORCH_CUDA_ARCH_LIST="):
        assert part in result.stderr, result.stderr


def test_ptx_of_an_older_gpu(tmp_path):
    """The driver compiles it for this GPU, but there are no tensor cores in it: flash.cu serves."""
    code = ("import torch, minimal_attn; from minimal_attn import flash_attention, which_kernel;"
            "x = torch.ones(1, 1, 4, 16, device='cuda', dtype=torch.half); out = flash_attention(x, x, x);"
            "print(which_kernel(x, x, x), out.eq(1).all().item())")
    result = run(code, tmp_path, TORCH_CUDA_ARCH_LIST="7.5+PTX")
    assert result.stdout.split() == ["simt", "True"], result.stderr
