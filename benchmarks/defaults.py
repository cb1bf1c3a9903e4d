"""Search the defaults of train.py: python benchmarks/defaults.py

Each command gets four settings, on the built-in shapes, seed 100, with the recipe's learning rate and epochs unless the
setting names others. A run that has its results in --out is not repeated. The results go to defaults.json.
`--only COMMAND ...` runs some of them; several such programs may share --out.
"""
import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train  # noqa: E402

SEARCH = {  # command: its options, and four settings
    "simclr": ("--loss simclr", ["--temperature 0.05", "--temperature 0.07", "--temperature 0.1", "--temperature 0.2"]),
    "debiased": ("--loss debiased", [
        "--temperature 0.1 --tau-plus 0.001", "--temperature 0.1 --tau-plus 0.01", "--temperature 0.2 --tau-plus 0.01",
        "--temperature 0.3 --tau-plus 0.1"]),
    "hcl": ("--loss hcl", [
        "--temperature 0.2 --beta 0.5 --tau-plus 0.01", "--temperature 0.2 --beta 1 --tau-plus 0.01",
        "--temperature 0.3 --beta 1 --tau-plus 0.01", "--temperature 0.3 --beta 1 --tau-plus 0.1"]),
    "ot": ("--loss ot", [
        "--temperature 0.1 --epsilon 0.1", "--temperature 0.1 --epsilon 0.3", "--temperature 0.2 --epsilon 0.1",
        "--temperature 0.2 --epsilon 0.3"]),
    "hard": ("--loss hard", [
        "--temperature 0.07 --alpha 0.3", "--temperature 0.1 --alpha 0.1", "--temperature 0.1 --alpha 0.3",
        "--temperature 0.2 --alpha 0.1"]),
    "hard-simple": ("--loss hard-simple", ["--alpha 0.01", "--alpha 0.03", "--alpha 0.1", "--alpha 0.3"]),
    "triplet": ("--loss triplet", ["--margin 0", "--margin 0.2", "--margin 0.5", "--margin 1"]),
}


def table(results):
    """Write the Markdown table: linear readout of each setting, the best of a command in bold."""
    lines = ["| command | settings and linear readout, % | untrained |", "|---|---|---|"]
    for command in SEARCH:
        some = {name: runs[0] for name, runs in results.items() if name.rsplit("-", 1)[0] == command}
        if not some:
            continue
        best = max(run["linear"] for run in some.values())
        cells = [f"`{SEARCH[command][1][int(name.rsplit('-', 1)[1])]}` " + "**" * (run["linear"] == best)
                 + f"{run['linear']:.1f}" + "**" * (run["linear"] == best) for name, run in some.items()]
        lines.append(f"| `{SEARCH[command][0]}` | {', '.join(cells)} | {run_of(some)['untrained']['linear']:.1f} |")
    return "\n".join(lines)


def run_of(some):
    return next(iter(some.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(SEARCH), choices=SEARCH)
    parser.add_argument("--out", type=Path, default=Path("runs", "defaults"))
    args = parser.parse_args()
    for command in args.only:
        own, settings = SEARCH[command]
        rows = {f"{command}-{k}": [*own.split(), *setting.split()] for k, setting in enumerate(settings)}
        train.compare(rows, [], [100], args.out / command)
    found = {}
    for path in (args.out / command / "compare.json" for command in SEARCH):
        found.update(json.loads(path.read_text()) if path.exists() else {})
    (HERE / "defaults.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
