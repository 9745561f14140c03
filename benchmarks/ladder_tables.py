"""The numbers of docs/ladder.md, from benchmarks/h200/*.json.

write_tables.py writes what BLOCKS returns, and write_pictures.py draws what steps() returns.
"""

from recorded import SIZE, mean, paragraph, peers_elsewhere, ratios, record, settings, span, table

PYTORCH = "three lines of PyTorch"
# (name, file in benchmarks/h200, implementation), from the first step to the last; all of one setting.
FP32 = dict(batch_size=4, nheads=16, seqlen_q=4096, head_dim=128, dtype="float32", causal=False)
FP32_STEPS = [(PYTORCH, "fp32", "manual"), ("flash.cu", "fp32", "cuda:simt"), ("flash_dmma.cu", "fp32", "cuda:dmma")]
BF16 = dict(batch_size=8, nheads=16, seqlen_q=2048, head_dim=128, dtype="bfloat16", causal=False)
BF16_STEPS = [("flash.cu", "fallback", "cuda:simt"), (PYTORCH, "sm80", "manual"),
              ("flash_sm80.cu", "sm80", "cuda:sm80"), ("flash_sm90.cu", "forward", "cuda:sm90")]
BF16_PEERS = [("FlashAttention-2 in torch", "sm80", "torch:flash"), ("cuDNN", "forward", "torch:cudnn")]
ARITHMETIC = {"flash.cu": "fp32 FMA units", "flash_dmma.cu": "fp64 tensor cores", "flash_sm80.cu": "`mma.sync`",
              "flash_sm90.cu": "`wgmma`"}


def tflops(name, impl, setting):
    (row,) = (row for row in record(name)["rows"] if row["impl"] == impl and setting.items() <= row.items())
    return row["tflops"]


def matmul(name, dtype):
    """TFLOP/s of torch's matmul of 8192³ in the same run."""
    return record(name)["meta"]["matmul_tflops"][dtype]


def ladder_problem():
    (b, h, s, d), bandwidth = (BF16[key] for key in ("batch_size", "nheads", "seqlen_q", "head_dim")), 4800e9
    flops, tensors, scores = 4 * b * h * s**2 * d, 4 * b * h * s * d * 2, b * h * s**2 * 2
    ceiling, pytorch = matmul("forward", "bfloat16"), tflops("sm80", "manual", BF16)
    return "\n".join([
        f"What this means for B {b}, H {h}, S {s}, D {d} in bf16:\n",
        table(["", "Formula", "Amount"],
              [["FLOPs of the two products", "4·B·H·S²·D", f"{flops / 1e9:,.0f} GFLOP"],
               ["bytes of Q, K, V and O", "4·B·H·S·D · 2 bytes", f"{tensors / 1e6:,.0f} MB"],
               ["bytes of the scores", "B·H·S² · 2 bytes", f"{scores / 1e6:,.0f} MB"],
               ["exponentials", "B·H·S²", f"{scores / 2e6:,.0f} million"]]),
        paragraph(f"""The memory of an H200 moves {bandwidth / 1e9:,.0f} GB/s by its data sheet, so it needs
            {tensors / bandwidth * 1e6:,.0f} µs to read Q, K and V and to write O. A bf16 matmul of
            8192³ by torch reaches {ceiling:.0f} TFLOP/s. At that rate the two products take
            {flops / ceiling / 1e6:,.0f} µs. So attention is not bound by memory, as long as the scores stay on the chip."""),
        paragraph(f"""The plain PyTorch code of step 1 does not keep them there. It writes and reads the scores six
            times: the first product writes them, the scaling and the softmax read and write them, and the second
            product reads them. That is {6 * scores / 1e6:,.0f} MB and at least {6 * scores / bandwidth * 1e6:,.0f} µs.
            The whole computation takes {flops / pytorch / 1e6:,.0f} µs.""")])


def ladder_milestones():
    def table_of(names, setting, pytorch):
        rows, before = [], None
        for name, file, impl in names:
            speed = tflops(file, impl, setting)
            rows.append([name if name == PYTORCH else f"`{name}`", ARITHMETIC.get(name, pytorch), f"{speed:.0f}",
                         f"{speed / before:.2f}" if before else ""])
            before = speed
        return table(["What runs", "Arithmetic", "TFLOP/s", "× row above"], rows)

    flash = [f"{tflops(file, 'torch:flash', BF16):.0f}" for file in ("fallback", "sm80", "forward")]
    peers = " and ".join(f"{name} reaches {tflops(file, impl, BF16):.0f}" for name, file, impl in BF16_PEERS)
    return "\n".join([
        "fp32 with TF32 off, B 4, H 16, S 4096, D 128:\n", table_of(FP32_STEPS, FP32, "fp32 FMA units"),
        paragraph(f"A matmul of 8192³ by torch reaches {matmul('fp32', 'float32'):.0f} TFLOP/s in the same run."),
        "bf16, B 8, H 16, S 2048, D 128:\n", table_of(BF16_STEPS, BF16, "tensor cores, by cuBLAS"),
        paragraph(f"""{peers}. A matmul of 8192³ by torch reaches {matmul('forward', 'bfloat16'):.0f}. The rows
            come from three runs. FlashAttention-2 ran in all three, as a control, and reached
            {' / '.join(flash)} TFLOP/s.""")])


def ladder_forward():
    cudnn = ratios(settings("forward", *SIZE, dtype="bfloat16"), "cuda:sm90", "torch:cudnn")
    longest = dict(head_dim=128, causal=False, seqlen_q=16384, dtype="bfloat16")
    best = {setting: max(peers[name] for name in ("cudnn", "fa3", "fa4") if name in peers) / peers["cudnn"]
            for setting, peers in peers_elsewhere().items()}
    by_best = {setting: value / best[setting] for setting, value in cudnn.items() if setting in best}
    today = " / ".join(mean({x: value for x, value in by_best.items() if x[0] == d}) for d in (64, 128, 256))
    return paragraph(f"""Over {len(cudnn)} recorded settings in bf16, `flash_sm90.cu` is on average {mean(cudnn)} times
        as fast as cuDNN ({span(cudnn)} by setting). At head_dim 128 and S = 16384 without a mask it reaches
        {tflops('forward', 'cuda:sm90', longest):.0f} TFLOP/s, and torch's matmul of 8192³ reaches
        {matmul('forward', 'bfloat16'):.0f} in the same run. In the unit of the table, the kernel of today is at
        {today}, and at {span(by_best)} by setting. Like the table, this is an estimate from two machines.""")


def ladder_backward():
    impls = {"cuda:sm80": "`flash_bwd_sm80.cu`", "triton": "Triton", "torch:flash": "FlashAttention-2",
             "torch:cudnn": "cuDNN"}
    rows = []
    for head_dim in (64, 128):
        setting = dict(batch_size=8, nheads=2048 // head_dim, seqlen_q=2048, head_dim=head_dim, causal=False)
        rows.append([f"B 8, H {2048 // head_dim}, S 2048, D {head_dim}",
                     *(f"{tflops('backward', impl, setting):.0f}" for impl in impls)])
    return table(["bf16, TFLOP/s", *impls.values()], rows)


BLOCKS = {block.__name__: block for block in (ladder_problem, ladder_milestones, ladder_forward, ladder_backward)}


def steps():
    """{title: (bars as (name, implementation, TFLOP/s), TFLOP/s of a matmul)}"""
    def bars(steps, setting):
        return [(name, impl, tflops(file, impl, setting)) for name, file, impl in steps]

    return {"fp32: B 4, H 16, S 4096, D 128": (bars(FP32_STEPS, FP32), matmul("fp32", "float32")),
            "bf16: B 8, H 16, S 2048, D 128": (bars(BF16_STEPS + BF16_PEERS, BF16), matmul("forward", "bfloat16"))}
