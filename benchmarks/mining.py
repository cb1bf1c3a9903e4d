"""Time `mine`, and the memory that it takes, beside an exact index of faiss if it is installed.

    pip install faiss-cpu
    python benchmarks/mining.py                       a million documents: some ten minutes
    python benchmarks/mining.py --documents 100000

Documents and queries are random unit rows of 128 dimensions. Both answer in turn, a part of the
queries each, in one process; the times are medians over the parts, for all queries. The memory is
what a process of its own takes at most, beyond its documents and queries; an index is a copy.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg

PARTS = 5  # of the queries


def rows(n, seed, dimensions=128):
    """Draw unit rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dimensions, generator=generator)
    for part in x.split(10_000):  # in place, and few at a time: the peak is what they take
        part /= part.norm(dim=1, keepdim=True)
    return x


def searches(documents, k):
    """Make the functions that find the k nearest documents of some queries."""
    found = {"mine": lambda queries, own: hardneg.mine(queries, documents, k, positives=own)}
    found["mine, margin"] = lambda queries, own: hardneg.mine(
        queries, documents, k, positives=own, relative_margin=0.05
    )
    try:
        import faiss
    except ImportError:
        return found
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(documents.shape[1])
    index.add(documents.numpy())
    # one more: the query's own document may be among them
    found["faiss, flat"] = lambda queries, own: index.search(queries.numpy(), k + 1)
    return found


def peak():
    """Return the most memory that this process has taken, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_memory(name, args):
    """Print how much one search of a part of the queries adds to the memory."""
    documents, queries = rows(args.documents, 0), rows(args.queries // PARTS, 1)
    own = torch.arange(len(queries))
    before = peak()
    search = searches(documents, args.k)[name]
    search(queries, own)
    print(round(peak() - before))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=10_000)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--memory", metavar="NAME", help="measure one search, in this process")
    args = parser.parse_args()
    if args.memory:
        measure_memory(args.memory, args)
        return
    memory = {}
    for name in searches(rows(100, 0), args.k):  # first: a process begins with its parent's peak
        given = [f"--{key}={value}" for key, value in vars(args).items() if key != "memory"]
        command = [sys.executable, __file__, *given, f"--memory={name}"]
        memory[name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    documents, queries = rows(args.documents, 0), rows(args.queries, 1)
    own = torch.arange(args.queries)
    functions = searches(documents, args.k)
    times = {name: [] for name in functions}
    for part in torch.arange(args.queries).chunk(PARTS):
        for name, search in functions.items():
            start = time.perf_counter()
            search(queries[part], own[part])
            times[name].append(time.perf_counter() - start)
    threads = torch.get_num_threads()
    print(f"{args.documents} documents, {args.queries} queries, k = {args.k}, {threads} threads\n")
    print("| search | seconds | times `mine` | memory beyond the rows, MiB |\n|---|---|---|---|")
    least = median(times["mine"])
    for name, seconds in times.items():
        middle = median(seconds)
        print(f"| {name} | {PARTS * middle:.1f} | {middle / least:.2f} | {memory[name].strip()} |")


if __name__ == "__main__":
    main()
