"""Measure time and memory: python benchmarks/speed.py losses

losses: two views of B samples in D = 128 dimensions, float32, forward and backward, beside other
libraries and dense formulas. `pip install pytorch-metric-learning lightly info-nce-pytorch POT`
adds the peers.
mining: `mine` among random unit rows, beside an exact index of faiss (`pip install faiss-cpu`).
loop: the encoder alone on views made before, which is the upper limit of any loop, and the training
loop on images in memory.
folder: `train.py` on a folder of photographs, which is decoded into memory, decoded into the cache,
or found there, in one process and in two. The memory is without pixels mapped from the cache.

Every round times all rows in turn, and a ratio is of times of one round. All but mining is recorded
in results/, and --show prints it again.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

import common
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

import hardneg
import train
from training import images, report

DIM = 128
TEMPERATURE, TAU_PLUS, BETA, EPSILON, ALPHA = 0.5, 0.1, 1.0, 0.3, 0.1


# ---- Time and memory ---------------------------------------------------------------------------


def seconds_of(function: Callable) -> float:
    """Time one call."""
    begin = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def rounds_of(functions: dict, rounds: int, least: float) -> dict[str, list[float]]:
    """Time all functions in turn, round after round → {name: seconds of one call, each round}.

    A function is repeated in a round for about `least` seconds, of which the median counts."""
    repeats, times = {}, {name: [] for name in functions}
    for name, function in functions.items():
        function()  # warm up: load libraries, allocate
        repeats[name] = max(1, min(20, round(least / seconds_of(function))))
    for _ in tqdm(range(rounds), "rounds", leave=False):
        for name, function in functions.items():
            times[name].append(median(seconds_of(function) for _ in range(repeats[name])))
    return times


def ratio(some: list[float], others: list[float]) -> float:
    """Return the median over rounds of one row's time over another's."""
    return median(one / other for one, other in zip(some, others, strict=True))


def added_by(function: Callable, device: str) -> float:
    """Measure the memory that a call takes at most, in MiB, beyond what was taken before."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def resident(key: str, process: int | str = "self") -> float:
    """Read a line on the memory of a process, in MiB; 0 where it has none."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def apart(args, name: str, size: int) -> float | None:
    """Measure the memory of a row in a process of its own; None if that fails."""
    words = [args.subject, "--one", name, "--sizes", str(size), "--device", args.device]
    done = subprocess.run([sys.executable, __file__] + words, stdout=subprocess.PIPE)
    return float(done.stdout) if done.returncode == 0 else None


def version(package: str) -> str | None:
    """Look up the version of a package, if it is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def about(device: str, packages: list[str]) -> dict:
    """Say when, on what and with which versions something is measured."""
    name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if device == "cuda":
        name = torch.cuda.get_device_name()
    versions = {package: version(package) for package in packages if version(package)}
    return {"date": str(date.today()), "device": name, "versions": versions}


def heading(found: dict, *what: str) -> str:
    """Say what was measured, and on what."""
    versions = [f"{name} {version}" for name, version in found["versions"].items()]
    return ", ".join([found["date"], found["device"], *what, *versions])


# ---- losses ------------------------------------------------------------------------------------


@functools.lru_cache(1)
def buffers(n: int, device: torch.device) -> list[Tensor]:
    """Allocate the memory of `products`."""
    return [torch.empty(n, columns, device=device) for columns in (n, DIM, DIM)]


def products(x: Tensor, y: Tensor) -> None:
    """Compute S = Z Zᵀ, S Z and Sᵀ Z, in memory allocated before: the least that a loss needs."""
    z = torch.cat([x.detach(), y.detach()])
    cosines, to_anchors, to_candidates = buffers(len(z), z.device)
    torch.mm(z, z.T, out=cosines)
    torch.mm(cosines, z, out=to_anchors)
    torch.mm(cosines.T, z, out=to_candidates)


def row_of(loss: str) -> Callable:
    """Return a loss of hardneg.py with its options."""
    options = {"temperature": TEMPERATURE, "beta": BETA, "epsilon": EPSILON, "alpha": ALPHA}
    if loss in ("hcl", "debiased"):
        options["tau_plus"] = TAU_PLUS
    return functools.partial(hardneg.contrastive_loss, loss=loss, **options)


def cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    """SimCLR in its usual form: one matrix of logits, one call."""
    z = F.normalize(torch.cat([x, y]))
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(-math.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(x)))


def dense_pairs(x: Tensor, y: Tensor) -> tuple:
    """Return unit rows, their cosines, the mask of different samples, and e^{s⁺} of each anchor."""
    z = F.normalize(torch.cat([x, y]))
    sample = torch.arange(len(x), device=x.device).repeat(2)
    positives = torch.exp((z * z.roll(len(x), 0)).sum(-1) / TEMPERATURE)
    return z, z @ z.T, sample[:, None] != sample, positives


def dense_hcl(x: Tensor, y: Tensor) -> Tensor:
    """[1] Fig. 5, line by line: exponentials of everything, in matrices of (2B, 2B − 2)."""
    z, cosines, different, pos = dense_pairs(x, y)
    n = len(z) - 2
    neg = torch.exp(cosines / TEMPERATURE).masked_select(different).view(-1, n)
    importance = torch.exp(BETA * neg.log())
    weighted = (importance * neg).sum(-1) / importance.mean(-1)
    corrected = (weighted - TAU_PLUS * n * pos) / (1 - TAU_PLUS)
    corrected = corrected.clamp(min=n * math.exp(-1 / TEMPERATURE))
    return -torch.log(pos / (pos + corrected)).mean()


def dense_ot(x: Tensor, y: Tensor) -> Tensor:
    """[2] with a cost by differences of rows, and POT's Sinkhorn.

    The rows come 64 at a time, as all differences are A·N·D numbers."""
    import ot

    z, cosines, different, pos = dense_pairs(x, y)
    with torch.no_grad():
        cost = torch.cat([(rows[:, None] - z).pow(2).sum(-1) for rows in z.split(64)]) / 2
        cost = cost.masked_fill(~different, 1e6).double().cpu().numpy()
        share = [1 / len(z)] * len(z)
        plan = torch.as_tensor(ot.sinkhorn(share, share, cost, EPSILON, stopThr=1e-5)).to(z.device)
        weights = (len(z) - 2) * (plan / plan.sum(1, keepdim=True)).to(z.dtype)
    neg = (weights * torch.exp(cosines / TEMPERATURE)).sum(-1)
    return -torch.log(pos / (pos + neg)).mean()


def by_library(module: str, name: str, x: Tensor, y: Tensor) -> Tensor:
    """Compute the loss of a library that takes two views."""
    return getattr(importlib.import_module(module), name)(TEMPERATURE)(x, y)


def metric_learning(x: Tensor, y: Tensor) -> Tensor:
    """Compute that of pytorch-metric-learning, which takes labels."""
    labels = torch.arange(len(x), device=x.device).repeat(2)
    module = "pytorch_metric_learning.losses"
    return by_library(module, "NTXentLoss", torch.cat([x, y]), labels)


ROWS = {"three products": products}
ROWS |= {loss: row_of(loss) for loss in hardneg.PRESETS if loss != "supcon"}  # it is ppcl
ROWS |= {"F.cross_entropy": cross_entropy, "dense formula of [1]": dense_hcl}
ROWS |= {"cost by rows, POT": dense_ot, "pytorch-metric-learning": metric_learning}
ROWS["lightly"] = functools.partial(by_library, "lightly.loss", "NTXentLoss")
# one view against the other alone, a quarter of the pairs
ROWS["info-nce-pytorch"] = functools.partial(by_library, "info_nce", "InfoNCE")
# the loss that a peer computes, and the package that it needs
PEERS = {"F.cross_entropy": "simclr", "dense formula of [1]": "hcl", "cost by rows, POT": "ot"}
PACKAGES = {"cost by rows, POT": "POT"}
for name in ("pytorch-metric-learning", "lightly", "info-nce-pytorch"):
    PEERS[name], PACKAGES[name] = "simclr", name


def one_pass(name: str, x: Tensor, y: Tensor) -> None:
    """Go through a row, forward and backward."""
    x.grad = y.grad = None
    loss = ROWS[name](x, y)
    if loss is not None:
        loss.backward()


def views_of(size: int, device: str) -> list[Tensor]:
    """Draw two views of half as many samples, normal numbers that want a gradient."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size // 2, DIM, generator=generator) for _ in range(2)]
    return [x.to(device).requires_grad_() for x in drawn]


def affordable(name: str, last: dict, size: int) -> bool:
    """Return whether a pass takes at most 20 s and, for a peer, 12 GiB.

    Time grows as the square of size, memory at most as the cube."""
    growth = size / last["size"]
    large = name in PEERS and last["memory"] / 1024 * growth**3 > 12
    return not large and last["seconds"] * growth**2 <= 20


def losses(args) -> None:
    """Measure and record all rows at all sizes; or print the memory of one row."""
    if args.one:
        one_pass(args.one, *views_of(16, args.device))  # load libraries, start threads
        x, y = views_of(args.sizes[0], args.device)
        print(added_by(lambda: one_pass(args.one, x, y), args.device))
        return
    rows, last = [], {}
    names = [name for name in ROWS if name not in PACKAGES or version(PACKAGES[name])]
    for size in args.sizes:
        names = [name for name in names if name not in last or affordable(name, last[name], size)]
        memory = {name: apart(args, name, size) for name in tqdm(names, f"2B = {size}")}
        names = [name for name in names if memory[name] is not None]
        x, y = views_of(size, args.device)
        passes = {name: functools.partial(one_pass, name, x, y) for name in names}
        for name, times in rounds_of(passes, args.rounds, 0.1).items():
            last[name] = {"case": name, "size": size, "seconds": median(times)}
            last[name]["rounds"] = [float(f"{t:.4g}") for t in times]
            last[name]["memory"] = round(memory[name], 1)
            rows.append(last[name])
        buffers.cache_clear()
    x, y = views_of(args.sizes[0], args.device)
    differences = {}
    for name in PEERS.keys() & last.keys():
        gap = ROWS[name](x, y) - ROWS[PEERS[name]](x, y)
        differences[name] = abs(gap.item())
    found = about(args.device, ["torch"] + list(PACKAGES.values()))
    found |= {"dim": DIM, "sizes": args.sizes, "rows": rows, "differences": differences}
    common.write(args.subject, found)


def show_losses(found: dict) -> str:
    """Write three Markdown tables: milliseconds, MiB, and each peer's time over ours."""
    rows = {}
    for row in found["rows"]:
        rows.setdefault(row["case"], []).append(row)
    header = [f"2B = {row['size']}" for row in rows["simclr"]]
    times, memory = [["milliseconds"] + header], [["MiB above the inputs"] + header]
    peers = [["peer, times as slow", "loss differs by"] + header]
    for name, some in rows.items():
        blank = [""] * (len(header) - len(some))
        times.append([name] + [f"{1000 * row['seconds']:.4g}" for row in some] + blank)
        memory.append([name] + [f"{row['memory']:.0f}" for row in some] + blank)
        if name in found["differences"]:
            line = [f"{name} / {PEERS[name]}", f"{found['differences'][name]:.0e}"]
            for row, ours in zip(some, rows[PEERS[name]], strict=False):
                line.append(f"{ratio(row['rounds'], ours['rounds']):.3g}")
            peers.append(line + blank)
    first = heading(found, f"D = {found['dim']}", f"{len(some[0]['rounds'])} rounds")
    written = [report.markdown(table) for table in (times, memory, peers)]
    return f"{first}\n" + "\n\n".join(written)


# ---- mining ------------------------------------------------------------------------------------


def unit_rows(n: int, seed: int) -> Tensor:
    """Draw unit rows."""
    return hardneg.unit(torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed)))


def searches(documents: Tensor, k: int = 32) -> dict[str, Callable]:
    """Make the functions that find the k nearest documents of some queries."""

    def by_mine(queries, own, margin=None):
        hardneg.mine(queries, documents, k, positives=own, relative_margin=margin)

    found = {"mine": by_mine, "mine, margin": functools.partial(by_mine, margin=0.05)}
    if version("faiss-cpu"):
        import faiss

        faiss.omp_set_num_threads(torch.get_num_threads())
        index = faiss.IndexFlatIP(DIM)
        index.add(documents.numpy())

        def by_faiss(queries, own):
            # one more: the query's own document may be among them
            index.search(queries.numpy(), k + 1)

        found["faiss, flat"] = by_faiss
    return found


def mining(args, count: int = 10_000) -> None:
    """Print time and memory of searches among documents; each round has a part of the queries."""
    documents, queries = unit_rows(args.sizes[-1], 0), unit_rows(count, 1)
    parts = torch.arange(count).chunk(args.rounds)
    if args.one:
        some = parts[0]
        print(added_by(lambda: searches(documents)[args.one](queries[some], some), "cpu"))
        return
    memory = {name: apart(args, name, args.sizes[-1]) for name in searches(unit_rows(100, 0))}
    functions = searches(documents)
    times = {name: [] for name in functions}
    for part in parts:
        for name, search in functions.items():
            times[name].append(seconds_of(functools.partial(search, queries[part], part)))
    lines = [["search", "seconds", "times `mine`", "memory beyond the rows, MiB"]]
    for name, some in times.items():
        share = f"{median(some) / median(times['mine']):.2f}"
        lines.append([name, f"{len(parts) * median(some):.1f}", share, f"{memory[name]:.0f}"])
    print(f"{len(documents)} documents, {count} queries\n{report.markdown(lines)}")


# ---- loop --------------------------------------------------------------------------------------


def loop(args) -> None:
    """Measure and record how many images a second each part of a training takes."""
    some = images.read(train.Options(device=args.device)).train
    torch.manual_seed(0)
    encoder = hardneg.Encoder("small", size=32).to(args.device)
    method = hardneg.SimCLR(hardneg.ContrastiveLoss("hcl", **hardneg.PAPERS["hcl"]))
    training = hardneg.Training(encoder, some, method, epochs=10**6, batch_size=256)
    trained = iter(training)
    batch = some[:256]
    views = torch.cat([hardneg.view(batch)] * 2).contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(len(views), encoder.head[-1].out_features, device=args.device)

    def encode():
        encoder.zero_grad()
        with torch.autocast(args.device, torch.bfloat16, enabled=training.bfloat16):
            z = encoder(views)[1]
        z.backward(gradient.to(z.dtype))

    steps = {"encoder alone": encode, "training loop": functools.partial(next, trained)}
    rates = {}
    for name, times in rounds_of(steps, args.rounds, 2.0).items():
        rates[name] = [round(len(batch) / t, 1) for t in times]
    found = about(args.device, ["torch"])
    found |= {"encoder": "small", "batch_size": len(batch), "rates": rates}
    found["of"] = {"training loop": "encoder alone"}
    common.write(args.subject, found)


def show_loop(found: dict) -> str:
    """Write the Markdown table: medians, and the median share of another row."""
    rates = found["rates"]
    lines = [["", "images/s", ""]]
    for name, some in rates.items():
        other, share = found["of"].get(name), ""
        if other:
            share = f"{ratio(some, rates[other]):.2f} × {other}"
        lines.append([name, f"{median(some):.0f}", share])
    what = f"{found['encoder']}, batches of {found['batch_size']} images in two views"
    return f"{heading(found, what, f'{len(some)} rounds')}\n{report.markdown(lines)}"


# ---- folder ------------------------------------------------------------------------------------

TIMED = """
import sys, time
import train
imported = time.time()
step = train.hardneg.Training._step

def timed(*arguments):
    begin = time.time()
    figures = step(*arguments)
    print("at", imported, begin, time.time(), figures["images"], flush=True)
    return figures

train.hardneg.Training._step = timed
train.main(sys.argv[1:])
"""


def anonymous_memory(process: int) -> float:
    """Return the memory of a process and those that it has started, in MiB, without mapped files.
    Of several processes it is that of the largest."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    sizes = [anonymous_memory(int(child)) for child in children]
    return max([resident("RssAnon", process), *sizes])


def measured(words: list[str]) -> list[str]:
    """Run a command that prints what TIMED does → its row: seconds, images a second, MiB."""
    begin, peak = time.time(), 0
    here = os.environ | {"PYTHONPATH": str(Path(train.__file__).parent)}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, stdout=said, env=here)
        while process.poll() is None:
            with contextlib.suppress(OSError):  # a process may end in the meantime
                peak = max(peak, anonymous_memory(process.pid))
            time.sleep(0.05)
        said.seek(0)
        lines = [line.split()[1:] for line in said if line.startswith("at ")]
    imported, first = [float(at) - begin for at in lines[0][:2]]
    seconds = float(lines[-1][2]) - float(lines[0][2])
    images = sum(int(line[3]) for line in lines[1:])
    return [f"{imported:.1f}", f"{first:.1f}", f"{images / seconds:.0f}", f"{peak:.0f}"]


def folder(args) -> None:
    """Record how long it takes to start on a folder, how fast it trains, and how much it needs."""
    lines = [["start", "seconds to import", "to the first step", "images/s", "peak, MiB"]]
    with tempfile.TemporaryDirectory() as temporary:
        script = Path(temporary, "timed.py")
        script.write_text(TIMED)
        cache = f"{temporary}/cache"
        two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        rows = {"decoded into memory": ([], "/dev/null/none")}
        rows |= {"decoded into the cache": ([], cache), "found in the cache": ([], cache)}
        rows |= {"the same, two processes": (two, cache)}
        for name, (launch, kept) in rows.items():
            words = [sys.executable, *launch, str(script), "--data", args.data]
            words += ["--cache", kept, "--out", f"{temporary}/out", "--no-report", "--overwrite"]
            words += f"--size {args.sizes[0]} --fraction {args.fraction} --epochs 1".split()
            words += ["--micro-batch", str(args.micro_batch)]
            lines.append([name] + measured(words))
    common.write(args.subject, about("cpu", ["torch"]) | {"lines": lines})


def show_folder(found: dict) -> str:
    """Write the Markdown table."""
    return f"{heading(found)}\n{report.markdown(found['lines'])}"


SUBJECTS = {"losses": losses, "mining": mining, "loop": loop, "folder": folder}
SIZES = {"losses": [2**k for k in range(8, 15)], "mining": [10**6], "folder": [128]}
ROUNDS = {"losses": 7, "mining": 5, "loop": 9, "folder": 1}
SHOWN = {"losses": show_losses, "loop": show_loop, "folder": show_folder}


def main():
    """Measure a subject, or show what is recorded of it."""
    parser = common.parser_of(__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--sizes", type=int, nargs="+", help="2B, documents, or pixels of a side")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--device", default=train.FLAGS["device"][1])
    parser.add_argument("--one", metavar="ROW", help="print the memory of one row alone")
    parser.add_argument("--data", help="a folder of images, for folder")
    parser.add_argument("--fraction", type=float, default=1.0, help="the share to train on")
    parser.add_argument("--micro-batch", type=int, default=128, help="views in one pass")
    args = parser.parse_args()
    args.sizes = args.sizes or SIZES.get(args.subject)
    args.rounds = args.rounds or ROUNDS[args.subject]
    if not args.show:
        SUBJECTS[args.subject](args)
    if args.subject in SHOWN and not args.one:
        print(SHOWN[args.subject](common.read(args.subject)))


if __name__ == "__main__":
    main()
