"""Build a corpus of real text that stands on every machine that runs this project.

It is the Python of the packages that the project requires, and of the standard library, without
tests and vendored copies. A query is the first paragraph of a function's docstring, its document
the source without docstrings. Files, not pairs, are split into those for training, validation and
test. The same versions of packages give the same corpus.
"""

import ast
import dataclasses
import hashlib
import importlib.metadata
import platform
import re
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

WORDS, LONGEST = 20_000, 256  # of the vocabulary; tokens of a text that an encoder reads
LEFT_OUT = "test tests testing _vendor vendored _distutils_hack site-packages dist-packages idlelib"
LEFT_OUT = set(f"{LEFT_OUT} lib2to3 third_party extern external externals".split())


def required(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Look up installed packages, and those that they require in turn."""
    found, queue = {}, list(names)
    while queue:
        name = re.match(r"[\w.-]+", queue.pop())[0]
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            found[key] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        requirements = found[key].requires or []
        queue += [line for line in requirements if "extra ==" not in line]
    return dict(sorted(found.items()))


def source_files(packages: dict) -> dict[str, Path]:
    """List the .py files of packages and of the standard library: {relative path: path}."""
    library = Path(sysconfig.get_path("stdlib"))
    files = {}
    for path in library.rglob("*.py"):
        files[f"python/{path.relative_to(library).as_posix()}"] = path
    for package in packages.values():
        for path in package.files or []:
            files[str(path)] = Path(package.locate_file(path))
    kept = {}
    for name in sorted(files):
        parts = set(name.split("/"))
        is_test = re.match(r"test_|conftest", Path(name).name)
        if name.endswith(".py") and not parts & LEFT_OUT and not is_test and ".." not in parts:
            kept[name] = files[name]
    return kept


def pairs_of(source: str) -> list[tuple[str, str]]:
    """Find the functions of a file that say what they do → (query, document)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes
        tree = ast.parse(source)
    functions, dropped = [], set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if ast.get_docstring(node) is None:
            continue
        text = node.body[0]
        dropped.update(range(text.lineno, text.end_lineno + 1))
        if not isinstance(node, ast.ClassDef):
            functions.append(node)
    lines, pairs = source.split("\n"), []
    for node in functions:
        paragraph = re.split(r"\n\s*\n", ast.get_docstring(node).strip())[0]
        words = paragraph.split()
        on_one_line = node.body[0].lineno == node.lineno
        if not 4 <= len(words) <= 60 or on_one_line:
            continue
        numbers = range(node.lineno, node.end_lineno + 1)
        rest = [lines[k - 1] for k in numbers if k not in dropped]
        pairs.append((" ".join(words), "\n".join(rest).strip()))
    return pairs


def read_pairs(files: dict[str, Path]) -> list[tuple[str, str, str]]:
    """Read all files → (file, query, document), where no query and no document comes twice."""
    pairs, queries, documents = [], set(), set()
    for name, path in tqdm(files.items(), "corpus", unit=" files"):
        try:
            found = pairs_of(path.read_text("utf-8"))
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # a template, or an example of bad code
        for query, document in found:
            if query not in queries and document not in documents:
                pairs.append((name, query, document))
            queries.add(query)
            documents.add(document)
    return pairs


def part_of(name: str) -> str:
    """Say where the pairs of a file belong: a sixth of all, the same on every machine, is test."""
    for part in ("test", "validation"):
        digest = hashlib.sha256(f"{part} {name}".encode()).digest()
        if int.from_bytes(digest[:8], "big") % 6 == 0:
            return part
    return "train"


def tokens_of(text: str) -> list[str]:
    """Split text at case changes, underscores and all that is no letter: HTTPServer → http server.

    Letters are those of ASCII."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)
    return [word.lower() for word in words]


def build(packages: dict) -> dict:
    """Parse all files → tokens as numbers, the most frequent of the training files first."""
    pairs = read_pairs(source_files(packages))
    text = "".join(f"{query}\0{document}\0" for _, query, document in pairs)
    parts = [part_of(name) for name, _, _ in pairs]
    texts = {"queries": [tokens_of(query) for _, query, _ in tqdm(pairs, "queries")]}
    texts["documents"] = [tokens_of(document) for _, _, document in tqdm(pairs, "documents")]
    frequent, others = Counter(), Counter()
    for lists in texts.values():
        for tokens, part in zip(lists, parts, strict=True):
            counter = frequent if part == "train" else others
            counter.update(tokens)
    by_frequency = sorted(frequent, key=lambda word: (-frequent[word], word))
    vocabulary = by_frequency + sorted(others.keys() - frequent.keys())
    number = {word: k for k, word in enumerate(vocabulary)}
    corpus = {
        "pairs": len(pairs),
        "sha256": hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(),
        "files": [name for name, _, _ in pairs],
        "parts": parts,
        "vocabulary": vocabulary,
    }
    for kind, lists in texts.items():
        numbers = [number[word] for tokens in lists for word in tokens]
        corpus[kind] = torch.tensor(numbers)
        corpus[f"lengths of {kind}"] = [len(tokens) for tokens in lists]
    return corpus


def load(out: Path) -> dict:
    """Read the parsed corpus from a folder, or build it there."""
    requirements = Path(__file__).resolve().parent.parent / "requirements.txt"
    packages = required(requirements.read_text().split())
    versions = {name: package.version for name, package in packages.items()}
    versions["python"] = platform.python_version()
    path = out / "corpus.pt"
    if path.exists():
        corpus = torch.load(path)
        if corpus["versions"] == versions:
            return corpus
    corpus = build(packages) | {"versions": versions}
    out.mkdir(parents=True, exist_ok=True)
    torch.save(corpus, path)
    return corpus


@dataclasses.dataclass
class Texts:
    """Hold bags of words: those of text i are words[starts[i] : starts[i + 1]], with counts."""

    words: Tensor
    counts: Tensor
    starts: Tensor

    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Put some bags behind one another → words, counts, where each begins."""
        starts = self.starts[index]
        lengths = self.starts[index + 1] - starts
        offsets = lengths.cumsum(0) - lengths
        shifts = (starts - offsets).repeat_interleave(lengths)
        places = torch.arange(len(shifts)) + shifts
        return self.words[places], self.counts[places], offsets


def lay(texts: list[Tensor]) -> Texts:
    """Lay the words of texts that are in the vocabulary behind one another.

    A bag has each of its words once, with a count."""
    words, counts = [], []
    for tokens in texts:
        read = tokens[:LONGEST]
        known = read[read < WORDS]
        known, times = known.unique(return_counts=True)
        words.append(known)
        counts.append(times.float())
    lengths = torch.tensor([0] + [len(some) for some in words])
    return Texts(torch.cat(words), torch.cat(counts), lengths.cumsum(0))


@dataclasses.dataclass
class Part:
    """Hold the pairs of the files for training, validation or test."""

    queries: Texts
    documents: Texts
    files: Tensor  # (n,), the number of each pair's file
    tokens: tuple[list, list]  # of queries and documents, whole, for BM25

    def __len__(self):
        return len(self.files)


def split(corpus: dict) -> dict[str, Part]:
    """Split a corpus by file."""
    all_queries = corpus["queries"].split(corpus["lengths of queries"])
    all_documents = corpus["documents"].split(corpus["lengths of documents"])
    parts = {}
    for part in ("train", "validation", "test"):
        index = [k for k, of_pair in enumerate(corpus["parts"]) if of_pair == part]
        queries = [all_queries[k] for k in index]
        documents = [all_documents[k] for k in index]
        names = [corpus["files"][k] for k in index]
        number = {name: k for k, name in enumerate(dict.fromkeys(names))}
        files = torch.tensor([number[name] for name in names])
        parts[part] = Part(lay(queries), lay(documents), files, (queries, documents))
    return parts
