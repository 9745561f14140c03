"""Print the ratios of speeds in benchmarks/h200/*.json beside their goals. journal/ says why some are not reached."""

from statistics import geometric_mean

from recorded import table, values

# A quantity as recorded.py describes it, and the goals for the mean and for the least of its values.
GOALS = [
    ("forward.sm90,dtype=any / cuDNN", 1.05, None), ("forward.sm90,dtype=any / FA2", 1.8, None),
    ("sm80.sm80,dtype=any / FA2", 1.05, None), ("backward.sm90 / cuDNN", 1.1, None),
    ("backward.sm90 / FA2", 1.8, None), ("backward.sm80 / FA2", 1, None), ("backward.triton / FA2", 1.1, None),
    ("backward_heads.sm80 / FA2", None, 1), ("backward_heads.sm90,S=8192 / cuDNN", None, 1.05),
    ("forward_backward.sm90 / cuDNN", 1.2, 1.1),
    ("triton.triton,dtype=any / FA2", 1.4, None), ("triton.triton,dtype=any / Flex", 1.1, None),
    ("fp32.dmma / efficient", None, None), ("matmul.triton,dtype=any / cublas", None, None),
    ("decode.cuda / read", None, None), ("decode.triton / read", None, None),
    ("varlen.sm90,op=varlen / varlen_attn", 1.7, 1.5), ("models.minimal_attn / sdpa", None, 1.08),
    ("window.sm90,op=window / Flex", None, 1.3), ("window.triton,op=window / Flex", None, 1.1),
    ("scores.sm90 / Flex", None, 1.3), ("scores.triton / Flex", None, 1.1),
    ("forward.sm90:of_matmul,D=128,S=16384,causal=no", None, 0.85),
    ("forward_fa3.sm90 / best", 1, 0.92), ("backward_fa3.sm90 / best", 1.03, 0.95),
    *((f"heads.sm90,Hk={few} / sm90,Hk={own}", None, 0.97) for few, own in ((8, 32), (1, 32))),
    *((f"backward_heads.sm90,S=8192,Hk={few} / sm90,Hk=64", None, 0.98) for few in (8, 1)),
    ("backward_fp16.sm90,dtype=float16 / sm90,dtype=bfloat16", None, 0.95),
    ("varlen.sm90:tflops,op=varlen / sm90:tflops,op=forward", None, 0.96),
    ("varlen_backward.sm80:tflops,op=varlen_backward / sm80:tflops,op=backward", None, 0.95),
    *((f"scores.sm90,score={score} / sm90,score=none", None, goal)
      for score, goal in (("softcap", 0.85), ("alibi", 0.85), ("bias", 0.7), ("mask", 0.8))),
    ("serving.cuda:attention_us,op=decode_step / cuda:within_us", None, 0.9),
    ("host_forward.flash_attention / FA2", None, 1), ("host.flash_attention / cuDNN", None, 1)]

if __name__ == "__main__":
    cells = []
    for what, mean_goal, least_goal in GOALS:
        found = values(what)
        mean, least = geometric_mean(found), min(found)
        is_missed = mean < (mean_goal or 0) or least < (least_goal or 0)
        numbers = [f"{x:.2f}" if x else "–" for x in (mean, mean_goal, least, least_goal)]
        cells.append([what, str(len(found)), *numbers, "missed" * is_missed])
    print(table(["record and what is compared", "settings", "mean", "goal", "least", "goal", ""], cells), end="")
