"""Draw the pictures of README.md and docs/, and the pages of results, from benchmarks/h200/*.json.

    python benchmarks/write_pictures.py            # draw those that are stale
    python benchmarks/write_pictures.py --all      # draw all of them
    python benchmarks/write_pictures.py --check    # draw nothing; exit code 1 if one is stale

A picture is stale when the digest that it holds is not that of its numbers and of the code that draws it. A run of
minimal-attn bench with --plot or --report draws the same pictures.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

import ladder_tables  # noqa: E402
from examples import train_tiny_gpt  # noqa: E402
from minimal_attn.bench import backward, page, pictures  # noqa: E402
from minimal_attn.bench.measure import Setting  # noqa: E402
from minimal_attn.bench.options import OPS  # noqa: E402
from minimal_attn.bench.tables import place  # noqa: E402
from recorded import PASSES, hashable  # noqa: E402

FOLDER = ROOT / "benchmarks/h200"
# Each file, the JSON it shows, and the dtype if it shows only one.
FILES = {
    "forward.svg": ("forward", None),
    "forward_bf16.svg": ("forward", "bfloat16"),
    "forward.html": ("forward", None),
    "heads.svg": ("heads", None),
    "sm80.png": ("sm80", None),
    "backward.png": ("backward", None),
    "fp32.png": ("fp32", None),
    "matmul.png": ("matmul", None),
    "triton.png": ("triton", None),
    "triton.html": ("triton", None),
    "training.png": ("training", None),
    "training_16k.png": ("training_16k", None),
    "ladder.svg": ("ladder", None),
}
FILES |= {f"{name}.svg": (name, None) for name in ("forward_backward", "varlen", "window", "scores", "decode", "models",
                                               "serving")
          if (FOLDER / f"{name}.json").exists()}
FILES |= {"../h200x2/context_parallel.svg": ("../h200x2/context_parallel", None)}
SHAPES = {case.op: shape for op in OPS.values() for shape, case in op.CASES.items()}  # by the op of a row


def results_of(content, only_dtype=None):
    """(results {setting: {impl: row}}, title, ceilings {dtype: TFLOP/s}) of the JSON of a run of bench."""
    meta, results = content["meta"], {}
    op = OPS[{"forward": "attention"}.get(content["rows"][0]["op"], content["rows"][0]["op"])]
    for row in content["rows"]:
        if only_dtype in (None, row["dtype"]):
            is_variant = any(row.get(x) for x in backward.USUAL)
            shape_class = backward.VariantShape if is_variant else SHAPES[row["op"]]
            shape = shape_class(*(hashable(row[x]) for x in shape_class._fields))
            setting = Setting(shape, row["dtype"], row.get("causal", False))
            results.setdefault(setting, {})[row["impl"]] = row
    title = pictures.title_of(op.TITLE, results, place(meta, {setting.dtype for setting in results}))
    return results, title, meta.get("matmul_tflops", {})


def panels_of_models(content):
    """Turns a record of models.py into arguments of plot_models(): {title: {impl: (ms, attention_ms)}}, and the title
    of the picture."""
    panels = {}
    for row in content["rows"]:
        heading = f"{PASSES[row['pass']]}, {row['seqlen']} tokens"
        panels.setdefault(heading, {})[row["impl"]] = row["ms"], row["attention_ms"]
    layers = content["meta"]["model"]["num_hidden_layers"]
    return panels, f"A Llama of {layers} layers, {content['rows'][0]['dtype']}, on {content['meta']['device']}"


def panels_of_serving(content):
    """Turns a record of serving.py into arguments of plot_curves(): the curves, the title and the labels."""
    curves, meta = {}, content["meta"]
    for row in content["rows"]:
        if row["op"] == "generate":
            curves.setdefault(row["impl"], {})[row["requests"]] = row["tokens_per_s"]
    heading = f"prompts of {meta['prompt']} tokens, {meta['new_tokens']} new ones"
    return {heading: curves}, f"Continuous batching on {meta['device']}", ("requests at once", "tokens per second")


def panels_of_context_parallel(content):
    """Turns a record of bench/context_parallel.py into arguments of plot_curves(). Each pass and number of key heads
    has a panel."""
    panels, meta = {}, content["meta"]
    for row in content["rows"]:
        if row["efficiency"] is not None:
            heading = f"{row['pass'].replace('_', ' and ')}, {row['nheads_k']} key heads"
            panels.setdefault(heading, {}).setdefault(row["impl"], {})[row["seqlen_q"]] = row["efficiency"]
    title = f"Causal attention on {meta['ranks']} {meta['device']}, {meta['nheads']} heads, D {meta['head_dim']}"
    return panels, title, ("tokens", "efficiency")


CURVES = {"serving": panels_of_serving, "../h200x2/context_parallel": panels_of_context_parallel}


def drawing(name_of_file):
    """(the digest that a file should hold, a function that draws it)"""
    file, (name, only_dtype) = FOLDER / name_of_file, FILES[name_of_file]
    if name == "ladder":
        what = ladder_tables.steps(), "Attention forward pass on NVIDIA H200"
        return pictures.digest_of_steps(*what), partial(pictures.plot_steps, file, *what)
    content = json.loads((FOLDER / f"{name}.json").read_text())
    if name in ("training", "training_16k"):
        what = content["losses"], content["tokens_per_s"], train_tiny_gpt.title_of(content["meta"])
        return pictures.digest_of_losses(*what), partial(pictures.plot_losses, file, *what)
    if name == "models":
        what = panels_of_models(content)
        return pictures.digest_of_models(*what), partial(pictures.plot_models, file, *what)
    if name in CURVES:
        what = CURVES[name](content)
        return pictures.digest_of_curves(*what), partial(pictures.plot_curves, file, *what)
    results, title, ceilings = results_of(content, only_dtype)
    if file.suffix == ".html":
        what = results, title, content["meta"], ceilings
        return page.digest_of_page(*what), lambda: file.write_text(page.html(*what))
    return pictures.digest_of_plot(results, title, ceilings), partial(pictures.plot, file, results, title, ceilings)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--check", action="store_true", help="draw nothing; exit code 1 if a picture is stale")
    which.add_argument("--all", action="store_true", help="draw all, not only what is stale")
    args = parser.parse_args(argv)
    stale = False
    for name in FILES:
        file, (digest, draw) = (FOLDER / name).resolve(), drawing(name)
        if args.all or pictures.digest_in(file) != digest:
            stale = True
            if not args.check:
                draw()
            print(f"{file.relative_to(ROOT)} is {'stale: run make docs' if args.check else 'drawn'}")
    return int(args.check and stale)


if __name__ == "__main__":
    sys.exit(main())
