"""Numbers and picture of docs/ladder.md, from benchmarks/h200/*.json.

    python benchmarks/ladder_tables.py    # draw docs/ladder.svg again

BLOCKS has the blocks of docs/ladder.md: {name: function that returns Markdown}. benchmarks/write_tables.py writes them.
"""

import json
import textwrap
from html import escape
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/ladder.svg"
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


def record(name):
    return json.loads((ROOT / f"benchmarks/h200/{name}.json").read_text())


def tflops(name, impl, setting):
    """TFLOP/s of one implementation in one setting; None if it was not measured."""
    (row,) = (row for row in record(name)["rows"] if row["impl"] == impl and setting.items() <= row.items())
    return row["tflops"]


def matmul(name, dtype):
    """TFLOP/s of torch's matmul of 8192³ in the same run."""
    return record(name)["meta"]["matmul_tflops"][dtype]


def paragraph(text):
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


def table(headings, rows):
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows))


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
               ["exponentials", "B·H·S²", f"{scores / 2e6:,.0f} million"]]), "",
        paragraph(f"""The memory of an H200 moves {bandwidth / 1e9:,.0f} GB/s by its data sheet, so it needs
            {tensors / bandwidth * 1e6:,.0f} µs to read Q, K and V and to write O. A plain matrix product reaches
            {ceiling:.0f} TFLOP/s on the same GPU. At that rate the two products take {flops / ceiling / 1e6:,.0f} µs.
            So attention is not bound by memory, as long as the scores stay on the chip."""), "",
        paragraph(f"""The plain PyTorch code of step 1 does not keep them there. It writes and reads the scores six
            times: the first product writes them, the scaling and the softmax read and write them, and the second
            product reads them. That is {6 * scores / 1e6:,.0f} MB and at least {6 * scores / bandwidth * 1e6:,.0f} µs.
            The whole computation takes {flops / pytorch / 1e6:,.0f} µs."""), ""])


def ladder_milestones():
    def steps(names, setting, pytorch):
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
        "fp32 with TF32 off, B 4, H 16, S 4096, D 128:\n", steps(FP32_STEPS, FP32, "fp32 FMA units"), "",
        paragraph(f"A plain matrix product of 8192³ reaches {matmul('fp32', 'float32'):.0f} TFLOP/s in the same run."),
        "\nbf16, B 8, H 16, S 2048, D 128:\n", steps(BF16_STEPS, BF16, "tensor cores, by cuBLAS"), "",
        paragraph(f"""{peers}. A plain matrix product of 8192³ reaches {matmul('forward', 'bfloat16'):.0f}. The rows
            come from three runs. FlashAttention-2 ran in all three, as a control, and reached
            {flash[0]}, {flash[1]} and {flash[2]} TFLOP/s."""), ""])


def ladder_forward():
    rows = {}
    for row in record("forward")["rows"]:
        if row["dtype"] == "bfloat16":
            rows.setdefault((row["head_dim"], row["causal"], row["seqlen_q"]), {})[row["impl"]] = row["ms"]
    ratios = [ms["torch:cudnn"] / ms["cuda:sm90"] for ms in rows.values()]
    longest = dict(head_dim=128, causal=False, seqlen_q=16384, dtype="bfloat16")
    return paragraph(f"""Over {len(ratios)} recorded settings in bf16 `flash_sm90.cu` is
        {geometric_mean(ratios):.2f} times as fast as cuDNN by the geometric mean, and {min(ratios):.2f} to
        {max(ratios):.2f} times by setting. At head_dim 128 and S = 16384 without a mask it reaches
        {tflops('forward', 'cuda:sm90', longest):.0f} TFLOP/s. A plain matrix product of 8192³ reaches
        {matmul('forward', 'bfloat16'):.0f} in the same run.""") + "\n"


def ladder_backward():
    impls = {"cuda:sm80": "`flash_bwd_sm80.cu`", "triton": "Triton", "torch:flash": "FlashAttention-2",
             "torch:cudnn": "cuDNN"}
    rows = []
    for head_dim in (64, 128):
        setting = dict(batch_size=8, nheads=2048 // head_dim, seqlen_q=2048, head_dim=head_dim, causal=False)
        rows.append([f"B 8, H {2048 // head_dim}, S 2048, D {head_dim}",
                     *(f"{tflops('backward', impl, setting):.0f}" for impl in impls)])
    return table(["bf16, TFLOP/s", *impls.values()], rows) + "\n"


BLOCKS = {block.__name__: block for block in (ladder_problem, ladder_milestones, ladder_forward, ladder_backward)}


def picture():
    """The milestones as bars: the text of an SVG."""
    ours, other = "#0072B2", "#999999"  # of the palette of Okabe and Ito, and gray
    product = "matrix product of 8192³"
    fp32 = [(name, tflops(file, impl, FP32)) for name, file, impl in FP32_STEPS]
    fp32.append((product, matmul("fp32", "float32")))
    bf16 = [(name, tflops(file, impl, BF16)) for name, file, impl in BF16_STEPS + BF16_PEERS]
    bf16.append((product, matmul("forward", "bfloat16")))
    lines, y = [], 10
    for title, bars in (("fp32: B 4, H 16, S 4096, D 128", fp32), ("bf16: B 8, H 16, S 2048, D 128", bf16)):
        lines.append(f'<text x="10" y="{y + 16}" font-weight="bold">{title}, TFLOP/s on one H200</text>')
        y += 28
        for name, speed in sorted(bars, key=lambda bar: bar[1]):
            width = 430 * speed / max(speed for _, speed in bars)
            color = ours if name.endswith(".cu") else other
            lines += [f'<text x="210" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
                      f'<rect x="220" y="{y}" width="{width:.1f}" height="20" fill="{color}"/>',
                      f'<text x="{226 + width:.1f}" y="{y + 15}">{speed:.0f}</text>']
            y += 26
        y += 12
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {y}" width="700" height="{y}" '
                      'font-family="Helvetica, Arial, sans-serif" font-size="14">',
                      f'<rect width="700" height="{y}" fill="white"/>', *lines, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture())
