"""What every test shares: the implementations of this machine, and the record of a run on a GPU.

Without a GPU, Triton's interpreter runs the twin; that has to be decided before Triton is imported.
"""

import datetime
import importlib.metadata
import json
import os
import subprocess
import time

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode asks for it
os.environ.setdefault("MINIMAL_ATTN_AUTOTUNE", "0")  # hundreds of shapes; test_twin.py has the tests of tuning

from minimal_attn import _build  # noqa: E402

HAS_GPU = torch.cuda.is_available()

# name: (backend, device). The same names as in bench.py's rows. A test with a parameter `impl` runs that very kernel.
IMPLEMENTATIONS = {"cuda:host": ("cuda", "cpu")}
if HAS_GPU:
    IMPLEMENTATIONS["cuda:simt"] = ("cuda", "cuda")
    if torch.cuda.get_device_capability() >= (8, 0):
        IMPLEMENTATIONS["cuda:sm80"] = ("cuda", "cuda")
    if torch.cuda.get_device_capability() == (9, 0):
        IMPLEMENTATIONS["cuda:dmma"] = ("cuda", "cuda")
    IMPLEMENTATIONS["triton"] = ("triton", "cuda")
    IMPLEMENTATIONS["torch"] = ("torch", "cuda")
else:
    IMPLEMENTATIONS["triton"] = ("triton", "cpu")
    IMPLEMENTATIONS["torch"] = ("torch", "cpu")


# The kernels that can be forced by name.
KERNEL_NEEDS = {"cuda:simt": "a GPU", "cuda:sm80": "a GPU from sm_80 on", "cuda:dmma": "a GPU of sm_90"}


def pytest_addoption(parser):
    parser.addoption("--gpu-record", metavar="FILE", help="write what this run proved on the GPU to FILE")


def pytest_configure(config):
    config.start = time.monotonic()
    if config.getoption("--gpu-record") and not HAS_GPU:
        raise pytest.UsageError("--gpu-record needs a GPU")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        impl = hasattr(item, "callspec") and item.callspec.params.get("impl")
        if impl in KERNEL_NEEDS and impl not in IMPLEMENTATIONS:
            item.add_marker(pytest.mark.skip(reason=f"needs {KERNEL_NEEDS[impl]}"))


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--gpu-record")
    if not path:
        return
    reports = {outcome: terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed", "error", "skipped")}
    count = {outcome: len(of_one) for outcome, of_one in reports.items()}
    record = {
        "device": torch.cuda.get_device_name(),
        "driver": gpu_driver(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "passed": count["passed"],
        "failed": count["failed"] + count["error"],
        "skipped": count["skipped"],
        "duration_s": round(time.monotonic() - config.start, 1),
        "source_digest": _build.source_digest(),
        # What tests found and handed over by pytest's record_property.
        "evidence": dict(sorted(fact for report in reports["passed"] for fact in report.user_properties)),
    }
    with open(path, "w") as file:
        json.dump(record, file, indent=2)
        file.write("\n")
    terminalreporter.write_line(f"GPU record written to {path}")


def gpu_driver():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]


@pytest.fixture
def poisoned_outputs():
    """torch.empty gives NaN, so that an element a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def forced_kernel(request):
    """MINIMAL_ATTN_KERNEL for tests of one kernel by name."""
    impl = getattr(request.node, "callspec", None) and request.node.callspec.params.get("impl")
    if impl not in KERNEL_NEEDS:
        yield
        return
    os.environ["MINIMAL_ATTN_KERNEL"] = impl.removeprefix("cuda:")
    _build.load().read_environment()
    yield
    del os.environ["MINIMAL_ATTN_KERNEL"]
    _build.load().read_environment()


@pytest.fixture(autouse=True)
def exact_fp32():
    """No TF32 in the oracle or in torch's kernels."""
    torch.backends.cuda.matmul.allow_tf32 = False
