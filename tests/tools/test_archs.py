"""csrc compiled for other GPUs than this one."""

import pytest
import torch

from cases import in_a_new_process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_built_for_another_gpu(tmp_path):
    other = "7.5" if torch.cuda.get_device_capability() != (7, 5) else "8.0"  # sm_75 has the fewest kernels
    code = ("import torch, minimal_attn; x = torch.ones(1, 1, 4, 16, device='cuda');"
            "minimal_attn.flash_attention(x, x, x, backend='cuda')")
    result = in_a_new_process(code, TORCH_EXTENSIONS_DIR=str(tmp_path), TORCH_CUDA_ARCH_LIST=other)
    assert result.returncode != 0
    for part in ("RuntimeError", torch.cuda.get_device_name(), "this build holds kernels for", "TORCH_CUDA_ARCH_LIST="):
        assert part in result.stderr, result.stderr


def test_ptx_of_an_older_gpu(tmp_path):
    """The driver compiles it for this GPU, but there are no tensor cores in it: flash.cu serves."""
    code = ("import torch, minimal_attn; from minimal_attn import flash_attention, which_kernel;"
            "x = torch.ones(1, 1, 4, 16, device='cuda', dtype=torch.half); out = flash_attention(x, x, x);"
            "print(which_kernel(x, x, x), out.eq(1).all().item())")
    result = in_a_new_process(code, TORCH_EXTENSIONS_DIR=str(tmp_path), TORCH_CUDA_ARCH_LIST="7.5+PTX")
    assert result.stdout.split() == ["simt", "True"], result.stderr
