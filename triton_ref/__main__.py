"""python -m triton_ref: the checks that Triton's attention examples end with. AssertionError where one fails."""

import torch

from minimal_attn.reference import reference_attention

from .classic import attention, driver_device, flash_attn_func

CASES = [(4, 32, 32, 64, 32, 32), (4, 32, 64, 64, 32, 64), (1, 2, 128, 128, 32, 128), (1, 1, 128, 128, 64, 128),
         (1, 1, 128, 128, 32, 128), (2, 2, 128, 256, 32, 128), (1, 2, 256, 256, 32, 256)]  # (B, H, S, D, BM, BN)


def main() -> None:
    device = driver_device()
    q, k, v = (torch.randn(2, 512, 8, 64, device=device) for _ in "qkv")
    out = flash_attn_func(q, k, v)
    expected = reference_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    print(f"Maximum absolute error: {(out - expected).abs().max().item()}")
    print(f"Approximately equal: {torch.allclose(out, expected, atol=1e-2, rtol=1e-2)}")
    for *shape, BM, BN in CASES:
        torch.manual_seed(20)
        q, k, v = (torch.empty(shape, dtype=torch.float16, device=device).normal_(0.0, 0.5) for _ in "qkv")
        torch.testing.assert_close(attention(q, k, v, False, 0.5, BM, BN), reference_attention(q, k, v, False, 0.5),
                                   atol=1e-2, rtol=1e-2)
        print(f"Attention BM: {BM}, BN: {BN}, dtype: {q.dtype} PASSED!")


if __name__ == "__main__":
    main()
