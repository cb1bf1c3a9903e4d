"""Find hard negatives in real text, and see what they gain: python benchmarks/code_search.py

A query is the first paragraph of a function's docstring, its document the rest of the function, as
`code_corpus.py` collects them. An encoder learns to find the document of a query among all those of
the test files. On the validation files, and with a seed of its own, each loss chooses its
temperature, and each row its learning rate. Seeds from 0 on compare the rows. What is measured goes
to results/code_search.json at once and is not repeated.
"""

import functools
import time
from collections.abc import Callable
from pathlib import Path

import common
import numpy as np
import tables
import torch
from code_corpus import WORDS, Part, Texts, load, split
from rows import LOSSES, SEARCHES, SETTINGS
from scipy import sparse
from torch import Tensor, nn
from tqdm import tqdm

import hardneg

DIM = 128  # of embeddings
EPOCHS = 5
POOL = 32  # mined documents are drawn from so many nearest ones
TEMPERATURES = (0.05, 0.07, 0.1, 0.14, 0.2)
RATES = (0.001, 0.002, 0.004, 0.008, 0.016)
FIRST_RATE = 0.008  # while temperatures are compared
SEARCH = 100  # the seed of the runs that choose


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

    def __init__(self, part: Part, settings: dict, seed: int):
        self.part, self.settings = part, settings
        self.epochs = EPOCHS * settings["passes"]
        self.encoder = Encoder(idf_of(part), seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.near = None  # (n, POOL), the documents nearest to each query; −1 where there is none
        self.seconds = 0.0

    def train(self, name: str) -> Encoder:
        """Take all steps, at a rate that falls to 0."""
        begin = time.process_time()
        size, rate = self.settings["batch_size"], self.settings["rate"]
        steps = self.epochs * -(-len(self.part) // size)
        if steps > 0:
            self.optimizer = torch.optim.Adam(self.encoder.parameters(), rate, fused=True)
            falling = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1, 1 / steps, steps)
        for epoch in tqdm(range(self.epochs), name, unit=" epochs", leave=False):
            if self.is_due(epoch):
                self.near = self.search()
            for index in torch.randperm(len(self.part), generator=self.generator).split(size):
                self.step(index)
                falling.step()
        self.seconds = time.process_time() - begin
        return self.encoder

    def is_due(self, epoch: int) -> bool:
        """Say whether to search before an epoch: the untrained encoder finds nothing of use."""
        due = epoch >= 1 and (epoch - 1) % self.settings["refresh"] == 0
        return due and self.settings["mined"] > 0

    def search(self) -> Tensor:
        """Find the documents that are nearest to each query, and not its own."""
        queries, documents = self.encoder.embed(self.part)
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
        common.descend(loss, self.optimizer)

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
        return options


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
    words = 1 + max(int(torch.cat(texts).max()) for texts in part.tokens)
    queries, documents = [counts_of(texts, words) for texts in part.tokens]
    documents_with = np.bincount(documents.indices, minlength=words)
    idf = np.log1p((len(part) - documents_with + 0.5) / (documents_with + 0.5))
    lengths = np.asarray(documents.sum(1)).ravel()
    penalty = k1 * (1 - b + b * lengths / lengths.mean())  # of long documents
    rows = np.repeat(np.arange(len(part)), np.diff(documents.indptr))
    share = documents.data * (k1 + 1) / (documents.data + penalty[rows])
    documents.data = share * idf[documents.indices]
    scores = (queries @ documents.T).toarray()
    return figures_of(torch.from_numpy(scores), part.files)


def counts_of(texts: list[Tensor], words: int) -> sparse.csr_matrix:
    """Count the words of each text → (texts, words)."""
    rows = np.repeat(np.arange(len(texts)), [len(tokens) for tokens in texts])
    places = rows, torch.cat(texts).numpy()
    # entries of one place are added
    return sparse.csr_matrix((np.ones(len(rows)), places), shape=(len(texts), words))


# ---- Runs and results --------------------------------------------------------------------------


class Record:
    """Keep what is measured, on disk after each measurement, and measure nothing twice."""

    def __init__(self, name: str, corpus: dict):
        self.name = name
        about = {key: corpus[key] for key in ("pairs", "sha256", "versions")}
        self.found = {"corpus": about, "choices": {}, "runs": []}
        if common.path_of(name).exists():
            self.found = common.read(name)
        if self.found["corpus"]["sha256"] != about["sha256"]:
            raise SystemExit(f"{name} is of another corpus; name another with --record")

    def choose(self, what: str, name: str, values: tuple, measure: Callable) -> float:
        """Return the value of a setting that has the best measure, an MRR on validation files."""
        tried = self.found["choices"].setdefault(what, {}).setdefault(name, {})
        for value in values:
            if str(value) not in tried:
                tried[str(value)] = measure(value)
                common.write(self.name, self.found)
        return float(max(tried, key=tried.get))

    def once(self, row: str, settings: dict, seed: int, measure: Callable) -> None:
        """Record what a row measures with a seed, and its processor time if it does not say."""
        about = {"row": row, "seed": seed, "settings": settings}
        if any(about.items() <= run.items() for run in self.found["runs"]):
            return
        begin = time.process_time()
        figures = measure()
        seconds = {"seconds": time.process_time() - begin}
        self.found["runs"].append(about | seconds | figures)
        common.write(self.name, self.found)


def compare(record: Record, parts: dict[str, Part], seeds: int) -> None:
    """Choose settings, then measure all rows, the first seed of all before the next."""

    def tried(settings, seed, part):
        run = Run(parts["train"], settings, seed)
        encoder = run.train(f"{settings['loss']}, seed {seed}")
        return {"seconds": run.seconds} | evaluate(encoder, parts[part])

    def choose(what, name, values, settings):
        def measure(value):
            return tried(settings | {what: value}, SEARCH, "validation")["mrr"]

        return {what: record.choose(what, name, values, measure)}

    if not record.found.get("bm25"):
        record.found["bm25"] = bm25(parts["test"])
    chosen = {}
    for row in SEARCHES:
        settings = SETTINGS | SEARCHES[row]
        if settings["passes"]:
            loss = settings["loss"]
            of_loss = SETTINGS | {"loss": loss, "rate": FIRST_RATE}
            settings |= choose("temperature", loss, TEMPERATURES, of_loss)
            settings |= choose("rate", row, RATES, settings)
        chosen[row] = settings
    for seed in range(seeds):
        for row, settings in chosen.items():
            measure = functools.partial(tried, settings, seed, "test")
            record.once(row, settings, seed, measure)


def main():
    """Train what is not recorded yet, and print the table."""
    parser = common.parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs", "code_search"))
    parser.add_argument("--record", default="code_search", help="file of results/, less .json")
    args = parser.parse_args()
    if not args.show:
        corpus = load(args.out)
        compare(Record(args.record, corpus), split(corpus), args.seeds)
    print(tables.search(args.record))


if __name__ == "__main__":
    main()
