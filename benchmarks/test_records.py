"""Tests of the benchmarks: what their programs print stands on the pages, and is of the records."""

import importlib
import itertools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as when a program is run
import common
import debias
import papers
import pytest
import rows
import studies
import tables
import torch
from matplotlib import figure as pictures

import hardneg
import train
from training.images import Images
from training.test_training import HERE, README, write_images

PAGES = "".join(path.read_text() for path in (HERE / "benchmarks").rglob("*.md")) + README
PROGRAMS = sorted(set(HERE.glob("benchmarks/*.py")) - set(HERE.glob("benchmarks/test_*.py")))
RECORDS = sorted(common.RESULTS.glob("*.json"))


def commands():
    """Find the commands of the pages: a program and its words, those in `…` and those indented."""
    found = re.findall(r"`(?:python benchmarks/)?(\w+)\.py(?:\s([^`…]+))?`", PAGES)
    found += re.findall(r"^ +python benchmarks/(\w+)\.py (.*)$", PAGES, re.M)
    programs = {path.stem for path in PROGRAMS if "__main__" in path.read_text()}
    named = [f"{name} {words}".split() for name, words in found if name in programs]
    return list(dict.fromkeys(" ".join(words) for words in named))


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
        assert papers.table() in PAGES


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
                settled = hardneg.settle({name: getattr(now, name) for name in train.CRITERION})
                for was in (run["options"] for run in recorded[row]):
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
            assert tables.of_study(path.stem) in PAGES

    def test_claims_are_judged_by_the_recorded_runs(self):
        for gaps, said in (([1, 2, 3], "open"), ([4, 5, 6], "holds"), ([-4, -5, -6], "fails")):
            assert tables.judgement(gaps) == said
        small, large = [1.0, 1.1, 0.9, 1.0, 1.2], [0.4, 1.1, 0.2, 0.9, 1.2]  # p = 0.00003, 0.018
        assert tables.corrected([large]) == {0} and tables.corrected([large] * 3) == set()
        assert tables.corrected([small] + [large] * 3) == {0}
        assert tables.corrected([large, small, large]) == {0, 1, 2}


BY_CELL = {"cause", "cause-t", "cause-tiny"}  # the page has other tables of these
MEASURED = {"speed given": "--rounds 1", "speed mining": "--rounds 2 --sizes 10000"}  # no record
MEASURED["speed losses --one hcl --sizes 16384"] = "--sizes 64"


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
            monkeypatch.setattr(program, "trained", str)
        if name == "figures":
            for of_encoders in program.OF_ENCODERS:
                monkeypatch.setitem(program.OF_ENCODERS, of_encoders, lambda *_: pictures.Figure())
            monkeypatch.setattr(program, "sample", lambda folder: (0, 0))
        if name in ("studies", "code_search", "minimal_pairs", "speed"):
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
            assert left_out or command in MEASURED or table in PAGES
        if name == "speed" and command not in MEASURED:
            assert printed.splitlines()[0] in PAGES

    def test_corrections_are_simulated_and_trained(self):
        """The figures of debias.py, small."""
        found = debias.simulate((0.25, 0.5, 1.0), anchors=5)
        assert len(found) == len(debias.ESTIMATES)
        accuracy, uniformity, tolerance = debias.learn(debias.EXACT, True, 0, steps=2)
        assert 10 < accuracy <= 100 and uniformity < 0 < tolerance

    @pytest.mark.parametrize("path", PROGRAMS, ids=Path.stem.fget)
    def test_programs_find_hardneg_from_anywhere(self, path):
        """A program imports the module that puts the project's folder on the path."""
        text = path.read_text()
        assert "__main__" not in text or re.search("^import common$", text, re.M)
