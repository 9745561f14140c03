"""Write the tables of README.md, and the sentences that quote them, from benchmarks/h200/*.json and the GPU record.

    python benchmarks/write_tables.py            # rewrite the files in place
    python benchmarks/write_tables.py --check    # change nothing; exit code 1 if a file is stale

Each block of a Markdown file between the lines `<!-- begin NAME -->` and `<!-- end NAME -->` is what the function NAME
of this file returns. Everything outside these lines is written by hand.
"""

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from statistics import geometric_mean as geomean

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md"]
BLOCK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->\n)", re.DOTALL)


def record(name):
    return json.loads((ROOT / "benchmarks/h200" / f"{name}.json").read_text())


def settings(name, *keys, **only):
    """{values of keys: {impl: row}} of the rows of a record that were measured and have the values `only`."""
    found = {}
    for row in record(name)["rows"]:
        if row["ms"] and all(row[key] == value for key, value in only.items()):
            found.setdefault(tuple(row[key] for key in keys), {})[row["impl"]] = row
    return found


def by_size(rows_of):
    """The items of settings(..., *SIZE) from the smallest size on."""
    return sorted(rows_of.items(), key=lambda item: item[0])


def ratios(rows_of, ours, peer):
    """How many times as fast ours is as peer, setting by setting."""
    return {setting: rows[peer]["ms"] / rows[ours]["ms"] for setting, rows in rows_of.items()
            if ours in rows and peer in rows}


def span(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def tflops(rows, impls):
    return [f"{rows[impl]['tflops']:.0f}" if impl in rows else "–" for impl in impls]


def paragraph(text):
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False) + "\n"


def table(headings, rows):
    heading, *lines = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    return "\n".join([heading, "|" + "---|" * len(headings), *lines])


def yes_or_no(flag):
    return "yes" if flag else "no"


SIZE = "head_dim", "causal", "seqlen_q"


def size(head_dim, causal, seqlen):
    return [str(head_dim), yes_or_no(causal), str(seqlen)]


def headline():
    hopper, ampere = settings("forward", *SIZE, dtype="bfloat16"), settings("sm80", "dtype", *SIZE)
    by_cudnn, by_flash, of_ampere = (geomean(ratios(*x).values()) for x in (
        (hopper, "cuda:sm90", "torch:cudnn"), (hopper, "cuda:sm90", "torch:flash"),
        (ampere, "cuda:sm80", "torch:flash")))
    return paragraph(f"""On an H200, in bf16 and by the geometric mean, `flash_sm90.cu` is {by_cudnn:.2f} times as fast
        as cuDNN and {by_flash:.2f} times as fast as the FlashAttention-2 in torch. `flash_sm80.cu`, in Ampere's
        instructions, is {of_ampere:.2f} times as fast as the latter.""")


def tests():
    gpu = json.loads((ROOT / "tests/gpu_record.json").read_text())
    parts = f"in {gpu['parts']} parts, {gpu['duration_s'] / 60:.0f} minutes together" if gpu["parts"] > 1 else \
        f"in {gpu['duration_s'] / 60:.1f} minutes"
    return paragraph(f"On an {gpu['device']}, {gpu['passed']} tests passed and {gpu['skipped']} were skipped, {parts}.")


def backward():
    rows_of = settings("backward", "batch_size", "nheads", "nheads_k", *SIZE)
    full = {(d, causal, s): rows for (b, h, _, d, causal, s), rows in rows_of.items()
            if b * s == 16384 and h * d == 2048}
    sm80, twin = (ratios(full, ours, "torch:flash") for ours in ("cuda:sm80", "triton"))
    cudnn = ratios(full, "triton", "torch:cudnn")
    small = [setting for setting in full if setting[0] <= 128]
    worst = max(rows[ours]["max_err"] / rows["torch:flash"]["max_err"] for rows in full.values()
                for ours in ("cuda:sm80", "triton"))
    impls = "cuda:sm80", "triton", "torch:flash", "torch:cudnn"
    cells = [[*size(*setting), *tflops(rows, impls), f"**{sm80[setting]:.2f}**", f"**{twin[setting]:.2f}**",
              f"{cudnn[setting]:.2f}"] for setting, rows in by_size(full)]
    shared = []
    for (b, h, h_k, d, causal, s), rows in rows_of.items():
        if b == 1 and d == 128 and s < 16384 and causal:
            speedups = (rows["torch:flash"]["ms"] / rows[ours]["ms"] for ours in ("cuda:sm80", "triton"))
            shared.append([f"{b},{h},{h_k},{s}", *tflops(rows, impls), *(f"**{x:.2f}**" for x in speedups)])
    sm80_small, twin_small, cudnn_small = ([values[setting] for setting in small] for values in (sm80, twin, cudnn))
    return "\n".join([
        paragraph(f"""**Speed of the backward pass** (dq, dk and dv) on one H200, TFLOP/s in bf16 with B·S = 16384 and
            H·D = 2048, medians of one run, FLOPs 2.5 times those of the forward. Up to head_dim 128 and by the
            geometric mean, `sm80` is {geomean(sm80_small):.2f} times as fast as FA2, by setting {span(sm80_small)}.
            `triton` is {geomean(twin_small):.2f} times as fast as FA2, by setting {span(twin_small)}, and reaches
            {geomean(cudnn_small):.2f} of cuDNN. At head_dim 256 `sm80` reaches
            {span([sm80[x] for x in sm80 if x[0] == 256])} of FA2. The largest error of ours is up to {worst:.1f} times
            that of FA2."""),
        table(["head_dim", "causal", "S", "cuda:sm80", "triton", "FA2", "cuDNN", "sm80 × FA2", "triton × FA2",
               "triton × cuDNN"], cells), "",
        "![TFLOP/s of the backward pass](benchmarks/h200/backward.png)\n",
        paragraph("""One sample, with and without shared keys, bf16, head_dim 128, causal, TFLOP/s of the backward pass
            in the same run:"""),
        table(["B,H,Hk,S", "cuda:sm80", "triton", "FA2", "cuDNN", "sm80 × FA2", "triton × FA2"], shared), ""])


def training():
    run = record("training")
    speed = {backend: f"{tokens / 1e6:.2f}" for backend, tokens in run["tokens_per_s"].items()}
    meta = run["meta"]
    return paragraph(f"""The picture is of {meta['steps']} steps with {meta['batch_size']} rows of {meta['seqlen']}
        bytes: cuda {speed['cuda']}, triton {speed['triton']}, torch {speed['torch']} million tokens a second.""")


def twin():
    halves = settings("triton", *SIZE, dtype="bfloat16")
    eighths = settings("triton", *SIZE, dtype="float8_e4m3fn")
    best = {setting: max(rows[peer]["tflops"] for peer in ("flex", "torch:flash") if peer in rows)
            for setting, rows in halves.items()}
    by_best = {setting: rows["triton"]["tflops"] / best[setting] for setting, rows in halves.items()}
    cudnn = ratios(halves, "triton", "torch:cudnn")
    fp8 = {setting: eighths[setting]["triton"]["tflops"] / halves[setting]["triton"]["tflops"] for setting in eighths}
    cells = [[*size(*setting), f"{rows['triton']['tflops']:.0f}", f"{eighths[setting]['triton']['tflops']:.0f}",
              *tflops(rows, ("flex", "torch:flash", "torch:cudnn")), f"**{by_best[setting]:.2f}**",
              f"{cudnn[setting]:.2f}"] for setting, rows in by_size(halves)]
    return "\n".join([
        paragraph(f"""**Speed** on one H200, TFLOP/s in bf16 with B·S = 16384 and H·D = 2048, medians of one run; fp8 is
            e4m3fn, with Vᵀ made in every call. By the geometric mean of {len(halves)} settings in bf16 it is
            {geomean(by_best.values()):.2f} times as fast as the better of FlexAttention and FA2, by setting
            {span(by_best.values())}. It reaches {geomean(cudnn.values()):.2f} of cuDNN, by setting
            {span(cudnn.values())}. fp8 at head_dim 128 and S = 16384 is {fp8[128, False, 16384]:.2f} times as fast as
            bf16, and {fp8[128, True, 16384]:.2f} times with a causal mask."""),
        table(["head_dim", "causal", "S", "triton", "fp8", "Flex", "FA2", "cuDNN", "× best of Flex, FA2", "× cuDNN"],
              cells), ""])


def matmul():
    rows_of = settings("matmul", "m", "n", "k", "dtype")
    faster = {setting: rows["cublas"]["ms"] / rows["triton"]["ms"] for setting, rows in rows_of.items()}
    cells = []
    for m, n, k in dict.fromkeys(setting[:3] for setting in rows_of):
        cells.append([f"{m},{n},{k}"])
        for dtype in ("float16", "bfloat16"):
            cells[-1] += [*tflops(rows_of[m, n, k, dtype], ("triton", "cublas")), f"**{faster[m, n, k, dtype]:.2f}**"]
    return "\n".join([
        paragraph(f"""**Speed of the product** on one H200, TFLOP/s, medians of one run: by the geometric mean,
            {geomean(faster.values()):.2f} times as fast as cuBLAS; by size and dtype {span(faster.values())}."""),
        table(["(M,N,K)", "fp16 triton", "fp16 cuBLAS", "fp16 ×", "bf16 triton", "bf16 cuBLAS", "bf16 ×"], cells), ""])


def forward():
    run, rows_of = record("forward"), settings("forward", *SIZE, dtype="bfloat16")
    flash, cudnn = (ratios(rows_of, "cuda:sm90", peer) for peer in ("torch:flash", "torch:cudnn"))
    half = [rows_of[setting]["cuda:sm90"]["ms"] / rows["cuda:sm90"]["ms"]
            for setting, rows in settings("forward", *SIZE, dtype="float16").items()]
    ceiling = run["meta"]["matmul_tflops"]
    of_matmul = rows_of[128, False, 16384]["cuda:sm90"]["tflops"] / ceiling["bfloat16"]
    best = {(row["head_dim"], row["causal"], row["seqlen"]):
            max(row[peer] or 0 for peer in ("cudnn", "fa3", "fa4")) / row["cudnn"]
            for row in json.loads((ROOT / "benchmarks/peers.json").read_text())["rows"]}
    by_best = {setting: cudnn[setting] / best[setting] for setting in cudnn}
    worst = max(rows["cuda:sm90"]["max_err"] / rows["torch:flash"]["max_err"] for rows in rows_of.values())
    rounds = re.search(r"--rounds (\d+)", run["meta"]["command"])[1]
    cells = [[*size(*setting), *tflops(rows, ("cuda:sm90", "torch:flash", "torch:cudnn")), f"{flash[setting]:.2f}",
              f"**{cudnn[setting]:.2f}**"] for setting, rows in by_size(rows_of)]
    return "\n".join([
        paragraph(f"""**bfloat16 on Hopper**, TFLOP/s with B·S = 16384 and H·D = 2048, by `flash_sm90.cu`. By the
            geometric mean of {len(rows_of)} settings it is {geomean(cudnn.values()):.2f} times as fast as cuDNN, by
            setting {span(cudnn.values())}, and {geomean(flash.values()):.2f} times as fast as FA2. In fp16 it reaches
            {geomean(half):.2f} of that, by setting {span(half)}. At head_dim 128 and S = 16384 it does
            {of_matmul:.2f} of what torch's matmul of 8192³ does in the same run. That matmul reaches
            {ceiling['float16'] / ceiling['bfloat16']:.2f} of it in fp16."""),
        table(["head_dim, bf16", "causal", "S", "cuda:sm90", "FA2", "cuDNN", "× FA2", "× cuDNN"], cells), "",
        "![TFLOP/s over S](benchmarks/h200/forward.svg)\n",
        paragraph(f"""FlashAttention-3 and 4 are not on that machine. On another H200 (`benchmarks/peers.json`) the best
            of them and cuDNN was {span([best[setting] for setting in cudnn])} times as fast as cuDNN, by setting. With
            these factors `sm90` is {geomean(by_best.values()):.2f} times as fast as the best of the three, and
            {min(by_best.values()):.2f} at the least, at S = {min(by_best, key=by_best.get)[-1]}. Each number is the
            median of {rounds} rounds. From S = 8192 on the GPU's power limits its clock, in the matmul too, and more in
            fp16, whose mantissas are longer. The largest error of `sm90` is up to {worst:.1f} times that of FA2, within
            the tests' rule.""")])


def heads():
    rows_of = settings("heads", "batch_size", "nheads", "nheads_k", "seqlen_q", "head_dim", "causal")
    shapes = list(dict.fromkeys(setting[:5] for setting in rows_of))
    cells = []
    for shape in shapes:
        cells.append([",".join(map(str, shape))])
        for causal in (False, True):
            rows = rows_of[*shape, causal]
            cells[-1] += [*tflops(rows, ("cuda:sm90", "torch:cudnn")),
                          f"**{rows['torch:cudnn']['ms'] / rows['cuda:sm90']['ms']:.2f}**"]

    def shared(nheads_k):
        """Speed with nheads_k key heads over that with 32, at head_dim 128."""
        return span([rows_of[b, 32, nheads_k, s, 128, causal]["cuda:sm90"]["tflops"]
                     / rows_of[b, 32, 32, s, 128, causal]["cuda:sm90"]["tflops"]
                     for b, s in ((8, 2048), (2, 8192)) for causal in (False, True)])

    rounds = re.search(r"--rounds (\d+)", record("heads")["meta"]["command"])[1]
    return "\n".join([
        paragraph(f"""**Shared keys and other head_dims**, TFLOP/s of `sm90` in bf16, medians of {rounds} rounds; the
            columns from *causal* on are with a mask. GQA runs at {shared(8)} of the speed of MHA, MQA at {shared(1)}.
            Two runs differ by up to 5 %."""),
        table(["(B,H,Hk,S,D)", "cuda:sm90", "cuDNN", "× cuDNN", "causal", "cuDNN", "× cuDNN"], cells), ""])


def ampere():
    rows_of = settings("sm80", "dtype", *SIZE)
    faster = ratios(rows_of, "cuda:sm80", "torch:flash")
    fallback = ratios(settings("fallback", "head_dim"), "cuda:simt", "cuda:sm80")
    worst = max(rows["cuda:sm80"]["max_err"] / rows["torch:flash"]["max_err"] for rows in rows_of.values())
    cells = [[*size(*setting), *tflops(rows, ("cuda:sm80", "torch:flash", "torch:cudnn", "manual")),
              f"**{faster[dtype, *setting]:.2f}**"] for (dtype, *setting), rows in by_size(rows_of)
             if dtype == "bfloat16" and setting[-1] != 8192]
    return "\n".join([
        paragraph(f"""**bfloat16 in the instructions of Ampere**, by `flash_sm80.cu`. FA2 is torch's FLASH_ATTENTION
            backend, built from the same instructions; cuDNN uses Hopper's own. By the geometric mean of {len(faster)}
            settings (fp16 and bf16, S up to 16384) ours is {geomean(faster.values()):.2f} times as fast as FA2, by
            setting {span(faster.values())}. The largest error is up to {worst:.1f} times that of FA2, within the tests'
            rule of twice torch's MATH backend: the price of the lazy maximum, see `csrc/softmax.cuh`. Where tensor
            cores cannot serve a 16-bit call, `simt` takes {1 / max(fallback.values()):.0f} to
            {1 / min(fallback.values()):.0f} times as long."""),
        table(["head_dim", "causal", "S", "cuda:sm80", "FA2", "cuDNN", "manual", "× FA2"], cells), ""])


def fp32():
    rows_of = settings("fp32", "batch_size", "nheads", "seqlen_q", "head_dim")
    impls = "manual", "torch:efficient", "cuda:simt", "cuda:dmma", "triton"
    cells = []
    for setting, rows in rows_of.items():
        ours = rows.get("cuda:dmma") or rows["cuda:simt"]
        cells.append([",".join(map(str, setting)), *(f"{rows[x]['ms']:.3g}" if x in rows else "–" for x in impls),
                      f"**{rows['manual']['ms'] / ours['ms']:.2f}**",
                      f"**{rows['torch:efficient']['ms'] / ours['ms']:.2f}**",
                      f"{ours['max_err']:.1e} / {rows['manual']['max_err']:.1e}"])
    dmma = ratios(rows_of, "cuda:dmma", "torch:efficient")
    return "\n".join([
        paragraph(f"""**float32** with TF32 off: ms, and the speed of ours, which is `dmma` where it is measured and
            `simt` elsewhere, over that of `manual` and of torch's memory-efficient kernel. The largest errors are those
            of ours / `manual`. By the geometric mean `dmma` is {geomean(dmma.values()):.2f} times as fast as the
            memory-efficient kernel."""),
        table(["(B,H,S,D)", "manual", "efficient", "cuda:simt", "cuda:dmma", "triton", "× manual", "× efficient",
               "max error"], cells), ""])


def host():
    one, both = record("forward")["meta"]["host_us"], record("host")["meta"]["host_us"]
    return paragraph(f"""**Host**, from a Python call to its return at (1,4,64,64) bf16: `flash_attention`
        {one['flash_attention']:.1f} µs, `flash_attn_func` {one['flash_attn_func']:.1f}, torch's FLASH_ATTENTION
        {one['torch:flash']:.1f}, EFFICIENT_ATTENTION {one['torch:efficient']:.1f}. Forward and backward together, in
        another run: `flash_attention` {both['flash_attention']:.0f} µs, SDPA by cuDNN {both['torch:cudnn']:.0f}, by FA2
        {both['torch:flash']:.0f}, `backend="triton"` {both['triton']:.0f}.""")


def build():
    evidence = json.loads((ROOT / "tests/gpu_record.json").read_text())["evidence"]
    (seconds,) = (x for name, x in evidence.items() if name.startswith("seconds of the JIT build"))
    return paragraph(f"""The library has {evidence['MB of the built library']:.1f} MB. `minimal_attn.load()` takes
        {seconds:.0f} s to build it from nothing, beside 16 workers of the tests, many of which compile at that
        time.""")


BLOCKS = {block.__name__: block for block in (headline, tests, backward, training, twin, matmul, forward, heads, ampere,
                                              fp32, host, build)}


def rewritten(text):
    return BLOCK.sub(lambda block: block[1] + BLOCKS[block[2]]() + block[3], text)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a file is stale")
    check = parser.parse_args(argv).check
    stale = [file for file in FILES if rewritten(file.read_text()) != file.read_text()]
    for file in stale:
        if not check:
            file.write_text(rewritten(file.read_text()))
        print(f"{file.relative_to(ROOT)} {'is stale: python benchmarks/write_tables.py' if check else 'is rewritten'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
