"""The losses in time and memory, beside what else there is: python benchmarks/losses.py

Two views of B samples in D dimensions, float32, forward and backward. The first row is what no such loss can do
without, three products (cosines, and their gradient to anchors and to candidates) into memory that is there already; it
is the unit of the ratios. All rows are timed in turn, round after round, and a ratio is the median over rounds of two
times of one round. Memory is the peak above the inputs, of one pass in a process of its own (on a GPU: of its
allocator).

Peers: pip install pytorch-metric-learning lightly info-nce-pytorch POT
What is not installed is left out with a note, and so is what would want more than --gigabytes, by what it took at the
size before, or 20 s a pass. Results come to losses.json and losses.png.
"""
import argparse
import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import matplotlib
import torch
from torch.nn import functional as F
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from hardneg import contrastive_loss  # noqa: E402

TEMPERATURE, TAU_PLUS, BETA, EPSILON = 0.5, 0.1, 1.0, 0.3


def products(x, y):
    """The floor: S = Z Zᵀ, S Z, Sᵀ Z, into memory that is there already."""
    z = torch.cat([x.detach(), y.detach()])
    if products.room is None or products.room[0].shape[0] != len(z) or products.room[0].device != z.device:
        products.room = z.new_empty(len(z), len(z)), torch.empty_like(z), torch.empty_like(z)
    similarities, to_anchors, to_candidates = products.room
    torch.mm(z, z.T, out=similarities)
    torch.mm(similarities, z, out=to_anchors)
    torch.mm(similarities.T, z, out=to_candidates)


products.room = None


def ours(loss):
    return lambda x, y: contrastive_loss(x, y, loss=loss, temperature=TEMPERATURE, beta=BETA, epsilon=EPSILON)


def pairs(x, y):
    """Unit rows, their cosines, and which of these are of two samples."""
    z = F.normalize(torch.cat([x, y]))
    sample = torch.arange(len(x), device=x.device).repeat(2)
    return z, z @ z.T, sample[:, None] != sample


def cross_entropy(x, y):
    """SimCLR as it is mostly written: one matrix of logits, one call."""
    z = F.normalize(torch.cat([x, y]))
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(-math.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(x)))


def dense_hcl(x, y):
    """[1] Fig. 5, line by line: exponentials of everything, in matrices of (2B, 2B − 2)."""
    z, cosines, negative = pairs(x, y)
    n = len(z) - 2
    neg = torch.exp(cosines / TEMPERATURE).masked_select(negative).view(-1, n)
    pos = torch.exp((F.normalize(x) * F.normalize(y)).sum(-1) / TEMPERATURE).repeat(2)
    importance = torch.exp(BETA * neg.log())
    weighted = (importance * neg).sum(-1) / importance.mean(-1)
    corrected = ((weighted - TAU_PLUS * n * pos) / (1 - TAU_PLUS)).clamp(min=n * math.exp(-1 / TEMPERATURE))
    return -torch.log(pos / (pos + corrected)).mean()


def dense_ot(x, y):
    """[2] with the cost from differences of rows (by 64 rows, as all at once are A·N·D numbers) and POT's Sinkhorn."""
    import ot
    z, cosines, negative = pairs(x, y)
    with torch.no_grad():
        cost = torch.cat([(rows[:, None] - z).pow(2).sum(-1) for rows in z.split(64)]) / 2
        cost = cost.masked_fill(~negative, 1e6).double().cpu().numpy()
        share = [1 / len(z)] * len(z)
        plan = torch.as_tensor(ot.sinkhorn(share, share, cost, EPSILON, stopThr=1e-5), device=z.device)
        weights = (len(z) - 2) * (plan / plan.sum(1, keepdim=True)).to(z.dtype)
    neg = (weights * torch.exp(cosines / TEMPERATURE)).sum(-1)
    pos = torch.exp((F.normalize(x) * F.normalize(y)).sum(-1) / TEMPERATURE).repeat(2)
    return -torch.log(pos / (pos + neg)).mean()


def metric_learning(x, y):
    from pytorch_metric_learning.losses import NTXentLoss
    return NTXentLoss(TEMPERATURE)(torch.cat([x, y]), torch.arange(len(x), device=x.device).repeat(2))


def lightly(x, y):
    from lightly.loss import NTXentLoss
    return NTXentLoss(TEMPERATURE)(x, y)


def info_nce(x, y):
    from info_nce import InfoNCE
    return InfoNCE(TEMPERATURE)(x, y)


CASES = {"three products": products} | {loss: ours(loss) for loss in
                                        ("simclr", "debiased", "hcl", "ot", "hard", "simple", "triplet", "ppcl")}
PEERS = {  # name: (what it computes, function)
    "F.cross_entropy": ("simclr", cross_entropy),
    "dense formula of [1]": ("hcl", dense_hcl),
    "cost by rows, POT": ("ot", dense_ot),
    "pytorch-metric-learning": ("simclr", metric_learning),
    "lightly": ("simclr", lightly),
    "info-nce-pytorch": ("simclr", info_nce),  # another loss: one view against the other, a quarter
}
CASES |= {name: function for name, (_, function) in PEERS.items()}
PACKAGES = {"cost by rows, POT": "POT", "pytorch-metric-learning": "pytorch-metric-learning", "lightly": "lightly",
            "info-nce-pytorch": "info-nce-pytorch"}


def inputs(b, dim, device):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(b, dim, generator=generator).to(device).requires_grad_() for _ in range(2)]


def once(case, x, y):
    """Seconds of one pass, forward and backward."""
    x.grad = y.grad = None
    if x.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    begin = time.perf_counter()
    loss = CASES[case](x, y)
    if loss is not None:
        loss.backward()
    if x.device.type != "cuda":
        return time.perf_counter() - begin
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def peak(case, b, dim, device):
    """MiB above the inputs that one pass holds at most, in this process."""
    once(case, *inputs(8, dim, device))  # libraries are loaded, threads started
    x, y = inputs(b, dim, device)
    if x.device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once(case, x, y)
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def resident(name):
        line, = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
    before = resident("VmRSS")
    once(case, x, y)
    return resident("VmHWM") - before


def measure(options):
    """Rows {case, size, seconds, memory}: medians of times, and times by round for the ratios."""
    rows, last = [], {}
    for size in options.sizes:
        x, y = inputs(size // 2, options.dim, options.device)
        cases = {}
        for case in tqdm(CASES, desc=f"memory, 2B = {size}", leave=False):
            package = PACKAGES.get(case)
            if package and not installed(package):
                continue
            before = last.get(case)  # memory grows at most with the cube, and time
            if before and (before["memory"] / 1024 * (size / before["size"])**3 > options.gigabytes and case in PEERS
                           or before["seconds"] * (size / before["size"])**2 > 20):
                continue
            out = subprocess.run([sys.executable, __file__, "--one", case, "--sizes", str(size), "--dim",
                                  str(options.dim), "--device", options.device], capture_output=True, text=True)
            cases[case] = float(out.stdout.split()[-1]) if out.returncode == 0 else math.nan
            if out.returncode:
                tqdm.write(f"{case} at 2B = {size}: {out.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        cases = {case: memory for case, memory in cases.items() if memory == memory}
        times = {case: [] for case in cases}
        repeats = {case: max(1, min(20, round(0.1 / once(case, x, y)))) for case in cases}  # of what is short, many
        for _ in tqdm(range(options.rounds), desc=f"time, 2B = {size}", leave=False):
            for case in cases:
                times[case].append(statistics.median(once(case, x, y) for _ in range(repeats[case])))
        for case, memory in cases.items():
            last[case] = {"case": case, "size": size, "seconds": statistics.median(times[case]),
                          "rounds": [float(f"{t:.4g}") for t in times[case]], "memory": round(memory, 1)}
            rows.append(last[case])
        products.room = None
    return rows


def installed(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def ratio(rows, size, case, to):
    """Median over rounds of one case's time over another's; None where one was not timed."""
    times = {row["case"]: row["rounds"] for row in rows if row["size"] == size}
    if case not in times or to not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[case], times[to]))


def table(results):
    """Markdown: for each size milliseconds, times the three products, and MiB."""
    sizes = sorted({row["size"] for row in results["rows"]})
    lines = ["| | " + " | ".join(f"2B = {size}" for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for case in CASES:
        cells = []
        for size in sizes:
            row = next((r for r in results["rows"] if (r["case"], r["size"]) == (case, size)), None)
            times = ratio(results["rows"], size, case, "three products")
            cells.append("" if row is None else f"{1000 * row['seconds']:.4g} ms"
                         + (f", {times:.2f} ×" if times else "") + f", {row['memory']:.0f} MiB")
        if any(cells):
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
    lines += ["", "| peer, times as slow | loss differs by | " + " | ".join(f"2B = {size}" for size in sizes) + " |",
              "|---" * (len(sizes) + 2) + "|"]
    for case, (same, _) in PEERS.items():
        cells = [ratio(results["rows"], size, case, same) for size in sizes]
        if any(cells):
            lines.append(f"| {case} / {same} | {results['differences'][case]:.0e} | "
                         + " | ".join(f"{c:.3g}" if c else "" for c in cells) + " |")
    return "\n".join(lines)


def draw(results, path):
    """Time and memory over the batch, peers dashed."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    shown = [case for case in CASES if case not in ("debiased", "simple", "triplet", "ppcl")]
    for k, case in enumerate(shown):
        rows = [row for row in results["rows"] if row["case"] == case]
        style = dict(color="black" if k == 0 else plt.cm.tab10(k - 1), marker="o", ms=3,
                     ls=":" if k == 0 else "--" if case in PEERS else "-")
        for axis, name, factor in zip(axes, ("seconds", "memory"), (1000, 1)):
            if not (name == "memory" and case == "three products"):
                axis.plot([r["size"] for r in rows], [factor * r[name] for r in rows], label=case, **style)
    for axis, label in zip(axes, ("ms, forward and backward", "MiB above the inputs")):
        axis.set(xscale="log", yscale="log", xlabel="2B", ylabel=label, xticks=results["sizes"],
                 xticklabels=results["sizes"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384], metavar="2B")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=12, help="memory that a peer may take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=HERE / "losses.json")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(peak(options.one, options.sizes[0] // 2, options.dim, options.device))
        return
    for package in PACKAGES.values():
        if not installed(package):
            print(f"{package} is not installed and left out", file=sys.stderr)
    rows = measure(options)
    hardware = torch.cuda.get_device_name() if options.device == "cuda" else \
        f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    x, y = inputs(options.sizes[0] // 2, options.dim, options.device)
    differences = {case: float((CASES[case](x, y) - CASES[same](x, y)).detach().abs())
                   for case, (same, _) in PEERS.items() if any(row["case"] == case for row in rows)}
    results = {"date": str(date.today()), "device": hardware, "dim": options.dim, "sizes": options.sizes,
               "rows": rows, "differences": differences,
               "versions": {name: installed(name) for name in ("torch", *PACKAGES.values()) if installed(name)}}
    options.out.write_text(json.dumps(results) + "\n")
    draw(results, options.out.with_suffix(".png"))
    print(heading(results))
    print(table(results))


def heading(results):
    """What was measured, on what."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    rounds = len(results["rows"][0]["rounds"])
    return f"{results['date']}, {results['device']}, D = {results['dim']}, {rounds} rounds, {versions}"


if __name__ == "__main__":
    main()
