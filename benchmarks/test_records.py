"""Tests of the benchmarks: what their programs print stands on the pages, and is of the records."""

import importlib
import itertools
import math
import re
import sys
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as when a program is run
import common
import debias
import formula
import numpy as np
import papers
import pytest
import rows
import speed
import studies
import tables
import torch
from matplotlib import figure as pictures

import hardneg
import train
from training import report
from training.images import Images
from training.test_training import HERE, README, write_images

FOLDER = HERE / "benchmarks"
PAGES = {path: path.read_text() for path in sorted(FOLDER.rglob("*.md"))}
ALL = "".join(PAGES.values()) + README
FRONT = PAGES[FOLDER / "README.md"]
PROGRAMS = sorted(set(FOLDER.glob("*.py")) - set(FOLDER.glob("test_*.py")))
RECORDS = sorted(common.RESULTS.glob("*.json"))


def commands(text=ALL):
    """Find the commands of a text: a program and its words, those in `…` and those indented."""
    found = re.findall(r"`(?:python benchmarks/)?(\w+)\.py(?:\s([^`…]+))?`", text)
    found += re.findall(r"^ +python benchmarks/(\w+)\.py (.*)$", text, re.M)
    programs = {path.stem for path in PROGRAMS if "__main__" in path.read_text()}
    named = [f"{name} {words}".split() for name, words in found if name in programs]
    return list(dict.fromkeys(" ".join(words) for words in named))


def records_of(text):
    """Return the names of the records that commands of a text show."""
    words = {word for command in commands(text) for word in command.split()}
    return words & {path.stem for path in RECORDS}


def cells_of(text):
    """Return the tables of a text, each a list of lines, each a list of cells."""
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.M)
    return [
        [re.split(r" *\| *", line.strip("|").strip()) for line in table.splitlines()]
        for table in tables
    ]


class TestPapers:
    """benchmarks/papers.py: the commands in the papers' own settings."""

    @pytest.mark.parametrize(
        "headline", papers.HEADLINES, ids=lambda line: line.split("|")[1].strip()
    )
    def test_each_command_trains(self, headline):
        """Two steps on small random images, in small batches."""
        options = papers.options_of(headline)
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8, generator=generator)
        labels = torch.arange(8) // 4
        some = Images(pixels, labels, pixels, labels, ["a", "b"])
        small = {"device": "cpu", "batch_size": 2, "out": None}
        if options.method == "diffhard":
            small |= {"width": 2, "pretrain": 1, "every": 1}
        encoder, training = train.build(options.but(**small), some)
        before = [p.clone() for p in encoder.parameters()]
        after_pretraining = (step for step in training if "loss" in step)
        steps = list(itertools.islice(after_pretraining, 2))
        assert len(steps) == 2 and all(step["loss"].isfinite() for step in steps)
        assert any(not torch.equal(p, q) for p, q in zip(before, encoder.parameters(), strict=True))

    def test_the_page_has_them(self):
        assert papers.table() in ALL


class TestStudies:
    """benchmarks/studies.py: runs of a study, and what is measured after them."""

    def test_a_study_is_recorded_with_its_fine_tuning(self, tmp_path, monkeypatch):
        """Also where the runs were there before."""
        monkeypatch.setattr(studies, "STEPS", 2)
        monkeypatch.setattr(common, "RESULTS", tmp_path)
        monkeypatch.setattr(studies, "LABELLED", 0.5)
        data = tmp_path / "images"
        for part in ("train", "test"):
            write_images(data / part)
        of_rows = {"SimCLR": "--loss simclr", "hcl": "--loss hcl --temperature 0.2"}
        small = rows.Study("cifar10", [3], "--batch-size 4 --epochs 1 --lr 0.001", of_rows)
        monkeypatch.setitem(rows.STUDIES, "finetune-tenth", small)
        for _ in range(2):
            studies.study("finetune-tenth", {"cifar10": data}, tmp_path / "out")
            found = common.read("finetune-tenth")
            assert found.keys() == of_rows.keys()
            runs_of_seed = [results[0] for results in found.values()]
            assert {run["seed"] for run in runs_of_seed} == {3}
            assert len({run["untrained"]["finetuned"] for run in runs_of_seed}) == 1
            assert all("finetuned" in run for run in runs_of_seed)
            assert "fine-tuned %" in tables.of_study("finetune-tenth")
        assert found["hcl"][0]["options"]["temperature"] == 0.2
        assert found["hcl"][0]["data"] == "cifar10"

    def test_rows_say_what_their_runs_were_trained_with(self, monkeypatch, tmp_path):
        """The loss's options of a record are those of its row, whatever the defaults become."""
        monkeypatch.setattr(studies, "first_classes", lambda folder, n, out: folder)
        folders = {name: tmp_path for name in ("shapes", "cifar10", "tiny")}
        compared = 0
        for path in RECORDS:
            if path.stem not in rows.STUDIES:
                continue
            _, plan = studies.plan_of(path.stem, folders, tmp_path)
            recorded = common.read(path.stem)
            for row in plan.keys() & recorded.keys():  # the program no longer has some rows
                now = plan[row][0]
                settled = hardneg.resolve({name: getattr(now, name) for name in train.CRITERION})
                for was in (run["options"] for run in recorded[row]):
                    if was.get("kappa"):  # once an option of the cost `exp`, which rescales ε
                        scaled = was["epsilon"] * math.exp(was["kappa"])
                        was = was | {"epsilon": round(scaled, 7)}
                    for name in filter(now.has_effect, train.CRITERION):
                        if was.get(name) is not None:  # older records leave None open
                            assert was[name] == settled[name], (path.stem, row, name)
                            compared += 1
        assert compared > 1000

    def test_gains_in_the_course_of_the_runs_are_paired_by_seed(self, monkeypatch):
        """Of several epochs that were measured, each has a line."""

        def run_of(seed, *accuracies):
            history = [{"epoch": 1, "loss": 3.0}]
            history += [{"epoch": 2 * k, "knn": x} for k, x in enumerate(accuracies, 1)]
            return {"seed": seed, "history": history}

        found = {
            "hcl": [run_of(1, 43.0, 50.0), run_of(0, 41.0, 47.0)],
            "simclr": [run_of(0, 40.0, 44.0), run_of(1, 42.0, 46.0)],
        }
        monkeypatch.setattr(common, "read", lambda name: found)
        lines = tables.course().splitlines()
        assert lines[0] == "| epoch | `simclr`, kNN % | `hcl`, gain |"
        factor = 12.706  # Student's for two differences
        assert lines[2:] == [
            "| 2 | 41.0 ± 1.4 | +1.0 ± 0.0 |",
            f"| 4 | 45.0 ± 1.4 | +3.5 ± {factor * 0.5:.1f} |",
        ]


class TestFormula:
    """benchmarks/formula.py: rows with weights beside a plain curve."""

    def test_a_row_that_is_plain_at_its_temperature_has_no_gap(self, monkeypatch):
        """Where the curve is straight over log t, and only over the seeds that both have."""

        def row_of(kind, t, beta, seeds):
            cold = formula.Row("x", kind, t, beta, 0.0, 0.2, {}).cold()
            values = {seed: np.array([10 * seed + math.log(cold)]) for seed in seeds}
            return formula.Row("x", kind, t, beta, 0.0, 0.2, {"linear": values, "knn": values})

        curve = [row_of("plain", 0.1, 0, [0, 1]), row_of("plain", 0.4, 0, [1, 2, 3])]
        monkeypatch.setattr(formula, "CURVES", {"x": curve})
        for kind, c in (("tilted", 2), ("tilted, held", 1), ("`ot`, held", 1)):
            row = row_of(kind, 0.2 * (1 + 0.5 * c), 0.5, [1, 2, 4])
            assert row.is_reached() and row.cold() == pytest.approx(0.2)
            assert row.gaps("knn", row.cold()) == pytest.approx(0, abs=1e-12)
            assert row.gaps("knn", row.t) == pytest.approx(-math.log(1 + 0.5 * c))
        assert not row_of("tilted", 0.15, 0.5, [1]).is_reached()
        assert not row_of("tilted", 0.3, 0.5, [0]).is_reached()

    def test_sigma_by_uniformity_is_as_the_page_says(self):
        """Of two records that have both; at β = 6 the mean cosine is not 0."""
        ratios = []
        for [run] in (common.read("beta-6") | common.read("cost-course")).values():
            if run["options"].get("beta") != 6:
                ratios.append(formula.normal_of(run) / run["history"][-1]["spread"])
        said = f"is\n{min(ratios):.2f} to {max(ratios):.2f} times σ"
        assert said in PAGES[FOLDER / "studies" / "formula.md"]


class TestRecords:
    """Records stand on the pages, and claims are judged by them."""

    @pytest.mark.parametrize("path", RECORDS, ids=Path.stem.fget)
    def test_every_record_stands_on_a_page(self, path):
        """With all its runs, unless it is registered and not at its end."""
        if path.stem not in rows.STUDIES:
            assert any(path.stem in command.split() for command in commands())
            return
        study, found = rows.STUDIES[path.stem], common.read(path.stem)
        assert all(run["seed"] in study.seeds for some in found.values() for run in some)
        runs = [found.get(row, []) for row in study.rows]
        if path.stem.startswith("pays") and min(map(len, runs)) < len(study.seeds):
            return
        assert len({len(some) for some in found.values()}) == 1
        if path.stem not in BY_CELL:
            places = [text for text in PAGES.values() if path.stem in records_of(text)]
            assert any(tables.of_study(path.stem) in text for text in places)

    def test_claims_are_judged_by_the_recorded_runs(self):
        for gaps, said in (([1, 2, 3], "open"), ([4, 5, 6], "holds"), ([-4, -5, -6], "fails")):
            assert tables.judgement(gaps) == said
        small, large = [1.0, 1.1, 0.9, 1.0, 1.2], [0.4, 1.1, 0.2, 0.9, 1.2]  # p = 0.00003, 0.018
        assert tables.corrected([large]) == {0} and tables.corrected([large] * 3) == set()
        assert tables.corrected([small] + [large] * 3) == {0}
        assert tables.corrected([large, small, large]) == {0, 1, 2}


BY_CELL = {"cause", "cause-t", "cause-tiny"}  # the page has other tables of these
MEASURED = {"speed mining": "--rounds 2 --sizes 10000"}  # no record
MEASURED["speed losses --one hcl --sizes 16384"] = "--sizes 64"


MEASURES = "linear knn uniformity tolerance finetuned transfer mrr all words blind other".split()
INTERVAL = r"(\d+\.\d+) ± (\d+\.\d+)"


def figures_of(study):
    """Return what a record measured, {row: {measure: {seed: value}}}, kNN of each epoch as well."""
    rows, found = {}, common.read(study)
    if study in ("explicit", "graphs"):
        for row, of_row in found.items():
            rows[row] = {title: dict(enumerate(values)) for title, values in of_row.items()}
        return rows
    for row, runs in tables.rows_of(study).items():
        of_row = rows[row] = {}
        for run in runs:
            values = {name: run[name] for name in MEASURES if name in run}
            course = [entry for entry in run.get("history", []) if "knn" in entry]
            values |= {entry["epoch"]: entry["knn"] for entry in course}
            if course:
                values["change"] = course[-1]["knn"] - course[0]["knn"]
            for name, value in values.items():
                of_row.setdefault(name, {})[run["seed"]] = value
    return rows


def differences_of(study):
    """List the differences of a study's rows: one value for each seed.

    Of the cells of cause.md those of one factor, elsewhere those of any two rows."""
    samples, means = [], []
    if study in rows.STUDIES:
        both = itertools.product(tables.MEANS, ("linear", "knn"))
        means = [some for some in itertools.starmap(partial(tables.gaps_of, study), both) if some]
    for one, other in itertools.combinations(means, 2):
        samples.append([x - y for x, y in zip(one, other, strict=True)])
    if study.startswith("cause"):
        some = itertools.product(tables.PAIRS, ("linear", "knn"), rows.EFFECTIVE)
        return samples + means + [tables.gaps_of(study, *words) for words in some]
    for one, other in itertools.combinations(figures_of(study).values(), 2):
        samples += paired(one, other, one.keys() & other.keys())
    return samples + means


def paired(one, other, measures):
    """List the differences of two rows by each measure."""
    samples = []
    for name in measures:
        others, some = sorted((one[name], other[name]), key=len)
        if len(others) == 1:  # a row without seeds
            others = dict.fromkeys(some, *others.values())
        samples.append([some[seed] - others[seed] for seed in some.keys() & others.keys()])
    return samples


@cache
def intervals_of(path):
    """Return the differences of the studies of a page, with intervals, without signs."""
    studied = records_of(PAGES[path]) - {"losses", "loop", "folder"}
    samples = [gaps for study in studied for gaps in differences_of(study)]
    if "finetune-all" in studied:  # its rows are compared with those of another study
        for one in figures_of("finetune-tenth").values():
            samples += paired(one, figures_of("finetune-all")["SimCLR"], ["finetuned"])
    for study in studied & {"pays-decoupled", "pays-rates"}:  # added to the study of before
        both = itertools.product(figures_of("pays-cifar10").values(), figures_of(study).values())
        for row, added in both:
            samples += paired(row, added, ["linear", "knn"])
    written = {report.gain(gaps, k) for gaps in samples if len(gaps) > 1 for k in (1, 2)}
    return {text.lstrip("+-") for text in written}


def paragraphs_of(path):
    """Yield the paragraphs of a page and the pages they are about: itself and those they link to.

    An item of a list is a paragraph, a table is none."""
    for text in re.split(r"\n\n|\n(?=- |\d\. )", PAGES[path]):
        if not text.startswith("|"):
            links = {path.parent / link for link in re.findall(r"\]\(([^)#]*\.md)", text)}
            yield " ".join(text.split()), {path} | {link.resolve() for link in links} & PAGES.keys()


class TestPages:
    """What pages say in their own words is of the records, too."""

    @pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
    def test_intervals_in_prose_are_differences_of_recorded_rows(self, path):
        """Of the page's studies, or of those of a page that the paragraph links to."""
        for text, places in paragraphs_of(path):
            known = set().union(*map(intervals_of, places))
            said = [" ± ".join(pair) for pair in re.findall(INTERVAL, text)]
            assert not [interval for interval in said if interval not in known], text

    def test_the_front_page_is_short(self):
        lines = FRONT.splitlines()
        assert len(lines) <= 200 and max(map(len, lines)) <= 100

    def test_claims_of_the_front_page_are_those_of_the_table(self):
        """With gain, number of seeds and judgement, of a study of the page that is linked."""
        [shown] = [table for table in cells_of(FRONT) if table[0][0] == "claim"]
        [judged] = cells_of(tables.claims())
        assert 5 < len(shown[2:]) <= 10
        for _, gain, n, linked in shown[2:]:
            judgement, link = re.fullmatch(r"\[(.*)\]\((.*)\)", linked).groups()
            here = records_of(PAGES[FOLDER / link])
            assert any(
                line[3:6] == [gain, n, judgement] and line[6].strip("`") in here for line in judged
            )

    def test_times_of_the_front_page_are_those_of_the_record(self):
        """A column names a unit and a size."""
        [shown] = [table for table in cells_of(FRONT) if table[0][0] == "loss"]
        milliseconds, memory, _ = cells_of(speed.show_losses(common.read("losses")))
        for title, *cells in zip(*shown, strict=True):
            unit, _, size = title.partition(", ")
            if size:
                table = memory if unit == "MiB" else milliseconds
                of_row = {line[0]: line[table[0].index(size)] for line in table}
                assert cells[1:] == [of_row[line[0]] for line in shown[2:]]


class TestCommands:
    """Every command of the pages runs; what it shows of a record stands on a page."""

    @pytest.mark.parametrize("command", commands())
    def test_it_shows_what_the_pages_have(self, command, monkeypatch, capsys):
        name, *words = command.split()
        program = importlib.import_module(name)
        drawn = []
        monkeypatch.setattr(pictures.Figure, "savefig", lambda *_, **__: drawn.append(1))
        if name == "debias":
            monkeypatch.setattr(program, "SETTINGS", [])
        if name == "figures":
            for of_encoders in program.OF_ENCODERS:
                monkeypatch.setitem(program.OF_ENCODERS, of_encoders, lambda *_: pictures.Figure())
            monkeypatch.setattr(program, "sample", lambda folder: (0, 0))
        if name in ("studies", "code_search", "minimal_pairs", "speed", "sentences"):
            words.append("--show")
        if command in MEASURED:
            words.remove("--show")
            words += MEASURED[command].split()
            monkeypatch.setattr(program, "apart", lambda *_: 0.0)
        monkeypatch.setattr(sys, "argv", [name, *words])
        program.main()
        printed = capsys.readouterr().out
        assert printed or drawn
        for table in re.findall(r"(?:^\|.*\n)+", printed, re.M):
            left_out = BY_CELL & set(words) or "pays" in command
            assert left_out or command in MEASURED or table in ALL
        if name == "speed" and command not in MEASURED:
            assert printed.splitlines()[0] in ALL

    def test_corrections_are_simulated(self):
        """The figures of debias.py, small."""
        found = debias.simulate((0.25, 0.5, 1.0), anchors=5)
        assert len(found) == len(debias.ESTIMATES)

    @pytest.mark.parametrize("path", PROGRAMS, ids=Path.stem.fget)
    def test_programs_find_hardneg_from_anywhere(self, path):
        """A program imports the module that puts the project's folder on the path."""
        text = path.read_text()
        assert "__main__" not in text or re.search("^import common$", text, re.M)
