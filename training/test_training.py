"""Tests of the command: train.py, training/ and what the README says of them.

`python -m pytest training -k TestRuns` runs one group.
"""

import ast
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch import nn
from torch.utils._pytree import tree_leaves
from torchvision import datasets
from torchvision.transforms import functional as transforms

import hardneg
import train
from hardneg import InvalidArgument
from training import compare, images, readouts, report, runs, words_of
from training.images import Images

HERE = Path(__file__).resolve().parent.parent
README, MORE = ((HERE / folder / "README.md").read_text() for folder in (".", "benchmarks"))
ALONE = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}  # no threads that wait
FIGURES = "linear knn uniformity tolerance untrained raw".split()  # the numbers of results.json
# 80 images, two steps in an epoch
SMALL = {"epochs": 2, "fraction": 0.1, "batch_size": 40, "size": 8, "report": False}
SMALL_WORDS = words_of(SMALL)
METHODS = {
    "simclr": {"loss": "hcl", "anneal": True},
    "bank": {"loss": "hard-simple", "alpha": 0.1},
    "queue": {"recipe": "sgd", "queue_size": 50},
    "clae": {"bound": 0.01},
    "diffhard": {"pretrain": 2, "every": 1, "width": 2, "latent": 4},
}


# ---- Helpers


def close(found, wanted, tolerance):
    """Assert that all numbers agree within a tolerance."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


def equal_states(one, other):
    """Whether two nests of tensors and numbers are equal to the bit."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)


def write_images(folder, per_class=6, classes=("cat", "dog"), size=(20, 20)):
    """Write constant images as PNG files; all pixels of image k of class c are 40 c + k."""
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for k in range(per_class):
            pixels = torch.full((3, *size), 40 * c + k, dtype=torch.uint8)
            transforms.to_pil_image(pixels).save(folder / name / f"{k}.png")


def values_of(pixels):
    """Return the first value of each constant image."""
    return pixels[:, 0, 0, 0].tolist()


def table(text):
    """Return the cells of a table's lines, which | divides."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


def numbers_of(path):
    """Return the figures of a results.json."""
    results = json.loads(path.read_text())
    return [results[name] for name in FIGURES]


def finish(out, **options):
    """Run in a folder → the figures, the checkpoint."""
    train.run(train.Options(out=out, **SMALL | options))
    return numbers_of(out / "results.json"), runs.read_checkpoint(out, "cpu")


def quit_with(words, capsys):
    """Run a command, which has to end with an error → its exit code or message, and its stderr."""
    with pytest.raises(SystemExit) as stop:
        train.main([str(word) for word in words])
    lines = capsys.readouterr().err.splitlines(keepends=True)
    lines = [line for line in lines if " images/s" not in line]  # of a progress bar
    return f"{stop.value.code} {''.join(lines).lstrip()}"


def times_of(folder):
    """Return when each file of a run was written."""
    paths = [path for path in folder.iterdir() if path.name != ".lock"]
    return {path.name: path.stat().st_mtime_ns for path in paths}


def stop_before(monkeypatch, step):
    """Let Ctrl-C come before a step of the next training."""
    whole, taken = hardneg.Training._step, []

    def interrupt(self, *arguments):
        taken.append(self)
        if len(taken) == step:
            raise KeyboardInterrupt
        return whole(self, *arguments)

    monkeypatch.setattr(hardneg.Training, "_step", interrupt)


@pytest.fixture
def small_shapes(monkeypatch):
    """Give the command a tenth of its built-in images."""
    whole = images.shapes
    monkeypatch.setattr(images, "shapes", lambda n, **options: whole(n // 10, **options))


@pytest.fixture(scope="module")
def few():
    """A small training set and test set of the built-in images, with four classes."""
    sets = images.shapes(240, 4, seed=1, size=16) + images.shapes(120, 4, seed=2, size=16)
    return Images._make(sets + (["a", "b", "c", "d"],))


# ---- images.py


class TestShapes:
    """The built-in images."""

    def test_a_seed_repeats_its_images(self):
        one, two, other = (images.shapes(50, seed=seed) for seed in (3, 3, 4))
        assert equal_states(one, two) and not equal_states(one, other)

    def test_sizes_and_classes(self):
        pixels, labels = images.shapes(50)
        assert pixels.shape == (50, 3, 32, 32) and labels.bincount().tolist() == [5] * 10
        assert images.shapes(7, size=48)[0].shape == (7, 3, 48, 48)
        with pytest.raises(InvalidArgument, match="classes is 11"):
            images.shapes(7, classes=11)


class TestLoad:
    """Shares of a set, and the validation split."""

    def test_fraction_of_each_class(self, tmp_path):
        write_images(tmp_path, per_class=10)
        one, two = (images.load(tmp_path, fraction=0.4) for _ in range(2))
        other = images.load(tmp_path, fraction=0.4, seed=1)
        least = images.load(tmp_path, fraction=0.001)
        assert equal_states(one, two) and not torch.equal(one.train, other.train)
        assert one.train_labels.bincount().tolist() == [3, 3]
        assert len(one.test) == 4 and len(least.train) == 2

    @pytest.mark.parametrize("folder", [True, False])
    def test_validation_images_are_training_images(self, folder, tmp_path, small_shapes):
        """Test images are not looked at, and nothing is in both sets."""
        data = "shapes"
        if folder:
            data = tmp_path
            write_images(tmp_path / "train", per_class=10)
            write_images(tmp_path / "test", per_class=7, size=(22, 22))
        whole, held = images.load(data), images.load(data, validation=True)
        assert len(held.train) + len(held.test) == len(whole.train)
        assert len(held.test) == len(whole.train) // 5
        rows = [tuple(x.flatten().tolist()) for x in torch.cat([held.train, held.test])]
        assert set(rows) == {tuple(x.flatten().tolist()) for x in whole.train}
        shares = [
            labels.bincount() / len(labels) for labels in (held.train_labels, held.test_labels)
        ]
        close(*shares, 1e-6)

    def test_images_without_a_label_are_no_test(self, few):
        """STL10 has many of them, beside its classes."""
        labels = few.train_labels.clone()
        labels[::2] = -1
        held = images.every_fifth(labels, few.classes)
        assert held.sum() == sum(count // 5 for count in labels[labels >= 0].bincount())
        assert (labels[held] >= 0).all()
        assert images.every_fifth(labels.fill_(-1), []).sum() == len(labels) // 5

    def test_at_most(self, few):
        some = images.at_most(few, 40)
        assert some.train_labels.bincount().tolist() == [10] * 4
        assert some.test_labels.bincount().tolist() == [10] * 4


class TestTorchvision:
    """torchvision's sets: stand-ins are read as its classes are, item by item."""

    @pytest.mark.parametrize(
        "kind, part, mode, target",
        [
            ("CIFAR10", "train", "RGB", "targets"),
            ("STL10", "split", "RGB", "labels"),
            ("FashionMNIST", "train", "L", "targets"),
        ],
    )
    def test_formats(self, monkeypatch, kind, part, mode, target):
        pixels = np.random.default_rng(1).integers(0, 256, (7, 28, 28, 3), np.uint8)
        pictures = [Image.fromarray(x).convert(mode) for x in pixels]
        labels, name = [0, 1, -1, 1, 0, 1, 0], kind.lower().replace("nm", "n-m")

        class StandIn(list):
            def __init__(self, root, download, **which):
                is_train = which[part] in (True, "train", "train+unlabeled")
                some = slice(0, 5) if is_train else slice(5, 7)
                super().__init__(zip(pictures[some], labels[some], strict=True))
                setattr(self, target, labels[some])

        monkeypatch.setattr(datasets, kind, StandIn)
        for size in (None, 28, 64):
            found = images.load(name, size=size)
            larger = [x.convert("RGB").resize((size or 28,) * 2, Image.BICUBIC) for x in pictures]
            wanted = torch.stack([transforms.pil_to_tensor(x) for x in larger])
            assert len(found.train) == 5
            assert torch.equal(torch.cat([found.train, found.test]), wanted)
            assert torch.cat([found.train_labels, found.test_labels]).tolist() == labels

    def test_a_set_that_cannot_be_had_is_named(self, monkeypatch):
        monkeypatch.setattr(datasets, "SVHN", lambda *_, **__: open("no-such-file"))
        with pytest.raises(InvalidArgument, match="svhn is not in here.*no-such-file"):
            images.load("svhn", root="here")


class TestFolders:
    """Folders of images: large or incomplete ones, broken files, all kinds of pixels."""

    @pytest.mark.parametrize("part, test", [("train", "test"), ("train", "val"), ("train", "")])
    def test_layouts(self, tmp_path, part, test):
        write_images(tmp_path / part, per_class=10)
        if test:
            write_images(tmp_path / test, per_class=2)
        found = images.load(tmp_path)
        kept = range(10) if test else [k for k in range(10) if k not in (4, 9)]
        held = (0, 1) if test else (4, 9)
        assert found.classes == ["cat", "dog"]
        assert found.train.shape[1:] == (3, 20, 20) and found.train.dtype == torch.uint8
        assert values_of(found.train) == [40 * c + k for c in (0, 1) for k in kept]
        assert values_of(found.test) == [40 * c + k for c in (0, 1) for k in held]
        assert found.train_labels.tolist() == [0] * len(kept) + [1] * len(kept)
        assert found.test_labels.tolist() == [0, 0, 1, 1]

    def test_images_without_classes(self, tmp_path):
        """They lie at any depth."""
        write_images(tmp_path / "all", 10, ("a", "b"), (8, 8))
        found = images.load(tmp_path)
        assert found.classes == [] and (len(found.train), len(found.test)) == (16, 4)
        assert found.train_labels.tolist() == [-1] * 16

    def test_hidden_folders_and_files_are_left_out(self, tmp_path):
        write_images(tmp_path, per_class=10)
        write_images(tmp_path / ".hidden", classes=("a",))
        write_images(tmp_path / "cat", classes=(".thumbnails",))
        found = images.load(tmp_path)
        assert found.classes == ["cat", "dog"] and len(found.train) == 16
        assert values_of(found.test) == [4, 9, 44, 49]

    @pytest.mark.parametrize("size, side", [((20, 20), 20), ((50, 71), 50), ((21, 120), 20)])
    def test_sides(self, tmp_path, size, side):
        """The shorter one, even and at most 96: images are cut to squares."""
        write_images(tmp_path, size=size)
        assert images.load(tmp_path).train.shape == (10, 3, side, side)
        assert images.load(tmp_path, size=24).test.shape == (2, 3, 24, 24)

    def test_the_middle_of_an_oblong_image_is_seen(self, tmp_path):
        pixels = torch.arange(60, dtype=torch.uint8).expand(3, 20, 60)
        for k in range(10):
            transforms.to_pil_image(pixels).save(tmp_path / f"{k}.png")
        assert torch.equal(images.load(tmp_path).train[0], pixels[:, :, 20:40])

    @pytest.mark.filterwarnings("ignore:.*cannot be read")
    def test_broken_files_are_left_out_and_named(self, tmp_path):
        for part in ("train", "test"):
            write_images(tmp_path / part)
        for name in ("cat/0", "cat/2", "dog/5"):
            (tmp_path / "train" / f"{name}.png").write_bytes(b"no image")
        with pytest.warns(UserWarning, match=r"3 of 12 .*cat.0\.png"):
            found = images.load(tmp_path)
        assert values_of(found.train) == [1, 3, 4, 5, 40, 41, 42, 43, 44]
        assert found.train_labels.tolist() == [0] * 4 + [1] * 5
        state = torch.get_rng_state()
        assert equal_states(found, images.load(tmp_path))
        assert torch.equal(torch.get_rng_state(), state)
        for path in (tmp_path / "test").rglob("*.png"):
            path.write_bytes(b"")
        with pytest.raises(InvalidArgument, match="9 readable images to train on and 0 to test"):
            images.load(tmp_path)

    def test_a_photograph_is_turned_as_the_camera_was(self, tmp_path):
        picture, exif = Image.new("RGB", (40, 20)), Image.Exif()
        picture.paste("white", (0, 0, 20, 20))
        exif[0x0112] = 6  # turn it by a quarter, clockwise
        for k in range(10):
            picture.save(tmp_path / f"{k}.png", exif=exif)
        x = images.load(tmp_path).train[0]
        assert x[:, :9].min() == 255 and x[:, 11:].max() == 0

    @pytest.mark.parametrize("kind", ["empty", "no images", "too few", "no images of a class"])
    def test_unusable_folders_are_named(self, kind, tmp_path):
        if kind == "no images":
            (tmp_path / "cat").mkdir()
        elif kind == "too few":
            write_images(tmp_path, per_class=1)
        elif kind == "no images of a class":
            write_images(tmp_path)
            (tmp_path / "cow").mkdir()
        with pytest.raises(InvalidArgument, match=f"^--data is {tmp_path}"):
            images.load(tmp_path)

    def test_test_images_have_the_classes_of_the_training_images(self, tmp_path):
        write_images(tmp_path / "train")
        write_images(tmp_path / "test", classes=("cat", "cow"))
        with pytest.raises(InvalidArgument, match="train/'s classes.*cat.*not.*cow"):
            images.load(tmp_path)


# ---- report.py


class TestReport:
    """Figures, tables, pictures, the page."""

    @pytest.mark.parametrize("trained", [False, True])
    def test_images_without_a_label_do_not_count(self, few, trained):
        encoder = hardneg.Encoder(size=16) if trained else None
        hidden = few.train_labels.clone()
        hidden[:40] = -1
        rest = few._replace(train=few.train[40:], train_labels=few.train_labels[40:])
        found = report.evaluate(encoder, few._replace(train_labels=hidden))
        assert found == report.evaluate(encoder, rest)

    def test_evaluate_reads_features_out_and_measures_embeddings(self, few):
        encoder = hardneg.Encoder(size=16)
        found = report.evaluate(encoder, few)
        x, _ = hardneg.embed(encoder, few.train)
        y, z = hardneg.embed(encoder, few.test)
        sets = x, few.train_labels, y, few.test_labels
        close(found["knn"], readouts.knn_accuracy(*sets), 1e-4)
        close(found["linear"], readouts.linear_readout(*sets), 1e-4)
        close(found["tolerance"], readouts.tolerance(z, few.test_labels), 1e-4)
        close(found["uniformity"], hardneg.uniformity(z), 1e-4)

    def test_of_very_many_images_an_even_share_is_read_out(self, few, monkeypatch):
        """Pixels are averaged to 32 × 32."""
        seen = []
        monkeypatch.setattr(readouts, "linear_readout", lambda *sets: seen.extend(sets) or 0.0)
        monkeypatch.setattr(report, "READOUT", 100)
        large = few.train.repeat_interleave(4, 2).repeat_interleave(4, 3)
        test = few.test.repeat_interleave(4, 2).repeat_interleave(4, 3)
        report.evaluate(None, few._replace(train=large, test=test))
        assert seen[1].bincount().tolist() == [25] * 4 and seen[0].shape == (100, 3 * 32 * 32)
        double = few.test.repeat_interleave(2, 2).repeat_interleave(2, 3)
        close(seen[2], double.flatten(1) / 255, 1e-6)

    def test_cells(self):
        runs_of_a = [{"linear": 10.0, "knn": 1.0, "tolerance": None}, {"linear": 12.0, "knn": 1.0}]
        lines = report.cells({"a": runs_of_a, "b": [{"linear": 7.0, "knn": 2.0}]})
        assert lines[0] == ["", "linear %", "kNN %"]
        assert lines[1:] == [["a", "11.0 ± 1.4", "1.0 ± 0.0"], ["b", "7.0", "2.0"]]

    def test_a_map_keeps_clusters_apart(self):
        labels = torch.arange(120) % 3
        noise = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
        z = hardneg.unit(torch.eye(6)[labels] + 0.1 * noise)
        title, _, figure = report.draw_map(z, labels, ["a", "b", "c"], 5)
        assert title == "100 % of an image's 5 nearest are of its class; by chance, 33 %"
        points = figure.axes[0].collections[1:]
        a, b, c = (x.get_offsets().data for x in points)
        for one, other in ((a, b), (b, c), (c, a)):
            apart = np.linalg.norm(one.mean(0) - other.mean(0))
            widths = [np.linalg.norm(x - x.mean(0), axis=1).mean() for x in (one, other)]
            assert 2 * max(widths) < apart < 30 * min(widths)

    def test_the_page_repeats_the_run(self, tmp_path, small_shapes):
        """Its command gives the same options, and it needs no other file."""
        options = train.Options(
            out=tmp_path, **SMALL | {"report": True}, lead_in=False, loss="hard"
        )
        train.run(options)
        page = (tmp_path / "report.html").read_text()
        assert 'src="http' not in page and page.count("data:image/png;base64,") == 3
        for text in ("hard on shapes", "trained encoder", "--alpha 0.3", "false negative"):
            assert text in page
        words = re.search("<pre>python train.py (.*)</pre>", page)[1].split()
        again = train.Options(**train.parse(words))
        assert again.of_the_run() == options.of_the_run()


# ---- compare.py


def row(*values):
    """Make results of a row with these linear accuracies."""
    start = {"untrained": {"linear": 5.0}, "raw": {"linear": 5.0}}
    return [{"seed": seed, "linear": value} | start for seed, value in enumerate(values)]


class TestCompare:
    """Several losses and seeds, and which differences hold."""

    def test_runs_are_those_of_the_command_alone(self, tmp_path, small_shapes, capsys):
        """Finished ones are kept; a folder with other options is found before anything else."""
        words = "--size 8 --epochs 1 --batch-size 20 --no-report --out".split()
        together = ["--compare", "simclr", "hcl", "--seeds", "2", *words, f"{tmp_path / 'all'}"]
        train.main(together)
        table, files = capsys.readouterr().out, sorted((tmp_path / "all").glob("*-?/results.json"))
        assert "| `hcl` |" in table and "linear, over `simclr`" in table
        assert (tmp_path / "all" / "compare.png").stat().st_size > 10000
        assert [path.parent.name for path in files] == ["hcl-0", "hcl-1", "simclr-0", "simclr-1"]
        train.main(["--loss", "hcl", "--seed", "1", *words, f"{tmp_path / 'one'}"])
        assert numbers_of(files[1]) == numbers_of(tmp_path / "one" / "results.json")
        times = [path.stat().st_mtime_ns for path in files]
        train.main(together)
        assert [path.stat().st_mtime_ns for path in files] == times
        files[0].unlink()
        capsys.readouterr()
        said = quit_with([*together, "--epochs", "2"], capsys)
        assert "--epochs was 1" in said and "images" not in said

    @pytest.mark.parametrize(
        "losses, given, wanted",
        [
            (("simclr", "hard-simple"), {}, (28, 64, 2e-3)),
            (("simclr", "hcl"), {}, (16, 256, 8e-3)),
            (("simclr", "hard-simple"), {"epochs": 3}, (3, 64, 2e-3)),
        ],
    )
    def test_losses_are_trained_equally_long(self, losses, given, wanted, tmp_path):
        rows = [train.Options(loss=loss, **given) for loss in losses]
        plan = compare.plan_of(rows, 2, tmp_path)
        assert list(plan) == list(losses)
        for loss, two in plan.items():
            assert [options.seed for options in two] == [0, 1]
            for options in two:
                assert (options.epochs, options.batch_size, options.lr) == wanted
                assert options.loss == loss and options.out.parent == tmp_path

    def test_interval(self):
        gaps = compare.gaps_of(row(12.0, 22.0, 32.5), row(10.0, 20.0, 30.0))
        assert gaps == [2, 2, 2.5]
        assert compare.gaps_of(row(12.0, 22.0, 32.5)[::-1], row(10.0, 20.0)) == [2, 2]
        middle, half = report.interval(gaps)
        low, high = stats.ttest_1samp(gaps, 0).confidence_interval()
        close((middle - half, middle + half), (low, high), 1e-9)
        assert report.gain(gaps) == "+2.2 ± 0.7"
        assert report.interval([2.0]) == (2.0, np.inf) and report.gain([2.0]) == "+2.0"

    def test_differences_are_to_simclr_or_to_the_first_row(self):
        found = {"b": row(12.0, 22.0, 32.5), "a": row(10.0, 20.0, 30.0)}
        header, _, *lines = compare.table_of(found).splitlines()
        assert "over `b`" in header and lines[1].endswith("| -2.2 ± 0.7 |")
        with_baseline = {"b": found["b"], "simclr": found["a"]}
        header, _, *lines = compare.table_of(with_baseline).splitlines()
        assert "over `simclr`" in header and lines[0].endswith("| +2.2 ± 0.7 |")
        assert all(line.endswith("|  |") for line in lines[1:])
        for alone in ({"a": row(1.0, 2.0)}, {"a": row(1.0), "b": row(2.0)}):
            assert "over" not in compare.table_of(alone)


# ---- runs.py


def die(options, moment):
    """Run, and be killed at a moment: before or after a step, a file is synced or replaced."""
    left = [moment]

    def deadly(function):
        def call(*arguments, **named):
            for act in (None, function):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                if act is not None:
                    result = act(*arguments, **named)
            return result

        return call

    hardneg.Training._step = deadly(hardneg.Training._step)
    os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)
    train.run(options)


def in_a_process(function, *arguments):
    """Call a function in a process of its own → its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training.test_training"])
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.filterwarnings("ignore:the generator has collapsed")
class TestRuns:
    """The folder of a run: stopped, killed, continued, locked, full."""

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("minutes", [0, 2])
    def test_stopped_and_continued(
        self, minutes, method, tmp_path, small_shapes, monkeypatch, capsys
    ):
        """A run that Ctrl-C stops within its second epoch ends as one that is not, to the bit.
        If each step takes minutes, each is saved."""
        options = METHODS[method] | {"method": method}
        whole, wanted = finish(tmp_path / "whole", **options)
        clock = itertools.count(step=60 * minutes)
        with monkeypatch.context() as patch:
            patch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
            stop_before(patch, step=4)
            words = [*words_of(SMALL | options), "--out", tmp_path / "cut"]
            said = quit_with(words, capsys)
        assert said.startswith("130") and "the same command goes on" in said
        at = runs.read_checkpoint(tmp_path / "cut", "cpu")["training"]["step_in_epoch"]
        assert at == (1 if minutes else 0) and not (tmp_path / "cut" / "results.json").exists()
        cut, found = finish(tmp_path / "cut", **options)
        total = 4 if method == "diffhard" else 2
        assert f"resumed after epoch 1 of {total}" in capsys.readouterr().out
        assert equal_states(found["training"], wanted["training"])
        assert found["history"] == wanted["history"] and cut == whole

    @pytest.mark.parametrize("method", METHODS)
    def test_killed(self, method, tmp_path):
        """A run that is killed at random moments ends as one that is not; no file is half."""
        chance = random.Random(os.environ.get("HYPOTHESIS_PROFILE") != "explore" or None)
        options = SMALL | METHODS[method] | {"method": method, "size": 8, "fraction": 0.01}
        whole = train.Options(out=tmp_path / "whole", **options)
        cut = train.Options(out=tmp_path / "cut", **options)
        assert in_a_process(train.run, whole) == 0
        for _ in range(3):
            moment = chance.randrange(1, 12)
            assert in_a_process(die, cut, moment) == -signal.SIGKILL, moment
            for path in cut.out.glob("*.pt"):
                torch.load(path, weights_only=True)
        assert in_a_process(train.run, cut) == 0
        found, wanted = (numbers_of(run.out / "results.json") for run in (cut, whole))
        assert found == wanted

    def test_a_finished_run_shows_its_table_again(self, tmp_path, small_shapes, capsys):
        train.main([*SMALL_WORDS, "--out", str(tmp_path)])
        table = capsys.readouterr().out
        kept = times_of(tmp_path)
        for more in ([], ["--seed", "0"]):
            train.main([*SMALL_WORDS, "--out", str(tmp_path), *more])
            said = capsys.readouterr().out
            assert "--overwrite replaces it" in said and "\ntrained encoder" in said
            assert said.splitlines()[3] in table
        assert times_of(tmp_path) == kept

    def test_a_run_with_other_options_is_another_run(self, tmp_path, small_shapes, capsys):
        numbers, _ = finish(tmp_path)
        kept = times_of(tmp_path)
        for more in ({"seed": 1}, {"loss": "ot"}):
            with pytest.raises(InvalidArgument, match="--overwrite replaces it"):
                finish(tmp_path, **more)
        assert times_of(tmp_path) == kept
        (tmp_path / "results.json").unlink()  # as if it had been stopped while it was measured
        with pytest.raises(InvalidArgument, match="--epochs was 2"):
            finish(tmp_path, epochs=3)
        assert finish(tmp_path)[0] == numbers
        assert "resumed after epoch 2 of 2" in capsys.readouterr().out

    def test_a_full_disk_leaves_no_half_file(self, tmp_path, small_shapes, monkeypatch, capsys):
        sync, written = os.fsync, []

        def full(handle):  # the first checkpoint fits, the second does not
            if written:
                raise OSError(28, "No space left on device")
            written.append(handle)
            sync(handle)

        monkeypatch.setattr(os, "fsync", full)
        said = quit_with([*SMALL_WORDS, "--out", tmp_path], capsys)
        assert said == "2 train.py: error: [Errno 28] No space left on device\n"
        assert set(times_of(tmp_path)) == {"checkpoint.pt"}
        monkeypatch.setattr(os, "fsync", sync)
        finish(tmp_path)
        assert "resumed after epoch 1 of 2" in capsys.readouterr().out

    def test_a_file_is_the_old_one_until_it_is_the_new_one(self, tmp_path, monkeypatch):
        runs.write(tmp_path / "x", b"old")
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *_: open("no-such-file"))
            with pytest.raises(OSError):
                runs.write(tmp_path / "x", b"new")
        assert times_of(tmp_path).keys() == {"x"} and (tmp_path / "x").read_bytes() == b"old"
        runs.write(tmp_path / "x", b"new")
        assert (tmp_path / "x").read_bytes() == b"new"

    def test_what_makes_a_run_can_be_stored(self, tmp_path):
        """As JSON, and as what torch loads without trusting it; a folder has one spelling."""
        options = train.Options(data=f"{tmp_path}/../{tmp_path.name}", method="diffhard")
        made = options.of_the_run()
        assert made == train.Options(data=f"{tmp_path}", method="diffhard").of_the_run()
        runs.save_checkpoint(tmp_path, {"args": made})
        assert runs.read_checkpoint(tmp_path, "cpu")["args"] == made == json.loads(json.dumps(made))

    def test_two_runs_do_not_share_a_folder(self, tmp_path, small_shapes, monkeypatch):
        """The second is told before it reads images."""
        with runs.alone(tmp_path), monkeypatch.context() as patch:
            patch.setattr(train, "read", lambda _: 1 / 0)
            with pytest.raises(InvalidArgument, match="another run is at work"):
                finish(tmp_path)
            assert not times_of(tmp_path)
        finish(tmp_path)

    def test_a_file_system_may_lack_locks(self, tmp_path, small_shapes, monkeypatch):
        monkeypatch.setattr(runs.fcntl, "flock", Mock(side_effect=OSError(38, "not implemented")))
        finish(tmp_path)

    def test_other_images_than_before_are_said(self, tmp_path, small_shapes):
        finish(tmp_path)
        (tmp_path / "results.json").unlink()
        state = runs.read_checkpoint(tmp_path, "cpu")
        runs.save_checkpoint(tmp_path, state | {"images": 77})
        with pytest.raises(InvalidArgument, match="as before, with 77 images"):
            finish(tmp_path)


# ---- train.py


def options_of(words):
    """Make the options of a command."""
    return train.Options(**train.parse(words.split()))


def values_named(text):
    """Read `name=value; name=value` → {name: value}; a value is Python."""
    pairs = [pair.split("=") for pair in text.split("; ")]
    return {name: ast.literal_eval(value) for name, value in pairs}


# a command | defaults that it leaves open
DEFAULTS = """
| loss='hcl'; epochs=16; batch_size=256; lr=8e-3; temperature=0.3; beta=1.0; tau_plus=0.1
--loss simclr | temperature=0.05; alpha=0.3; epsilon=0.2; margin=0.0; lead_in=True; tau_plus=None
--loss debiased | temperature=0.1; tau_plus=None
--loss ot | temperature=0.1; epsilon=0.2
--loss hard | temperature=0.07; alpha=0.3; lead_in=True
--loss hard-simple | lead_in=False; alpha=0.1; epochs=28
--loss supcon | temperature=0.1; tau_plus=None; margin=0.0
--loss triplet | weights='top'; alpha=0.1; margin=0.5; epochs=16; batch_size=64
--loss triplet --recipe sgd | batch_size=128; epochs=200
--loss hcl --temperature 2 | temperature=2.0
--method bank --loss hard --lr 1 | lr=1.0; batch_size=64
--method bank | epochs=24; momentum=0.8; loss='hcl'
--method bank --recipe sgd | lr=0.03; momentum=0.8
--method queue --loss simclr | momentum=0.9; temperature=0.05
--method diffhard | loss='ppcl'; temperature=0.1; epochs=6
--method diffhard --loss hcl | objective='ppcl'; weights='tilted'
--method diffhard --no-pairs --loss hcl | objective='nce'
"""
# a command | what it says of flags without effect
IDLE = """
--loss simclr --beta 2 | --beta has no effect
--loss hcl --alpha .3 | --alpha has no effect
--loss hcl --no-lead-in | --no-lead-in has no effect
--loss simclr --anneal | --anneal has no effect
--margin 1 | --margin
--loss triplet --temperature 1 | --temperature
--loss triplet --epsilon 1 --weights transported |
--loss triplet --temperature 1 --weights transported | --temperature
--bound .1 | --bound
--queue-size 9 | --queue-size
--no-pairs | --no-pairs
--momentum .5 | --momentum
--loss simple --weights tilted --temperature 1 |
--compare hcl hard --alpha .3 |
--compare hcl ot --alpha .3 | --alpha
--loss ppcl --tau-plus .1 |
"""


class TestOptions:
    """Defaults, and what has an effect."""

    @pytest.mark.parametrize("words, wanted", table(DEFAULTS))
    def test_defaults(self, words, wanted):
        options = options_of(words)
        for name, value in values_named(wanted).items():
            assert getattr(options, name) == value, name

    def test_choices_are_named(self):
        with pytest.raises(InvalidArgument, match="--method is moco; it must be one of simclr"):
            train.Options(method="moco")

    @pytest.mark.parametrize("words, said", table(IDLE))
    def test_flags_without_effect_are_said(self, words, said, monkeypatch, capsys):
        with monkeypatch.context() as patch:
            patch.setattr(train, "run", Mock())
            patch.setattr(compare, "compare", Mock())
            train.act(train.parse(words.split()))
        found = capsys.readouterr().out
        assert bool(said) == ("no effect" in found) and said in found

    @pytest.mark.parametrize("loss", hardneg.PRESETS)
    def test_what_has_an_effect_changes_the_loss(self, loss):
        """An option has one exactly if another value changes the loss or its gradient."""
        options = train.Options(loss=loss, cost="exp", weights=hardneg.PRESETS[loss][0])
        settings = {name: getattr(options, name) for name in train.CRITERION}
        x, y = torch.randn(2, 60, 4, generator=torch.Generator().manual_seed(0)).double()
        x.requires_grad_()

        def loss_and_slope(**changes):
            loss = hardneg.contrastive_loss(x, y, **settings | changes)
            (slope,) = torch.autograd.grad(loss, x)
            return torch.cat([slope.flatten(), loss.detach()[None]])

        as_it_is = loss_and_slope()
        others = {"temperature": 0.4, "tau_plus": 0.003, "beta": 0.3, "epsilon": 0.7}
        others |= {"cost": "sqeuclidean", "kappa": 0.2, "alpha": 0.6, "margin": 1.5}
        others |= {"detach_weights": options.weights != "transported"}
        for name, other in others.items():
            changed = not torch.equal(loss_and_slope(**{name: other}), as_it_is)
            assert options.has_effect(name) == changed, name


class TestSummary:
    """report.summary: what is kept of an epoch."""

    @pytest.mark.parametrize("n, epochs, wanted", [(2000, 12, 1000), (50_000, 60, 15_000)])
    def test_longer_runs_are_measured_on_more_images(self, monkeypatch, n, epochs, wanted):
        """Ten times in a run, on a twentieth of the images that it saw meanwhile."""
        labels = torch.arange(n) % 2
        of_a_pixel = torch.zeros(n, 3, 1, 1, dtype=torch.uint8)
        everything = Images(of_a_pixel, labels, of_a_pixel, labels, ["a", "b"])
        asked = []

        def evaluate(encoder, some, figures):
            asked.append((len(some.train), len(some.test), *figures))
            return {"knn": 50.0}

        monkeypatch.setattr(report, "evaluate", evaluate)
        every = -(-epochs // 10)
        for epoch in range(1, epochs + 1):
            training = SimpleNamespace(
                epoch=epoch, epochs=epochs, images=everything.train, encoder=None
            )
            means = report.summary(training, [{"loss": 1.0}, {"loss": 2.0}], everything)
            assert means["loss"] == 1.5
            assert ("knn" in means) == (epoch % every == 0)
        assert asked == [(wanted, wanted, "knn")] * (epochs // every)


def attribute(x, path):
    """Follow a path of attributes, keys and places."""
    for name in path.split("."):
        if name.isdigit():
            x = x[int(name)]
        elif isinstance(x, dict):
            x = x[name]
        else:
            x = getattr(x, name)
    return x


# a command | attributes of the method of training
BUILT = """
--loss ot --cost exp | criterion.options.weights='transported'; criterion.options.tau_plus=0.0
--objective triplet | criterion.options.objective='triplet'; criterion.options.tau_plus=0.0
--loss ot --cost exp --kappa 2 | criterion.options.cost='exp'; criterion.options.kappa=2.0
--loss triplet --margin .2 | criterion.options.objective='triplet'; criterion.options.margin=0.2
--beta 2 --tau-plus .4 | criterion.options.beta=2; criterion.options.tau_plus=0.4
--method bank --momentum .3 | bank.momentum=0.3
--method bank | bank.momentum=0.8
--method queue --momentum .7 --queue-size 30 | momentum=0.7; rows.shape=(30, 128)
--method clae --bound .2 | bound=0.2; view_options={}
--method diffhard --no-pairs --no-ascent | game.pairs=False; game.ascent=False
--method diffhard --momentum .8 --pretrain 7 --every 3 | game.momentum=0.8; pretrain=7; game.every=3
--method diffhard --latent 6 --width 5 | game.G.latent=6; game.G.blocks.2.num_features=5
--method diffhard | game.pairs=True; game.ascent=True
--method diffhard --gan-lr .1 --ascent-lr .2 | game.optimizers.ascent.defaults.lr=0.2
--method diffhard --gan-lr .1 | game.optimizers.G.defaults.lr=0.1; game.optimizers.D.defaults.lr=0.1
"""


# a command | its schedules: their values at the beginning and at the end
SCHEDULES = """
--anneal --beta 2 | beta=(2, 0.4)
--beta 2 |
--loss hard --alpha .2 | alpha=(1, 0.2)
--loss hard --no-lead-in |
"""


class TestBuild:
    """The training is made as the options say."""

    @pytest.mark.parametrize("words, wanted", table(BUILT))
    def test_the_method(self, words, wanted, few):
        _, training = train.build(options_of(words), few)
        for path, value in values_named(wanted).items():
            assert attribute(training.method, path) == value, path

    def test_the_training(self, few):
        given = {"recipe": "sgd", "weight_decay": 0.25, "epochs": 3, "batch_size": 100, "seed": 3}
        options = train.Options(**given, micro_batch=20)
        encoder, training = train.build(options, few)
        assert training.encoder is encoder
        assert (training.epochs, training.steps_per_epoch, training.seed) == (3, 3, 3)
        assert (training.recipe["lr"], training.recipe["weight_decay"]) == (0.03, 0.25)
        assert training.micro_batch == 20

    def test_large_images_are_blurred(self, few):
        large = few._replace(train=few.train[:4].repeat(1, 1, 6, 6))
        encoder, training = train.build(train.Options(encoder="resnet18"), large)
        assert training.method.view_options == {"blur": 0.5} and encoder.features == 512

    @pytest.mark.parametrize("words, wanted", table(SCHEDULES))
    def test_schedules(self, words, wanted, few):
        _, training = train.build(options_of(words), few)
        last = 1 - 1 / (training.epochs * training.steps_per_epoch)  # progress at the last step
        ends = {name: (f(0.0), round(f(last), 9)) for name, f in training.schedules.items()}
        assert ends == (values_named(wanted) if wanted else {})

    def test_the_encoder_is_compiled_on_demand(self, few, monkeypatch):
        compiled = []
        monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
        train.build(train.Options(), few)
        assert not compiled
        encoder, _ = train.build(train.Options(compile=True), few)
        assert compiled == [encoder]

    @pytest.mark.parametrize("loss", hardneg.PRESETS)
    def test_every_loss_trains(self, loss, tmp_path, small_shapes):
        numbers, checkpoint = finish(tmp_path, loss=loss)
        assert math.isfinite(numbers[0] + checkpoint["history"][-1]["loss"])

    def test_a_loss_that_is_not_finite_is_said_in_one_line(
        self, tmp_path, small_shapes, monkeypatch, capsys
    ):
        monkeypatch.setattr(hardneg.Training, "_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # a fault of the program shows its traceback
            train.main([*SMALL_WORDS, "--out", str(tmp_path)])

        def diverge(*_):
            raise FloatingPointError("the loss is nan")

        monkeypatch.setattr(hardneg.Training, "_step", diverge)
        said = quit_with([*SMALL_WORDS, "--out", tmp_path], capsys)
        assert said.startswith("2 train.py: error: step 1 of 4: the loss is nan; lower lr?")


# a command | what it complains of
MISTAKES = """
--loss hrad | invalid choice: 'hrad'
--tempreature 1 | unrecognized arguments: --tempreature
--alpha much | --alpha
--lr nan | lr is nan
--lr 0 | lr is 0
--lr -1 | lr is -1
--epochs 0 | epochs is 0
--epochs 1.5 | --epochs
--epochs many | --epochs
--batch-size 1 | batch_size is 1
--micro-batch 0 | --micro-batch is 0
--temperature 0 | temperature is 0
--temperature nan | temperature is nan
--tau-plus 1 | tau_plus is 1
--beta -1 | beta is -1
--alpha 0 | alpha is 0
--alpha 1.1 | alpha is 1.1
--epsilon 0 | epsilon is 0
--margin -1 | margin is -1
--kappa inf | kappa is inf
--cost l1 | --cost
--weights hard | --weights
--objective infonce | --objective
--method moco | --method
--encoder resnet | --encoder
--recipe adamm | --recipe
--fraction 0 | --fraction is 0
--fraction 2 | --fraction
--seed -1 | --seed is -1
--weight-decay -1 | --weight-decay is -1
--compare hcl --loss ot | --loss is ot
--size 4 | --size is 4
--method bank --momentum 1 | momentum is 1
--method queue --queue-size 0 | queue_size is 0
--method clae --bound 1 | bound is 1
--method diffhard --size 24 | size is 24
--method diffhard --width 0 | width is 0
--method diffhard --gan-lr -1 | --gan-lr is -1
--method diffhard --ascent-lr nan | --ascent-lr is nan
--method diffhard --pretrain -1 | pretrain is -1
--method diffhard --every 0 | every is 0
--method diffhard --objective simple | objective is simple
--compare hcl --seeds 0 | --seeds is 0
--device abacus | try --device cpu
--device cuda:77 | try --device cpu
--compare | --compare
hard | unrecognized
--data no/such/folder | --data is no/such/folder
"""


class TestCommand:
    """train.py as a person uses it, with mistakes."""

    def test_a_whole_run(self, tmp_path):
        words = (
            "--loss hard --alpha 0.3 --epochs 2 --fraction 0.02 --batch-size 40 --size 8".split()
        )
        program = [sys.executable, HERE / "train.py", *words]
        run = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, env=ALONE)
        assert run.returncode == 0 and "images/s" in run.stderr, run.stderr  # the bar
        for text in ("raw pixels", "untrained encoder", "trained encoder"):
            assert f"\n{text}" in run.stdout
        assert "temperature 0.07, debias published, alpha 0.3" in run.stdout
        out = tmp_path / "runs" / "shapes-simclr-hard-0"
        results = json.loads((out / "results.json").read_text())
        names = "loss method data seed epochs device seconds options history versions".split()
        assert results.keys() == {*names, *FIGURES}
        assert (results["loss"], results["options"]["alpha"], results["epochs"]) == ("hard", 0.3, 2)
        assert results["raw"].keys() == results["untrained"].keys() == report.COLUMNS.keys()
        assert 0 < results["seconds"] < 600
        assert set(times_of(out)) == {"checkpoint.pt", "results.json", "report.html"}

    def test_what_needs_classes_is_left_out_without_them(self, tmp_path, capsys):
        write_images(tmp_path / "images" / "all", 10, ("a", "b"), (8, 8))
        words = ["--data", f"{tmp_path / 'images'}", "--epochs", "2", "--out"]
        train.main([*words, f"{tmp_path / 'run'}"])
        said = capsys.readouterr().out
        assert "16 images to train on, 4 to test, no classes" in said and "%" not in said
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert results["linear"] is results["tolerance"] is results["raw"]["knn"] is None
        assert results["uniformity"] < 0
        train.main([*words, f"{tmp_path / 'both'}", "--compare", "hcl", "simclr", "--seeds", "2"])
        said = capsys.readouterr().out
        assert "| `simclr` |" in said and "over" not in said

    def test_a_flag_without_its_value_has_the_default(self):
        words = ["--alpha", "--beta", "2", "--no-lead-in"]
        given = train.parse(words)
        assert given == {"beta": 2.0, "lead_in": False}

    @pytest.mark.parametrize("flag, least, most", [("--help", 20, 40), ("--help-all", 80, 200)])
    def test_help_of_the_flags_that_matter_first_fits_two_screens(self, flag, least, most, capsys):
        with pytest.raises(SystemExit) as stop:
            train.main([flag])
        assert stop.value.code in (0, None)
        assert least < len(capsys.readouterr().out.splitlines()) < most

    @pytest.mark.parametrize("words, complaint", table(MISTAKES))
    def test_mistakes_are_named(self, words, complaint, tmp_path, monkeypatch, capsys):
        """In one line and before anything is read; with exit code 2."""
        monkeypatch.chdir(tmp_path)  # runs/ may hold a finished run
        monkeypatch.setattr(images, "load", lambda **_: 1 / 0)
        said = quit_with(words.split(), capsys)
        assert (
            said.startswith("2 train.py: error: ") and complaint in said and said.count("\n") == 1
        )
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "words, complaint",
        [
            (f"--out {__file__}/run", "Not a directory"),
            ("--method queue --queue-size 800", "queue_size is 800"),
            ("--data .", "--data is ., with 0 readable images"),
        ],
    )
    def test_what_the_data_shows(
        self, words, complaint, tmp_path, monkeypatch, capsys, small_shapes
    ):
        monkeypatch.chdir(tmp_path)
        said = quit_with(words.split(), capsys)
        assert said.startswith("2 train.py: error: ") and complaint in said
        assert said.count("\n") == 1


# ---- The README and the recorded runs


def blocks(language):
    """Return the README's blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


COMMANDS = re.findall(r"train\.py([^#&\n]*)", "".join(blocks("sh")))
COMMANDS += re.findall(r"\| `(--.*?)` \|", README + MORE)


def headings(page):
    """Return the anchors of the headings of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


class TestReadme:
    """Commands run, and tables are of the recorded runs."""

    @pytest.mark.parametrize("name", images.TORCHVISION)
    def test_names_every_set(self, name):
        assert f"`{name}`" in README or f"--data {name}`" in README

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
