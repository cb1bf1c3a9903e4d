"""Compare losses on the built-in shapes over five seeds: python benchmarks/shapes.py

Every loss has the defaults of train.py, the best of four settings by defaults.py on another seed, and sees
the same images: `python train.py --compare simclr debiased hcl ot hard --seeds 5`, recorded in shapes.json.
"""
import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train  # noqa: E402

LOSSES = "simclr", "debiased", "hcl", "ot", "hard"
table = train.table_of


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs", "shapes"))
    out = parser.parse_args().out
    train.compare({loss: ["--loss", loss] for loss in LOSSES}, [], range(5), out)
    found = json.loads((out / "compare.json").read_text())
    for run in (run for runs in found.values() for run in runs):
        run["options"] = {k: v for k, v in run["options"].items() if k not in ("root", "out")}  # no paths
    (HERE / "shapes.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
