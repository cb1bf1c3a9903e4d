"""Tests of the pages: what README, tutorial and benchmarks say runs, and prints what they say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import hardneg
import train
from hardneg import contrastive_loss

HERE = Path(__file__).resolve().parent
README, MORE = ((HERE / folder / "README.md").read_text() for folder in (".", "benchmarks"))
PRESETS = sorted(hardneg.PRESETS)
# a process of its own has one thread: more would wait for each other
ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}


# ---- Helpers
def start(words, folder):
    """Start Python with these words in a folder, and record what it prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=ALONE, **pipes)


def embeddings(seed, *shape):
    """Draw normal numbers as a tensor in float64."""
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape))


def blocks(language):
    """Return the README's blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def headings(page):
    """Return the anchors of the headings of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


def statements():
    """List the statements of the README's block of calls, those of several lines in one."""
    block = README.split("## Coming from")[1].split("```")[1]
    found, code = [], ""
    for line in re.findall(r"^    (.*)", block, re.M):
        code = f"{code} {line.strip()}".strip()
        if code.count("(") == code.count(")"):
            found.append(code)
            code = ""
    return found


COMMANDS = re.findall(r"train\.py([^#&\n]*)", "".join(blocks("sh")))
COMMANDS += re.findall(r"\| `(--.*?)` \|", README + MORE)


class TestReadme:
    """Snippets, calls and commands run; the map has every name."""

    FIT = """
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
loader = torch.utils.data.DataLoader(torch.rand(32, 2, 3, 32, 32), batch_size=16)
lightning.Trainer(max_epochs=1, **quiet).fit(Model(), loader)
"""

    @pytest.mark.parametrize("needs", ["torch alone", "lightning"])
    def test_snippets_print_what_their_comments_say(self, tmp_path, needs):
        shutil.copy(HERE / "hardneg.py", tmp_path)
        hidden = {}
        if needs == "lightning":
            pytest.importorskip("lightning")
        else:
            hidden = dict.fromkeys(("torchvision", "numpy", "scipy", "tqdm", "matplotlib", "PIL"))
            encoder, some = hardneg.Encoder("small").eval(), torch.rand(2, 3, 32, 32)
            sizes = ({0: torch.export.Dim("n")},)
            program = torch.export.export(encoder, (some,), dynamic_shapes=sizes)
            torch.export.save(program, tmp_path / "encoder.pt2")
        hide = f"import sys; sys.modules.update({hidden})\n"
        codes = [
            code for code in blocks("python") if ("lightning" in code) == (needs == "lightning")
        ]
        fit = self.FIT if needs == "lightning" else ""
        runs = [start(["-W", "ignore", "-c", hide + code + fit], tmp_path) for code in codes]
        for code, run in zip(codes, runs, strict=True):
            out, error = run.communicate()
            comments, lines = re.findall(r"#\s*(.*)", code), out.strip().splitlines()
            said = [any(comment.startswith(line) for comment in comments) for line in lines]
            assert lines and all(said), error or lines

    def test_the_map_has_every_public_name_and_preset(self):
        rows = "\n".join(re.findall(r"^\| \d.*", README, re.M))  # of the table of sections
        own = {k: x for k, x in vars(hardneg).items() if getattr(x, "__module__", "") == "hardneg"}
        public = {name: x for name, x in own.items() if name[0] != "_"}
        assert len(public) > 40 and all(x.__doc__ for x in public.values())
        names = *public, "PRESETS", "WEIGHTS", "OBJECTIVES", "RECIPES"
        assert not [name for name in names if f"`{name}`" not in rows]
        assert not [loss for loss in PRESETS if f"| `{loss}` |" not in README]

    def test_a_star_import_takes_what_is_listed(self):
        names = {}
        exec("from hardneg import *", names)
        assert set(hardneg.__all__) == names.keys() - {"__builtins__"}
        assert not {"top", "view", "simple"} & names.keys()

    def test_the_header_says_what_it_is(self):
        header = hardneg.__doc__.split("Symbols")[0]
        version = re.search('version = "(.*)"', (HERE / "pyproject.toml").read_text())[1]
        assert hardneg.__version__ == version and f"Version {version}" in header
        assert "MIT licence" in header and "Copyright" in header

    @pytest.mark.parametrize("words", sorted(set(COMMANDS)))
    def test_commands_parse(self, words):
        given = train.parse(words.split())
        others = {"compare", "seeds"}
        train.Options(**{name: x for name, x in given.items() if name not in others})

    def test_set_up_commands_are_those_of_ci(self):
        commands, ci = "".join(blocks("sh")), (HERE / ".ci" / "run").read_text()
        parts = "python3 -m venv .venv", "r requirements.txt", ".venv/bin/python -m pytest -q"
        for part in parts:
            assert part in commands and part in ci

    def test_links_lead_to_files_and_headings(self):
        paths = [HERE / "README.md", HERE / "tutorial" / "README.md"]
        paths += (HERE / "benchmarks").glob("*.md")
        for path in paths:
            for link, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text()):
                if link.startswith("https://"):
                    continue
                target = path.parent / link if link else path
                assert target.stat().st_size > 1000, link
                assert not heading or heading in headings(target), heading


class TestCalls:
    """README's calls give the values of the packages that they stand for.

    Each package ran once, on the CPU in float64: lightly 1.6.0, pytorch-metric-learning 2.9.0,
    info-nce-pytorch 0.1.4, open_clip 3.3.0 and sentence-transformers 6.2.0, in README's order.
    Compared are the loss, and the norm and one projection of its gradient.
    """

    CALLS = [  # value, norm, projection
        (2.98841832198, 1.08630541418, 0.727559923599),
        (2.83405002174, 1.15381455348, 0.56528918891),
        (2.04514859482, 1.08018365701, 0.778002641582),
        (2.79175843402, 0.933170347727, 0.347625347815),
        (1.17761394216, 0.999321930125, 1.56922649859),
        (2.79175843402, 0.933170347727, 0.347625347815),
        (3.99845144176, 2.92790991494, 2.90986489536),
        (3.17041338841, 0.977547868993, 0.522631071643),
        (4.51519113613, 1.04841234185, 0.447859253384),
        (3.43595912137, 0.558609503361, 0.343165064833),
    ]

    def test_calls_of_the_readme(self):
        calls = [code for code in statements() if re.match(r"\(?contrastive_loss", code)]
        calls.insert(3, calls[3])  # negatives for all, and for each
        names = {"torch": torch, "contrastive_loss": contrastive_loss, "a": 3.0, "t": 0.2}
        names |= {"i": torch.arange(6), "c": torch.arange(6) % 3, "y": embeddings(2, 6, 8)}
        x, direction = embeddings(1, 6, 8).requires_grad_(), embeddings(5, 6, 8)
        scale = torch.tensor(12.5, dtype=torch.float64, requires_grad=True)
        each, queue = embeddings(3, 6, 2, 8), embeddings(4, 9, 8)
        names |= {"x": x, "scale": scale, "queue": queue}
        names["rows"] = torch.cat([names["y"], each.flatten(0, 1)])
        assert "rows = torch.cat([y, n.flatten(0, 1)])" in statements()
        for k, (call, expected) in enumerate(zip(calls, self.CALLS, strict=True)):
            value = eval(call, names | {"n": queue if k == 3 else each})
            (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
            figures = value.item(), gradient.norm().item(), (gradient * direction).sum().item()
            np.testing.assert_allclose(figures, expected, 1e-10)
            if "scale" in call:
                slope = float(torch.autograd.grad(value, scale)[0])
                assert slope == pytest.approx(0.273304946416, rel=1e-10)

    def test_graded_relevance(self):
        """−Σ g_pq log( e^{s_pq} / (e^{s_pq} + Σ e^s over documents without relevance) ) / Σ g."""
        x, y = embeddings(0, 2, 6, 8)
        relevance = np.maximum(0, np.random.default_rng(3).integers(-2, 4, (6, 6)))
        p, q = np.nonzero(relevance)
        g = torch.tensor(relevance[p, q])
        losses, mean = (code for code in statements() if "losses" in code)
        s = (F.normalize(x) @ F.normalize(y).T / 0.1).numpy()
        want = 0
        for i, j in zip(p, q, strict=True):
            others = np.exp(s[i][relevance[i] == 0]).sum()
            want += relevance[i, j] * np.log1p(others / np.exp(s[i, j]))
        names = {"contrastive_loss": contrastive_loss, "x": x, "y": y, "p": p, "q": q, "g": g}
        names["off"] = torch.tensor(relevance == 0)
        exec(losses, names)
        assert float(eval(mean, names)) == pytest.approx(want / relevance.sum(), rel=1e-12)


class TestTutorial:
    """The page of tutorial/ runs, and says what its steps print."""

    PAGE = (HERE / "tutorial" / "README.md").read_text()

    def test_the_page_runs(self, capsys):
        """One seed of its three, which moves a result by less than two points."""
        code = "\n".join(re.findall(r"```python\n(.*?)```", self.PAGE, re.S))
        try:
            exec(code.replace("in range(3)", "in range(1)"), {})
        finally:
            torch.set_default_dtype(torch.float32)  # the page computes in float64
        printed = [float(line.rstrip(" %")) for line in capsys.readouterr().out.splitlines()]
        said = [float(x) for x in re.findall(r"^(?:step|train)\(.*\)  # (.*) %$", code, re.M)]
        assert len(said) == 14
        np.testing.assert_allclose(printed, said, atol=2.0)

    def test_pictures_are_there(self):
        for name in re.findall(r"!\[.*?\]\((.*?)\)", self.PAGE):
            assert (HERE / "tutorial" / name).exists(), name
