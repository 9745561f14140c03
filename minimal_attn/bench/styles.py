"""How each implementation looks in every picture of the project, by its name in bench, benchmarks/peers.json,
benchmarks/models.py and examples/train_tiny_gpt.py.

The colors are those of Okabe and Ito (jfly.uni-koeln.de/color), completed by the "muted" ones of Paul Tol
(personal.sron.nl/~pault): readers with any color vision can tell them apart. Ours have thick lines, filled markers and
solid bars, the others thin lines, hollow markers and light bars. Read next: pictures.py.
"""

from typing import NamedTuple


class Style(NamedTuple):
    label: str  # without a comma: pictures.py may add a dtype after one
    color: str
    marker: str
    is_ours: bool = False


VERMILLION, BLUE, ORANGE, PURPLE, GREEN, SKY, BLACK = (  # Okabe and Ito
    "#D55E00", "#0072B2", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#000000")
WINE, OLIVE, INDIGO, TEAL, MAGENTA, ROSE = "#882255", "#999933", "#332288", "#44AA99", "#AA4499", "#CC6677"  # Tol
GRAY, DARK_GRAY = "#999999", "#555555"

FA3 = Style("FlashAttention-3", MAGENTA, "P")

# In the order of legends and bars. Names with one color are never in one picture.
STYLES = {
    "cuda:sm90": Style("sm90 (ours)", VERMILLION, "o", True),
    "cuda:sm80": Style("sm80 (ours)", ORANGE, "^", True),
    "cuda:dmma": Style("dmma (ours)", PURPLE, "D", True),
    "cuda:simt": Style("simt (ours)", WINE, "v", True),
    "cuda:host": Style("host (ours)", VERMILLION, "h", True),
    "cuda": Style("cuda (ours)", VERMILLION, "p", True),
    "cuda:rotary": Style("cuda with rotary (ours)", ORANGE, "p", True),
    "cuda:attend": Style("cuda without append (ours)", PURPLE, "p", True),
    "cuda:apart": Style("cuda in two calls (ours)", ORANGE, "h", True),
    "cuda:dense": Style("cuda and flash_attention (ours)", PURPLE, "h", True),
    "triton": Style("triton (ours)", BLUE, "s", True),
    "triton:rotary": Style("triton with rotary (ours)", SKY, "s", True),
    "triton:attend": Style("triton without append (ours)", INDIGO, "s", True),
    "triton:apart": Style("triton in two calls (ours)", SKY, "o", True),
    "triton:dense": Style("triton and flash_attention (ours)", INDIGO, "o", True),
    "minimal_attn": Style("minimal_attn (ours)", VERMILLION, "*", True),
    "activated": Style("sdpa after activate() (ours)", ORANGE, "*", True),
    "all_gather": Style("all-gather (ours)", VERMILLION, "X", True),
    "plain_all_gather": Style("all-gather by NCCL (ours)", ORANGE, "X", True),
    "ring": Style("ring (ours)", PURPLE, "X", True),
    "ulysses": Style("Ulysses (ours)", BLUE, "X", True),
    "torch_ours": Style("context_parallel (torch) with our kernels", GREEN, "P"),
    "torch_cudnn": Style("context_parallel (torch) with cuDNN", BLACK, "P"),
    "torch:cudnn": Style("cuDNN (torch)", BLACK, "o"),
    "fa4": Style("FlashAttention-4", ROSE, "X"),
    "fa3": FA3,
    "flash_attn_interface": FA3,
    "flash_attn": Style("FlashAttention-2 (flash_attn)", TEAL, "<"),
    "torch:flash": Style("FlashAttention-2 (torch)", GREEN, "^"),
    "torch:varlen": Style("varlen_attn (torch)", INDIGO, "X"),
    "flex": Style("FlexAttention (torch)", SKY, "D"),
    "torch:efficient": Style("memory-efficient (torch)", OLIVE, "v"),
    "torch:math": Style("math (torch)", INDIGO, ">"),
    "manual": Style("plain PyTorch (manual)", GRAY, "s"),
    "read": Style("plain read", GRAY, ""),  # the ceiling of caches: a line
    "cublas": Style("cuBLAS (torch)", BLACK, "s"),
    "torch": Style("torch", BLACK, "d"),
    "sdpa": Style("sdpa as it comes", BLACK, "*"),  # of transformers
    "reference": Style("reference", GRAY, "d"),
}
MATMUL = Style("large matmul (torch)", DARK_GRAY, "")  # the ceiling: a dashed line
