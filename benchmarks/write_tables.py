"""Write the result tables of README.md and docs/, and the sentences that quote them, from the recorded results.

    python benchmarks/write_tables.py            # rewrite the files in place
    python benchmarks/write_tables.py --check    # change nothing; exit code 1 if a file is stale

make docs runs this file and write_pictures.py. The text of a Markdown file between the lines `<!-- begin NAME -->` and
`<!-- end NAME -->` is a block. The function NAME of this file or of ladder_tables.py returns it. The numbers come from
benchmarks/h200/*.json, benchmarks/peers.json and tests/gpu_record/.
"""

import argparse
import re
import sys

import ladder_tables
from recorded import (PASSES, ROOT, SHAPE, SIZE, bullet, by_size, gpu_record, is_recorded, largest_error, mean, names,
                      paragraph, peers_elsewhere, ratio, ratios, record, rounds, settings, span, speed_in_step, speeds,
                      table, tflops)

FILES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->\n)", re.DOTALL)


def opening():
    forward = ratios(settings("forward", *SIZE, dtype="bfloat16"), "cuda:sm90", "torch:cudnn")
    backward = ratios(backward_settings(), "cuda:sm90", "torch:cudnn")
    short = max(s for (_, _, s), value in forward.items() if value <= 1)
    longer = {setting: value for setting, value in forward.items() if setting[2] > short}
    shorter = {setting: value for setting, value in forward.items() if setting[2] <= short}
    return paragraph(f"""On an H200, the bf16 forward pass is {span(longer)} times as fast as that of cuDNN for sequence
        lengths S from {min(s for _, _, s in longer)} on, and {span(shorter)} times as fast up to S = {short}.
        The bf16 backward pass is {span(backward)} times as fast as that of cuDNN for S from
        {min(s for _, _, s in backward)} on, where no heads share keys.""")


def both_passes(backward_of):
    """{setting: {impl: row}} with the sum of the times of the forward and the backward pass, which were timed apart."""
    forward_of = settings("triton", *SIZE, dtype="bfloat16")
    return {setting: {impl: {"ms": forward_of[setting][impl]["ms"] + rows[impl]["ms"]}
                      for impl in ("triton", "torch:cudnn", "torch:flash")}
            for setting, rows in backward_of.items() if setting in forward_of}


def slower_unaligned(name, kernel):
    """How many times as long simt takes for calls that a kernel serves, whose times are in the record `name`."""
    keys = "batch_size", "nheads", "dtype", *SIZE
    kernel_of = settings(name, *keys)
    slower = [rows["cuda:simt"]["ms"] / kernel_of[setting][kernel]["ms"]
              for setting, rows in settings("fallback", *keys).items()]
    return f"{min(slower):.0f} to {max(slower):.0f}"


def results():
    rows_of, backward_of = by_size(settings("forward", *SIZE, dtype="bfloat16")), backward_settings()
    cudnn, flash = (ratios(rows_of, "cuda:sm90", peer) for peer in ("torch:cudnn", "torch:flash"))
    shown = {(d, s): rows for (d, causal, s), rows in rows_of.items() if causal and s != 8192}
    backward = [ratios(backward_of, "cuda:sm90", peer) for peer in ("torch:cudnn", "torch:flash")]
    both = [ratios(both_passes(up_to_128(backward_of)), "triton", peer) for peer in ("torch:cudnn", "torch:flash")]
    fp32_of = settings("fp32", *SHAPE)
    dmma = ratios(fp32_of, "cuda:dmma", "torch:efficient")
    (simt,) = [ratio(rows, "cuda:simt", "torch:efficient") for rows in fp32_of.values() if "cuda:dmma" not in rows]
    by_triton = [rows["triton"]["ms"] / rows["cuda:dmma" if "cuda:dmma" in rows else "cuda:simt"]["ms"]
                 for rows in fp32_of.values()]
    return "\n".join([
        paragraph("""TFLOP/s with a causal mask. Each batch has B·S = 16384 tokens, and H·D = 2048. `sm90` is the kernel
            of this library that serves these calls. cuDNN and FA2 (FlashAttention-2) are two of the kernels behind
            PyTorch's `scaled_dot_product_attention`. All were timed in the same run. The last two columns are ratios of
            speeds. Above 1, `sm90` is faster."""),
        speeds(shown, ("cuda:sm90", "torch:cudnn", "torch:flash"),
               (("cuda:sm90", "torch:cudnn"), ("cuda:sm90", "torch:flash")), ("head_dim", "S")),
        bullet(f"""**Forward, bf16.** Over all {len(rows_of)} settings, with and without a mask, `sm90` is on average
            {mean(cudnn)} times as fast as cuDNN ({span(cudnn)}) and {mean(flash)} times as fast as FA2. Its largest
            error is up to {largest_error(rows_of, "cuda:sm90", "torch:flash"):.1f} times that of FA2. The tests allow
            [twice the error of PyTorch's math kernel](docs/benchmarks.md#how-it-is-measured), plus rounding."""),
        bullet(f"""**Backward, bf16.** Over {len(backward_of)} settings, `sm90` is on average {mean(backward[0])} times
            as fast as cuDNN ({span(backward[0])}) and {mean(backward[1])} times as fast as FA2."""),
        of_flash_attention_3(),
        bullet(f"""**Training with Triton, bf16.** By the sum of both passes of `backend="triton"`, which were timed
            separately, it reaches {mean(both[0])} of the speed of cuDNN ({span(both[0])}) and {mean(both[1])} times the
            speed of FA2, up to head_dim 128."""),
        *of_decoding(), *of_models(),
        bullet(f"""**fp32 without TF32.** On average, up to head_dim 128, the forward kernel `dmma` is {mean(dmma)}
            times as fast as PyTorch's memory-efficient kernel ({span(dmma)}). At head_dim 256, `simt` serves and
            reaches {simt:.2f} of the speed of that kernel. The Triton kernels take {min(by_triton):.1f} to
            {max(by_triton):.1f} times as long as the CUDA kernels. The backward pass is slower than PyTorch's
            ([docs/training.md](docs/training.md#speed))."""),
        bullet(f"""**Unaligned 16-bit calls.** A 16-bit call whose head_dim is not a multiple of 8, or whose strides or
            addresses are not multiples of 16 bytes, takes {slower_unaligned("forward", "cuda:sm90")} times as long as
            with `sm90`. A warning names the reason."""), ""])


def of_decoding():
    """Yields README.md's text about decode.json: dense caches and one token, by sizes."""
    if not is_recorded("decode"):
        return
    all_rows = decode_settings("batch_size", "nheads_k", "seqlen_k", "page_size", seqlen_q=1, lengths="full")
    rows_of = {setting[:3]: rows for setting, rows in all_rows.items() if setting[3] == 0}
    costs = {setting: rows["cuda"]["ms"] / rows_of[setting[:3]]["cuda"]["ms"] for setting, rows in all_rows.items()
             if setting[3] in PAGES[1:]}
    small, large = ({impl: ratios({x: rows for x, rows in rows_of.items()
                                   if (megabytes(rows["read"]) > 200) == is_large}, impl, "read")
                     for impl in ("cuda", "torch:cudnn")} for is_large in (False, True))
    yield bullet(f"""**Attention to caches, bf16.** A call with one query token is bound by reading keys and values. With
        caches of 268 MB and more, `cuda` reaches {mean(large["cuda"])} of the speed of a plain read
        ({span(large["cuda"])}), and cuDNN {mean(large["torch:cudnn"])}. With 4 and 34 MB these are
        {mean(small["cuda"])} and {mean(small["torch:cudnn"])}. Pages of 16 to 128
        keys take {mean(costs)} times as long as none ({span(costs)}).""")


def of_models():
    """Yields README.md's text about models.json."""
    if not is_recorded("models"):
        return
    forward, step = (ratios({x: rows for x, rows in settings("models", "pass", "seqlen").items() if x[0] == which},
                            "minimal_attn", "sdpa") for which in ("forward", "step"))
    yield bullet(f"""**A whole Llama** of transformers is {span(forward)} times as fast forward as with torch's `sdpa`, and
        {span(step)} times in training ([docs/integrations.md](docs/integrations.md#a-whole-model)).""")


def forward():
    run, rows_of = record("forward"), by_size(settings("forward", *SIZE, dtype="bfloat16"))
    flash, cudnn = (ratios(rows_of, "cuda:sm90", peer) for peer in ("torch:flash", "torch:cudnn"))
    half = {setting: rows_of[setting]["cuda:sm90"]["ms"] / rows["cuda:sm90"]["ms"]
            for setting, rows in settings("forward", *SIZE, dtype="float16").items()}
    ceiling = run["meta"]["matmul_tflops"]
    of_matmul = rows_of[128, False, 16384]["cuda:sm90"]["tflops"] / ceiling["bfloat16"]
    return "\n".join([
        paragraph(f"""Each number is the median of {rounds("forward")} rounds. On average over {len(rows_of)} settings,
            `sm90` is {mean(cudnn)} times as fast as cuDNN ({span(cudnn)}) and {mean(flash)} times as fast as FA2
            ({span(flash)}). In fp16, `sm90` reaches {mean(half)} of its speed in bf16 ({span(half)}). At head_dim 128
            and S = 16384 without a mask, `sm90` reaches {of_matmul:.2f} of the TFLOP/s of torch's bf16 matmul of 8192³
            in the same run. The largest error of `sm90` is up to
            {largest_error(rows_of, "cuda:sm90", "torch:flash"):.1f} times that of FA2."""),
        speeds(rows_of, ("cuda:sm90", "torch:cudnn", "torch:flash"),
               (("cuda:sm90", "torch:cudnn"), ("cuda:sm90", "torch:flash")))])


FA3 = "flash_attn_interface"  # the module of FlashAttention-3
BESIDE_FA3 = {"forward": "forward_fa3", "backward": "backward_fa3"}  # {pass: record}


def over_fa3():
    """{pass: {setting: the speed of sm90 over that of FlashAttention-3}}, each pass in a run of its own."""
    return {name: ratios(by_size(settings(file, *SIZE)), "cuda:sm90", FA3) for name, file in BESIDE_FA3.items()}


def of_flash_attention_3():
    forward, backward = over_fa3().values()
    return bullet(f"""**FlashAttention-3** was built from its source and timed beside `sm90` in [two more
        runs](docs/benchmarks.md#flashattention-3). On average, `sm90` is {mean(forward)} times as fast in the forward
        pass over {len(forward)} settings ({span(forward)}), and {mean(backward)} times as fast in the backward pass
        over {len(backward)} with S ≥ 2048 ({span(backward)}).""")


def flash_attention_3():
    forward, backward = over_fa3().values()
    fa4 = [{setting: row["fa4"] / row["fa3"] for setting, row in peers_elsewhere(name).items() if "fa4" in row}
           for name in ("rows", "backward")]
    by_head_dim = " / ".join(mean({x: value for x, value in backward.items() if x[0] == d}) for d in (64, 128, 256))
    tables = [f"The {name} pass:\n\n" + speeds(by_size(settings(file, *SIZE)), ("cuda:sm90", FA3, "torch:cudnn"),
                                               (("cuda:sm90", FA3), ("cuda:sm90", "torch:cudnn")))
              for name, file in BESIDE_FA3.items()]
    return "\n".join([
        paragraph(f"""Each number is the median of {rounds("forward_fa3")} rounds. In the forward pass, `sm90` is on
            average {mean(forward)} times as fast as FlashAttention-3 ({span(forward)}). In the backward pass it is
            {mean(backward)} times as fast from S = 2048 on ({span(backward)}), and {by_head_dim} times at head_dim
            64 / 128 / 256. FlashAttention-4 did not run here. On another H200, it was {span(fa4[0])} times as fast as
            FlashAttention-3 in the forward pass, and {span(fa4[1])} times in the backward pass
            ([peers.json](../benchmarks/peers.json))."""), *tables])


def heads():
    rows_of = settings("heads", "batch_size", "nheads", "nheads_k", "seqlen_q", "head_dim", "causal")

    def shared(nheads_k):
        """Speed with nheads_k key heads over that with 32, at head_dim 128."""
        return span({(b, s, causal): rows_of[b, 32, nheads_k, s, 128, causal]["cuda:sm90"]["tflops"]
                     / rows_of[b, 32, 32, s, 128, causal]["cuda:sm90"]["tflops"]
                     for b, s in ((8, 2048), (2, 8192)) for causal in (False, True)})

    return "\n".join([
        paragraph(f"""Each number is the median of {rounds("heads")} rounds; two such runs differ by up to 5 %. With 32
            query heads, 8 key heads (GQA) reach {shared(8)} times the speed of 32 key heads (MHA), and 1 key head (MQA)
            reaches {shared(1)} times that speed. Differences below 5 % can be noise."""),
        speeds(rows_of, ("cuda:sm90", "torch:cudnn"), (("cuda:sm90", "torch:cudnn"),),
               ("B", "H", "Hk", "S", "D", "causal"))])


def ampere():
    rows_of = settings("sm80", "dtype", *SIZE)
    faster = ratios(rows_of, "cuda:sm80", "torch:flash")
    shown = by_size({tuple(size): rows for (dtype, *size), rows in rows_of.items()
                     if dtype == "bfloat16" and size[-1] != 8192})
    return "\n".join([
        paragraph(f"""On average over {len(faster)} settings (fp16 and bf16, S from 512 to 16384), `sm80` is
            {mean(faster)} times as fast as FA2 ({span(faster)}). Its largest error is up to
            {largest_error(rows_of, "cuda:sm80", "torch:flash"):.1f} times that of FA2, because a row's largest
            probability is rounded like any other (the lazy maximum of `csrc/common/softmax.cuh`). Where tensor cores
            cannot serve a 16-bit call, `simt` serves it. It takes {slower_unaligned("fallback", "cuda:sm80")} times as
            long as `sm80`, and {slower_unaligned("forward", "cuda:sm90")} times as long as `sm90`."""),
        speeds(shown, ("cuda:sm80", "torch:flash", "torch:cudnn", "manual"), (("cuda:sm80", "torch:flash"),))])


def fp32():
    rows_of = settings("fp32", *SHAPE)
    impls = "cuda:dmma", "cuda:simt", "triton", "torch:efficient", "manual"
    cells = []
    for setting, rows in rows_of.items():
        ours = "cuda:dmma" if "cuda:dmma" in rows else "cuda:simt"
        cells.append([",".join(map(str, setting)), *(f"{rows[x]['ms']:.3g}" if x in rows else "–" for x in impls),
                      f"{ratio(rows, ours, 'torch:efficient'):.2f}",
                      *(f"{rows[x]['max_err'] * 1e7:.1f}" for x in (ours, "manual"))])
    dmma = ratios(rows_of, "cuda:dmma", "torch:efficient")
    return "\n".join([
        paragraph(f"""The times are in milliseconds, and the errors in units of 10⁻⁷. "Ours" is `dmma`, or `simt` at
            head_dim 256, which `dmma` does not serve. On average over {len(dmma)} shapes, `dmma` is {mean(dmma)} times
            as fast as PyTorch's memory-efficient kernel ({span(dmma)})."""),
        table(["B,H,S,D", *names(impls), "ours / efficient", "error of ours", "error of manual"], cells)])


# The dense length whose speed a packed batch is compared with.
DENSE = {"16 of 64..4096": 2048, "32 x 512": 512, "8192 + 64 x 128": 8192}


def beside_dense(name, op, dense_op, ours):
    """({(lengths, causal): {impl: row}}, the same for the dense batches, {the same: speed of ours over its dense one}).
    A row of `dense` is at the length that DENSE names."""
    rows_of = settings(name, "lengths", "causal", op=op)
    dense_of = settings(name, "seqlen_q", "causal", op=dense_op)
    dense = {(lengths, causal): dense_of[DENSE[lengths], causal] for lengths, causal in rows_of}
    return rows_of, dense, {x: rows[ours]["tflops"] / dense[x][ours]["tflops"] for x, rows in rows_of.items()}


def packed_table(rows_of, dense, of_dense, impls, pairs, ours):
    """speeds(), and behind it the dense rate of ours and what the packed batch reaches of it."""
    cells = [[lengths, "yes" if causal else "no", *tflops(rows, impls),
              *(f"{ratio(rows, *pair):.2f}" for pair in pairs), *tflops(dense[lengths, causal], [ours]),
              f"{of_dense[lengths, causal]:.2f}"] for (lengths, causal), rows in rows_of.items()]
    (name,) = names([ours])
    return table(["lengths", "causal", *names(impls), *(" / ".join(names(pair)) for pair in pairs), f"{name}, dense",
                  f"{name} / dense"], cells)


def varlen():
    if not is_recorded("varlen"):
        return ""
    rows_of, dense, of_dense = beside_dense("varlen", "varlen", "forward", "cuda:sm90")
    faster = ratios(rows_of, "cuda:sm90", "torch:varlen")
    host = record("varlen")["meta"].get("host_us", {})
    us = f"""A small packed call takes the host {host["flash_attn_varlen_func"]:.1f} µs, and a dense one
        {host["flash_attn_func"]:.1f} µs.""" if host else ""
    return "\n".join([
        "## Packed batches, bf16\n",
        paragraph(f"""`flash_attn_varlen_func` with 16 query heads, 4 key heads and head_dim 128, in TFLOP/s. FLOPs are
            those of the samples. `32 x 512` are 32 samples of length 512, and `16 of 64..4096` are 16 lengths that were
            drawn once (`minimal_attn/bench/varlen.py`). varlen_attn is `torch.nn.attention.varlen.varlen_attn`, which
            is FlashAttention-2. The dense batches have lengths of {', '.join(map(str, DENSE.values()))}, in this order,
            and about as many tokens as the packed ones. On average,
            `sm90` is {mean(faster)} times as fast as varlen_attn ({span(faster)}), and packed batches reach
            {mean(of_dense)} of the speed of dense ones ({span(of_dense)}). {us}"""),
        packed_table(rows_of, dense, of_dense, ("cuda:sm90", "cuda:sm80", "triton", "torch:varlen"),
                     (("cuda:sm90", "torch:varlen"), ("triton", "torch:varlen")), "cuda:sm90"),
        "![TFLOP/s of packed batches by lengths](../benchmarks/h200/varlen.svg)\n"])


def varlen_backward():
    if not is_recorded("varlen_backward"):
        return ""
    rows_of, dense, of_dense = beside_dense("varlen_backward", "varlen_backward", "backward", "cuda:sm80")
    return "\n".join([
        paragraph(f"""The backward pass of the same batches. `sm80` reaches {mean(of_dense)} of the speed of its dense
            backward pass ({span(of_dense)})."""),
        packed_table(rows_of, dense, of_dense, ("cuda:sm80", "triton", "torch:varlen"),
                     (("cuda:sm80", "torch:varlen"), ("triton", "torch:varlen")), "cuda:sm80")])


def window():
    if not is_recorded("window"):
        return ""
    impls, size = ("cuda:sm90", "cuda:sm80", "triton", "flex"), ("seqlen_q", "causal")
    rows_of = settings("window", "window_size", *size, op="window")
    flex = [ratios(rows_of, impl, "flex") for impl in ("cuda:sm90", "triton")]
    dense, sinks = (settings("window", *size, op=op) for op in ("forward", "sinks"))
    of_dense = {setting: rows["cuda:sm90"]["tflops"] / dense[setting]["cuda:sm90"]["tflops"]
                for setting, rows in sinks.items()}
    cells = [[str(window_size), str(s), "yes" if causal else "no", *(f"{rows[x]['ms']:.3f}" for x in impls),
              *(f"{by[window_size, s, causal]:.2f}" for by in flex)]
             for (window_size, s, causal), rows in rows_of.items()]
    return "\n".join([
        "## Sliding windows and sinks, bf16\n",
        paragraph(f"""16 query heads, 4 key heads and head_dim 128, in milliseconds. A window (left, right) counts the
            keys before and after the one of the row. Flex has a block mask of the same window. On average, `sm90` is
            {mean(flex[0])} times and `triton` {mean(flex[1])} times as fast as Flex. With attention sinks and without a
            window, `sm90` reaches {span(of_dense)} of its speed without them."""),
        table(["window", "S", "causal", *names(impls), "sm90 / Flex", "triton / Flex"], cells),
        "![TFLOP/s of sliding windows and of attention sinks](../benchmarks/h200/window.svg)\n"])


def scores():
    if not is_recorded("scores"):
        return ""
    by_score = {score: rows for (score,), rows in settings("scores", "score", op="scores", causal=False).items()}
    impls = "cuda:sm90", "cuda:sm80", "triton", "flex", "torch:efficient", "torch:cudnn", "torch:flash"
    pairs = ("cuda:sm90", "flex"), ("triton", "flex"), ("cuda:sm90", "torch:efficient")
    cells = [[score, *tflops(rows, impls), *(of_dense(by_score, score, impl) for impl in ("cuda:sm90", "triton")),
              *(f"{ratio(rows, *pair):.2f}" if all(x in rows for x in pair) else "–" for pair in pairs)]
             for score, rows in by_score.items()]
    flex = [ratios(by_score, impl, "flex") for impl in ("cuda:sm90", "triton")]
    efficient = {score: x for score, x in ratios(by_score, "cuda:sm90", "torch:efficient").items() if score != "none"}
    row = next(iter(by_score.values()))["cuda:sm90"]
    return "\n".join([
        "## Softcap, ALiBi, biases and masks, bf16\n",
        paragraph(f"""B = {row["batch_size"]}, H = {row["nheads"]}, S = {row["seqlen_q"]}, head_dim {row["head_dim"]},
            without a causal mask, in TFLOP/s. FLOPs count all pairs of a row and a key, also those that the mask hides.
            The bias, one for each head, and the mask, one for all heads, are shared by the batch. The mask is random
            and shows 3 of 4 keys. FlexAttention gets a `score_mod` for each, and PyTorch's
            `scaled_dot_product_attention`, which has neither softcap nor ALiBi, an `attn_mask`. Columns such as
            `sm90 / none` are the speed of a row over that of the same kernel in the first row. On average, `sm90` is
            {mean(flex[0])} times and `triton` {mean(flex[1])} times as fast as Flex. With a bias or a mask, `sm90` is
            {span(efficient)} times as fast as PyTorch's memory-efficient kernel. In the picture, the numbers in
            brackets are the speed over that of the same kernel without a score."""),
        table(["score", *names(impls), "sm90 / none", "triton / none", *(" / ".join(names(pair)) for pair in pairs)],
              cells),
        "![TFLOP/s by what changes the scores](../benchmarks/h200/scores.svg)\n"])


def of_dense(by_score, score, impl):
    """The speed of impl with a score over that without one."""
    return f"{by_score['none'][impl]['ms'] / by_score[score][impl]['ms']:.2f}" if impl in by_score[score] else "–"


DECODED = "cuda", "triton", "torch:cudnn", "torch:flash"
PAGES = 0, 16, 64, 128  # their keys; 0 for dense caches


def decode():
    if not is_recorded("decode"):
        return ""
    rows_of = decode_settings("batch_size", "nheads", "nheads_k", "seqlen_k", "page_size", "seqlen_q", "lengths")
    one_token = {setting[:5]: rows for setting, rows in rows_of.items()
                 if setting[5:] == (1, "full") and setting[4] in PAGES}
    by_read = [ratios(one_token, impl, "read") for impl in DECODED]
    averages = ", ".join(f"{mean(x)} for {name} ({span(x)})" for x, name in zip(by_read, names(DECODED)) if x)
    columns = [(impl, page_size) for impl in DECODED for page_size in (PAGES if impl in DECODED[:2] else PAGES[:1])]
    cells = [[*map(str, size), *of_the_read(one_token[(*size, 0)]),
              *(share(one_token[(*size, page_size)], impl) for impl, page_size in columns)]
             for size in dict.fromkeys(setting[:4] for setting in one_token)]
    more = [[*map(str, (b, seqlen_k, seqlen_q, page_size or "–", lengths)), *of_the_read(rows),
             *(share(rows, impl) for impl in DECODED)]
            for (b, h, h_k, seqlen_k, page_size, seqlen_q, lengths), rows in rows_of.items()
            if (seqlen_q, lengths) != (1, "full") or page_size not in PAGES]
    return "\n".join([
        "## Attention to caches, bf16\n",
        paragraph(f"""`attention_with_kvcache` with one query token of each sample and head_dim 128. A call is bound by
            the reading of K and V. So the table compares it with a plain read, a Triton kernel
            (`minimal_attn/bench/read.py`) that reads as many bytes and computes nothing. The columns from `cuda` on are
            shares of its speed: dense caches, and pages of {', '.join(map(str, PAGES[1:]))} keys in random order. Times
            are those of the GPU in a CUDA graph of up to 32 calls, each on a cache of its own, and medians of
            {rounds("decode")} rounds. Some reads take 15 % longer than others of as many bytes, for no reason that we
            know. So each call is compared with the fastest read of as many bytes. The averages are {averages}."""),
        table(["B", "H", "Hk", "S", "MB", "read, GB/s",
               *(", ".join([*names([impl]), str(page_size)][:1 + bool(page_size)]) for impl, page_size in columns)],
              cells),
        paragraph("""The same for other sizes of pages, for several query tokens with a causal mask, and for lengths
            that are drawn from 1 to S. There, only the valid keys count as bytes. H is 32 and Hk is 8."""),
        table(["B", "S", "tokens", "page", "lengths", "MB", "read, GB/s", *names(DECODED)], more),
        "![GB/s of attention to caches over the bytes](../benchmarks/h200/decode.svg)\n"])


def serving():
    if not (is_recorded("append") and is_recorded("mixed")):
        return ""
    keys = "batch_size", "nheads", "nheads_k", "seqlen_k", "page_size"
    ours = "cuda", "triton"
    appended = settings("append", *keys)
    cells = [[*map(str, setting[:4]), str(setting[4] or "–"),
              *(x for impl in ours
                for x in (us(rows, f"{impl}:attend"), more_us(rows, impl), more_us(rows, f"{impl}:rotary")))]
             for setting, rows in appended.items()]
    ways = "", ":apart", ":dense"
    together = [[str(setting[4] or "–"), *(us(rows, impl + way) for impl in ours for way in ways)]
                for setting, rows in settings("mixed", *keys).items()]
    return "\n".join([
        "## Append, and mixed batches, bf16\n",
        paragraph("""The first table has the µs of a call that decodes one token of each sample, and how many more it takes
            to append the new key and value in the same call, without and with rotary embeddings. In the second, 32
            samples with 8192 keys decode beside a sample that reads a prompt of 2048 tokens: in one packed call, in two
            calls of `attention_with_kvcache`, and in two calls where `flash_attention` serves the prompt, which needs
            a cache without pages. H is 32, Hk is 8. Both are timed in CUDA graphs, as above. Differences of calls that
            take over 200 µs are uncertain by a few µs."""),
        table(["B", "H", "Hk", "S", "page", *(f"{impl}{what}" for impl in ours
                                              for what in ("", ", append", ", append and rotary"))], cells),
        table(["page", *(f"{impl}, {what}" for impl in ours
                         for what in ("one call", "two calls", "with `flash_attention`"))], together)])


def us(rows, impl):
    return f"{1e3 * rows[impl]['ms']:.1f}" if impl in rows else "–"


def more_us(rows, impl):
    attend = impl.partition(":")[0] + ":attend"
    return f"{1e3 * (rows[impl]['ms'] - rows[attend]['ms']):+.1f}".replace("-", "−")


def decode_settings(*keys, **only):
    """settings() of decode.json. The read of each setting is the fastest one of as many bytes in the run."""
    rows_of = settings("decode", *keys, **only)
    reads = sorted((row for row in record("decode")["rows"] if row["impl"] == "read"), key=lambda row: row["ms"])
    for rows in rows_of.values():
        rows["read"] = next(read for read in reads if round(megabytes(read)) == round(megabytes(rows["read"])))
    return rows_of


def megabytes(row):
    """Megabytes that a call reads."""
    return row["ms"] * row["gbps"]


def of_the_read(rows):
    """Its MB, and its GB/s."""
    return f"{megabytes(rows['read']):.0f}", f"{rows['read']['gbps']:.0f}"


def share(rows, impl):
    """The speed of impl over that of the plain read."""
    return f"{ratio(rows, impl, 'read'):.2f}" if impl in rows else "–"


def backward_settings():
    """The settings with 16384 tokens and a width of 2048: {(head_dim, causal, S): {impl: row}}."""
    rows_of = settings("backward", "batch_size", "nheads", *SIZE)
    return by_size({(d, causal, s): rows for (b, h, d, causal, s), rows in rows_of.items()
                    if b * s == 16384 and h * d == 2048})


def up_to_128(rows_of):
    return {setting: rows for setting, rows in rows_of.items() if setting[0] <= 128}


def from_256(rows_of):
    return {setting: rows for setting, rows in rows_of.items() if setting[0] >= 256}


BACKWARD_IMPLS = "cuda:sm90", "cuda:sm80", "triton", "torch:flash", "torch:cudnn"


def backward():
    rows_of = backward_settings()
    flash, cudnn = (ratios(rows_of, "cuda:sm90", peer) for peer in ("torch:flash", "torch:cudnn"))
    small, large = up_to_128(rows_of), from_256(rows_of)
    triton, large_triton = (ratios(x, "triton", "torch:flash") for x in (small, large))
    errors = max(largest_error(rows_of, ours, "torch:flash") for ours in ("cuda:sm90", "cuda:sm80", "triton"))
    return "\n".join([
        paragraph(f"""On average, `sm90` is {mean(cudnn)} times as fast as cuDNN ({span(cudnn)}) and {mean(flash)} times
            as fast as FA2 ({span(flash)}). `triton` is {mean(triton)} times as fast as FA2 up to head_dim 128
            ({span(triton)}), and {mean(large_triton)} times at 256 ({span(large_triton)}). The largest error of ours is
            up to {errors:.1f} times that of FA2. In fp16, `sm90` is {span(fp16_speeds())} times as fast as in bf16, by
            a run of its own."""),
        speeds(rows_of, BACKWARD_IMPLS, (("cuda:sm90", "torch:flash"), ("cuda:sm90", "torch:cudnn"),
                                         ("cuda:sm80", "torch:flash"), ("triton", "torch:flash")))])


def fp16_speeds():
    """{setting: the speed of sm90 in fp16 over that in bf16}, in a run of both."""
    fp16, bf16 = (settings("backward_fp16", *SIZE, dtype=dtype) for dtype in ("float16", "bfloat16"))
    return {setting: bf16[setting]["cuda:sm90"]["ms"] / rows["cuda:sm90"]["ms"] for setting, rows in fp16.items()}


def backward_variants():
    if not is_recorded("backward_variants"):
        return ""
    rows_of = settings("backward_variants", *SIZE, "deterministic", "dropout_p")
    usual, fixed, dropped = (by_size({key[:3]: rows for key, rows in rows_of.items() if key[3:] == kind})
                             for kind in ((False, 0.0), (True, 0.0), (False, 0.1)))
    of_fixed, of_dropped = ({x: usual[x]["cuda:sm90"]["ms"] / rows["cuda:sm90"]["ms"] for x, rows in variant.items()}
                            for variant in (fixed, dropped))
    at_64, at_128, at_256 = (span({x: y for x, y in of_dropped.items() if x[0] == head_dim})
                             for head_dim in (64, 128, 256))
    cells = [[str(x[0]), "yes" if x[1] else "no", str(x[2]),
              *(f"{y[x]['cuda:sm90']['tflops']:.0f}" for y in (usual, fixed, dropped)),
              f"{of_fixed[x]:.2f}", f"{of_dropped[x]:.2f}", f"{ratio(dropped[x], 'cuda:sm90', 'cuda:sm80'):.2f}"]
             for x in usual]
    return "\n".join([
        paragraph(f"""Up to head_dim 128, a deterministic pass has {mean(up_to_128(of_fixed))} of the speed of the usual
            one ({span(up_to_128(of_fixed))}), and {span(from_256(of_fixed))} at 256. A pass with dropout_p = 0.1 has
            {at_64} of it at head_dim 64, {at_128} at 128 and {at_256} at 256."""),
        table(["head_dim", "causal", "S", "usual", "deterministic", "dropout", "deterministic / usual",
               "dropout / usual", "dropout, sm90 / sm80"], cells)])


def backward_heads():
    rows_of = settings("backward_heads", "nheads", "nheads_k", "seqlen_q", "causal")
    impls = [impl for impl in BACKWARD_IMPLS if impl != "triton"]
    return speeds(rows_of, impls, (("cuda:sm90", "torch:flash"), ("cuda:sm90", "torch:cudnn")),
                  ("H", "Hk", "S", "causal"))


def forward_backward():
    rows_of = by_size(settings("forward_backward", *SIZE))
    cudnn, flash = (ratios(rows_of, "cuda:sm90", peer) for peer in ("torch:cudnn", "torch:flash"))
    return "\n".join([
        paragraph(f"""On average, `sm90` is {mean(cudnn)} times as fast as cuDNN ({span(cudnn)}) and {mean(flash)} times
            as fast as FA2 ({span(flash)})."""),
        speeds(rows_of, ("cuda:sm90", "torch:flash", "torch:cudnn"),
               (("cuda:sm90", "torch:flash"), ("cuda:sm90", "torch:cudnn")))])


def models():
    if not is_recorded("models"):
        return ""
    rows_of, meta = settings("models", "pass", "seqlen"), record("models")["meta"]
    impls = [impl for impl in ("sdpa", "minimal_attn", "activated") if all(impl in rows for rows in rows_of.values())]
    model = meta["model"]
    cells = [[PASSES[which], str(seqlen), *(f"{rows[impl]['ms']:.1f}" for impl in impls),
              *(f"{ratio(rows, impl, 'sdpa'):.2f}" for impl in impls[1:]),
              *(f"{rows[impl]['attention_ms']:.1f}" for impl in impls)] for (which, seqlen), rows in rows_of.items()]
    faster = {which: ratios({x: rows for x, rows in rows_of.items() if x[0] == which}, "minimal_attn", "sdpa")
              for which in PASSES}
    kernels = {x: rows["sdpa"]["attention_ms"] / rows["minimal_attn"]["attention_ms"] for x, rows in rows_of.items()}
    shares = {x: rows["sdpa"]["attention_ms"] / rows["sdpa"]["ms"] for x, rows in rows_of.items()}
    return "\n".join([
        "### A whole model\n",
        paragraph(f"""A Llama with random weights on one {meta["device"]} in bf16: {model["num_hidden_layers"]} layers,
            hidden size {model["hidden_size"]}, intermediate size {model["intermediate_size"]},
            {model["num_attention_heads"]} query heads, {model["num_key_value_heads"]} key heads and head_dim
            {model["head_dim"]}. There is one sequence, without a cache. A training step is the forward pass, the loss
            and the backward pass, without an optimizer. `activated` is `sdpa` after `minimal_attn.activate()`. Times
            are in milliseconds, medians of {meta["rounds"]} rounds in which the implementations take turns. The last
            columns are the attention kernels alone, by torch's profiler (`benchmarks/models.py` says which they
            are)."""),
        paragraph(f"""With `minimal_attn`, the forward pass is {span(faster["forward"])} times and the training step
            {span(faster["step"])} times as fast as with `sdpa` as it comes. Its attention kernels are {span(kernels)}
            times as fast. Those of `sdpa` take {span(shares)} of its time."""),
        table(["pass", "tokens", *(f"`{x}`" for x in impls), *(f"`{x}` / `sdpa`" for x in impls[1:]),
               *(f"attention, `{x}`" for x in impls)], cells),
        "![Milliseconds of a Llama by pass and length](../benchmarks/h200/models.svg)\n"])


def generate():
    """The text of serving.md about serving.json."""
    if not is_recorded("serving"):
        return ""
    meta, rows = record("serving")["meta"], record("serving")["rows"]
    rates, steps = {}, {}
    for row in rows:
        if row["op"] == "generate":
            rates.setdefault(row["requests"], {})[row["impl"]] = row["tokens_per_s"]
        else:
            steps.setdefault((row["samples"], row["seqlen_k"]), {})[row["impl"]] = row
    impls = list(next(iter(rates.values())))
    shares = {setting: speed_in_step(of_impl[impls[0]]) for setting, of_impl in steps.items()}
    return "\n".join([
        f"One run without options on one {meta['device']}:\n", "```text", *map(str.rstrip, meta["transcript"]), "```\n",
        paragraph(f"""Requests that all arrive at once, with prompts of {meta["prompt"]} tokens and {meta["new_tokens"]}
            new ones, on the same GPU and with the model of the example (`benchmarks/serving.py`). The numbers are
            tokens per second, the median of three runs. They count the time of the prompts: a step reads one of them,
            and its launches come from the host."""),
        table(["requests", *(f"`{x}`" for x in impls)],
              [[str(n), *(f"{x[impl]:,.0f}" for impl in impls)] for n, x in rates.items()]),
        "![Tokens per second over requests](../benchmarks/h200/serving.svg)\n",
        paragraph(f"""And what attention costs within a decode step, where each call appends a token, rotates and
            attends. "In the step" is the time of the step's CUDA graph minus that of the same step with attention that
            returns q. "Alone" is the time of a graph of the step's calls of attention, each after a read of as many bytes
            as a layer has weights, minus that of the reads. The ratio is the speed of these calls in the step over
            their speed alone. With `{impls[0]}` it is {mean(shares)} on average ({span(shares)})."""),
        table(["samples", "keys", *(f"{what}, `{x}`" for x in impls
                                    for what in ("step, µs", "in the step", "alone", "ratio"))],
              [[str(n), str(keys), *(cell for impl in impls for cell in step_cells(x[impl]))]
               for (n, keys), x in steps.items()])])


def step_cells(row):
    within = row["step_us"] - row["without_attention_us"]
    return f"{row['step_us']:.0f}", f"{within:.0f}", f"{row['attention_us']:.0f}", f"{speed_in_step(row):.2f}"


def triton():
    rows_of = by_size(settings("triton", *SIZE, dtype="bfloat16"))
    for setting, rows in settings("triton", *SIZE, dtype="float8_e4m3fn").items():
        rows_of[setting]["fp8"] = rows["triton"]
    best = {setting: min(ratio(rows, "triton", peer) for peer in ("flex", "torch:flash") if peer in rows)
            for setting, rows in rows_of.items()}
    cudnn = ratios(rows_of, "triton", "torch:cudnn")
    fp8, ceiling = ratios(rows_of, "fp8", "triton"), record("triton")["meta"]["matmul_tflops"]
    return "\n".join([
        paragraph(f"""On average over {len(rows_of)} settings in bf16, `triton` is {mean(best)} times as fast as the
            faster of Flex and FA2 ({span(best)}). It reaches {mean(cudnn)} of the speed of cuDNN
            ({span(cudnn)}). At head_dim 128 and S = 16384, fp8 (e4m3fn) is {fp8[128, False, 16384]:.2f} times as fast
            as bf16, and {fp8[128, True, 16384]:.2f} times with a causal mask. The time for fp8 includes the transpose
            of V, which every call makes. In the same run, torch's matmul of 8192³ reaches {ceiling["bfloat16"]:.0f}
            TFLOP/s in bf16, which is the dashed line of the picture, and {ceiling["float8_e4m3fn"]:.0f} in fp8."""),
        speeds(rows_of, ("triton", "fp8", "flex", "torch:flash", "torch:cudnn"),
               (("triton", "flex"), ("triton", "torch:flash"), ("triton", "torch:cudnn")))])


def matmul():
    rows_of = settings("matmul", "m", "n", "k", "dtype")
    faster = ratios(rows_of, "triton", "cublas")
    small, large = (rows_of[n, n, n, "bfloat16"]["cublas"]["tflops"] for n in (4096, 8192))
    cells = []
    for size in dict.fromkeys(setting[:3] for setting in rows_of):
        cells.append([*map(str, size)])
        for dtype in ("float16", "bfloat16"):
            cells[-1] += [*tflops(rows_of[(*size, dtype)], ("triton", "cublas")), f"{faster[(*size, dtype)]:.2f}"]
    headings = [f"{dtype} {column}" for dtype in ("fp16", "bf16") for column in ("triton", "cuBLAS", "ratio")]
    return "\n".join([
        paragraph(f"""On average over all sizes and both dtypes, `triton_matmul` is {mean(faster)} times as fast as
            cuBLAS ({span(faster)}). In bf16, cuBLAS reaches {small:.0f} TFLOP/s at 4096³, but {large:.0f} at 8192³.
            The power limit of the GPU is the likely reason: it lowers the clock in long products."""),
        table(["M", "N", "K", *headings], cells)])


def training(name="training"):
    run = record(name)
    cells = [[f"`{backend}`", f"{tokens / 1e6:.2f}"] for backend, tokens in run["tokens_per_s"].items()]
    meta = run["meta"]
    sequences = "one sequence" if meta["batch_size"] == 1 else f"{meta['batch_size']} sequences"
    return "\n".join([
        paragraph(f"""One run on an H200: {meta['steps']} steps with {sequences} of {meta['seqlen']} bytes."""),
        table(["backend", "million tokens per second"], cells)])


def training_16k():
    return training("training_16k")


def host():
    one, both = record("host_forward")["meta"]["host_us"], record("host")["meta"]["host_us"]
    calls = {"`flash_attention`": "flash_attention", "`flash_attn_func`": "flash_attn_func",
             "`flash_attn_varlen_func`": "flash_attn_varlen_func",
             "`flash_attention(backend=\"triton\")`": "triton", "SDPA, FA2": "torch:flash",
             "SDPA, cuDNN": "torch:cudnn", "SDPA, memory-efficient": "torch:efficient", "SDPA as it comes": "torch",
             "SDPA after `activate()`": "activated"}
    cells = [[call, f"{one[key]:.1f}" if key in one else "–", f"{both[key]:.0f}" if key in both else "–"]
             for call, key in calls.items() if key in one or key in both]
    other = record("sm80")["meta"]["host_us"]
    apart = max(max(one[key] / other[key], other[key] / one[key]) for key in calls.values() if key in other)
    return "\n".join([
        table(["call", "forward, µs", "forward and backward, µs"], cells),
        paragraph(f"""The columns are from two runs (host_forward.json and host.json). Host times vary between runs:
            another run of the first column (sm80.json) differs by a factor of up to {apart:.1f}.""")])


def build():
    _, evidence = gpu_record()
    (seconds,) = (x for name, x in evidence.items() if name.startswith("seconds of the JIT build"))
    return paragraph(f"""The compiled library has {float(evidence['MB of the built library']):.1f} MB. On 16 cores,
        `minimal_attn.load()` took {float(seconds):.0f} s to build it from nothing.""")


def memory():
    measured = {name: int(x) for name, x in gpu_record()[1].items() if name.startswith("bytes beyond inputs")}
    (shape,) = {re.search(r"\([\d,]+\)", name)[0].replace(",", ", ") for name in measured}
    return paragraph(f"""Beyond inputs and output, a forward pass at {shape} needed at most
        {max(measured.values()) >> 10} KiB of GPU memory, on every kernel: the size of `lse`. `sm90` may also need a
        counter of four bytes, and Triton in fp8 needs the transposed copy of V.""")


def tests():
    gpu, _ = gpu_record()
    return paragraph(f"""The recorded run on an {gpu['device']} (torch {gpu['torch']}, Triton {gpu['triton']}) passed
        {gpu['tests'] - gpu['skipped']:.0f} tests, skipped {gpu['skipped']:.0f} and took {gpu['time'] / 60:.1f}
        minutes.""")


BLOCKS = {block.__name__: block for block in (opening, results, forward, flash_attention_3, heads, ampere, fp32, varlen,
                                              varlen_backward, window, scores, decode, serving, backward,
                                              backward_variants, backward_heads, forward_backward, models, generate,
                                              triton, matmul, training, training_16k, host, memory, build, tests)}
BLOCKS |= ladder_tables.BLOCKS


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
        print(f"{file.relative_to(ROOT)} is {'stale: run make docs' if check else 'rewritten'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
