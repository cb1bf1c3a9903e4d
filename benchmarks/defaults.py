"""Search the defaults of train.py: python benchmarks/defaults.py

Each loss gets four settings, on the built-in shapes with seed 100; epochs, batch and learning rate are those
of the recipe. A run that has its results in --out is not repeated; `--only LOSS ...` runs some, and several
such programs may share --out. The results go to defaults.json.
"""
import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train  # noqa: E402

SEARCH = {  # loss: four settings
    "simclr": ["--temperature 0.05", "--temperature 0.07", "--temperature 0.1", "--temperature 0.2"],
    "debiased": ["--temperature 0.1 --tau-plus 0.001", "--temperature 0.1 --tau-plus 0.01",
                 "--temperature 0.2 --tau-plus 0.01", "--temperature 0.3 --tau-plus 0.1"],
    "hcl": ["--temperature 0.2 --beta 0.5 --tau-plus 0.01", "--temperature 0.2 --beta 1 --tau-plus 0.01",
            "--temperature 0.3 --beta 1 --tau-plus 0.01", "--temperature 0.3 --beta 1 --tau-plus 0.1"],
    "ot": ["--temperature 0.1 --epsilon 0.1", "--temperature 0.1 --epsilon 0.3",
           "--temperature 0.2 --epsilon 0.1", "--temperature 0.2 --epsilon 0.3"],
    "hard": ["--temperature 0.07 --alpha 0.3", "--temperature 0.1 --alpha 0.1",
             "--temperature 0.1 --alpha 0.3", "--temperature 0.2 --alpha 0.1"],
    "hard-simple": ["--alpha 0.01", "--alpha 0.03", "--alpha 0.1", "--alpha 0.3"],
    "triplet": ["--margin 0", "--margin 0.2", "--margin 0.5", "--margin 1"],
}


def table(results):
    """Write the Markdown table: linear readout of each setting, the best of a loss in bold."""
    lines = ["| loss | settings and linear readout, % | untrained |", "|---|---|---|"]
    for loss, settings in SEARCH.items():
        runs = {setting: results[f"{loss}-{k}"][0] for k, setting in enumerate(settings)
                if f"{loss}-{k}" in results}
        if runs:
            best = max(run["linear"] for run in runs.values())
            bold = {setting: "**" * (run["linear"] == best) for setting, run in runs.items()}
            cells = [f"`{setting}` {bold[setting]}{run['linear']:.1f}{bold[setting]}"
                     for setting, run in runs.items()]
            untrained = results[f"{loss}-0"][0]["untrained"]["linear"]
            lines.append(f"| `{loss}` | {', '.join(cells)} | {untrained:.1f} |")
    return "\n".join(lines)


def main():
    """Run the settings of the losses named, then record and print all that --out holds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(SEARCH), choices=SEARCH)
    parser.add_argument("--out", type=Path, default=Path("runs", "defaults"))
    args = parser.parse_args()
    for loss in args.only:
        rows = {f"{loss}-{k}": ["--loss", loss, *setting.split()] for k, setting in enumerate(SEARCH[loss])}
        train.compare(rows, [], [100], args.out / loss)
    found = {}
    for path in (args.out / loss / "compare.json" for loss in SEARCH):
        found.update(json.loads(path.read_text()) if path.exists() else {})
    (HERE / "defaults.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
