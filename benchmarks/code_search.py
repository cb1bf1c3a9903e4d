"""Find hard negatives in real text, and see what they gain: python benchmarks/code_search.py

A query is the first paragraph of a function's docstring, its document the rest of the function, as
`code_corpus.py` collects them. An encoder learns to find the document of a query among all those of
the test files. On the validation files, and with a seed of its own, each loss chooses its
temperature, and each row its learning rate; seeds from 0 on compare the rows, those of SHORT if
none are named. What is measured goes to results/code_search.json at once and is not repeated;
--table prints it again. Other corpora, --limit and --epochs have a file of their own, in --out.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg
from benchmarks import code_corpus
from benchmarks.code_corpus import WORDS, Part, Texts
from training import report

RECORD = Path(__file__).resolve().parent / "results" / "code_search.json"
DIM = 128  # of embeddings
EPOCHS = 5
POOL = 32  # mined documents are drawn from so many nearest ones
TEMPERATURES = (0.05, 0.07, 0.1, 0.14, 0.2)
RATES = (0.001, 0.002, 0.004, 0.008, 0.016)
FIRST_RATE = 0.008  # while temperatures are compared
SEARCH = 100  # the seed of the runs that choose
MEASURES = ("mrr", "r1", "r10", "same_file")

LOSSES = {  # options of contrastive_loss; N is the number of candidates of a query
    "simclr": dict(loss="simclr"),
    "hcl": dict(loss="hcl", beta=0.5, tau_plus="1/N"),
    "ot": dict(loss="ot", epsilon=0.2),
    "hard": dict(loss="hard", alpha=0.3),
    "debiased": dict(loss="debiased", tau_plus="1/N"),
    "decoupled": dict(objective="decoupled"),
}
SETTINGS = {  # of a row, where it does not say otherwise
    "loss": "simclr",  # of LOSSES
    "batch_size": 128,
    "passes": 1,  # times --epochs
    "random": 0,  # random documents for each query, candidates of the whole batch
    "mined": 0,  # the same, drawn from the nearest, from the second epoch on
    "grouped": 0,  # a sample stands in a batch with so many near ones, from the second epoch on
    "refresh": 1,  # epochs between two searches for the nearest
    "bank": False,  # search among the embeddings that training steps made, not among new ones
    "mine_margin": None,  # relative_margin of `mine`
    "loss_margin": None,  # relative_margin of the loss
    "temperature": None,  # these two are chosen
    "rate": None,
}
ROWS = {
    "untrained": dict(passes=0),
    # weighting the negatives of a batch
    **{loss: dict(loss=loss) for loss in LOSSES},
    # more candidates, as many as with four more for each query, and the time that `mined` takes
    "random": dict(random=4),
    "batch 640": dict(batch_size=640),
    "batch 640, equal time": dict(batch_size=640, passes=7),
    "batch 128, equal time": dict(passes=3),
    # finding near ones
    "grouped": dict(grouped=8),
    "mined": dict(mined=4),
    **{f"mined, {loss}": dict(mined=4, loss=loss) for loss in LOSSES if loss != "simclr"},
    # against false negatives
    "mined, margin": dict(mined=4, mine_margin=0.05),
    "mined, margin in loss": dict(mined=4, loss_margin=0.05),
    # how old the lists of the nearest may be
    "mined, every 2": dict(mined=4, refresh=2),
    "mined, every 4": dict(mined=4, refresh=4),
    "mined, bank": dict(mined=4, bank=True),
}
IN_WORDS = {  # rows of ../README.md
    "simclr": "`simclr`",
    "hcl": "`hcl`",
    "random": "`simclr`, 4 random documents more for each query",
    "mined": "`simclr`, 4 mined documents more for each query",
    "mined, debiased": "`debiased`, 4 mined",
}
SHORT = ("untrained", "simclr", "hcl", "random", "batch 640, equal time", "mined", "mined, hcl")


# ---- Training ----------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Embed a text as the sum of its words' vectors, each with a learned weight."""

    def __init__(self, idf: Tensor, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.randn(WORDS, DIM, generator=generator) / DIM**0.5
        self.words = nn.EmbeddingBag.from_pretrained(vectors, freeze=False, mode="sum")
        self.weights = nn.Parameter(idf.clone())
        self.scale = nn.Parameter(torch.ones(DIM))  # of queries

    def forward(self, texts: Texts, index: Tensor) -> Tensor:
        """Embed the documents at index (B,) → (B, DIM)."""
        words, counts, offsets = texts.take(index)
        weights = self.weights[words] * counts
        return self.words(words, offsets, per_sample_weights=weights)

    def queries(self, texts: Texts, index: Tensor) -> Tensor:
        """Embed the queries at index (B,) → (B, DIM)."""
        return self(texts, index) * self.scale

    @torch.no_grad()
    def embed(self, part: Part) -> tuple[Tensor, Tensor]:
        """Embed all queries and documents, as unit rows."""
        queries, documents = [], []
        for index in torch.arange(len(part)).split(2048):
            queries.append(self.queries(part.queries, index))
            documents.append(self(part.documents, index))
        return hardneg.unit(torch.cat(queries)), hardneg.unit(torch.cat(documents))


def idf_of(part: Part) -> Tensor:
    """Compute log(1 + n / (1 + n_w)) of each word, n_w the number of texts that have it."""
    words = torch.cat([part.queries.words, part.documents.words])
    texts_with = torch.bincount(words, minlength=WORDS)
    return torch.log1p(2 * len(part) / (1 + texts_with))


class Run:
    """Train an encoder by a row's settings; `seconds` are processor time, searches included."""

    def __init__(self, part: Part, settings: dict, epochs: int, seed: int):
        self.part, self.settings = part, settings
        self.epochs = epochs * settings["passes"]
        self.encoder = Encoder(idf_of(part), seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.near = None  # (n, POOL), the documents nearest to each query; −1 where there is none
        self.banks = None
        if settings["bank"]:  # the first epoch fills all rows, before they are read
            rows = torch.zeros(len(part), DIM)
            self.banks = [hardneg.MemoryBank(rows, momentum=0) for _ in range(2)]
        self.seconds = 0.0

    def train(self, bar: tqdm) -> Encoder:
        """Take all steps, at a rate that falls to 0."""
        begin = time.process_time()
        size, rate = self.settings["batch_size"], self.settings["rate"]
        steps = self.epochs * -(-len(self.part) // size)
        if steps > 0:
            self.optimizer = torch.optim.Adam(self.encoder.parameters(), rate, fused=True)
            falling = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1, 1 / steps, steps)
        for epoch in range(self.epochs):
            if self.is_due(epoch):
                self.near = self.search()
            for index in self.order().split(size):
                self.step(index)
                falling.step()
            bar.update()
        self.seconds = time.process_time() - begin
        return self.encoder

    def order(self) -> Tensor:
        """Shuffle the samples, with near ones side by side if the row says so."""
        if self.near is not None and self.settings["grouped"]:
            return group_batches(self.near, self.settings["grouped"], self.generator)
        return torch.randperm(len(self.part), generator=self.generator)

    def is_due(self, epoch: int) -> bool:
        """Say whether to search before an epoch: the untrained encoder finds nothing of use."""
        wanted = self.settings["mined"] or self.settings["grouped"]
        return bool(wanted) and epoch >= 1 and (epoch - 1) % self.settings["refresh"] == 0

    def search(self) -> Tensor:
        """Find the documents that are nearest to each query, and not its own."""
        if self.banks is None:
            queries, documents = self.encoder.embed(self.part)
        else:
            queries, documents = [bank.rows for bank in self.banks]
        margin = self.settings["mine_margin"]
        return hardneg.mine(queries, documents, POOL, relative_margin=margin)

    def step(self, index: Tensor) -> None:
        """Descend the loss of a batch, whose queries share all candidates."""
        given = self.more_documents(index)
        is_there = given >= 0
        shown = torch.cat([index, given.clamp_min(0)])
        queries = self.encoder.queries(self.part.queries, index)
        documents = self.encoder(self.part.documents, shown)
        # a query's own document may be among the given ones of another: labels know it
        labels = torch.cat([index, shown])
        in_batch = torch.ones(len(index), dtype=torch.bool)
        counts = torch.cat([in_batch, is_there])
        loss = hardneg.contrastive_loss(
            queries,
            documents[: len(index)],
            negatives=documents,
            positive_index=torch.arange(len(index)),
            negative_mask=counts.expand(len(index), -1),
            labels=labels,
            **self.options_of_loss(int(counts.sum()) - 1),
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.banks is not None:
            self.banks[0].update(index, queries.detach())
            self.banks[1].update(index, documents[: len(index)].detach())

    def more_documents(self, index: Tensor) -> Tensor:
        """Draw the documents that join those of a batch; −1 where a query has too few near ones."""
        b = len(index)
        if self.settings["random"]:
            count = b * self.settings["random"]
            return torch.randint(len(self.part), (count,), generator=self.generator)
        if self.near is None or not self.settings["mined"]:
            return index.new_empty(0)
        near = self.near[index]  # (B, POOL)
        # the largest of uniform numbers are a draw without replacement; −1 comes last
        numbers = torch.rand(near.shape, generator=self.generator)
        drawn = numbers.masked_fill(near < 0, -1).topk(self.settings["mined"]).indices
        return near.gather(1, drawn).flatten()

    def options_of_loss(self, candidates: int) -> dict:
        """Complete the options of the loss: they may depend on the number of candidates."""
        options = dict(LOSSES[self.settings["loss"]])
        if options.get("tau_plus") == "1/N":
            options["tau_plus"] = 1 / max(2, candidates)
        options["temperature"] = self.settings["temperature"]
        options["relative_margin"] = self.settings["loss_margin"]
        return options


def group_batches(index: Tensor, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Order samples so that near ones come in one batch, where they are hard negatives.

    index (n, k): neighbours of each sample, other samples as `mine` finds them → order (n,), to be
    cut into batches. It is one group after another, in random order: a random sample, and the
    nearest of its neighbours that are in no group yet, up to size. The CPU does this"""
    if size < 1:
        raise hardneg.InvalidArgument(f"size is {size}; it must be at least 1")
    neighbours = index.tolist()
    free, groups = set(range(len(neighbours))), []
    for i in torch.randperm(len(neighbours), generator=generator).tolist():
        if i in free:
            near = dict.fromkeys([i, *neighbours[i]])  # each once
            group = [j for j in near if j in free][:size]
            free.difference_update(group)
            groups.append(torch.tensor(group))
    order = torch.randperm(len(groups), generator=generator).tolist()
    return torch.cat([groups[k] for k in order])


# ---- Measures ----------------------------------------------------------------------------------


def figures_of(scores: Tensor, files: Tensor) -> dict[str, float]:
    """Measure how well queries find their documents, in percent; scores (n, n), own ones diagonal.

    MRR is the mean of 1 / rank, R@k the share of ranks up to k. Ties count against the query.
    same_file is the share of queries whose document is the first of those of its own file, in files
    of two or more."""
    own = scores.diagonal()[:, None]
    is_ahead = scores >= own  # as the own one itself
    ranks = is_ahead.sum(1)
    in_file = files[:, None] == files
    ranks_in_file = (is_ahead & in_file).sum(1)
    has_rivals = in_file.sum(1) > 1
    values = {
        "mrr": 1 / ranks,
        "r1": ranks <= 1,
        "r10": ranks <= 10,
        "same_file": ranks_in_file[has_rivals] <= 1,
    }
    return {name: 100 * value.double().mean().item() for name, value in values.items()}


def evaluate(encoder: Encoder, part: Part) -> dict[str, float]:
    """Measure an encoder on a part of the corpus."""
    queries, documents = encoder.embed(part)
    return figures_of(queries @ documents.T, part.files)


def bm25(part: Part, k1: float = 1.2, b: float = 0.75) -> dict[str, float]:
    """Measure the formula of lexical search, on whole texts and without a limit to the words."""
    queries, documents = [counts_of(texts) for texts in part.tokens]
    words = max(queries.shape[1], documents.shape[1])
    queries.resize(len(part), words)
    documents.resize(len(part), words)
    documents_with = np.bincount(documents.indices, minlength=words)
    idf = np.log1p((len(part) - documents_with + 0.5) / (documents_with + 0.5))
    lengths = np.asarray(documents.sum(1)).ravel()
    penalty = k1 * (1 - b + b * lengths / lengths.mean())  # of long documents
    rows = np.repeat(np.arange(len(part)), np.diff(documents.indptr))
    share = documents.data * (k1 + 1) / (documents.data + penalty[rows])
    documents.data = share * idf[documents.indices]
    scores = (queries @ documents.T).toarray()
    return figures_of(torch.from_numpy(scores), part.files)


def counts_of(texts: list[Tensor]) -> sparse.csr_matrix:
    """Count the words of each text → (texts, words)."""
    lengths = torch.tensor([len(tokens) for tokens in texts])
    rows = torch.arange(len(texts)).repeat_interleave(lengths)
    words = torch.cat(texts)
    ones = np.ones(len(words))
    return sparse.csr_matrix((ones, (rows.numpy(), words.numpy())))  # entries of a place are added


# ---- Runs and results --------------------------------------------------------------------------


class Results:
    """Keep what is measured in a JSON file, written anew after every run."""

    def __init__(self, path: Path, about: dict):
        self.path = path
        self.found = about | {"bm25": None, "choices": {}, "runs": []}
        if path.exists():
            self.found = json.loads(path.read_text())

    def write(self) -> None:
        """Write the file in one move: whoever stops the program leaves the old file or the new."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(temporary, self.path)

    def tried(self, what: str, name: str) -> dict[str, float]:
        """Return the validation MRR by temperature of a loss, or by rate of a row."""
        return self.found["choices"].setdefault(what, {}).setdefault(name, {})

    def settings_of(self, row: str) -> dict:
        """Complete a row's settings by what is chosen for it so far."""
        settings = SETTINGS | ROWS[row]
        if settings["passes"] == 0:
            return settings
        for what, name in (("temperature", settings["loss"]), ("rate", row)):
            tried = self.tried(what, name)
            if tried:
                settings[what] = float(max(tried, key=tried.get))
        return settings

    def runs_of(self, row: str) -> dict[int, dict]:
        """Look up the runs of a row, by seed."""
        settings = self.settings_of(row)
        runs = [run for run in self.found["runs"] if run["row"] == row]
        return {run["seed"]: run for run in runs if run["settings"] == settings}


def path_of(record: Path, corpus: dict, args: argparse.Namespace) -> Path:
    """Choose the file of results: the record of the project, unless it is of other runs."""
    if args.limit is None and args.epochs == EPOCHS:
        if not record.exists():
            return record
        if json.loads(record.read_text())["corpus"]["sha256"] == corpus["sha256"]:
            return record
    runs = f"{corpus['sha256'][:8]}-{args.limit or 'all'}-{args.epochs}"
    return args.out / f"{record.stem}-{runs}.json"


class Study:
    """Train what is not recorded yet, first to choose settings, then to compare rows."""

    def __init__(self, parts: dict[str, Part], rows: list[str], epochs: int, results: Results):
        self.parts, self.epochs, self.results = parts, epochs, results
        self.rows = rows
        self.trained = [row for row in rows if ROWS[row].get("passes") != 0]
        self.losses = list(dict.fromkeys(ROWS[row].get("loss", "simclr") for row in self.trained))

    def run(self, seeds: int) -> None:
        """Do all that is left to do, the first seed of all rows before the next."""
        if self.results.found["bm25"] is None:
            self.results.found["bm25"] = bm25(self.parts["test"])
        passes = sum(ROWS[row].get("passes", 1) for row in self.rows) * (len(RATES) + seeds)
        passes += len(self.losses) * len(TEMPERATURES)
        with tqdm(total=passes * self.epochs, unit=" epochs") as self.bar:
            for loss in self.losses:
                settings = SETTINGS | {"loss": loss, "rate": FIRST_RATE}
                self.choose("temperature", loss, TEMPERATURES, settings)
            for row in self.trained:
                self.choose("rate", row, RATES, self.results.settings_of(row))
            for seed in range(seeds):
                for row in self.rows:
                    self.compare(row, seed)

    def choose(self, what: str, name: str, values: tuple, settings: dict) -> None:
        """Measure all values of a setting on the validation files."""
        tried = self.results.tried(what, name)
        for value in values:
            if str(value) in tried:
                self.bar.update(settings["passes"] * self.epochs)
                continue
            self.bar.set_description(f"{name}, {what} {value}")
            run = Run(self.parts["train"], settings | {what: value}, self.epochs, SEARCH)
            encoder = run.train(self.bar)
            tried[str(value)] = evaluate(encoder, self.parts["validation"])["mrr"]
            self.results.write()

    def compare(self, row: str, seed: int) -> None:
        """Measure a row on the test files."""
        settings = self.results.settings_of(row)
        if seed in self.results.runs_of(row):
            self.bar.update(settings["passes"] * self.epochs)
            return
        self.bar.set_description(f"{row}, seed {seed}")
        run = Run(self.parts["train"], settings, self.epochs, seed)
        figures = evaluate(run.train(self.bar), self.parts["test"])
        about = {"row": row, "seed": seed, "settings": settings, "seconds": run.seconds}
        self.results.found["runs"].append(about | figures)
        self.results.write()


def table(results: Results) -> str:
    """Write the results as a Markdown table.

    Gains are differences of MRR to `simclr`, paired by seed, with Student's interval of 95 %. Times
    are multiples of that of `simclr`."""
    names = ["row", "t", "rate", "MRR", "R@1", "R@10", "same file", "gain in MRR", "n", "time"]
    lines = [names]
    floor = results.found["bm25"]
    if floor:
        figures = [f"{floor[name]:.1f}" for name in MEASURES]
        lines.append(["BM25", "", "", *figures, "", "", ""])
    baseline = results.runs_of("simclr")
    for row in ROWS:
        runs = results.runs_of(row)
        if runs:
            lines.append(line_of(row, runs, baseline))
    return report.markdown(lines)


def brief(results: Results) -> str:
    """Write the table of ../README.md."""
    lines = [["negatives, text", "MRR", "gain in MRR"]]
    baseline = results.runs_of("simclr")
    for row, words in IN_WORDS.items():
        _, _, _, mrr, _, _, _, gain, _, _ = line_of(row, results.runs_of(row), baseline)
        lines.append([words, mrr, gain])
    return report.markdown(lines)


def line_of(row: str, runs: dict[int, dict], baseline: dict[int, dict]) -> list[str]:
    """Write the line of a row, from its runs by seed and those of `simclr`."""
    settings = next(iter(runs.values()))["settings"]
    cells = [row]
    for what in ("temperature", "rate"):
        cells.append(str(settings[what] or ""))
    for name in MEASURES:
        cells.append(report.spread([run[name] for run in runs.values()]))
    shared = [seed for seed in runs if seed in baseline]
    gain, ratio = "", ""
    if shared and row != "simclr":
        gain = report.gain([runs[seed]["mrr"] - baseline[seed]["mrr"] for seed in shared])
    if shared:
        seconds = sum(runs[seed]["seconds"] for seed in shared)
        ratio = f"{seconds / sum(baseline[seed]['seconds'] for seed in shared):.1f}"
    return [*cells, gain, str(len(runs)), ratio]


def parser_of(about: str) -> argparse.ArgumentParser:
    """Make a parser with the flags of an experiment on the corpus."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--limit", type=int, metavar="PAIRS", help="only so many of the corpus")
    parser.add_argument("--out", type=Path, default=Path("runs", "code_search"))
    parser.add_argument("--table", action="store_true", help="print the record, train nothing")
    return parser


def main():
    """Train what is not recorded yet, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="NAME", default=SHORT)
    parser.add_argument("--all", action="store_true", help="all rows")
    args = parser.parse_args()
    if args.table:
        print(table(Results(RECORD, {})))
        return
    corpus = code_corpus.load(args.out)
    path = path_of(RECORD, corpus, args)
    about = {key: corpus[key] for key in ("pairs", "sha256", "versions")}
    results = Results(path, {"corpus": about, "epochs": args.epochs, "limit": args.limit})
    parts = code_corpus.split(corpus, args.limit)
    rows = list(ROWS) if args.all else args.rows
    Study(parts, rows, args.epochs, results).run(args.seeds)
    print(f"{table(results)}\n\nin {path}")


if __name__ == "__main__":
    main()
