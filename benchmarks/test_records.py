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
import pytest
import rows
import sentence_rows
import studies
import tables
from matplotlib import figure as pictures

import hardneg
import train
from training import images, report
from training.test_training import HERE, README, write_images

FOLDER = HERE / "benchmarks"
PLACES = [HERE / "README.md", *sorted(FOLDER.rglob("*.md"))]
PAGES = {path: path.read_text() for path in PLACES}
ALL = "".join(PAGES.values())
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


class TestStudies:
    """benchmarks/studies.py: runs of a study, and what is measured after them."""

    def test_a_study_is_recorded_with_what_is_measured_after_it(self, tmp_path, monkeypatch):
        """Also where the runs were there before."""
        monkeypatch.setattr(common, "RESULTS", tmp_path)
        data, load = tmp_path / "images", images.load
        monkeypatch.setattr(images, "load", lambda **given: load(**{"data": str(data)} | given))
        for part in ("train", "test"):
            write_images(data / part)
        of_rows = {"SimCLR": "--loss simclr", "hcl": "--loss hcl --temperature 0.2"}
        small = rows.Study("cifar10", [3], "--batch-size 4 --epochs 1 --lr 0.001", of_rows)
        monkeypatch.setitem(rows.STUDIES, "games-10", small)
        for _ in range(2):
            studies.study("games-10", {"cifar10": data}, tmp_path / "out")
            found = common.read("games-10")
            assert found.keys() == of_rows.keys()
            runs_of_seed = [results[0] for results in found.values()]
            assert {run["seed"] for run in runs_of_seed} == {3}
            assert all("transfer" in run for run in runs_of_seed)
            assert "on shapes %" in tables.of_study("games-10")
        assert found["hcl"][0]["options"]["temperature"] == 0.2
        assert found["hcl"][0]["data"] == "cifar10"

    def test_rows_say_what_their_runs_were_trained_with(self, tmp_path):
        """The loss's options of a record are those of its row, whatever the defaults become."""
        folders = {name: tmp_path for name in ("shapes", "cifar10", "tiny")}
        compared = 0
        for path in RECORDS:
            if path.stem not in rows.STUDIES:
                continue
            plan = studies.plan_of(path.stem, folders, tmp_path)
            recorded = common.read(path.stem)
            for row in plan.keys() & recorded.keys():  # the program no longer has some rows
                now = plan[row][0]
                settled = hardneg.resolve({name: getattr(now, name) for name in train.CRITERION})
                for was in (run["options"] for run in recorded[row]):
                    for name in filter(now.has_effect, train.CRITERION):
                        if was.get(name) is not None:  # older records leave None open
                            assert was[name] == settled[name], (path.stem, row, name)
                            compared += 1
        assert compared > 1000

    def test_gains_in_the_course_of_the_runs_are_paired_by_seed(self, monkeypatch):
        """By kNN at an epoch, and from the first measurement to the last."""

        def run_of(seed, *accuracies):
            history = [{"epoch": 1, "loss": 3.0}]
            history += [{"epoch": 2 * k, "knn": x} for k, x in enumerate(accuracies, 1)]
            return {"seed": seed, "history": history}

        found = {
            "hcl": [run_of(1, 43.0, 49.0, 50.0), run_of(0, 41.0, 45.0, 47.0)],
            "simclr": [run_of(0, 40.0, 43.0, 44.0), run_of(1, 42.0, 45.0, 46.0)],
        }
        monkeypatch.setattr(tables, "rows_of", lambda study: found)
        expected = {"epoch 2": [1.0, 1.0], "epoch 6": [3.0, 4.0], "change": [2.0, 3.0]}
        for name, gaps in expected.items():
            assert sorted(tables.gaps_of("", "hcl − simclr", name)) == gaps

    def test_a_loss_that_is_plain_at_its_temperature_is_near(self, monkeypatch):
        """Where the plain curve is straight over log t."""

        def search(name):
            found = {}
            for t in rows.SHARED["t"]:
                cold = {"simclr": 1, "hcl": 2, "ot": 1 + float(t) / 0.3}
                for loss, factor in cold.items():
                    found[f"{loss}-{t}"] = [{"linear": 10 * math.log(float(t) / factor)}]
            return found

        monkeypatch.setattr(common, "read", search)
        [table] = cells_of(tables.near())
        for _, loss, own, held, sharp, count in table[2:]:
            if loss == "`hcl`":
                assert (own, sharp, count) == (f"{10 * math.log(2):.2f}", "0.00", "4")
            else:
                assert (held, sharp, count) == ("0.00", "", "5") and float(own) > 1


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
        places = [text for text in PAGES.values() if path.stem in records_of(text)]
        assert any(tables.of_study(path.stem) in text for text in places)

    def test_claims_are_judged_by_the_recorded_runs(self):
        """They are sure after Holm's correction alone."""
        chances = {"a": 0.04, "b": 0.001, "c": 0.02, "d": 0.7, "e": 0.012}  # b and e stand
        assert sentence_rows.standing(chances) == {"b", "e"}
        cases = [(1, 0.02, True, "yes"), (1, 0.02, False, "probably")]
        cases += [(-1, 0.02, True, "no"), (-1, 0.02, False, "probably not")]
        for middle, chance, stands, said in [*cases, (1, 0.06, False, "we cannot tell")]:
            assert tables.Claim("", middle, 0, chance, 5).verdict(stands) == said


MEASURED = {"speed mining": "--rounds 2 --sizes 10000"}  # no record
MEASURED["speed losses --one hcl --sizes 16384"] = "--sizes 64"


MEASURES = (
    "linear knn uniformity tolerance finetuned transfer mrr r10 all words blind other".split()
)
INTERVAL = r"(\d+\.\d+) ± (\d+\.\d+)"


def figures_of(study):
    """Return what a record measured, {row: {measure: {seed: value}}}, kNN of each epoch as well."""
    rows = {}
    for row, runs in tables.rows_of(study).items():
        of_row = rows[row] = {}
        for run in runs:
            values = {name: run[name] for name in MEASURES if name in run}
            values |= tables.course_of(run)
            for name, value in values.items():
                of_row.setdefault(name, {})[run["seed"]] = value
    return rows


def differences_of(study):
    """List the differences of any two rows of a study: one value for each seed."""
    samples, means = [], []
    if study in rows.STUDIES:
        both = itertools.product(tables.MEANS, ("linear", "knn"))
        means = [some for some in itertools.starmap(partial(tables.gaps_of, study), both) if some]
    for one, other in itertools.combinations(means, 2):
        samples.append([x - y for x, y in zip(one, other, strict=True)])
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
    for study in studied & {"pays-decoupled", "pays-rates"}:  # added to the study of before
        both = itertools.product(figures_of("pays-cifar10").values(), figures_of(study).values())
        for row, added in both:
            samples += paired(row, added, ["linear", "knn"])
    written = {report.gain(gaps, k) for gaps in samples if len(gaps) > 1 for k in (1, 2)}
    for study in studied & set(tables.OF_TEXT):
        runs = common.read(study)["runs"]
        for pair in itertools.combinations(tables.rows_of(study), 2):
            question = " − ".join(pair)
            if len(sentence_rows.gaps(runs, question)) > 1:
                gaps = sentence_rows.by_group(runs, question)
                middle, half, _ = sentence_rows.over_seeds_and_sources(gaps)
                written.add(f"{middle:.1f} ± {half:.1f}")
    return {text.lstrip("+-") for text in written}


def paragraphs_of(path):
    """Yield paragraphs and items of a page, each with the pages it is about: this, and links."""
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

    def test_readme_and_the_front_page_have_the_table_of_claims(self):
        """Each claim is of a study of the page that is linked."""
        assert tables.claims() in FRONT and tables.claims("benchmarks/studies/") in README
        found = tables.judged()
        assert len(found) <= 8 and "three points" in " ".join(README.split())
        lost = [tables.gaps_of(x, "simclr-0.1 − simclr-0.5") for x in ("cifar10-t", "tiny-t")]
        assert [round(*gaps) for gaps in lost] == [3, 3]
        for _, page, study, *_ in found:
            assert study in records_of(PAGES[FOLDER / "studies" / f"{page}.md"])


class TestCommands:
    """Every command of the pages runs; what it shows of a record stands on a page."""

    @pytest.mark.parametrize("command", commands())
    def test_it_shows_what_the_pages_have(self, command, monkeypatch, capsys):
        name, *words = command.split()
        program = importlib.import_module(name)
        drawn = []
        monkeypatch.setattr(pictures.Figure, "savefig", lambda *_, **__: drawn.append(1))
        if name == "debias":
            monkeypatch.setattr(program, "SETTINGS", [])  # the simulation takes a minute
        if name in ("studies", "speed", "sentences", "equal_time"):
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
            # those of pays-rates lack seeds
            assert "pays-rates" in command or command in MEASURED or table in ALL
        if name == "speed" and command not in MEASURED:
            assert printed.splitlines()[0] in ALL

    @pytest.mark.parametrize("path", PROGRAMS, ids=Path.stem.fget)
    def test_programs_find_hardneg_from_anywhere(self, path):
        """A program imports the module that puts the project's folder on the path."""
        text = path.read_text()
        assert "__main__" not in text or re.search("^import common$", text, re.M)
