"""Code that all tests share: the implementations of this machine, the order of the tests, the record of a GPU.

Without a GPU, the Triton kernels run in Triton's interpreter; that has to be decided before Triton is imported.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from _pytest.junitxml import xml_key
from filelock import FileLock

CORES = len(os.sched_getaffinity(0))
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # they share the cores, in what they start as well
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, CORES // int(workers))))

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode asks for it
os.environ.setdefault("MINIMAL_ATTN_AUTOTUNE", "0")  # hundreds of shapes; test_twin.py has the tests of tuning

import code_digest  # noqa: E402
from minimal_attn import force_kernel  # noqa: E402

HAS_GPU = torch.cuda.is_available()

# name: (backend, device). The same names as in bench.py's rows. A test with a parameter `impl` runs that very kernel.
IMPLEMENTATIONS = {"cuda:host": ("cuda", "cpu")}
if HAS_GPU:
    IMPLEMENTATIONS["cuda:simt"] = ("cuda", "cuda")
    if torch.cuda.get_device_capability() >= (8, 0):
        IMPLEMENTATIONS["cuda:sm80"] = ("cuda", "cuda")
    if torch.cuda.get_device_capability() == (9, 0):
        IMPLEMENTATIONS["cuda:sm90"] = IMPLEMENTATIONS["cuda:dmma"] = ("cuda", "cuda")
    IMPLEMENTATIONS["triton"] = ("triton", "cuda")
    IMPLEMENTATIONS["torch"] = ("torch", "cuda")
else:
    IMPLEMENTATIONS["triton"] = ("triton", "cpu")
    IMPLEMENTATIONS["torch"] = ("torch", "cpu")


# The kernels that can be forced by name.
KERNEL_NEEDS = {"cuda:simt": "a GPU", "cuda:sm80": "a GPU from sm_80 on", "cuda:sm90": "a GPU of sm_90",
                "cuda:dmma": "a GPU of sm_90"}
ON_TENSOR_CORES = ("cuda:sm80", "cuda:sm90", "cuda:dmma")  # whose loads want 16 bytes
OF_16_BITS = ("cuda:sm80", "cuda:sm90")
WITHOUT_DROPOUT = ("cuda:dmma",)
FORWARD_ONLY = ("cuda:dmma",)  # with the backward pass of another


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """pytest-xdist's -n auto: one for each core, up to 16, and 2 GiB of the GPU for each."""
    gib = torch.cuda.get_device_properties(0).total_memory >> 30 if HAS_GPU else 32
    return max(1, min(CORES, 16, gib // 2))


@pytest.hookimpl(trylast=True)  # after --junitxml has made its report
def pytest_configure(config):
    hurry_interpreter()
    if HAS_GPU and (xml := config.stash.get(xml_key, None)):  # --junitxml
        ran = {"tokens": code_digest.all_tokens(), "kernels": code_digest.kernels_of_library()}
        for name, value in {**of_this_machine(), **ran}.items():
            xml.add_global_property(name, value)


def of_this_machine():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    return {"device": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"), "cuda": torch.version.cuda}


def hurry_interpreter():
    """Triton's interpreter in less than half the time: what is left out has no effect.

    Each call of a device function searches triton.language for what it has to patch. One patch for each launch is
    enough. Each sum of integers is checked for overflow. What the check finds goes to device_assert, which the
    interpreter has off. And the dtype of numpy is looked up in a dict that is made anew for it. If Triton lacks one of
    these names, nothing is changed.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or not importlib.util.find_spec("triton"):
        return
    from triton.runtime import interpreter

    names = "interpreter_builder", "_patch_lang", "_LangPatchScope", "_get_np_dtype"
    if not all(hasattr(interpreter, name) for name in names):
        return
    builder, patch, dtype_of = interpreter.interpreter_builder, interpreter._patch_lang, interpreter._get_np_dtype
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patched, dtypes = set(), {}

    @functools.cache
    def languages_of(function):
        """The modules by which a function knows triton.language. patch looks for them."""
        language = interpreter.tl, interpreter.tl.core
        return frozenset(x for x in function.__globals__.values() if any(x is module for module in language))

    def patch_once(function):
        """The scope that undoes it at the end of the launch."""
        languages = languages_of(function)
        if languages in patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        patched.add(languages)
        restore = scope.restore  # called for the launch, and not for device functions

        def restore_all():
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    def dtype_once(dtype):
        if dtype.name not in dtypes:
            dtypes[dtype.name] = dtype_of(dtype)
        return dtypes[dtype.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_once


@pytest.hookimpl(tryfirst=True)  # before -m and -k deselect tests
def pytest_itemcollected(item):
    impl = getattr(item, "callspec", None) and item.callspec.params.get("impl")
    if impl == "cuda:host":
        item.add_marker(pytest.mark.cpu)
    if item.get_closest_marker("gpu") and not HAS_GPU:
        item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if impl in KERNEL_NEEDS and impl not in IMPLEMENTATIONS:
        item.add_marker(pytest.mark.skip(reason=f"needs {KERNEL_NEEDS[impl]}"))


@pytest.hookimpl(trylast=True)  # after -m and -k have deselected tests
def pytest_collection_modifyitems(items):
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        items[:] = longest_first(items, workers)


def longest_first(items, workers):
    """items in an order that keeps all workers busy. `--dist worksteal` gives each of them one run of consecutive tests.

    The first worker begins with the tests that need the GPU's memory to themselves. The others begin with the longest
    tests, which have a time limit of their own.
    """
    ready = [item for item in items if not item.get_closest_marker("skip")]
    of_memory = [item for item in ready if "much_memory" in item.fixturenames]
    longest = [item for item in ready if item.get_closest_marker("timeout") and "much_memory" not in item.fixturenames]
    placed = {*of_memory, *longest}
    rest = (item for item in items if item not in placed)
    runs = [of_memory, *([] for _ in range(workers - 1))]
    for i, item in enumerate(longest):
        runs[-1 - i % max(1, workers - 1)].append(item)
    for i, run in enumerate(runs):
        size = len(items) * (i + 1) // workers - len(items) * i // workers
        run += itertools.islice(rest, max(0, size - len(run)))
    return [item for run in runs for item in run] + list(rest)


def made_once(tmp_path_factory, name, make):
    """A folder that make(folder) fills, once, whichever of pytest-xdist's workers is the first to want it.

    .ci/run has two runs of the same sources. It names a folder, MINIMAL_ATTN_MADE_ONCE, where they share what is made.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root = Path(os.environ.get("MINIMAL_ATTN_MADE_ONCE", root))
    folder, error = root / name, root / f"{name}.error"
    with FileLock(root / f"{name}.lock"):
        if error.exists():
            pytest.fail(error.read_text())
        if not folder.exists():
            folder.mkdir()
            try:
                make(folder)
            except BaseException as e:
                shutil.rmtree(folder)
                if isinstance(e, Exception):  # a skip is none
                    error.write_text(str(e))
                raise
    return folder


def captured(call, warm_up=None):
    """A CUDA graph of call, and what call returned under capture. First warm_up, or else call, builds and compiles what
    it needs, on a side stream, as torch asks of what autograd takes part in."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (warm_up or call)()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def needs_gib(n):
    total = torch.cuda.get_device_properties(0).total_memory / 2**30 if HAS_GPU else 0
    return pytest.mark.skipif(total < n, reason=f"needs {n} GiB of GPU memory")


@pytest.fixture
def much_memory(tmp_path_factory):
    """The GPU's memory for one test at a time, also where xdist runs several."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "gpu_memory.lock"):
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def poisoned_outputs():
    """torch.empty gives NaN, so that an element a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def four():
    """Four ranks on CPUs."""
    import ranks
    return ranks.on_cpus()


@pytest.fixture(autouse=True)
def forced_kernel(request):
    """For tests of one kernel by name."""
    impl = getattr(request.node, "callspec", None) and request.node.callspec.params.get("impl")
    if impl not in KERNEL_NEEDS:
        yield
        return
    with force_kernel(impl.removeprefix("cuda:")):
        yield


@pytest.fixture(autouse=True)
def shared_gpu():
    """Several workers share one GPU: none keeps much of its memory from one test to the next."""
    yield
    if HAS_GPU and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def exact_fp32():
    """No TF32 in the reference or in torch's kernels."""
    torch.backends.cuda.matmul.allow_tf32 = False
