"""A build of csrc from nothing for this GPU. `make gpu-record` runs this file alone: it says how long a build takes."""

import os
import subprocess
import time

import pytest

from cases import in_a_new_process
from conftest import CORES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_build_from_nothing(tmp_path, record_property):
    start = time.monotonic()
    result = in_a_new_process("import minimal_attn; print(minimal_attn.load().__file__)",
                              TORCH_EXTENSIONS_DIR=str(tmp_path))
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
