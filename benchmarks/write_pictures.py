"""Draw the pictures of README.md and docs/ from benchmarks/h200/*.json.

    python benchmarks/write_pictures.py            # draw those that are stale
    python benchmarks/write_pictures.py --check    # draw nothing; exit code 1 if one is stale

A picture is stale when the digest that it holds is not that of its numbers and of the code that draws it.
"""

import sys
from functools import partial

from recorded import NAMES, ROOT, of, record, rewrite

sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

from examples import train_tiny_gpt  # noqa: E402
from minimal_attn.bench import pictures  # noqa: E402
from minimal_attn.bench.tables import number  # noqa: E402
from write_tables import LADDER, PASSES, tflops  # noqa: E402

FOLDER = ROOT / "benchmarks/h200"
RUNS = ("forward.svg", "forward_bf16.svg", "heads.svg", "sm80.png", "backward.png", "fp32.png", "matmul.png",
        "triton.png", "forward_backward.svg", "varlen.svg", "window.svg", "scores.svg", "decode.svg")
IMPLS = {name: impl for impl, name in NAMES.items()}


def run(name):
    """A run of minimal-attn bench, of which forward_bf16 shows only one dtype. What runs in fp8 is beside bf16."""
    content = record(name.removesuffix("_bf16"))
    rows = [row | {"impl": f"{row['impl']}:fp8", "dtype": "bfloat16"} if row["dtype"] == "float8_e4m3fn" else row
            for row in content["rows"] if not name.endswith("_bf16") or row["dtype"] == "bfloat16"]
    return pictures.of_run(rows, content["meta"])


def training(name):
    content = record(name)
    return (train_tiny_gpt.loss_curves, content["losses"], content["tokens_per_s"],
            train_tiny_gpt.title_of(content["meta"]))


def ladder(name):
    peers, panels = [("FlashAttention-2 in torch", "", "sm80.FA2"), ("cuDNN", "", "forward.cuDNN")], {}
    for dtype, (setting, steps) in LADDER.items():
        bars = []
        for step, _, impl in steps + peers * (dtype == "bf16"):
            speed, is_ours = tflops(impl, setting), step.endswith(".cu")
            bars.append((step, IMPLS.get(impl.split(".")[1], "manual"), speed, speed * is_ours, f"{speed:.0f}"))
        file, full = {"fp32": ("fp32", "float32"), "bf16": ("forward", "bfloat16")}[dtype]
        heading = f"{dtype}: {', '.join(setting.replace('=', ' ').split(',')[:4])}"
        panels[heading] = sorted(bars, key=lambda bar: bar[2]), record(file)["meta"]["matmul_tflops"][full]
    return pictures.bars, panels, "Attention forward pass on NVIDIA H200", "TFLOP/s", 1


def models(name):
    """The times of whole models, and solid the part of attention."""
    panels, content = {}, record(name)
    for row in content["rows"]:
        bars, _ = panels.setdefault(f"{PASSES[row['pass']]}, {row['seqlen']} tokens", ([], None))
        text = number(row["ms"]) + (f" ({bars[0][2] / row['ms']:.2f}×)" if bars else "")
        bars.append((pictures.STYLES[row["impl"]].label, row["impl"], row["ms"], row["attention_ms"], text))
    title = "A Llama of {model[num_hidden_layers]} layers, bfloat16, on {device}".format(**content["meta"])
    return pictures.bars, panels, title, "ms (solid: attention kernels)", 2


def serving(name):
    curves, meta = {}, record(name)["meta"]
    for row in of("serving,op=generate"):
        curves.setdefault(row["impl"], []).append((row["requests"], row["tokens_per_s"]))
    heading = f"prompts of {meta['prompt']} tokens, {meta['new_tokens']} new ones"
    return (pictures.curves, {heading: curves}, f"Continuous batching on {meta['device']}",
            ("requests at once", "tokens per second"))


def context_parallel(name):
    """Each pass and number of key heads has a panel."""
    panels, meta = {}, record(name)["meta"]
    for row in record(name)["rows"]:
        if row["efficiency"] is not None:
            heading = f"{row['pass'].replace('_', ' and ')}, {row['nheads_k']} key heads"
            panels.setdefault(heading, {}).setdefault(row["impl"], []).append((row["seqlen_q"], row["efficiency"]))
    title = f"Causal attention on {meta['ranks']} {meta['device']}, {meta['nheads']} heads, D {meta['head_dim']}"
    return pictures.curves, panels, title, ("tokens", "efficiency")


# What draw() draws into each file.
FILES = {**dict.fromkeys(RUNS, run), "training.png": training, "training_16k.png": training, "ladder.svg": ladder,
         "models.svg": models, "serving.svg": serving, "../h200x2/context_parallel.svg": context_parallel}


def main(argv=None):
    shown = {(FOLDER / name).resolve(): what(name.rpartition(".")[0]) for name, what in FILES.items()}
    stale = [(file, partial(pictures.draw, file, make, *drawn)) for file, (make, *drawn) in shown.items()
             if pictures.digest_in(file) != pictures.digest_of(make, drawn)]
    return rewrite(stale, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    sys.exit(main())
