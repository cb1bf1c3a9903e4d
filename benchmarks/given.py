"""Measure losses with negatives of each anchor's own, (B, K, D): python benchmarks/given.py

The unit of the ratios is the dense formula: normalise, `torch.einsum`, `F.cross_entropy`. Every
round times all rows in turn, forward and backward to views and negatives. A ratio is the median
over rounds.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg

LOSSES = {
    "simclr": {},
    "hcl": {"beta": 1.0, "tau_plus": 0.1},
    "hard": {"alpha": 0.1},
    "triplet": {},
}


def dense(x, y, given, t):
    """Compute the loss with one matrix of logits, (B, 1 + K)."""
    x, y, given = (F.normalize(z, dim=-1) for z in (x, y, given))
    logits = torch.cat([(x * y).sum(-1, keepdim=True), torch.einsum("bd,bkd->bk", x, given)], 1) / t
    return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))


def main():
    """Time all rows in turn, and print a table of medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("--samples", 1024),
        ("--negatives", 8),
        ("--dim", 128),
        ("--rounds", 31),
    ):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    b, k, d = options.samples, options.negatives, options.dim
    x, y, given = (
        torch.randn(*shape, generator=generator).to(options.device).requires_grad_()
        for shape in ((b, d), (b, d), (b, k, d))
    )
    learned = torch.tensor(0.5, device=options.device, requires_grad=True)
    rows = {"dense": lambda t: dense(x, y, given, t)}
    for loss, own in LOSSES.items():
        criterion = hardneg.ContrastiveLoss(loss, **own)
        rows[loss] = lambda t, c=criterion: c(x, y, negatives=given, temperature=t)
    times = {(name, kind): [] for name in rows for kind in ("fixed", "learned")}
    for _ in range(options.rounds + 1):
        for name, kind in times:
            begin = time.perf_counter()
            value = rows[name](learned if kind == "learned" else 0.5)
            torch.autograd.grad(value, (x, y, given), allow_unused=True)
            if options.device == "cuda":
                torch.cuda.synchronize()
            times[name, kind].append(time.perf_counter() - begin)
    print(
        f"B = {b}, K = {k}, D = {d}, {options.device}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {options.rounds} rounds; "
        "ms, × the dense formula; t fixed | learned"
    )
    for name in rows:
        cells = []
        for kind in ("fixed", "learned"):
            own, unit = times[name, kind][1:], times["dense", kind][1:]
            ratio = statistics.median(a / b for a, b in zip(own, unit, strict=True))
            cells.append(f"{1000 * statistics.median(own):.2f} ms, {ratio:.2f} ×")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
