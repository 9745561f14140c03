"""Fill the recorded numbers into README.md and docs/, and draw their pictures.

    python benchmarks/write_docs.py            # rewrite what is stale
    python benchmarks/write_docs.py --check    # change nothing; exit code 1 if a file is stale

A comment `<!-- STAT FORMAT: QUANTITY -->` stands before a number: a key of recorded.STATS or `meta`, a format or none,
and a quantity as recorded.py describes it. TABLES has what stands between `<!-- begin NAME -->` and its `end`.
A picture is stale when the digest that it holds is not that of its numbers and of the code that draws it.
"""

import argparse
import math
import re
import sys
from functools import partial

from recorded import COLUMNS, NAMES, ROOT, by_setting, of, only, quoted, record, table, values

sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

from examples import train_tiny_gpt  # noqa: E402
from minimal_attn.bench import pictures  # noqa: E402
from minimal_attn.bench.tables import number  # noqa: E402

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->\n)", re.DOTALL)
NUMBER = re.compile(r"(<!-- (mean|most|count|span|value|meta)(?: ([,.\w]+))?: ((?:(?!-->).)*?) -->)"
                    r"\d(?:[\d,]*\d)?(?:\.\d+)?(?: to \d+(?:\.\d+)?)?")


def cell(x, form=""):
    """A dash stands for what is not there, and for the page size 0 of a cache without pages."""
    if isinstance(x, bool):
        return "yes" if x else "no"
    return re.sub("^-", "−", format(x, form)) if x else "–"


def column(text, key, form):
    """(heading, {impl: row} -> cell) of `sm90`, `sm90;ms;.3f`, `sm90 / FA2` (a ratio of speeds) or `sm90 - FA2` (a
    difference of the numbers), which may stand behind `heading=`."""
    heading, _, text = text.rpartition("=")
    impl, sign, peer = re.fullmatch("(.*?)(?: ([/-]) (.*))?", text).groups()
    if sign == "/":
        form, number = ".2f", lambda rows: rows[peer]["ms"] / rows[impl]["ms"]
    elif sign == "-":
        form, number = f"+{form}", lambda rows: rows[impl][key] - rows[peer][key]
    else:
        impl, key, form = text.split(";") if ";" in text else (text, key, form)
        number = lambda rows: rows[impl][key]  # noqa: E731
    return heading or text, lambda rows: cell(number(rows) if {impl, peer or impl} <= rows.keys() else None, form)


def speeds(rows, head, columns, key="tflops", form=".0f"):
    """A table with a line for each setting. rows: themselves, or what of() takes. head: the columns of a setting, as
    `S` or `heading=column`. columns: as column() has them."""
    heads = [x.rpartition("=") for x in head.split("|")]
    rows = of(rows) if isinstance(rows, str) else rows
    lines = by_setting(rows, *(COLUMNS.get(x, x) for *_, x in heads)).items()
    columns = [column(text, key, form) for text in columns.split("|")]
    return table([*(heading or x for heading, _, x in heads), *(heading for heading, _ in columns)],
                 [[*map(cell, setting), *(cell_of(impls) for _, cell_of in columns)]
                  for setting, impls in (sorted(lines) if head.startswith("head_dim") else lines)])


SIZE, CALL, OURS = "head_dim|causal|S", "B|H|S|D|causal", ("cuda", "triton")
BESIDE_TORCH = "sm90|cuDNN|FA2|sm90 / cuDNN|sm90 / FA2"
BESIDE_FA3 = "sm90|FA3|cuDNN|sm90 / FA3|sm90 / cuDNN"
BLOCK_MASKS = "sm90|from_torch|native|triton|Flex|sm90 / native|sm90 / Flex|triton / Flex"
READ = "MB=read;mb;d|read, GB/s=read;gbps;.0f"
PASSES = {"forward": "forward pass", "step": "training step"}  # of whole models


def each(texts, names):
    """Columns for each of some names, which stand where a text says {}."""
    return "|".join(text.format(name) for name in names for text in texts.split("|"))


def fp32():
    rows = [dict(row, shape=",".join(str(row[COLUMNS[x]]) for x in "BHSD"), error=1e7 * row["max_err"])
            for row in of("fp32")]
    return speeds(rows, "B,H,S,D=shape", "dmma|simt|triton|efficient|manual|ours / efficient"
                  "|error of ours=ours;error;.1f|error of manual=manual;error;.1f", "ms", ".3g")


def beside(rows, others, *columns):
    """rows with `other`, the TFLOP/s of the row of others with equal columns, and `share`, their own over these."""
    found = {(row["impl"], *(row[x] for x in columns)): row["tflops"] for row in others}
    pairs = [(row, found.get((row["impl"], *(row[x] for x in columns)), math.nan)) for row in rows]
    return [dict(row, other=other, share=row["tflops"] / other) for row, other in pairs]


def packed(name, dense_op, ours, others):
    """The last columns are the dense rate of ours and what a packed batch reaches of it."""
    rows = beside(of(f"{name},op={name}"), of(f"{name},op={dense_op}"), "seqlen_q", "causal")
    return speeds(rows, "lengths|causal", f"{ours}{others}|triton|varlen_attn|{ours} / varlen_attn|triton / varlen_attn"
                  f"|{ours}, dense={ours};other;.0f|{ours} / dense={ours};share;.2f")


def scores():
    rows = beside(of("scores,causal=no"), of("scores,score=none"))
    return speeds(rows, "score", "sm90|sm80|triton|Flex|efficient|cuDNN|FA2|sm90 / none=sm90;share;.2f"
                  "|triton / none=triton;share;.2f|sm90 / Flex|triton / Flex|sm90 / efficient")


def decode():
    """Calls of one token on full caches. Those with pages are columns of their own."""
    rows = [dict(row, impl=f"{row['impl']}, {row['page_size']}" if row["page_size"] else row["impl"])
            for row in of("decode,seqlen_q=1,lengths=full")]
    pages = each("{0}|{0}, 16|{0}, 64|{0}, 128", OURS)
    return speeds(rows, "B|H|Hk|S=seqlen_k", f"{READ}|" + each("{0}={0} / read", (*pages.split("|"), "cuDNN", "FA2")))


def decode_more():
    """All other calls."""
    rows = [row for row in of("decode")
            if row["page_size"] in (1, 8) or row["seqlen_q"] != 1 or row["lengths"] != "full"]
    return speeds(rows, "B|H|S=seqlen_k|tokens=seqlen_q|page|lengths",
                  f"{READ}|" + each("{0}={0} / read", ("cuda", "triton", "cuDNN", "FA2")))


def backward_variants():
    rows = [dict(row, impl=("deterministic" if row["deterministic"] else "dropout" if row["dropout_p"] else "usual")
                 + " sm80" * (row["impl"] == "sm80")) for row in of("backward_variants")]
    return speeds(rows, SIZE, "usual|deterministic|dropout|deterministic / usual|dropout / usual"
                  "|dropout, sm90 / sm80=dropout / dropout sm80")


def models():
    impls = "sdpa", "minimal_attn", "activated"
    columns = each("`{0}`={0}", impls), each("`{0}` / `sdpa`={0} / sdpa", impls[1:]), \
        each("attention, `{0}`={0};attention_ms;.1f", impls)
    return speeds([row | {"pass": PASSES[row["pass"]]} for row in of("models")], "pass|tokens=seqlen",
                  "|".join(columns), "ms", ".1f")


def decode_step():
    rows = [dict(row, ratio=row["attention_us"] / row["within_us"]) for row in of("serving,op=decode_step")]
    return speeds(rows, "samples|keys=seqlen_k", each(
        "step, µs, `{0}`={0};step_us;.0f|in the step, `{0}`={0};within_us;.0f|alone, `{0}`={0};attention_us;.0f"
        "|ratio, `{0}`={0};ratio;.2f", OURS))


def triton():
    rows = [dict(row, impl="fp8") for row in of("triton,dtype!=bfloat16,impl=triton")]
    return speeds(of("triton,dtype=bfloat16") + rows, SIZE,
                  "triton|fp8|Flex|FA2|cuDNN|triton / Flex|triton / FA2|triton / cuDNN")


def matmul():
    names = {"float16": "fp16", "bfloat16": "bf16"}
    rows = [dict(row, impl=f"{names[row['dtype']]} {row['impl']}") for row in of("matmul")]
    return speeds(rows, "M=m|N=n|K=k", each("{0} triton|{0} cuBLAS={0} cublas|{0} ratio={0} triton / {0} cublas",
                                            names.values()))


def training(name):
    rows = [[f"`{x}`", f"{tokens / 1e6:.2f}"] for x, tokens in record(name)["tokens_per_s"].items()]
    return table(["backend", "million tokens per second"], rows)


def host():
    one, both = (record(name)["meta"]["host_us"] for name in ("host_forward", "host"))
    calls = {f"`{x}`": x for x in ("flash_attention", "flash_attn_func", "flash_attn_varlen_func")} | {
        "`flash_attention(backend=\"triton\")`": "triton", "SDPA, FA2": "torch:flash", "SDPA, cuDNN": "torch:cudnn",
        "SDPA, memory-efficient": "torch:efficient", "SDPA as it comes": "torch",
        "SDPA after `activate()`": "activated"}
    return table(["call", "forward, µs", "forward and backward, µs"],
                 [[call, cell(one.get(key), ".1f"), cell(both.get(key), ".0f")] for call, key in calls.items()])


# The ladder: (name, what computes it, record and implementation) of each step, all of one setting.
PYTORCH = "three lines of PyTorch"
LADDER = {
    "fp32": ("B=4,H=16,S=4096,D=128",
             [(PYTORCH, "fp32 FMA units", "fp32.manual"), ("flash.cu", "fp32 FMA units", "fp32.simt"),
              ("flash_dmma.cu", "fp64 tensor cores", "fp32.dmma")]),
    "bf16": ("B=8,H=16,S=2048,D=128,causal=no",
             [("flash.cu", "fp32 FMA units", "fallback.simt"), (PYTORCH, "tensor cores, by cuBLAS", "sm80.manual"),
              ("flash_sm80.cu", "`mma.sync`", "sm80.sm80"), ("flash_sm90.cu", "`wgmma`", "forward.sm90")]),
}


def tflops(impl, setting):
    return only(values(f"{impl}:tflops,{setting}"))


def ladder(dtype):
    setting, steps = LADDER[dtype]
    speed = [tflops(impl, setting) for *_, impl in steps]
    return table(["What runs", "Arithmetic", "TFLOP/s", "× row above"], [
        [name if name == PYTORCH else f"`{name}`", arithmetic, f"{x:.0f}", f"{x / before:.2f}" if before else ""]
        for (name, arithmetic, _), x, before in zip(steps, speed, (None, *speed))])


def ladder_backward():
    rows = [dict(row, shape=f"B 8, H {row['nheads']}, S 2048, D {row['head_dim']}")
            for row in of("backward,B=8,S=2048,D<=128,causal=no")]
    return speeds(sorted(rows, key=lambda row: row["head_dim"]), "bf16, TFLOP/s=shape",
                  "`flash_bwd_sm80.cu`=sm80|Triton=triton|FlashAttention-2=FA2|cuDNN")


def transcript():
    return "\n".join(["```text", *map(str.rstrip, record("serving")["meta"]["transcript"]), "```\n"])


# {name: the arguments of speeds(), or a function that makes the table}
TABLES = {
    "results": ("forward,dtype=bfloat16,causal=yes,S!=8192", "head_dim|S", BESIDE_TORCH),
    "forward": ("forward,dtype=bfloat16", SIZE, BESIDE_TORCH),
    "forward_fa3": ("forward_fa3", SIZE, BESIDE_FA3), "backward_fa3": ("backward_fa3", SIZE, BESIDE_FA3),
    "heads": ("heads", "B|H|Hk|S|D|causal", "sm90|cuDNN|sm90 / cuDNN"),
    **{name: (name, CALL, "sm90|cuDNN|FA2|sm90 / best") for name in ("short", "short_backward")},
    "tiny": ("tiny", "B|H|S|D", "sm90|cuDNN|FA2|sm90 / best", "us", ".0f"),
    **{name: (name, CALL, "sm90|cuDNN|sm90 / cuDNN") for name in ("mla_prefill", "mla_prefill_backward")},
    **{name: (name, CALL, "cuda|FA2|cuda / FA2") for name in ("unaligned", "unaligned_backward")},
    "ampere": ("sm80,dtype=bfloat16,S!=8192", SIZE, "sm80|FA2|cuDNN|manual|sm80 / FA2"),
    "varlen": partial(packed, "varlen", "forward", "sm90", "|sm80"),
    "varlen_backward": partial(packed, "varlen_backward", "backward", "sm80", ""),
    **{name: (name, "D=head_dim|S|mask", BLOCK_MASKS) for name in ("block_masks", "block_masks_backward")},
    "window": ("window,op=window", "window=window_size|S|causal",
               "sm90|sm80|triton|Flex|sm90 / Flex|triton / Flex", "ms", ".3f"),
    "backward": ("backward,tokens=16384", SIZE,
                 "sm90|sm80|triton|FA2|cuDNN|sm90 / FA2|sm90 / cuDNN|sm80 / FA2|triton / FA2"),
    "backward_heads": ("backward_heads", "H|Hk|S|causal", "sm90|sm80|FA2|cuDNN|sm90 / FA2|sm90 / cuDNN"),
    "forward_backward": ("forward_backward", SIZE, "sm90|FA2|cuDNN|sm90 / FA2|sm90 / cuDNN"),
    "append": ("append", "B|H|Hk|S=seqlen_k|page", each(
        "{0}={0}:attend|{0}, append={0} - {0}:attend|{0}, append and rotary={0}:rotary - {0}:attend", OURS),
        "us", ".1f"),
    "mixed": ("mixed", "page", each(
        "{0}, one call={0}|{0}, two calls={0}:apart|{0}, with `flash_attention`={0}:dense", OURS), "us", ".1f"),
    "generate": ("serving,op=generate", "requests", each("`{0}`={0};tokens_per_s;,.0f", OURS)),
    **{x.__name__: x for x in (backward_variants, decode, decode_more, decode_step, fp32, host, ladder_backward, matmul,
                               models, scores, transcript, triton)},
    **{f"ladder_{dtype}": partial(ladder, dtype) for dtype in LADDER},
    **{name: partial(training, name) for name in ("training", "training_16k")},
}


FOLDER = ROOT / "benchmarks/h200"
IMPLS = {name: impl for impl, name in NAMES.items()}


def run(name):
    """A run of minimal-attn bench, of which forward_bf16 shows only one dtype. What runs in fp8 is beside bf16."""
    content = record(name.removesuffix("_bf16"))
    rows = [row | {"impl": f"{row['impl']}:fp8", "dtype": "bfloat16"} if row["dtype"] == "float8_e4m3fn" else row
            for row in content["rows"] if not name.endswith("_bf16") or row["dtype"] == "bfloat16"]
    return pictures.of_run(rows, content["meta"])


def loss_curves(name):
    meta, tokens_per_s, losses = record(name).values()
    return train_tiny_gpt.loss_curves, losses, tokens_per_s, train_tiny_gpt.title_of(meta)


def ladder_bars(name):
    peers, panels = [("FlashAttention-2 in torch", "", "sm80.FA2"), ("cuDNN", "", "forward.cuDNN")], []
    for dtype, (setting, steps) in LADDER.items():
        bars = []
        for step, _, impl in steps + peers * (dtype == "bf16"):
            speed, is_ours = tflops(impl, setting), int(step.endswith(".cu"))
            bars.append((step, [(IMPLS.get(impl.split(".")[1], "manual"), speed, is_ours, f"{speed:.0f}")]))
        file, full = {"fp32": ("fp32", "float32"), "bf16": ("forward", "bfloat16")}[dtype]
        heading = f"{dtype}: {', '.join(setting.replace('=', ' ').split(',')[:4])}"
        bars.sort(key=lambda bar: bar[1][0][1])
        ceiling = record(file)["meta"]["matmul_tflops"][full]
        panels.append(pictures.Bars(heading, *zip(*bars), "TFLOP/s", ceiling, False))
    return pictures.figure, [], panels, "Attention forward pass on NVIDIA H200", 1


def model_bars(name):
    """The times of whole models, and solid the part of attention."""
    panels, content = {}, record(name)
    for row in content["rows"]:
        bars = panels.setdefault(f"{PASSES[row['pass']]}, {row['seqlen']} tokens", [])
        text = number(row["ms"]) + (f" ({bars[0][1][0][1] / row['ms']:.2f}×)" if bars else "")
        bar = row["impl"], row["ms"], row["attention_ms"] / row["ms"], text
        bars.append((pictures.STYLES[row["impl"]].label, [bar]))
    bars = [pictures.Bars(heading, *zip(*bars), "ms (solid: attention kernels)", None, False)
            for heading, bars in panels.items()]
    title = "A Llama of {model[num_hidden_layers]} layers, bfloat16, on {device}".format(**content["meta"])
    return pictures.figure, [], bars, title, 2


def serving_curves(name):
    curves, meta = {}, record(name)["meta"]
    for row in of("serving,op=generate"):
        curves.setdefault(row["impl"], []).append((row["requests"], row["tokens_per_s"]))
    heading = f"prompts of {meta['prompt']} tokens, {meta['new_tokens']} new ones"
    lines = pictures.Lines(heading, curves, ("requests at once", "tokens per second"))
    return pictures.figure, [lines], [], f"Continuous batching on {meta['device']}"


def efficiency_curves(name):
    panels, meta = {}, record(name)["meta"]
    for row in record(name)["rows"]:
        if row["efficiency"] is not None:
            heading = f"{row['pass'].replace('_', ' and ')}, {row['nheads_k']} key heads"
            panels.setdefault(heading, {}).setdefault(row["impl"], []).append((row["seqlen_q"], row["efficiency"]))
    title = f"Causal attention on {meta['ranks']} {meta['device']}, {meta['nheads']} heads, D {meta['head_dim']}"
    lines = [pictures.Lines(heading, curves, ("tokens", "efficiency")) for heading, curves in panels.items()]
    return pictures.figure, lines, [], title


# Pictures that draw() makes, by file.
PICTURES = {**{file.name: run for file in sorted(FOLDER.glob("*.[ps][nv]g"))}, "training.png": loss_curves,
            "training_16k.png": loss_curves, "ladder.svg": ladder_bars, "models.svg": model_bars,
            "serving.svg": serving_curves, "../h200x2/context_parallel.svg": efficiency_curves,
            "../masks.svg": lambda name: pictures.of_gallery((ROOT / "docs/masks.md").read_text())}


def made(table):
    return speeds(*table) if isinstance(table, tuple) else table()


def rewritten(text):
    text = BLOCK.sub(lambda found: found[1] + made(TABLES[found[2]]) + found[3], text)
    return NUMBER.sub(lambda found: found[1] + quoted(found[2], found[3], found[4]), text)


def stale():
    """Yields each stale file, and a function that writes it."""
    for file in PAGES:
        if file.read_text() != (text := rewritten(file.read_text())):
            yield file, partial(file.write_text, text)
    for name, drawn in PICTURES.items():
        file, (make, *args) = (FOLDER / name).resolve(), drawn(name.rpartition(".")[0])
        if pictures.digest_in(file) != pictures.digest_of(make, args):
            yield file, partial(pictures.draw, file, make, *args)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is stale")
    check, found = parser.parse_args(argv).check, list(stale())
    for file, write in found:
        if not check:
            write()
        print(f"{file.relative_to(ROOT)} is {'stale: run make docs' if check else 'rewritten'}")
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
