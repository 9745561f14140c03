"""Print the ratios of speeds in benchmarks/h200/*.json beside their goals. journal/ says why some are not reached.

    python benchmarks/report.py
"""

from statistics import geometric_mean

from recorded import NAMES, SIZE, peers_elsewhere, ratios, record, settings, speed_in_step, table
from write_tables import FA3, beside_dense, fp16_speeds

SM90, SM80, FA2, CUDNN = "cuda:sm90", "cuda:sm80", "torch:flash", "torch:cudnn"
# Record, ours, a peer, the goals for the mean of their ratios and for the least, and what rows must have.
SPEEDS = [
    ("forward", SM90, CUDNN, 1.05, None), ("forward", SM90, FA2, 1.8, None), ("sm80", SM80, FA2, 1.05, None),
    ("backward", SM90, CUDNN, 1.1, None), ("backward", SM90, FA2, 1.8, None), ("backward", SM80, FA2, 1, None),
    ("backward", "triton", FA2, 1.1, None), ("backward_heads", SM80, FA2, None, 1),
    ("backward_heads", SM90, CUDNN, None, 1.05, {"seqlen_q": 8192}), ("forward_backward", SM90, CUDNN, 1.2, 1.1),
    ("triton", "triton", FA2, 1.4, None), ("triton", "triton", "flex", 1.1, None),
    ("fp32", "cuda:dmma", "torch:efficient", None, None), ("matmul", "triton", "cublas", None, None),
    ("decode", "cuda", "read", None, None), ("decode", "triton", "read", None, None),
    ("varlen", SM90, "torch:varlen", 1.7, 1.5, {"op": "varlen"}), ("models", "minimal_attn", "sdpa", None, 1.08),
    ("window", SM90, "flex", None, 1.3, {"op": "window"}), ("window", "triton", "flex", None, 1.1, {"op": "window"}),
    ("scores", SM90, "flex", None, 1.3), ("scores", "triton", "flex", None, 1.1)]
OF_DENSE = {"softcap": 0.85, "alibi": 0.85, "bias": 0.7, "mask": 0.8}  # the goals of scores, over a call without one
MEASURED = {"impl", "ms", "ms_p20", "ms_p80", "us", "tflops", "gbps", "read_gbps", "peak_mb", "max_err", "attention_ms"}


def speed(name, ours, peer, only):
    """{setting: the speed of ours over that of peer}"""
    row = next(row for row in record(name)["rows"] if all(row[x] == y for x, y in only.items()))
    return ratios(settings(name, *(x for x in row if x not in MEASURED), **only), ours, peer)


def of_best_peer(name, elsewhere):
    """{setting: the speed of sm90 over that of the fastest of cuDNN, FlashAttention-3 and 4}. The last one is estimated
    by its speed over that of FlashAttention-3 on another H200, in peers.json."""
    fa4 = {x: peers.get("fa4", 0) / peers["fa3"] for x, peers in peers_elsewhere(elsewhere).items()}
    return {x: min(rows[CUDNN]["ms"], rows[FA3]["ms"] / max(1, fa4.get(x, 0))) / rows[SM90]["ms"]
            for x, rows in settings(name, *SIZE).items()}


def of_own_heads(name, **only):
    """{setting: the speed of sm90 with keys that heads share over that with keys for each head}"""
    rows = settings(name, *SIZE, "batch_size", "nheads", "nheads_k", **only)
    return {x: y[SM90]["tflops"] / rows[(*x[:-1], x[-2])][SM90]["tflops"] for x, y in rows.items() if x[-1] < x[-2]}


def lines():
    """(what is compared, {setting: ratio}, the goal for their mean, the goal for the least)"""
    for name, ours, peer, *goals in SPEEDS:
        only = goals[2] if goals[2:] else {}
        yield f"{name}: {NAMES.get(ours, ours)} / {NAMES.get(peer, peer)}", speed(name, ours, peer, only), *goals[:2]
    run, longest = record("forward")["meta"], settings("forward", *SIZE, dtype="bfloat16")[128, False, 16384]
    yield "forward: sm90 / matmul", {"": longest[SM90]["tflops"] / run["matmul_tflops"]["bfloat16"]}, None, 0.85
    for name, peer in (("host_forward", FA2), ("host", CUDNN)):
        us = record(name)["meta"]["host_us"]
        yield f"{name}: time of {NAMES[peer]} / time of ours", {"": us[peer] / us["flash_attention"]}, None, 1
    yield "forward_fa3: sm90 / best peer", of_best_peer("forward_fa3", "rows"), 1, 0.92
    yield "backward_fa3: sm90 / best peer", of_best_peer("backward_fa3", "backward"), 1.03, 0.95
    yield "heads: shared keys / own keys", of_own_heads("heads"), None, 0.97
    yield "backward_heads: shared keys / own keys", of_own_heads("backward_heads", seqlen_q=8192), None, 0.98
    yield "backward_fp16: fp16 / bf16", fp16_speeds(), None, 0.95
    for name, dense, ours, goal in (("varlen", "forward", SM90, 0.96), ("varlen_backward", "backward", SM80, 0.95)):
        yield f"{name}: packed / dense", beside_dense(name, name, dense, ours)[2], None, goal
    ms = {score: rows[SM90]["ms"] for (score,), rows in settings("scores", "score", causal=False).items()}
    for score, goal in OF_DENSE.items():
        yield f"scores: {score} / none", {"": ms["none"] / ms[score]}, None, goal
    steps = {(row["samples"], row["seqlen_k"]): speed_in_step(row) for row in record("serving")["rows"]
             if (row["op"], row["impl"]) == ("decode_step", "cuda")}
    yield "serving: attention in a decode step / alone", steps, None, 0.9


if __name__ == "__main__":
    cells = []
    for what, found, *goals in lines():
        numbers = geometric_mean(found.values()), goals[0], min(found.values()), goals[1]
        is_missed = numbers[0] < (goals[0] or 0) or numbers[2] < (goals[1] or 0)
        cells.append([what, str(len(found)), *(f"{x:.2f}" if x else "–" for x in numbers), "missed" * is_missed])
    print(table(["record and what is compared", "settings", "mean", "goal", "least", "goal", ""], cells), end="")
