"""The wheel: its library beside the JIT build, bit by bit, what it asks of torch, what it says where it does not fit.

csrc's binding for torch's stable ABI is compiled with g++ alone and linked with the JIT build's objects of the kernels.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import traceback
import zipfile
from pathlib import Path

import pytest
import torch

from minimal_attn import _build, stable
from minimal_attn.options import OF_OP, Options

pytestmark = pytest.mark.timeout(300)  # the first test compiles the binding
ROOT = Path(__file__).resolve().parents[2]
OPS = "flash_forward", "flash_backward"
DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64


def objects():
    """The JIT build's objects of the kernels and of what they ask of the GPU, by the name of their source."""
    folder = Path(_build.load().__file__).parent
    found = {source.name: folder / f"{source.stem}{'.cuda' * (source.suffix == '.cu')}.o"
             for source in _build.CSRC.rglob("*.c*") if source.name.startswith(("flash", "device"))}
    return {name: file for name, file in found.items() if file.exists()}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder as site-packages have it after the wheel was installed: that of MINIMAL_ATTN_WHEEL, if it names a file of
    `make wheel`, or one that is made here."""
    from conftest import made_once

    def make(folder):
        if wheel := os.environ.get("MINIMAL_ATTN_WHEEL"):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(folder)
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / "tools")
            from build_wheel import compile_library

        made, cuda = objects(), _build.load().has_cuda
        assert len(made) >= (9 if cuda else 2)
        library = compile_library(folder / "build", cuda, made)
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        for package in ("minimal_attn", "triton_ref"):
            shutil.copytree(ROOT / package, folder / package, ignore=ignore)
        shutil.copytree(ROOT / "csrc", folder / "minimal_attn" / "csrc", ignore=ignore)
        shutil.copy(library, folder / "minimal_attn")

    return made_once(tmp_path_factory, "wheel", make)


def in_wheel(site, code, **env):
    """Runs code in a process with the wheel and without a compiler, and returns the text that it prints."""
    path = os.pathsep.join([str(site), *(str(ROOT / "tests" / name) for name in ("", "attention", "tools"))])
    env = os.environ | {"PYTHONPATH": path, "CXX": "no-such-compiler", "CUDA_HOME": "/no/such/folder"} | env
    run = subprocess.run([sys.executable, "-c", code], cwd=site, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.strip()


# The results of a call, bit by bit.

def results(device):
    """Results of calls of csrc with changed scores, dense and packed."""
    from test_scores import BATCHES, step_of

    dtypes = DTYPES[:3] if device == "cuda" else DTYPES
    return [x.cpu() for i, batch in enumerate(BATCHES)
            for x in step_of(batch, dtypes[i % len(dtypes)], device, "cuda", i)()]


def assert_same(from_wheel, ours):
    assert len(ours) == len(from_wheel)
    for x, y in zip(ours, from_wheel):
        assert x.stride() == y.stride() and torch.equal(x, y)  # lse of rows without keys is -inf, nothing is NaN


def test_results_equal_those_of_the_jit_build(checked):
    assert_same(torch.load(checked["results"]), results("cpu"))


@pytest.mark.gpu
def test_results_on_a_gpu_equal_those_of_the_jit_build(site, tmp_path):
    file = str(tmp_path / "results")
    in_wheel(site, f"import test_wheel, torch; torch.save(test_wheel.results('cuda'), {file!r})")
    assert_same(torch.load(file), results("cuda"))


# Scripts that check the wheel. One process runs them one after the other.

CALL = """
import pathlib, tempfile, torch, minimal_attn
from minimal_attn import flash_attention, stable
from minimal_attn.options import OF_OP, Lengths, Options
library = minimal_attn.load()
torch.manual_seed(0)
ops = torch.ops.minimal_attn
q, k, v = (torch.randn(2, 3, s, 8, requires_grad=True) for s in (5, 7, 7))
options = dict(softcap=2.0, sinks=torch.randn(3), window_size=(4, 1), backend="cuda")

def fault(op, *inputs):
    try:
        op(*inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def fast(q, k, v, causal=False, scale=None, seq_major=False, window_size=(-1, -1), lengths=Lengths(), sinks=None):
    given = Options(*lengths, sinks, softmax_scale=scale, deterministic=True)
    return library.fast_forward(q, k, v, given, causal, window_size, seq_major)
"""
CHECKS = {"opcheck": """
inputs = q, k, v, *[None] * 7, 0.3, 0.0, -1, -1, 0
torch.library.opcheck(ops.flash_forward.default, inputs)
out, lse, _ = (x.detach() for x in ops.flash_forward(*inputs))
torch.library.opcheck(ops.flash_backward.default, (out, None, *inputs[:3], out, lse, *inputs[3:]),
                      test_utils=("test_schema", "test_faketensor"))
""", "torch.compile": """
eager = flash_attention(q, k, v, **options)
compiled = torch.compile(lambda *x: flash_attention(*x, **options), fullgraph=True, backend="aot_eager")(q, k, v)
assert torch.equal(eager, compiled)
for x, y in zip(torch.autograd.grad(eager.sum(), (q, k, v)), torch.autograd.grad(compiled.sum(), (q, k, v))):
    assert torch.equal(x, y)
""", "vmap": """
with torch.no_grad():
    mapped = torch.vmap(lambda x: flash_attention(x[None], k[:1], v[:1], backend="cuda"))(q)
    assert torch.equal(mapped[1], flash_attention(q[1:], k[:1], v[:1], backend="cuda"))
chosen = []
torch.vmap(lambda x: (chosen.append(library.which_kernel(x[None], k[:1], v[:1], *Options()[:OF_OP + 1])), x)[1])(q)
assert chosen == [None]
""", "second derivative": """
dq, = torch.autograd.grad(flash_attention(q, k, v, **options).sum(), q, create_graph=True)
assert fault(torch.autograd.grad, dq.sum(), q).startswith("NotImplementedError: ")
""", "folder for the package kernels": """
import os
from minimal_attn.integrations import kernels
os.environ["LOCAL_KERNELS"] = kernels.write(tempfile.mkdtemp())
from kernels import get_kernel
kernel = get_kernel(kernels.NAME, version=1)
assert kernel.flash_attn_func is minimal_attn.flash_attn_func
assert torch.equal(kernel.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2),
                   flash_attention(q, k, v, **options))
""", "wrong arguments": """
of_op = [*[None] * 7, 0.3, 0.0, -1, -1, 0]
for inputs in ((q, k[:1], v, *of_op), (q.int(), k, v, *of_op), (q, k, v, *of_op[:-3], -2, 0, 0)):
    assert fault(ops.flash_forward, *inputs).startswith("ValueError: ")
assert fault(ops.force_kernel, "sm70").startswith("ValueError: ")
""", "deterministic algorithms": """
asked, below_autograd = [], stable._below_autograd
stable._below_autograd = lambda op, *inputs: asked.append(inputs[-5])
with torch.no_grad():
    for deterministic, of_torch in ((False, False), (True, False), (False, True)):
        torch.use_deterministic_algorithms(of_torch)
        stable.backward(*[q] * 7, deterministic, True, True, False, False)
torch.use_deterministic_algorithms(False)
stable._below_autograd = below_autograd
assert asked == [False, True, True]
""", "fast path, on CPU tensors, which it leaves to the checks otherwise": """
assert fast(q, k, v) is None
stable.is_everyday = lambda *x: True  # from here on

def check(got, want, leaves):
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y) and x.stride() == y.stride()
    for x, y in zip(*(torch.autograd.grad(out.square().sum() + lse.sum(), leaves) for out, lse in (got, want))):
        assert torch.equal(x, y)

options = dict(backend="cuda", return_lse=True, deterministic=True)
sinks = torch.randn(3)
check(fast(q, k, v, True, 0.3, sinks=sinks), flash_attention(q, k, v, True, 0.3, sinks=sinks, **options), (q, k, v))
rows = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
check(fast(*rows, window_size=[2, None], seq_major=True),
      minimal_attn.flash_attn_func(*rows, window_size=(2, -1), **options), rows)
packed = [x.detach()[0].requires_grad_() for x in rows]
ends = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32)
check(fast(*packed, seq_major=True, lengths=Lengths(*ends)),
      minimal_attn.flash_attn_varlen_func(*packed, *ends, 9, 9, **options), packed)
used = Lengths(*ends, None, ends[1][1:])
assert fast(*packed, seq_major=True, lengths=used) is None  # gradients of keys that samples may share
with torch.no_grad():
    assert fast(*packed, seq_major=True, lengths=used)[0].shape == packed[0].shape
# Inputs that the op refuses, which the checks in Python are to refuse.
assert fast(q, k[:1], v) is fast(q, k, v, sinks=sinks.half()) is None
""", "other sources": """
from minimal_attn import _build
assert _build._of_wheel().__file__ == library.__file__
_build.CSRC = pathlib.Path(tempfile.mkdtemp())
assert "was built from other sources" in fault(_build._of_wheel)
"""}
ON_A_GPU = """
q, k, v = (x.detach().cuda() for x in (q, k, v))
assert fast(q, k, v) is not None and fast(q, k, v, True, 0.5, window_size=[3, None]) is not None
for unusual in (dict(causal=1), dict(scale=1), dict(window_size=(1, 2, 3)), dict(window_size=(-2, 0)),
                dict(window_size=(1.0, 0)), dict(sinks=torch.randn(3, device="cuda", requires_grad=True)),
                dict(lengths=Lengths(seqused_k=[1, 2])), dict(seq_major=True, lengths=Lengths(*[q] * 2))):
    assert fast(q, k, v, **unusual) is None, unusual
for x in (q.double(), q[..., ::2], q[:0], q.cpu(), q[0, 0], None):
    assert fast(x, x, x) is None
with torch.autocast("cuda", torch.bfloat16):
    assert fast(q, k, v) is None
with torch.autograd.forward_ad.dual_level():
    assert fast(q, k, v) is None
with torch.profiler.profile():
    assert fast(q, k, v) is None
graph, want = torch.cuda.CUDAGraph(), flash_attention(q, k, v, backend="cuda")
with torch.cuda.graph(graph):  # on a stream of its own: a launch on another one would fail
    out = flash_attention(q, k, v, backend="cuda")
graph.replay()
assert torch.equal(out, want)
"""


def kernels(library):
    """The kernels that a library chooses for GPUs that need not be here, and the results of force_kernel."""
    found = []
    for capability in (75, 80, 90, 100):
        for dtype, head_dim in ((torch.half, 64), (torch.float, 64), (torch.half, 60)):
            x = torch.empty(1, 2, 8, head_dim, dtype=dtype)
            found += [list(library.which_kernel(x, x, x, *Options(softcap=softcap)[:OF_OP + 1], capability, True))
                      for softcap in (0.0, 2.0)]
    return found + [library.force_kernel(name) for name in ("sm80", None, None)]


def schemas():
    return [str(getattr(torch.ops.minimal_attn, op).default._schema) for op in OPS]


def run_checks(file):
    """In the process of the fixture `checked`: prints what went wrong by the check's name, and more."""
    library = _build.load()
    torch.save(results("cpu"), file)
    found = {"file": library.__file__, "results": file, "kernels": kernels(library), "schemas": schemas()}
    for name, code in CHECKS.items():
        try:
            exec(CALL + code, {})
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def checked(site, tmp_path_factory):
    file = str(tmp_path_factory.mktemp("checked") / "results")
    found = json.loads(in_wheel(site, f"import test_wheel; test_wheel.run_checks({file!r})").splitlines()[-1])
    assert found["file"] == str(site / "minimal_attn" / "_stable.so")
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_in_the_wheel(checked, name):
    if name == "folder for the package kernels":
        pytest.importorskip("kernels", reason="the package `kernels` is not installed")
    assert checked[name] is None, checked[name]


@pytest.mark.gpu
def test_fast_path_and_streams(site):
    in_wheel(site, CALL + ON_A_GPU)


def test_kernels_and_schemas_are_those_of_the_jit_build(checked):
    ours = kernels(_build.load())
    assert checked["kernels"] == ours and ours[-2] == "sm80"
    assert ["sm90", None] in ours and ["simt", "head_dim is not a multiple of 16 bytes"] in ours
    assert checked["schemas"] == schemas()


# Symbols that the library needs from torch.

def symbols(library, *options):
    """{name: kind} of the dynamic symbols of a library, without their versions."""
    said = subprocess.run(["nm", "-D", *options, library], capture_output=True, text=True, check=True).stdout
    return {name: kind for kind, name in re.findall(r"^.{17}(\w) ([^@\s]+)", said, re.M)}


def test_symbols_are_those_of_the_stable_abi(site):
    """C functions that the headers of the stable ABI declare. C++ comes from its own library alone."""
    library = site / "minimal_attn" / "_stable.so"
    shims = [Path(torch.__path__[0]) / "include" / "torch" / "csrc" / name for name in
             ("inductor/aoti_torch/c/shim.h", "stable/c/shim.h", "inductor/aoti_torch/generated/c_shim_aten.h")]
    declared = set(re.findall(r"\b((?:aoti_)?torch_\w+)\(", "".join(shim.read_text() for shim in shims)))
    wanted = symbols(library, "--undefined-only")
    of_torch = {name for name in wanted if "torch" in name or "c10" in name or "at4" in name}
    assert 40 < len(of_torch) and of_torch <= declared
    weak = {name for name in of_torch if wanted[name] == "w"}
    assert weak == {"aoti_torch_get_current_cuda_stream"}  # which a torch for the CPU lacks
    assert of_torch - weak <= symbols(Path(torch.__path__[0]) / "lib" / "libtorch_cpu.so", "--defined-only").keys()
    assert not any(name.startswith(("Py", "_Py")) for name in wanted)
    assert symbols(library, "--defined-only").keys() == {
        "minimal_attn_slow_because", "minimal_attn_csrc_digest", "minimal_attn_has_cuda"}


# Where the wheel does not fit.

def why_not(**kw):
    stable.why_not.cache_clear()
    try:
        return stable.why_not(**kw)
    finally:
        stable.why_not.cache_clear()


@pytest.mark.parametrize("version, processor, says", [
    ("2.10.1+cu130", "AVX2", "2.10.1"), ("3.0.0", "AVX2", "3.0.0"), ("2.30.0a0+git123", "AVX2", None),
    ("2.11.0", "DEFAULT", "AVX2")])
def test_wheel_refuses_another_torch_or_processor(version, processor, says, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)
    monkeypatch.setattr(stable.platform, "machine", lambda: "x86_64")
    assert why_not() is None if says is None else says in why_not()


@pytest.mark.parametrize("cuda, capabilities, says", [
    (None, [], "without CUDA"), ("12.8", [(9, 0)], "CUDA 13"), ("13.0", [(7, 0)], "compute capability 7.5"),
    ("13.2", [(7, 0), (9, 0)], None), ("13.0", [], None)])
def test_wheel_refuses_another_cuda_or_gpu(cuda, capabilities, says, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "a GPU")
    reason = why_not(on_gpu=True)
    assert reason is None if says is None else says in reason
    assert why_not() is None  # the CPU is served


# The file.

def test_wheel_has_one_tag_for_every_python(site, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from build_wheel import pack

    wheel = pack(site / "minimal_attn" / "_stable.so", tmp_path)
    assert re.fullmatch(r"minimal_attn-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("minimal_attn/_stable.so") == (site / "minimal_attn" / "_stable.so").read_bytes()
    assert {"minimal_attn/stable.py", "minimal_attn/csrc/flash.cu", "triton_ref/attention.py"} <= names
    assert sum(name.endswith(".so") for name in names) == 1 and not any(name.startswith("tools/") for name in names)
