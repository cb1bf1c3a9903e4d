"""Tests of the benchmarks: what their programs print stands on the pages, and is of the records."""

import importlib
import itertools
import json
import re
from pathlib import Path

import pytest
import torch

import hardneg
import train
from benchmarks import papers
from training.images import Images
from training.test_training import HERE, MORE, README, write_images

CAUSE = (HERE / "benchmarks" / "CAUSE.md").read_text()


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    """Let the programs import each other, as they do when they are run."""
    monkeypatch.syspath_prepend(str(HERE / "benchmarks"))


class TestPapers:
    """benchmarks/papers.py: the commands in the papers' own settings."""

    @pytest.mark.parametrize("headline", papers.HEADLINES, ids=lambda h: h.claim)
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
        assert papers.table() in MORE


class TestStudies:
    """benchmarks/studies.py: runs of a study, and what is measured after them."""

    def test_a_study_is_recorded_with_its_fine_tuning(self, tmp_path, monkeypatch):
        """Also where the runs were there before."""
        studies = importlib.import_module("studies")
        monkeypatch.setattr(studies, "STEPS", 2)
        monkeypatch.setattr(studies, "HERE", tmp_path)
        monkeypatch.setattr(studies, "LABELLED", 0.5)
        data = tmp_path / "images"
        for part in ("train", "test"):
            write_images(data / part)
        common = dict(batch_size=4, epochs=1, lr=0.001)
        rows = {"SimCLR": dict(loss="simclr"), "hcl": dict(loss="hcl", temperature=0.2)}
        small = ("cifar10", [3], common, rows)
        monkeypatch.setitem(studies.STUDIES, "finetune-tenth", small)
        (tmp_path / "results").mkdir()
        for _ in range(2):
            studies.study("finetune-tenth", {"cifar10": data}, tmp_path / "out")
            found = studies.read("finetune-tenth")
            assert found.keys() == rows.keys()
            runs_of_seed = [results[0] for results in found.values()]
            assert {run["seed"] for run in runs_of_seed} == {3}
            assert len({run["untrained"]["finetuned"] for run in runs_of_seed}) == 1
            assert all("finetuned" in run for run in runs_of_seed)
            assert "fine-tuned %" in studies.table("finetune-tenth")
        assert found["hcl"][0]["options"]["temperature"] == 0.2
        assert found["hcl"][0]["data"] == "cifar10"

    def test_rows_say_what_their_runs_were_trained_with(self, monkeypatch, tmp_path):
        """The loss's options of a record are those of its row, whatever the defaults become."""
        studies = importlib.import_module("studies")
        monkeypatch.setattr(studies, "first_classes", lambda folder, n, out: folder)
        folders = {name: tmp_path for name in ("shapes", "cifar10", "tiny")}
        compared = 0
        for path in (HERE / "benchmarks" / "results").glob("*.json"):
            if path.stem not in studies.STUDIES:
                continue
            _, plan = studies.plan_of(path.stem, folders, tmp_path)
            recorded = studies.read(path.stem)
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
        studies = importlib.import_module("studies")

        def run_of(seed, *accuracies):
            history = [{"epoch": 1, "loss": 3.0}]
            history += [{"epoch": 2 * k, "knn": x} for k, x in enumerate(accuracies, 1)]
            return {"seed": seed, "history": history}

        found = {
            "hcl": [run_of(1, 43.0, 50.0), run_of(0, 41.0, 47.0)],
            "simclr": [run_of(0, 40.0, 44.0), run_of(1, 42.0, 46.0)],
        }
        monkeypatch.setattr(studies, "read", lambda name: found)
        lines = studies.progress("long").splitlines()
        assert lines[0] == "| epoch | `simclr`, kNN % | `hcl`, gain |"
        factor = 12.706  # Student's for two differences
        assert lines[2:] == [
            "| 2 | 41.0 ± 1.4 | +1.0 ± 0.0 |",
            f"| 4 | 45.0 ± 1.4 | +3.5 ± {factor * 0.5:.1f} |",
        ]


class TestRecords:
    """Tables are of the recorded runs, and claims are judged by them."""

    @pytest.mark.parametrize(
        "path", sorted((HERE / "benchmarks").rglob("*.json")), ids=Path.stem.fget
    )
    def test_tables_are_of_the_recorded_runs(self, path, monkeypatch):
        """All rows are shown, and no others below the same header."""
        results, text = json.loads(path.read_text()), f"{README}\n{MORE}\n{CAUSE}"
        has_program = (HERE / "benchmarks" / f"{path.stem}.py").exists()
        program = importlib.import_module(path.stem if has_program else "studies")
        is_study = not has_program
        if path.stem.startswith("cause"):
            return  # these have a page of their own
        if is_study and set(results) != set(program.STUDIES[path.stem][3]):
            return  # it is not at its end
        if hasattr(program, "Results"):
            results = program.Results(path, {})
        for table in program.table(path.stem if is_study else results).split("\n\n"):
            header, rows = table.strip().split("\n", 1)
            shown = re.findall(rf"^{re.escape(header)}\n((?:\|.*\n?)*)", text, re.M)
            if is_study and rows in "\n".join(shown):
                continue
            lines = {line for part in shown for line in part.splitlines()}
            assert lines == set(rows.splitlines())
        if hasattr(program, "brief"):
            assert program.brief(results) in README
        if hasattr(program, "heading"):
            assert program.heading(results) in text
        if is_study:
            assert program.summary() in README
            seeds = program.STUDIES[path.stem][1]
            counts = {len(some) for some in results.values()}
            assert len(counts) == 1
            assert all(run["seed"] in seeds for some in results.values() for run in some)

    PROGRAMS = sorted((HERE / "benchmarks").glob("*.py"))

    @pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
    def test_programs_find_hardneg_from_anywhere(self, path):
        """A program puts the project's folder on the path, or imports one that does."""
        text = path.read_text()
        finds = "sys.path.insert(0, " in text or re.search("^import studies$", text, re.M)
        assert finds or "__main__" not in text

    def test_the_cause_has_its_tables(self, monkeypatch):
        for title, table in importlib.import_module("cause").tables():
            assert table in CAUSE, title

    def test_claims_are_judged_by_the_recorded_runs(self, monkeypatch):
        claims, studies = (importlib.import_module(name) for name in ("claims", "studies"))
        assert claims.table() in MORE
        assert studies.progress("long") in MORE
        assert all(table in MORE for table in studies.geometry("tiny-t").split("\n\n"))
        for gaps, said in (([1, 2, 3], "open"), ([4, 5, 6], "holds"), ([-4, -5, -6], "fails")):
            assert claims.judgement(gaps) == said
        small, large = [1.0, 1.1, 0.9, 1.0, 1.2], [0.4, 1.1, 0.2, 0.9, 1.2]  # p = 0.00003, 0.018
        assert claims.corrected([large]) == {0} and claims.corrected([large] * 3) == set()
        assert claims.corrected([small] + [large] * 3) == {0}
        assert claims.corrected([large, small, large]) == {0, 1, 2}
