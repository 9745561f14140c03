"""Time two checkouts against one another, in turns, by the benchmark of each.

    git worktree add /tmp/old HEAD~1
    python benchmarks/compare_builds.py /tmp/old . --dtype bfloat16 --causal both --seqlens '' --impls cuda:sm90 \\
        --shape 8,16,2048,128 --shape 2,32,8192,64

Each round runs bench.py in both, so that a change of the clock meets both alike. Other options are those of bench.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean, median

from recorded import MEASURED


def rows_of(checkout, options):
    """{what was timed: ms} of a run of bench.py."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        # Each checkout compiles csrc in a folder of its own: the path of csrc is in its name.
        subprocess.run([sys.executable, "bench.py", *options, "--json", file], cwd=checkout, check=True,
                       stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(checkout)})
        rows = json.loads(file.read_text())["rows"]
    return {", ".join(f"{key} {x}" for key, x in row.items() if key == "impl" or key not in MEASURED): row["ms"]
            for row in rows if row["ms"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("checkouts", nargs=2, type=Path, help="the second is compared with the first")
    parser.add_argument("--rounds", type=int, default=5)
    args, options = parser.parse_known_args()
    rounds = [[rows_of(checkout.resolve(), options) for checkout in args.checkouts] for _ in range(args.rounds)]
    ratios = []
    print("what was timed: ms of the first, speed of the second by it")
    for name in rounds[0][0].keys() & rounds[0][1].keys():
        ratios.append(median(old[name] / new[name] for old, new in rounds))
        print(f"{name}: {median(old[name] for old, _ in rounds):.4g} {ratios[-1]:.3f}")
    print(f"{len(ratios)} settings, geometric mean {geometric_mean(ratios):.4f}, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()
