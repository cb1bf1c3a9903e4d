"""Measure the losses' time and memory, beside other libraries: python benchmarks/losses.py

Two views of B samples in D dimensions, float32, forward and backward. The first row is the least
that such a loss needs: three products (cosines, their gradient to anchors and to candidates) into
preallocated memory. It is the unit of the ratios. Every round times all rows in turn; a ratio is
the median over rounds of two times of one round. Memory is the peak above the inputs of one pass,
in a process of its own (on a GPU: of the allocator).

    pip install pytorch-metric-learning lightly info-nce-pytorch POT  # the peers
    python benchmarks/losses.py --old FILE                            # an older hardneg.py as well

The program leaves out missing peers. A row ends where a pass would take more than 20 s or, for a
peer, more than --gigabytes, as estimated from the size before. The results go to losses.json and
losses.png.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from functools import lru_cache
from pathlib import Path

import matplotlib
import torch
from torch.nn import functional as F
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg

HERE = Path(__file__).resolve().parent
TEMPERATURE, TAU_PLUS, BETA, EPSILON, ALPHA = 0.5, 0.1, 1.0, 0.3, 0.1


# ---- Rows ----------------------------------------------------------------------------------------
@lru_cache(1)
def buffers(n, dim, device):
    return torch.empty(n, n, device=device), *(torch.empty(n, dim, device=device) for _ in range(2))


def products(x, y):
    """Compute S = Z Zᵀ, S Z and Sᵀ Z, in memory allocated before."""
    z = torch.cat([x.detach(), y.detach()])
    cosines, to_anchors, to_candidates = buffers(*z.shape, z.device)
    torch.mm(z, z.T, out=cosines)
    torch.mm(cosines, z, out=to_anchors)
    torch.mm(cosines.T, z, out=to_candidates)


def row_of(module, loss):
    options = {"loss": loss, "temperature": TEMPERATURE, "beta": BETA, "epsilon": EPSILON}
    options["alpha"] = ALPHA
    if loss in ("hcl", "debiased"):
        options["tau_plus"] = TAU_PLUS
    return lambda x, y: module.contrastive_loss(x, y, **options)


def add_old(path):
    """Add the losses of another hardneg.py as rows."""
    spec = importlib.util.spec_from_file_location("old_hardneg", path)
    module = sys.modules["old_hardneg"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    old = {
        f"old {loss}": (loss, row_of(module, loss))
        for loss in hardneg.PRESETS
        if loss in module.PRESETS
    }
    PEERS.update(old)
    ROWS.update({name: function for name, (_, function) in old.items()})


def cross_entropy(x, y):
    """SimCLR in its usual form: one matrix of logits, one call."""
    z = F.normalize(torch.cat([x, y]))
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(-math.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(x)))


def dense_pairs(x, y):
    """Return unit rows, their cosines, the mask of different samples, and e^{s⁺} of each anchor."""
    z = F.normalize(torch.cat([x, y]))
    sample = torch.arange(len(x), device=x.device).repeat(2)
    return (
        z,
        z @ z.T,
        sample[:, None] != sample,
        torch.exp((z * z.roll(len(x), 0)).sum(-1) / TEMPERATURE),
    )


def dense_hcl(x, y):
    """[1] Fig. 5, line by line: exponentials of everything, in matrices of (2B, 2B − 2)."""
    z, cosines, different, pos = dense_pairs(x, y)
    n = len(z) - 2
    neg = torch.exp(cosines / TEMPERATURE).masked_select(different).view(-1, n)
    importance = torch.exp(BETA * neg.log())
    weighted = (importance * neg).sum(-1) / importance.mean(-1)
    corrected = ((weighted - TAU_PLUS * n * pos) / (1 - TAU_PLUS)).clamp(
        min=n * math.exp(-1 / TEMPERATURE)
    )
    return -torch.log(pos / (pos + corrected)).mean()


def dense_ot(x, y):
    """[2] with a cost by differences of rows, and POT's Sinkhorn.

    The rows come 64 at a time, as all differences are A·N·D numbers."""
    import ot

    z, cosines, different, pos = dense_pairs(x, y)
    with torch.no_grad():
        cost = torch.cat([(rows[:, None] - z).pow(2).sum(-1) for rows in z.split(64)]) / 2
        cost = cost.masked_fill(~different, 1e6).double().cpu().numpy()
        share = [1 / len(z)] * len(z)
        plan = torch.as_tensor(
            ot.sinkhorn(share, share, cost, EPSILON, stopThr=1e-5), device=z.device
        )
        weights = (len(z) - 2) * (plan / plan.sum(1, keepdim=True)).to(z.dtype)
    neg = (weights * torch.exp(cosines / TEMPERATURE)).sum(-1)
    return -torch.log(pos / (pos + neg)).mean()


def metric_learning(x, y):
    from pytorch_metric_learning.losses import NTXentLoss

    return NTXentLoss(TEMPERATURE)(
        torch.cat([x, y]), torch.arange(len(x), device=x.device).repeat(2)
    )


def lightly(x, y):
    from lightly.loss import NTXentLoss

    return NTXentLoss(TEMPERATURE)(x, y)


def info_nce(x, y):
    from info_nce import InfoNCE

    return InfoNCE(TEMPERATURE)(x, y)


PEERS = {  # name: the loss that it computes, function
    "F.cross_entropy": ("simclr", cross_entropy),
    "dense formula of [1]": ("hcl", dense_hcl),
    "cost by rows, POT": ("ot", dense_ot),
    "pytorch-metric-learning": ("simclr", metric_learning),
    "lightly": ("simclr", lightly),
    "info-nce-pytorch": (
        "simclr",
        info_nce,
    ),  # one view against the other alone, a quarter of the pairs
}
PACKAGES = {"cost by rows, POT": "POT", **{name: name for name in list(PEERS)[3:]}}
ROWS = {
    "three products": products,
    **{loss: row_of(hardneg, loss) for loss in hardneg.PRESETS if loss != "supcon"},  # it is ppcl
    **{name: function for name, (_, function) in PEERS.items()},
}


# ---- Measurements --------------------------------------------------------------------------------
def inputs(size, options):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(size // 2, options.dim, generator=generator).to(options.device).requires_grad_()
        for _ in range(2)
    ]


def once(name, x, y):
    """Time one pass, forward and backward, in seconds."""
    x.grad = y.grad = None
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    loss = ROWS[name](x, y)
    if loss is not None:
        loss.backward()
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def peak(name, size, options):
    """Measure the memory that one pass takes above its inputs, in MiB; for a process of its own."""
    once(name, *inputs(16, options))  # warm up: load libraries, start threads
    x, y = inputs(size, options)
    if x.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once(name, x, y)
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def resident(key):
        (line,) = (
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(key)
        )
        return int(line.split()[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident("VmRSS")
    once(name, x, y)
    return resident("VmHWM") - before


def peak_apart(name, size, options):
    """Run `peak` in a process of its own; None, and a message, if that fails."""
    old = ["--old", str(options.old)] if options.old else []
    command = [
        sys.executable,
        __file__,
        "--one",
        name,
        "--sizes",
        str(size),
        "--dim",
        str(options.dim),
        "--device",
        options.device,
        *old,
    ]
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        tqdm.write(f"{name} at 2B = {size}: {out.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return float(out.stdout.split()[-1])


def affordable(name, last, size, options):
    """Return whether a pass fits the limits.

    Time grows as the square of size, memory at most as the cube."""
    growth = size / last["size"]
    large = name in PEERS and last["memory"] / 1024 * growth**3 > options.gigabytes
    return not large and last["seconds"] * growth**2 <= 20


def measure(options):
    """Measure all rows at all sizes → [{case, size, seconds, rounds, memory}]."""
    rows, last = [], {}
    names = [name for name in ROWS if name not in PACKAGES or version(PACKAGES[name])]
    for size in options.sizes:
        names = [
            name
            for name in names
            if name not in last or affordable(name, last[name], size, options)
        ]
        memory = {
            name: peak_apart(name, size, options)
            for name in tqdm(names, f"memory, 2B = {size}", leave=False)
        }
        names = [name for name in names if memory[name] is not None]
        x, y = inputs(size, options)
        times = {name: [] for name in names}
        repeats = {name: max(1, min(20, round(0.1 / once(name, x, y)))) for name in names}
        for _ in tqdm(range(options.rounds), f"time, 2B = {size}", leave=False):
            for name in names:
                times[name].append(
                    statistics.median(once(name, x, y) for _ in range(repeats[name]))
                )
        for name in names:
            rounds = [float(f"{t:.4g}") for t in times[name]]
            last[name] = {
                "case": name,
                "size": size,
                "seconds": statistics.median(times[name]),
                "rounds": rounds,
                "memory": round(memory[name], 1),
            }
            rows.append(last[name])
        buffers.cache_clear()
    return rows


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- Results -------------------------------------------------------------------------------------
def ratio(rows, size, name, to):
    """Return the median over rounds of one row's time over another's.

    It is None where one was not timed."""
    times = {row["case"]: row["rounds"] for row in rows if row["size"] == size}
    if name not in times or to not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))


def table(results):
    """Write three Markdown tables: milliseconds, MiB, and each peer's time over ours."""
    rows, differences = results["rows"], results["differences"]
    sizes = sorted({row["size"] for row in rows})
    header = " | ".join(f"2B = {size}" for size in sizes) + " |"
    measured = list(dict.fromkeys(row["case"] for row in rows))
    lines = []
    for title, figure in (("milliseconds", "seconds"), ("MiB above the inputs", "memory")):
        lines += [f"| {title} | {header}", "|---" * (len(sizes) + 1) + "|"]
        for name in measured:
            cells = dict.fromkeys(sizes, "")
            for row in (row for row in rows if row["case"] == name):
                value = f"{1000 * row['seconds']:.4g}"
                if figure == "memory":
                    value = f"{row['memory']:.0f}"
                cells[row["size"]] = value
            lines.append(f"| {name} | {' | '.join(cells.values())} |")
        lines.append("")
    lines += [
        f"| peer, times as slow | loss differs by | {header}",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for name in (name for name in measured if name in differences):
        same = PEERS[name][0] if name in PEERS else name.removeprefix("old ")
        cells = [ratio(rows, size, name, same) for size in sizes]
        lines.append(
            f"| {name} / {same} | {differences[name]:.0e} | "
            + " | ".join(f"{cell:.3g}" if cell else "" for cell in cells)
            + " |"
        )
    return "\n".join(lines)


def heading(results):
    """Say what was measured, and on what."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    rounds = len(results["rows"][0]["rounds"])
    return (
        f"{results['date']}, {results['device']}, D = {results['dim']}, {rounds} rounds, {versions}"
    )


def draw(results, path):
    """Draw time and memory over the batch, peers dashed."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    shown = [
        "three products",
        "simclr",
        "hcl",
        "ot",
        "hard",
        *(name for name in PEERS if name[:4] != "old "),
    ]
    for k, name in enumerate(shown):
        rows = [row for row in results["rows"] if row["case"] == name]
        sizes = [row["size"] for row in rows]
        style = dict(
            color="black" if k == 0 else plt.cm.tab10(k - 1),
            marker="o",
            ms=3,
            label=name,
            ls=":" if k == 0 else "--" if name in PEERS else "-",
        )
        if rows:
            axes[0].plot(sizes, [1000 * row["seconds"] for row in rows], **style)
        if rows and k > 0:
            axes[1].plot(sizes, [row["memory"] for row in rows], **style)
    labels = "ms, forward and backward", "MiB above the inputs"
    for axis, label in zip(axes, labels, strict=True):
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="2B",
            ylabel=label,
            xticks=results["sizes"],
            xticklabels=results["sizes"],
        )
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[2**k for k in range(8, 15)], metavar="2B"
    )
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=12, help="most memory of a peer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--old", type=Path, metavar="FILE", help="another hardneg.py, for the same rounds"
    )
    parser.add_argument("--out", type=Path, default=HERE / "losses.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.old:
        add_old(options.old)
    if options.one:
        print(peak(options.one, options.sizes[0], options))
        return
    missing = [package for package in PACKAGES.values() if not version(package)]
    print("left out, as not installed:", ", ".join(missing) or "nothing", file=sys.stderr)
    rows = measure(options)
    x, y = inputs(options.sizes[0], options)
    differences = {
        name: float((ROWS[name](x, y) - ROWS[same](x, y)).detach().abs())
        for name, (same, _) in PEERS.items()
        if any(row["case"] == name for row in rows)
    }
    device = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    results = {
        "date": str(date.today()),
        "device": device,
        "dim": options.dim,
        "sizes": options.sizes,
        "rows": rows,
        "differences": differences,
        "versions": {
            name: version(name) for name in ("torch", *PACKAGES.values()) if version(name)
        },
    }
    options.out.write_text(json.dumps(results) + "\n")
    draw(results, options.out.with_suffix(".png"))
    print(heading(results))
    print(table(results))


if __name__ == "__main__":
    main()
