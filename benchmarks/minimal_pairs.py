"""Do given negatives that differ by one word teach an encoder to mind it?
python benchmarks/minimal_pairs.py

Pairs are those of `code_search.py`: a docstring is the query, the function its document. A query
that says one word of OPPOSITES gets a double that says the other: "the first row", "the last row".
Given the document, which of the two is right? In training, the double can be a given negative of
its document. Every loss is the sum of two: documents look for their queries, where the doubles are
candidates of the whole batch, and queries for their documents, where they are not.

Doubles can be told without the document: "a get of numbers" is no English. So `blind` is an encoder
that reads the two queries alone. Balanced accuracies weight pairs such that guesses without the
document are right half the time: from the word alone, and those of `blind`. And an encoder is asked
again with the document of another pair: what it has above 50 % it has from the queries alone.

The temperature has the best MRR of in-batch negatives on the validation files. What is measured
goes to results/minimal_pairs.json at once and is not repeated.
"""

import dataclasses
import functools
import random
from collections import Counter

import code_corpus
import code_search
import common
import tables
import torch
from code_corpus import LONGEST, WORDS, Part, Texts, lay
from code_search import DIM, SEARCH, evaluate, idf_of
from rows import DOUBLED, SETTINGS
from torch import Tensor, nn
from torch.nn import functional as F

import hardneg

TEMPERATURES = (0.05, 0.1, 0.2)
RATE = 0.004  # no better MRR on the validation files, to 0.2, at half or twice the rate
BLIND_EPOCHS, BLIND_RATE = 10, 0.002  # the epoch that is best on the validation files counts
BINS = 10  # of the margins of `blind`, when they are balanced
OPPOSITES = """
    min/max minimum/maximum minimal/maximal minimize/maximize minimise/maximise smallest/largest
    smaller/larger less/greater lower/upper lowest/highest low/high encode/decode encoder/decoder
    encoded/decoded encoding/decoding compress/decompress encrypt/decrypt pack/unpack row/column
    rows/columns first/last left/right start/end begin/end starts/ends before/after next/previous
    above/below top/bottom add/remove insert/delete append/prepend open/close opened/closed
    read/write reads/writes reading/writing load/save input/output inputs/outputs forward/backward
    increase/decrease true/false positive/negative odd/even north/south east/west parent/child
    parents/children push/pop lock/unlock acquire/release enable/disable enabled/disabled get/set
    import/export ascending/descending horizontal/vertical horizontally/vertically width/height
    source/target source/destination client/server request/response send/receive start/stop
    local/global local/remote public/private inner/outer include/exclude numerator/denominator
    addition/subtraction multiply/divide sum/product union/intersection sine/cosine valid/invalid
    absolute/relative success/failure"""


# ---- Pairs -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Doubles:
    """Hold the queries of a part that differ from true ones by a word."""

    index: Tensor  # (S,), the sample of each
    texts: Texts
    words: Tensor  # (S, 2), the word of the true query, and that of the double


def opposites_of(vocabulary: list[str]) -> dict[int, list[int]]:
    """Look up the numbers of OPPOSITES, in both directions."""
    number = {word: k for k, word in enumerate(vocabulary[:WORDS])}
    opposites = {}
    for pair in OPPOSITES.split():
        one, other = [number.get(word) for word in pair.split("/")]
        if one is not None and other is not None:
            opposites.setdefault(one, []).append(other)
            opposites.setdefault(other, []).append(one)
    return opposites


def doubles_of(part: Part, opposites: dict[int, list[int]]) -> Doubles:
    """Make the double of each query that has a word once and its opposite never."""
    index, texts, words = [], [], []
    for k, tokens in enumerate(part.tokens[0]):
        counts = Counter(tokens[:LONGEST].tolist())
        choices = []
        for word in counts:
            others = [other for other in opposites.get(word, ()) if other not in counts]
            if counts[word] == 1:
                choices += [(word, other) for other in others]
        if choices:
            word, other = random.Random(k).choice(choices)
            index.append(k)
            texts.append(tokens.masked_fill(tokens == word, other))
            words.append((word, other))
    return Doubles(torch.tensor(index), lay(texts, in_order=True), torch.tensor(words))


# ---- Training ----------------------------------------------------------------------------------


class Encoder(code_search.Encoder):
    """Add to the sum of words one that depends on their neighbours: a convolution of width 3."""

    def __init__(self, idf: Tensor, seed: int, order: bool = True):
        super().__init__(idf, seed)
        self.mix = None
        if order:
            self.mix = nn.Linear(3 * DIM, DIM)
            nn.init.zeros_(self.mix.weight)  # begin as a bag of words
            nn.init.zeros_(self.mix.bias)

    def forward(self, texts: Texts, index: Tensor) -> Tensor:
        """Embed the texts at index (B,) → (B, DIM)."""
        bag = super().forward(texts, index)
        if self.mix is None:
            return bag
        words, _, offsets = texts.take(index)
        begins = torch.zeros(len(words) + 1, 1, dtype=torch.bool)
        begins[offsets] = True
        begins[-1] = True
        # texts stand behind one another: what is beyond the ends of a text counts as 0
        vectors = F.embedding(words, self.words.weight)
        before = vectors.roll(1, 0).masked_fill(begins[:-1], 0)
        after = vectors.roll(-1, 0).masked_fill(begins[1:], 0)
        mixed = F.gelu(self.mix(torch.cat([before, vectors, after], 1)))
        places, weights = torch.arange(len(words)), self.weights[words]
        sums = F.embedding_bag(places, mixed, offsets, mode="sum", per_sample_weights=weights)
        return bag + sums


class Run(code_search.Run):
    """Train an encoder by a row's settings."""

    def __init__(self, part: Part, doubles: Doubles, settings: dict, seed: int):
        super().__init__(part, settings, seed)
        self.doubles = doubles
        self.encoder = Encoder(idf_of(part), seed, settings["order"])

    def step(self, index: Tensor) -> None:
        """Descend the losses of a batch, in both directions."""
        b = len(index)
        queries = self.encoder.queries(self.part.queries, index)
        documents = self.encoder(self.part.documents, index)
        more, samples = self.more_queries(index)
        candidates = torch.cat([queries, more])
        own = torch.arange(b)
        from_documents = hardneg.contrastive_loss(
            documents,
            queries,
            negatives=candidates,
            positive_index=own,
            labels=torch.cat([index, index, samples]),  # a random query may be one of the batch
            **self.options_of_loss(len(candidates) - 1),
        )
        from_queries = hardneg.contrastive_loss(
            queries,
            documents,
            negatives=documents,
            positive_index=own,
            **self.options_of_loss(b - 1),
        )
        common.descend(from_documents + from_queries, self.optimizer)

    def more_queries(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Embed the queries that join those of a batch → (S, DIM), and the samples they are of."""
        doubles = torch.isin(self.doubles.index, index).nonzero()[:, 0]
        if self.settings["extra"] == "swapped":
            samples = torch.full((len(doubles),), -1)  # of none: negatives of their own document
            return self.encoder.queries(self.doubles.texts, doubles), samples
        count = len(doubles) if self.settings["extra"] == "random" else 0
        samples = torch.randint(len(self.part), (count,), generator=self.generator)
        return self.encoder.queries(self.part.queries, samples), samples


class Blind(nn.Module):
    """Score a query without a document: the true one should score higher than its double."""

    def __init__(self, idf: Tensor, seed: int):
        super().__init__()
        self.encoder = Encoder(idf, seed)
        self.score = nn.Linear(DIM, 1, bias=False)  # a bias would know which comes first
        nn.init.zeros_(self.score.weight)

    def forward(self, part: Part, doubles: Doubles, which: Tensor) -> Tensor:
        """Compute by how much true queries score higher than their doubles → (S,)."""
        true = self.encoder(part.queries, doubles.index[which])
        swapped = self.encoder(doubles.texts, which)
        return self.score(true - swapped)[:, 0]


def train_blind(data: dict, seed: int) -> Tensor:
    """Train `Blind` → its margins of the test pairs, at its best epoch by the validation pairs."""
    generator = torch.Generator().manual_seed(seed)
    part, doubles = data["train"]
    blind = Blind(idf_of(part), seed)
    optimizer = torch.optim.Adam(blind.parameters(), BLIND_RATE, fused=True)
    best, margins = -1.0, None
    for _ in range(BLIND_EPOCHS):
        for which in torch.randperm(len(doubles.index), generator=generator).split(128):
            loss = F.softplus(-blind(part, doubles, which)).mean()
            common.descend(loss, optimizer)
        found = {}
        for name in ("validation", "test"):
            every = torch.arange(len(data[name][1].index))
            with torch.no_grad():
                found[name] = blind(*data[name], every)
        right = share_right(found["validation"])
        if right > best:
            best, margins = right, found["test"]
    return margins


# ---- Measures ----------------------------------------------------------------------------------


def share_right(margins: Tensor, weights: Tensor | None = None) -> float:
    """Compute the percentage of positive margins; ties count half."""
    right = (margins > 0).double() + (margins == 0).double() / 2
    if weights is None:
        weights = torch.ones_like(right)
    return 100 * ((weights * right).sum() / weights.sum()).item()


def balance(groups: Tensor, sides: Tensor) -> Tensor:
    """Weight members of groups such that the two sides of each weigh the same.

    The larger side weighs as much as the smaller, as if it were subsampled, without the chance."""
    counts = torch.zeros(int(groups.max()) + 1, 2, dtype=torch.float64)
    counts.index_put_((groups, sides.long()), torch.ones(len(groups)).double(), accumulate=True)
    smaller = counts.amin(1)
    return smaller[groups] / counts[groups, sides.long()]


def balances(doubles: Doubles, blind: Tensor) -> dict[str, Tensor | None]:
    """Weight pairs such that no guess from the word, and none of a blind encoder, is of use."""
    both = doubles.words.sort(1).values
    kinds = (both[:, 0] * WORDS + both[:, 1]).unique(return_inverse=True)[1]
    by_word = balance(kinds, doubles.words[:, 0] < doubles.words[:, 1])
    sizes = blind.abs().argsort().argsort()
    by_margin = balance(sizes * BINS // len(sizes), blind > 0)
    return {"all": None, "words": by_word, "blind": by_margin}


@torch.no_grad()
def judge(encoder: Encoder, part: Part, doubles: Doubles, weights: dict) -> dict[str, float]:
    """Measure an encoder on the pairs and on the retrieval of a part."""
    queries, documents = encoder.embed(part)
    every = torch.arange(len(doubles.index))
    swapped = hardneg.unit(encoder.queries(doubles.texts, every))
    gaps = queries[doubles.index] - swapped
    margins = (gaps * documents[doubles.index]).sum(1)
    figures = {name: share_right(margins, weights[name]) for name in weights}
    others = documents[doubles.index.roll(len(every) // 2)]  # far away, so of another file
    figures["other"] = share_right((gaps * others).sum(1))
    figures["mrr"] = evaluate(encoder, part)["mrr"]
    return figures


def by_count(part: Part, doubles: Doubles) -> Tensor:
    """Count the two words in each document → how much more often it has the true one."""
    margins = []
    for sample, words in zip(doubles.index.tolist(), doubles.words, strict=True):
        tokens = part.tokens[1][sample][:LONGEST]
        true, swapped = (tokens[:, None] == words).sum(0)
        margins.append(true - swapped)
    return torch.stack(margins)


# ---- Runs and results --------------------------------------------------------------------------


def compare(record: code_search.Record, data: dict, seeds: int) -> None:
    """Choose the temperature, then measure all rows, the first seed of all before the next."""
    part, doubles = data["test"]
    weights = balances(doubles, train_blind(data, SEARCH))
    sizes = {name: len(some.index) for name, (_, some) in data.items()}
    balanced = {f"{name} balanced": weights[name].sum().item() for name in ("words", "blind")}
    record.found["minimal pairs"] = sizes | balanced

    alike = SETTINGS | {"order": True, "extra": None, "rate": RATE}

    def train(settings, seed):
        run = Run(*data["train"], settings, seed)
        return run.train(f"{settings['extra']}, t = {settings['temperature']}, seed {seed}")

    def tried(temperature):
        encoder = train(alike | {"temperature": temperature}, SEARCH)
        return evaluate(encoder, data["validation"][0])["mrr"]

    def judged(settings, seed):
        return judge(train(settings, seed), part, doubles, weights)

    def right(margins_of):
        margins = margins_of()
        return {name: share_right(margins, some) for name, some in weights.items()}

    temperature = record.choose("temperature", "in-batch", TEMPERATURES, tried)
    counted = functools.partial(by_count, part, doubles)
    record.once("count of words", {}, 0, functools.partial(right, counted))
    for seed in range(seeds):
        blind = functools.partial(train_blind, data, seed)
        about = {"epochs": BLIND_EPOCHS, "rate": BLIND_RATE}
        record.once("blind", about, seed, functools.partial(right, blind))
        for row in DOUBLED:
            settings = alike | DOUBLED[row] | {"temperature": temperature}
            record.once(row, settings, seed, functools.partial(judged, settings, seed))


def main():
    """Train what is not recorded yet, and print the tables."""
    args = code_search.arguments(__doc__, "minimal_pairs")
    if not args.show:
        corpus, data = code_corpus.load(args.out), {}
        opposites = opposites_of(corpus["vocabulary"])
        for name, part in code_corpus.split(corpus).items():
            queries, documents = [lay(texts, in_order=True) for texts in part.tokens]
            in_order = Part(queries, documents, part.files, part.tokens)
            data[name] = in_order, doubles_of(part, opposites)
        compare(code_search.Record(args.record, corpus), data, args.seeds)
    print(tables.pairs(args.record))


if __name__ == "__main__":
    main()
