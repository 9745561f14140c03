"""The backend that "auto" takes, what it says of those that are missing, and what an import loads."""

import dataclasses
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import minimal_attn
from cases import in_a_new_process
from minimal_attn import available_backends, flash_attention, flash_attn_func, forward
from minimal_attn.attention import BACKENDS


def test_import_loads_neither_triton_nor_dynamo():
    """torch._dynamo alone takes a second; Triton is for the calls that need it, and on CPU tensors its interpreter."""
    result = in_a_new_process(
        "import minimal_attn, sys; print({'torch._dynamo', 'triton', 'triton_ref'} & sys.modules.keys());"
        "import torch; x = torch.ones(1, 1, 4, 16); minimal_attn.flash_attention(x, x, x, backend='triton')",
        TRITON_INTERPRET="0")
    assert result.stdout.strip() == "set()", result.stderr
    assert "ValueError: CUDA tensors required" in result.stderr and "set TRITON_INTERPRET=1" in result.stderr


@pytest.mark.parametrize("error, said", [
    ("ModuleNotFoundError('no triton')", "triton is required"),
    pytest.param("ImportError('libcuda.so.1: no such file')", "libcuda.so.1: no such file", marks=pytest.mark.slow)])
def test_without_triton(error, said, tmp_path):
    (tmp_path / "triton.py").write_text(f"raise {error}")
    result = in_a_new_process("import torch, minimal_attn; x = torch.ones(1, 1, 4, 16);"
                              "print(minimal_attn.available_backends());"
                              "minimal_attn.flash_attention(x, x, x, backend='triton')", PYTHONPATH=str(tmp_path))
    assert said in result.stderr and result.stdout and "triton" not in result.stdout, result.stderr


@pytest.fixture
def choosing():
    """"auto" chooses anew among what the test says is there."""
    minimal_attn.backends.auto._choose_first_available.cache_clear()
    yield
    minimal_attn.backends.auto._choose_first_available.cache_clear()


@pytest.fixture
def nvcc(monkeypatch, choosing):
    monkeypatch.setattr(minimal_attn._build, "why_not", lambda on_gpu=False: None)


@pytest.fixture
def no_nvcc(monkeypatch, choosing):
    monkeypatch.setattr(minimal_attn._build, "why_not", lambda on_gpu=False: "there is no nvcc" if on_gpu else None)


@pytest.fixture
def no_triton(monkeypatch, choosing):
    monkeypatch.setattr(minimal_attn.backends.triton, "why_not_imported", lambda: "there is no triton")


# (what is missing, the backend that "auto" then takes, its message)
MISSING = pytest.mark.parametrize("missing, backend, said", [
    (["no_nvcc"], "triton", "takes triton, since cuda is not available: there is no nvcc$"),
    (["no_nvcc", "no_triton"], "torch", "takes torch, since cuda is .*: there is no nvcc; triton is .* no triton$"),
], ids=["nvcc", "both"])


@MISSING
@pytest.mark.parametrize("call", [flash_attention, flash_attn_func, forward])
def test_auto_backend_warns_once_of_what_is_missing(call, missing, backend, said, request, monkeypatch):
    for fixture in missing:
        request.getfixturevalue(fixture)
    chosen = []
    record = lambda q, *args, **options: chosen.append(backend) or (q, None)  # noqa: E731
    monkeypatch.setitem(BACKENDS, backend, dataclasses.replace(BACKENDS[backend], forward=record))
    with FakeTensorMode():
        q = torch.empty(2, 4, 20, 16, device="cuda", dtype=torch.float16)
        with pytest.warns(UserWarning, match=f"backend='auto' {said}") as caught:
            line = sys._getframe().f_lineno + 1
            assert [call(q, q, q).device.type for _ in range(3)] == ["cuda"] * 3
    assert chosen == [backend] * 3
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]  # the user's line, once


@MISSING
def test_auto_backend_compiles_fullgraph(missing, backend, said, request):
    for fixture in missing:
        request.getfixturevalue(fixture)
    with FakeTensorMode(), pytest.warns(UserWarning, match=f"backend='auto' {said}"):
        q = torch.empty(2, 4, 20, 16, device="cuda", dtype=torch.float16)
        compiled = torch.compile(lambda q: flash_attention(q, q, q, True), fullgraph=True, backend="aot_eager")
        assert compiled(q).device.type == "cuda"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_auto_backend_does_not_warn(dtype, nvcc, no_triton):
    """It takes csrc on a GPU without asking for Triton, also where gradients are wanted."""
    with FakeTensorMode():
        for needs_grad in (False, True):
            q = torch.empty(2, 4, 1024, 64, device="cuda", dtype=dtype, requires_grad=needs_grad)
            assert minimal_attn.backends.auto.auto_backend(q, q, q) == "cuda"


def test_auto_backend_serves_fp8(nvcc):
    with FakeTensorMode():
        q = torch.empty(2, 4, 20, 16, device="cuda", dtype=torch.float8_e4m3fn)
        assert minimal_attn.backends.auto.auto_backend(q, q, q) == "triton"


def test_cuda_backend_without_nvcc(no_nvcc):
    with FakeTensorMode(), pytest.raises(RuntimeError, match="there is no nvcc"):
        q = torch.empty(2, 4, 20, 16, device="cuda")
        flash_attention(q, q, q, backend="cuda")
    assert "cuda" in available_backends()  # for CPU tensors
