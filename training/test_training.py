"""Tests of the command: train.py, training/ and what the README says of them.

`python -m pytest training -k TestRuns` runs one group.
"""

import contextlib
import fcntl
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import hardneg
import train
from hardneg import InvalidArgument, Training
from test_hardneg import ALONE, HERE, equal_states
from training import compare, images, readouts, report, runs
from training.cache import Rows
from training.images import Images
from training.test_images import write_images

README = (HERE / "README.md").read_text()
FIGURES = "linear knn uniformity tolerance untrained raw".split()  # the numbers of results.json
# 80 images, two steps in an epoch
SMALL_WORDS = "--epochs 2 --fraction 0.1 --batch-size 40 --size 8 --no-report".split()
SMALL = train.parse(SMALL_WORDS)
METHODS = {
    "simclr": "--loss hcl --anneal",
    "bank": "--loss hard-simple --alpha 0.1",
    "queue": "--recipe sgd --queue-size 50",
    "clae": "--bound 0.01",
    "diffhard": "--pretrain 2 --every 1 --width 2 --latent 4",
}


# ---- Helpers


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
    lines = [line for line in lines if not line.startswith("epoch ")]
    return f"{stop.value.code} {''.join(lines).lstrip()}"


def times_of(folder):
    """Return when each file of a run was written."""
    paths = [path for path in folder.iterdir() if path.name != runs.LOCK]
    return {path.name: path.stat().st_mtime_ns for path in paths}


def legend_of(figure):
    """Return the names that a figure explains beside its axes, where they cover nothing."""
    figure.draw_without_rendering()
    boxes = [part.get_tightbbox() for part in figure.axes + figure.legends]
    assert all(0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


@pytest.fixture
def small_shapes(monkeypatch):
    """Give the command a tenth of its built-in images."""
    whole = images.shapes
    monkeypatch.setattr(images, "shapes", lambda n, **options: whole(n // 10, **options))


@pytest.fixture(scope="module")
def few():
    """A small training set and test set of the built-in images, with four classes."""
    sets = images.shapes(240, seed=1, size=16) + images.shapes(120, seed=2, size=16)
    return Images(*sets, ["a", "b", "c", "d"])


class TestReport:
    """Figures, tables, pictures, the page."""

    def test_features_with_a_label_are_read_out_and_embeddings_measured(self, few):
        encoder = hardneg.Encoder(size=16)
        hidden = few.train_labels.clone()
        hidden[:40] = -1
        found = report.evaluate(encoder, few._replace(train_labels=hidden))
        x, _ = hardneg.embed(encoder, few.train[40:])
        y, z = hardneg.embed(encoder, few.test)
        sets = x, few.train_labels[40:], y, few.test_labels
        wanted = {
            "linear": readouts.linear_readout(*sets),
            "knn": readouts.knn_accuracy(*sets),
            "uniformity": float(readouts.uniformity(z)),
            "tolerance": float(readouts.tolerance(z, few.test_labels)),
        }
        assert found == pytest.approx(wanted, abs=1e-4)

    @pytest.mark.parametrize("side", [9, 64])
    def test_of_very_many_images_an_even_share_is_measured(self, side, few, monkeypatch):
        """Pixels are averaged to 16 × 16. Those of small images are taken as they are."""
        readout, uniformity = Mock(return_value=0.0), Mock(return_value=0.0)
        monkeypatch.setattr(readouts, "linear_readout", readout)
        monkeypatch.setattr(readouts, "uniformity", uniformity)
        monkeypatch.setattr(report, "READOUT", 100)
        monkeypatch.setattr(report, "PAIRED", 60)
        train, test = (x.repeat_interleave(4, 2).repeat_interleave(4, 3) for x in few[:3:2])
        large = few._replace(train=train[:, :, :side, :side], test=test[:, :, :side, :side])
        report.evaluate(report.Pixels(large), large)
        x, labels, y, _ = readout.call_args.args
        assert labels.bincount().tolist() == [10] * 10 and x.shape == (100, 3 * min(16, side) ** 2)
        averaged = few.test if side == 64 else large.test
        torch.testing.assert_close(y, averaged.flatten(1) / 255, rtol=0, atol=1e-6)
        assert len(uniformity.call_args.args[0]) == 60

    def test_no_figure_is_of_nan(self, few):
        encoder = hardneg.Encoder(size=16)
        of_own_classes = few._replace(test_labels=torch.arange(120))
        assert report.evaluate(encoder, of_own_classes, ["tolerance"]) == {"tolerance": None}
        nn.init.constant_(encoder.head[0].weight, math.nan)
        with pytest.raises(hardneg.NotFinite, match="^embeddings has NaN or inf in 120 of 120"):
            report.evaluate(encoder, few, ["uniformity"])

    def test_what_runs_share_is_measured_once(self, few, monkeypatch):
        """Pixels, and the untrained encoder of each seed."""
        evaluate, known = Mock(wraps=report.evaluate), {}
        monkeypatch.setattr(report, "evaluate", evaluate)
        for seed in (3, 3, 4):
            found = report.measure(hardneg.Encoder(size=16), few, "small", seed, known)
        assert evaluate.call_count == 3 + 1 + 2
        assert found["untrained"] == report.evaluate(runs.untrained("small", few, 4), few)
        assert known["small 3"] != known["small 4"]

    def test_a_map_keeps_classes_apart(self):
        """Its plane ignores a direction that has most of the spread, and nothing of the classes."""
        labels = torch.arange(120) % 3
        noise = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
        noise[:, 5] *= 30
        features = torch.eye(6)[labels] + 0.1 * noise
        x = (features @ report.plane_of(features, labels)).numpy()
        for one, other in itertools.combinations([x[labels == k] for k in range(3)], 2):
            apart = np.linalg.norm(one.mean(0) - other.mean(0))
            assert apart > 5 * np.linalg.norm(one - one.mean(0), axis=1).mean()

    def test_a_map_names_ten_classes(self, few):
        """Names are no formulas. There are ten colours, and no room for more names."""
        names = ["$10_$20", "_b", "\\frac$", 30 * "W", *"efghijk"]
        encoder = hardneg.Encoder(size=16)
        for some in (names[:10], names):
            images = few._replace(classes=some)
            _, _, figure = report.draw_map({"untrained": encoder, "trained": encoder}, images)
            assert report.png(figure)
            assert legend_of(figure) == ([f" {name}" for name in some] if len(some) == 10 else [])
            assert [len(axis.collections) for axis in figure.axes] == [11, 11]

    @pytest.mark.parametrize("n, epochs, wanted", [(2000, 12, 1000), (50_000, 60, 15_000)])
    def test_longer_runs_are_measured_on_more_images(self, monkeypatch, n, epochs, wanted):
        """Ten times in a run, on a twentieth of the images that it saw meanwhile."""
        labels = torch.arange(n) % 2
        of_a_pixel = torch.zeros(n, 3, 1, 1, dtype=torch.uint8)
        everything = Images(of_a_pixel, labels, of_a_pixel, labels, ["a", "b"])
        evaluate = Mock(return_value={"knn": 50.0})
        monkeypatch.setattr(report, "evaluate", evaluate)
        every = -(-epochs // 10)
        for epoch in range(1, epochs + 1):
            training = SimpleNamespace(epoch=epoch, epochs=epochs, images=labels, encoder=None)
            means = report.summary(training, [{"loss": 1.0}, {"loss": 2.0}], everything)
            assert means["loss"] == 1.5
            assert ("knn" in means) == (epoch % every == 0)
        assert evaluate.call_count == epochs // every
        assert len(evaluate.call_args.args[1].train) == wanted

    def test_curves_show_each_figure_that_changes(self):
        history = [{"epoch": 1, "loss": 3.0, "candidates": 30.0, "ess": 1.0, "clamped": 0.1}]
        history.append({"epoch": 2, "loss": 2.0, "candidates": 30.0, "ess": 1.0, "clamped": 0.2})
        drawn = {}
        for title, _, figure in report.draw_curves(history):
            drawn[title] = {x.get_label(): x.get_xydata().tolist() for x in figure.axes[0].lines}
            assert legend_of(figure) == list(drawn[title])
        assert drawn == {
            "Loss": {"loss": [[1, 3], [2, 2]]},
            "Shares": {"clamped": [[1, 0.1], [2, 0.2]]},
        }
        known = " ".join(names for names, _ in report.CURVES.values()).split()
        assert set(known) == {*report.FIGURES, "knn"}

    def test_nearest_images_have_their_weights(self, few):
        """Of six images, three for each class; false negatives have another colour. Two are alike,
        and the one that is framed comes first."""
        z = hardneg.unit(torch.tensor([[4.0, 0], [4, 2], [4, 2], [0, 4], [1, 4], [2, 4]]))
        labels, options = torch.tensor([0, 0, 0, 1, 1, 1]), train.Options(beta=2.0, temperature=0.5)
        weights = report.weights_of(z, options)
        others = ~torch.eye(6, dtype=torch.bool)
        logits = (z @ z.T / 0.5)[others].view(6, 5)
        wanted = 5 * (2 * logits).softmax(1)
        torch.testing.assert_close(weights[others].view(6, 5), wanted, rtol=0, atol=1e-5)
        _, _, figure = report.draw_nearest(options, {"trained": z}, labels, few.test[:6])
        titles = [axis.title for axis in figure.axes]
        assert [title.get_text() for title in titles[:2]] == ["trained", f"{weights[0, 1]:.2g}"]
        assert [title.get_color() for title in titles[:6]] == ["k", "C1", "C1", "k", "k", "k"]
        framed = [axis.spines["left"].get_visible() for axis in figure.axes]
        assert framed == 3 * [True, *5 * [False]]  # the frames of the anchors 0, 2 and 4

    def test_a_page_and_a_table_say_what_was_learned(self, capsys):
        before = {"linear": 25.6, "uniformity": -0.1}
        results = {"linear": 82.04, "uniformity": -2.0, "untrained": before}
        results["raw"] = {"linear": 30.0}
        verdict, besides = report.verdict_of(results, 10)
        assert verdict.startswith("82.0 % of test images are told right")
        assert besides.startswith("Without training it is 25.6 %.")
        assert besides.endswith("for 10.0 %.")
        for linear, raw, doubt in ((25.6, 1, "learned nothing"), (99.9, 100, "are too easy")):
            doubtful = results | {"linear": linear, "raw": {"linear": raw}}
            report.print_table(doubtful, train.Options())
            assert doubt in report.verdict_of(doubtful, 10)[1] and doubt in capsys.readouterr().out
        without_classes = report.verdict_of(results, 0)
        assert without_classes == ("Uniformity is -2.0", "Without training it is -0.1.")


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
        assert [path.parent.name for path in files] == ["hcl-0", "hcl-1", "simclr-0", "simclr-1"]
        train.main(["--loss", "hcl", "--seed", "1", *words, f"{tmp_path / 'one'}"])
        assert numbers_of(files[1]) == numbers_of(tmp_path / "one" / "results.json")
        times = [path.stat().st_mtime_ns for path in files]
        train.main(together)
        assert [path.stat().st_mtime_ns for path in files] == times
        shutil.rmtree(files[2].parent)  # the first to be trained
        said = quit_with([*together, "--epochs", "2"], capsys)
        assert "--epochs was 1" in said and not files[2].parent.exists()

    PLANS = [("--compare simclr hard-simple simclr --seeds 2", ["simclr", "hard-simple"], 2, 28)]
    PLANS += [("--compare simclr hard-simple --epochs 3", ["simclr", "hard-simple"], 3, 3)]
    PLANS += [("--method diffhard --seeds", ["ppcl"], 3, 6)]

    @pytest.mark.parametrize("words, losses, seeds, epochs", PLANS)
    def test_each_loss_is_trained_equally_long(self, words, losses, seeds, epochs, monkeypatch):
        """Once for each seed."""
        monkeypatch.setattr(compare, "compare", Mock())
        train.main(words.split())
        plan, _, out = compare.compare.call_args.args
        assert list(plan) == losses
        for loss, several in plan.items():
            assert [options.seed for options in several] == list(range(seeds))
            for options in several:
                assert (options.epochs, options.batch_size, options.lr) == (epochs, 64, 2e-3)
                assert options.loss == loss and options.out.parent == out

    def test_interval(self):
        gaps = compare.gaps_of(row(12.0, 22.0, 32.5), row(10.0, 20.0, 30.0))
        assert gaps == [2, 2, 2.5]
        assert compare.gaps_of(row(12.0, 22.0, 32.5)[::-1], row(10.0, 20.0)) == [2, 2]
        middle, half = report.interval(gaps)
        low, high = stats.ttest_1samp(gaps, 0).confidence_interval()
        assert (middle - half, middle + half) == pytest.approx((low, high), abs=1e-9)
        assert report.gain(gaps) == "+2.2 ± 0.7"
        assert report.interval([2.0]) == (2.0, np.inf) and report.gain([2.0]) == "+2.0"

    def test_differences_are_to_simclr_or_to_the_best_row(self):
        """The best row comes first."""
        found = {"a": row(10.0, 20.0, 30.0), "b": row(12.0, 22.0, 32.5)}
        header, _, *lines = compare.table_of(found).splitlines()
        assert "over `b`" in header and lines[1].endswith("| -2.2 ± 0.7 |")
        assert lines[2:] == ["| untrained encoder | 5.0 ± 0.0 |  |", "| raw pixels | 5.0 |  |"]
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

    Training._step = deadly(Training._step)
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

    @pytest.mark.parametrize("minutes, method", [(0, "simclr"), *((2, name) for name in METHODS)])
    def test_stopped_and_continued(
        self, minutes, method, tmp_path, small_shapes, monkeypatch, capsys
    ):
        """A run that Ctrl-C stops within its second epoch ends as one that is not, to the bit.
        If each step takes minutes, each is saved."""
        words = f"--method {method} {METHODS[method]}".split()
        monkeypatch.setattr(train.tqdm, "update", Mock(return_value=True))  # each step is shown
        options = train.parse(words)
        whole, wanted = finish(tmp_path / "whole", **options)
        clock, steps, step = itertools.count(step=60 * minutes), itertools.count(1), Training._step

        def interrupted(self, *arguments):
            if next(steps) == 4:
                raise KeyboardInterrupt
            return step(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
            patch.setattr(Training, "_step", interrupted)
            said = quit_with([*SMALL_WORDS, *words, "--out", tmp_path / "cut"], capsys)
        assert said.startswith("130") and "The same command without --overwrite goes on" in said
        at = runs.read_checkpoint(tmp_path / "cut", "cpu")["training"]["step_in_epoch"]
        assert at == (1 if minutes else 0) and not (tmp_path / "cut" / "results.json").exists()
        cut, found = finish(tmp_path / "cut", **options)
        total = 4 if method == "diffhard" else 2
        assert f"resumed after epoch 1 of {total}." in capsys.readouterr().out
        assert equal_states(found["training"], wanted["training"])
        assert found["seen"] == []  # each epoch is summarised by its own steps
        assert found["history"] == wanted["history"] and cut == whole

    @pytest.mark.parametrize("method", ["simclr", "diffhard"])
    def test_killed(self, method, tmp_path):
        """A run that is killed at random moments ends as one that is not; no file is half."""
        chance = random.Random(os.environ.get("HYPOTHESIS_PROFILE") != "explore" or None)
        given = train.parse(f"--method {method} {METHODS[method]}".split())
        options = SMALL | given | {"fraction": 0.01}
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

    def test_a_run_with_other_options_is_another_run(
        self, tmp_path, small_shapes, monkeypatch, capsys
    ):
        numbers, _ = finish(tmp_path)
        kept = times_of(tmp_path)
        for more in ({"seed": 1}, {"loss": "ot"}):
            said = "^--out is .* replace the run by --overwrite"
            with pytest.raises(InvalidArgument, match=said):
                finish(tmp_path, **more)
        assert times_of(tmp_path) == kept
        (tmp_path / "results.json").unlink()  # as if it had been stopped while it was measured
        with pytest.raises(InvalidArgument, match=r"of other options, where --epochs was 2\. "):
            finish(tmp_path, epochs=3)
        assert finish(tmp_path)[0] == numbers
        assert "resumed after epoch 2 of 2" in capsys.readouterr().out
        finish(tmp_path, epochs=1, overwrite=True)
        assert "resumed" not in capsys.readouterr().out
        assert json.loads((tmp_path / "results.json").read_text())["epochs"] == 1
        monkeypatch.setattr(train, "learn", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finish(tmp_path, overwrite=True)
        assert not times_of(tmp_path)

    def test_a_full_disk_leaves_no_half_file(self, tmp_path, small_shapes, monkeypatch, capsys):
        """The first checkpoint fits, the second does not."""
        with monkeypatch.context() as patch:
            full = OSError(28, "No space left on device")
            patch.setattr(os, "fsync", Mock(side_effect=[None, full]))
            said = quit_with([*SMALL_WORDS, "--out", tmp_path], capsys)
        path = tmp_path / "checkpoint.pt"
        assert said == f"2 train.py: error: [Errno 28] No space left on device: '{path}'\n"
        assert set(times_of(tmp_path)) == {"checkpoint.pt"}
        finish(tmp_path)
        assert "resumed after epoch 1 of 2" in capsys.readouterr().out

    def test_two_runs_do_not_share_a_folder(self, tmp_path, small_shapes, monkeypatch):
        """The second is told before it trains; a file system may lack locks."""
        with runs.alone(tmp_path), monkeypatch.context() as patch:
            patch.setattr(train, "learn", lambda *_: 1 / 0)
            with pytest.raises(InvalidArgument, match="^--out is .*, where another run is at work"):
                finish(tmp_path)
            assert not times_of(tmp_path)
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(38, "not implemented")))
        finish(tmp_path)

    @pytest.mark.parametrize("method", ["bank", "queue"])
    def test_no_run_gathers_all_images(self, method, tmp_path):
        """Neither to begin or resume, nor to train, measure or report."""
        sets, mapped = [], []
        for n, seed in ((1100, 1), (600, 2)):
            pixels, labels = images.shapes(n, seed=seed, size=8)
            mapped.append(MagicMock(shape=pixels.shape, device=pixels.device))
            mapped[-1].__getitem__.side_effect = pixels.__getitem__
            sets += [Rows(mapped[-1], torch.arange(n)), labels]
        given = {"method": method, "epochs": 1, "out": tmp_path / "run", "report": True}
        options = train.Options(**SMALL | given)
        train.run(options, Images(*sets, images.SHAPES))
        calls = [call for kept in mapped for call in kept.__getitem__.call_args_list]
        assert 0 < max(len(call.args[0]) for call in calls) <= 500

    def test_code_in_a_checkpoint_does_not_run(self, tmp_path):
        runs.save_checkpoint(tmp_path, {"args": Path()})  # as any class would
        with pytest.raises(Exception, match="^Weights only load failed"):
            runs.read_checkpoint(tmp_path, "cpu")


# ---- train.py


def options_of(words):
    """Make the options of a command."""
    return train.Options(**train.parse(words.split()))


# a command | what is true of its options
DEFAULTS = """
| loss == 'hcl'; epochs == 16; batch_size == 256; lr == 8e-3
| temperature == 0.3; beta == 1.0; tau_plus == 0.1; margin == 0.0
--loss simclr | temperature == 0.05; tau_plus is None; alpha == 0.3; lead_in
--loss hard-simple | not lead_in; alpha == 0.1; epochs == 28
--loss triplet | weights == 'top'; alpha == 0.1; margin == 0.5; epochs == 16; batch_size == 64
--loss triplet --recipe sgd | batch_size == 128; epochs == 200
--method bank --loss hard --lr 1 | lr == 1.0; batch_size == 64; temperature == 0.07
--method bank --recipe sgd | lr == 0.03; momentum == 0.8
--method queue | queue_size == 64; momentum == 0.9; epochs == 24
--method diffhard | loss == 'ppcl'; temperature == 0.1; epochs == 6
--loss hard --no-lead-in | alpha == 0.3; not lead_in
--method diffhard --no-pairs --data a$b | not pairs; data == 'a$b'
--recipe sgd --epochs 3 --seed 2 --labels --out there | epochs == 3; labels; out.name == 'there'
"""
# a command | how that begins which it says of flags without effect
IDLE = """
--loss simclr --beta 2 | --beta has no effect here. It is for hcl, --weights tilted
--loss simclr --alpha | --alpha has no effect here. It is for hard, hard-simple, triplet, --weights
--no-lead-in | --no-lead-in has no effect here. It is for hard, hard-simple, triplet, --weights
--loss simple --temperature 1 | --temperature has no effect here. It is for simclr, debiased, hcl,
--loss hard --detach-weights | --detach-weights has no effect here. It is for hcl, ot, --weights
--momentum .5 | --momentum has no effect here. It is for bank, queue, diffhard.
--loss simple --weights tilted --temperature 1 |
--compare hcl hard --alpha .3 |
--compare hcl ot --margin 1 | --margin has no effect here. It is for triplet, --objective triplet.
--method queue --labels | --labels has no effect here. It is for simclr, bank, clae.
--loss ppcl --tau-plus .1 | Without --labels, ppcl of --loss ppcl is the same as nce.
--objective each --method queue | Without --labels, each of --loss hcl is the same as nce.
--loss supcon --labels |
--method diffhard |
--root here | --root has no effect here. It is for cifar10, cifar100, stl10, svhn, fashion-mnist.
--root there --data svhn |
--batch-size 8 --micro-batch 15 |
--batch-size 8 --micro-batch 16 | --micro-batch has no effect, as a batch has no more views
"""
# a command | the arguments of the line of Python that makes its loss
LINES = """
| "hcl", temperature=0.3, tau_plus=0.1, beta=1.0
--loss simclr --beta 2 --tau-plus 0 | "simclr", temperature=0.05, tau_plus=0.0
--loss debiased --absolute-margin .1 | "debiased", absolute_margin=0.1
--loss ot --cost exp --no-detach-weights | "ot", cost="exp", detach_weights=False
--loss hard --alpha .2 --objective each | "hard", objective="each", temperature=0.07, alpha=0.2
--loss simple --epsilon .3 | "simple"
--loss hard-simple | "hard-simple", alpha=0.1
--loss triplet | "triplet", weights="top", alpha=0.1, margin=0.5
--method diffhard | "ppcl"
--loss supcon --temperature .2 | "supcon", temperature=0.2
"""


class TestOptions:
    """Defaults, and what has an effect."""

    @pytest.mark.parametrize("words, wanted", table(DEFAULTS))
    def test_defaults(self, words, wanted):
        """A page has a command for the same options."""
        options = options_of(words)
        for condition in wanted.split("; "):
            assert eval(condition, vars(options) | {}), condition
        _, _, *again = shlex.split(report.command_of(options))
        assert train.Options(**train.parse(again)) == options

    @pytest.mark.parametrize("words, said", table(IDLE))
    def test_flags_without_effect_are_said(self, words, said, monkeypatch, capsys):
        with monkeypatch.context() as patch:
            patch.setattr(train, "run", Mock())
            patch.setattr(compare, "compare", Mock())
            train.act(train.parse(words.split()))
            plans = [call.args[0] for call in compare.compare.call_args_list]
        assert all(len(seeds) == 3 for plan in plans for seeds in plan.values())
        out = capsys.readouterr().out.strip()
        assert out.startswith(said) and bool(out) == bool(said) and "\n" not in out

    WITHOUT_DEFAULT = {"absolute_margin", "relative_margin", "size", "micro_batch"}
    NUMBERS = {name for name, flag in train.FLAGS.items() if flag.kind in (int, float)}

    @pytest.mark.parametrize("flag", sorted(map(train.flag_of, NUMBERS - WITHOUT_DEFAULT)))
    def test_a_number_that_is_left_out_is_the_default(self, flag):
        for words in ("--loss hard", "--loss simclr --recipe sgd", "--method bank", "--cost exp"):
            assert options_of(f"{flag} {words}") == options_of(words)
            assert options_of(f"{words} {flag}") == options_of(words)

    @staticmethod
    def another(name):
        """Return another value of an option than train.Options(cost="exp") has."""
        allowed = hardneg.ALLOWED[name]
        if isinstance(allowed, list):
            value = 4 * (hardneg.DEFAULTS[name] or 0)  # a power of 2, so that a unit of t cancels
            return min(value or 0.003, allowed[1])
        return next(iter(allowed))

    @pytest.mark.filterwarnings("ignore:Sinkhorn stopped")
    @pytest.mark.parametrize("weights", hardneg.WEIGHTS)
    @pytest.mark.parametrize("objective", hardneg.OBJECTIVES)
    def test_what_has_an_effect_changes_the_loss(self, weights, objective):
        """An option has one exactly if another value changes the loss or its gradient."""
        given = {"weights": weights, "objective": objective, "detach_weights": False}
        options = train.Options(loss="debiased", cost="exp", **given)
        x, y = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0)).double()
        x.requires_grad_()

        def loss_and_slope(**changes):
            loss = hardneg.contrastive_loss(x, y, **options.of("loss") | changes)
            (slope,) = torch.autograd.grad(loss, x)
            return torch.cat([slope.flatten(), loss.detach()[None]])

        as_it_is = loss_and_slope()
        for name in set(train.CRITERION) - {"loss", "weights", "objective"}:
            changed = not torch.equal(loss_and_slope(**{name: self.another(name)}), as_it_is)
            assert options.has_effect(name) == changed, name

    def test_a_new_row_of_hardneg_needs_no_edit_here(self, monkeypatch, capsys):
        """A rule with an option of whole numbers, and an objective that is debiased."""
        rows = {"WEIGHTS": {"power": (lambda logits, order: logits**order, "scaled")}}
        rows["OBJECTIVES"] = {"other": (lambda pos, log_negatives: log_negatives, False)}
        rows |= {"DEFAULTS": {"order": 3}, "ALLOWED": {"order": [1, 9]}}
        rows["TEXTS"] = {"order": "The power of\n    a logit. It is odd."}
        for table, row in rows.items():
            for name, value in row.items():
                monkeypatch.setitem(getattr(hardneg, table), name, value)
        anew = {"__name__": "train"}
        exec((HERE / "train.py").read_text(), anew)
        given = anew["parse"]("--weights power --order 4 --objective other".split())
        assert given == {"weights": "power", "order": 4, "objective": "other"}
        wanted = {"loss": "hcl", "temperature": 0.3, "tau_plus": 0.1} | given
        assert anew["Options"](**given).criterion().given == wanted
        assert anew["users_of"]("tau_plus").endswith("other")
        users = anew["users_of"]("temperature")
        assert "/power, --objective" in users and users.endswith("/other")
        for words in ("--order 1.5", "--help-all"):
            with pytest.raises(SystemExit):
                anew["parse"](words.split())
        out, error = capsys.readouterr()
        assert "invalid int" in error
        said = "--order [INT] The power of a logit; for --weights power (default 3)"
        assert said in " ".join(out.split())

    @pytest.mark.parametrize("words, wanted", table(LINES))
    def test_the_line_of_python_makes_the_loss(self, words, wanted):
        """It leaves out what hardneg does by itself, and what the loss does not use."""
        options = options_of(words)
        criterion = options.criterion()
        assert f"{criterion}" == f"ContrastiveLoss({wanted})"
        x, y = torch.randn(2, 60, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        losses = criterion(x, y), hardneg.contrastive_loss(x, y, **options.of("loss"))
        slopes = [torch.autograd.grad(loss, x)[0] for loss in losses]
        assert torch.equal(*losses) and torch.equal(*slopes)


# a command | what is true of its training
BUILT = """
--loss ot --cost exp --epsilon 2 | loss['weights'] == 'transported'; loss['epsilon'] == 2
--method bank --momentum .3 | method.bank.momentum == 0.3
--method queue --momentum .7 --queue-size 30 | method.momentum == 0.7; len(method.rows) == 30
--method clae --bound .2 | method.bound == 0.2; method.view_options == {}
--method diffhard --no-pairs --no-ascent | method.game.pairs == False; method.game.ascent == False
--method diffhard --momentum .8 --pretrain 7 | method.game.momentum == 0.8; method.pretrain == 7
--method diffhard --every 3 --latent 6 | method.game.every == 3; method.game.G.latent == 6
--method diffhard --width 5 | method.game.G.blocks[2].num_features == 5
--recipe sgd --epochs 3 | epochs == 3; optimizer.defaults['lr'] == 0.03
--recipe sgd --batch-size 100 | steps_per_epoch == 3
--seed 3 --micro-batch 20 --lr .5 | seed == 3; micro_batch == 20; optimizer.defaults['lr'] == 0.5
--views small | method.view_options == {'area': (0.08, 1.0), 'blur': 0.5}
"""


class TestBuild:
    """The training is made as the options say."""

    @pytest.mark.parametrize("words, wanted", table(BUILT))
    def test_the_training(self, words, wanted, few):
        _, training = train.build(options_of(words), few)
        names = vars(training) | {"method": training.method}
        names["loss"] = training.method.criterion.options
        for condition in wanted.split("; "):
            assert eval(condition, names), condition

    def test_large_images_are_blurred_and_have_a_network_for_them(self, few, monkeypatch):
        """It is compiled on demand."""
        compiled = []
        monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
        large = few._replace(train=few.train[:4].repeat(1, 1, 6, 6))
        for compile in (False, True):
            options = train.Options(encoder="resnet18", compile=compile)
            encoder, training = train.build(options, large)
            assert compiled == [encoder] * compile
        assert training.method.view_options == {"blur": 0.5} and encoder.features == 512
        assert encoder.backbone.conv1.kernel_size == (7, 7)

    @pytest.mark.parametrize("method", ["simclr", "bank", "clae"])
    def test_labels_reach_the_loss(self, method, few):
        """An image without a label shares its number with no other."""
        labels = torch.cat([torch.tensor([-1, -1]), few.train_labels[2:]])
        options = train.Options(method=method, labels=True, loss="supcon")
        _, training = train.build(options, few._replace(train_labels=labels))
        training.method.contrast = Mock(wraps=training.method.contrast)
        index = torch.tensor([3, 0, 1, 5])
        training.method.step(training.encoder, few.train[index], index, None, torch.Tensor.backward)
        found = training.method.contrast.call_args.kwargs["labels"]
        bank = [10, 11, *labels[2:].tolist()] if method == "bank" else []
        assert found.tolist() == [labels[3], 10, 11, labels[5], *bank]
        with pytest.raises(InvalidArgument, match="^--labels is given; .* have no classes"):
            train.build(options, few._replace(train_labels=labels.clamp(max=-1)))

    def test_schedules(self, few):
        def ends(words):  # values at the first and at the last step
            _, training = train.build(options_of(words), few)
            last = 1 - 1 / training.steps
            return {name: (f(0.0), round(f(last), 9)) for name, f in training.schedules.items()}

        assert ends("--anneal --beta 2") == {"beta": (2, 0.4)}
        assert ends("--loss hard --alpha .2") == {"alpha": (1, 0.2)}
        assert ends("--beta 2") == ends("--loss hard --no-lead-in") == {}

    def test_an_infinite_loss_is_one_line(self, tmp_path, small_shapes, monkeypatch, capsys):
        """Any other fault of a step shows its traceback."""
        words = [*SMALL_WORDS, "--out", f"{tmp_path}"]
        step = Mock(side_effect=[FloatingPointError("The loss is nan."), ZeroDivisionError])
        monkeypatch.setattr(Training, "_step", step)
        said = quit_with(words, capsys)
        said = said.removeprefix("2 train.py: error: ")
        assert said == "Training stopped at step 1 of 4. The loss is nan. A lower lr may help.\n"
        with pytest.raises(ZeroDivisionError):
            train.main(words)


# a command | what it complains of
MISTAKES = """
--loss hrad | argument --loss: hrad is not one of simclr, debiased, hcl
--compare hcl hrad | did you mean 'hard'?
--compar hcl hard | there is no --compar; did you mean '--compare'?
hard | there is no hard
--micro-batch --beta 2 | argument --micro-batch: expected one argument
--lr 0 | lr is 0
--micro-batch 0 | --micro-batch is 0
--tau-plus 1 | tau_plus is 1
--fraction 0 | --fraction is 0
--seed 2000000000 | --seed is 2000000000
--compare hcl --loss ot | argument --loss: not allowed with argument --compare
--size 4 | --size is 4
--method bank --momentum 1 | momentum is 1
--method diffhard --size 40 | --size is 40; it must be a power of two here, such as 32
--seeds 0 | --seeds is 0
--device abacus | --device is abacus
--device cuda:77 | --device is cuda:77
--device meta | --device is meta
"""
FOUND_LATER = f"""\
--out {__file__}/run | Not a directory
--out {__file__} | --out is {__file__}, a file; it must be a folder
--method queue --queue-size 800 | queue_size is 800
--data no/such/folder | --data is no/such/folder
"""


class TestCommand:
    """train.py as a person uses it, with mistakes."""

    def test_a_whole_run(self, tmp_path):
        words = "--loss hard --alpha --epochs 2 --fraction 0.02 --batch-size 40 --size 8"
        program = [sys.executable, HERE / "train.py", *words.split()]
        run = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, env=ALONE)
        epochs = [line.split(", ")[0] for line in run.stderr.splitlines()]  # as it is no terminal
        assert run.returncode == 0 and epochs == ["epoch 1 of 2", "epoch 2 of 2"], run.stderr
        line = 'criterion = ContrastiveLoss("hard", temperature=0.07)'
        for text in ("raw pixels", "untrained encoder", "trained encoder", line):
            assert f"\n{text}" in run.stdout
        out = tmp_path / "runs" / "shapes-simclr-hard-0"
        results = json.loads((out / "results.json").read_text())
        names = "loss method data seed epochs device seconds options history versions date"
        names = names.split() + ["content"]
        assert results.keys() == {*names, *FIGURES}
        assert (results["loss"], results["options"]["alpha"], results["epochs"]) == ("hard", 0.3, 2)
        assert results["raw"].keys() == results["untrained"].keys() == report.COLUMNS.keys()
        assert set(times_of(out)) == {"checkpoint.pt", "results.json", "report.html"}
        page = (out / "report.html").read_text()  # needs no other file
        assert 'src="http' not in page
        changes = len({epoch["knn"] for epoch in results["history"]}) > 1  # else it has no curve
        assert page.count("data:image/png;base64,") == 5 + changes
        texts = "hard on shapes", "trained encoder", "false negative", "python train.py", line
        assert all(text in unescape(page) for text in texts)

    def test_a_report_that_fails_costs_no_result(self, tmp_path, small_shapes, monkeypatch):
        def broken(*_):
            assert (tmp_path / "results.json").exists()
            raise MemoryError("no more")

        monkeypatch.setattr(report, "draw_map", broken)
        with pytest.warns(UserWarning, match="report.html cannot be drawn .MemoryError: no more"):
            finish(tmp_path, report=True)

    def test_names_of_folders_are_text(self, tmp_path, monkeypatch, capsys):
        write_images(tmp_path / "$<i>\n\x1b[2J", 10, ("$10_$20", "_a\x1b[2J\udcff"), (8, 8))
        monkeypatch.chdir(tmp_path)
        train.main(["--data", "$<i>\n\x1b[2J", "--epochs", "1"])
        said = capsys.readouterr().out
        assert "of 2 classes ($10_$20, _a\\x1b[2J\\udcff). All" in said
        (out,) = (tmp_path / "runs").iterdir()
        assert "\x1b" not in said and out.name == "$<i>\\n\\x1b[2J-simclr-hcl-0"
        page = (out / "report.html").read_text()
        assert "on $&lt;i&gt;" in page and "<i>" not in page and "\x1b" not in page

    def test_what_needs_classes_is_left_out_without_them(self, tmp_path, capsys):
        write_images(tmp_path / "images" / "all", 10, ("a", "b"), (8, 8))
        words = ["--data", f"{tmp_path / 'images'}", "--epochs", "2", "--out"]
        train.main([*words, f"{tmp_path / 'run'}"])
        first = capsys.readouterr().out
        assert "has 16 images to train on and 4 to test, without classes" in first
        assert "%" not in first
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        assert results["linear"] is results["tolerance"] is results["raw"]["knn"] is None
        words[1] += "/."  # the same folder
        times = times_of(tmp_path / "run")
        train.main([*words, f"{tmp_path / 'run'}"])
        table, said = capsys.readouterr().out.split("This run was finished before. --overwrite")
        assert "\ntrained encoder" in table and "\ncriterion = ContrastiveLoss(" in table
        assert table[table.index("uniformity") :] in first and times_of(tmp_path / "run") == times
        (tmp_path / "run" / "report.html").unlink()  # as if the run had been killed while drawing
        os.utime(tmp_path / "images" / "all" / "a" / "0.png")  # its content stays
        kept = tmp_path / "kept"
        train.main([*words, f"{tmp_path / 'run'}", "--cache", f"{kept}"])
        assert "resumed after epoch 2 of 2" in capsys.readouterr().out
        assert (tmp_path / "run" / "report.html").exists() and len(list(kept.glob("*.images"))) == 1
        more = "--compare hcl simclr --seeds 2 --no-report"
        train.main([*words, f"{tmp_path / 'both'}", *more.split()])
        said = capsys.readouterr().out
        assert "| `simclr` |" in said and "over" not in said
        for name in ("0.png", "4.png"):  # one to train on, and one to test
            image = tmp_path / "images" / "all" / "a" / name
            content = image.read_bytes()
            shutil.copy(tmp_path / "images" / "all" / "b" / "0.png", image)
            said = quit_with([*words, tmp_path / "run"], capsys)
            assert "whose run had other pixels or labels. Restore" in said
            image.write_bytes(content)
            (tmp_path / "run" / "results.json").unlink(missing_ok=True)  # as if it was stopped

    @pytest.mark.parametrize("flag, least, most", [("--help", 20, 40), ("--help-all", 80, 200)])
    def test_help_of_the_flags_that_matter_fits_a_screen(self, flag, least, most, capsys):
        with pytest.raises(SystemExit):
            train.main([flag])
        said = capsys.readouterr().out
        assert least < len(said.splitlines()) < most
        assert "(default hcl, ppcl for diffhard)" in " ".join(said.split())

    @pytest.mark.parametrize("words, complaint", table(MISTAKES + FOUND_LATER))
    def test_mistakes_are_named(
        self, words, complaint, tmp_path, small_shapes, monkeypatch, capsys
    ):
        """In one line, with exit code 2. Most are found before anything is read."""
        monkeypatch.chdir(tmp_path)  # runs/ may hold a finished run
        if [words, complaint] not in table(FOUND_LATER):
            monkeypatch.setattr(images, "load", lambda **_: 1 / 0)
        said = quit_with(words.split(), capsys)
        assert said.startswith("2 train.py: error: ") and complaint in said
        assert said.count("\n") == 1 and not list(tmp_path.iterdir())

    BROKEN = [("seconds", "soon"), ("seconds", -1), ("seconds", True), ("history", 3)]
    BROKEN += [("history", [{"loss": "low"}]), ("seen", [1]), ("content", None), ("args", [])]
    BROKEN += [("training", {}), ("training", {"epoch": 10**6, "step_in_epoch": 0})]

    @pytest.mark.parametrize("name, value", BROKEN)
    def test_a_checkpoint_of_other_values_is_refused(self, name, value, stopped, capsys):
        torch.save(stopped[1] | {name: value}, stopped[0] / "checkpoint.pt")
        said = quit_with([*SMALL_WORDS, "--out", stopped[0]], capsys)
        assert said.startswith("2 train.py: error: ") and said.count("\n") == 1
        assert "--overwrite" in said or f"{name} is " in said

    @pytest.fixture
    def stopped(self, tmp_path, small_shapes, monkeypatch, capsys):
        """A run that was stopped after its first epoch: its folder, and its state."""
        with monkeypatch.context() as patch:
            patch.setattr(report, "measure", Mock(side_effect=KeyboardInterrupt))
            quit_with([*SMALL_WORDS, "--out", tmp_path], capsys)
        return tmp_path, runs.read_checkpoint(tmp_path, "cpu")

    def test_nothing_of_others_is_removed_or_overwritten(self, tmp_path, small_shapes, capsys):
        names = [".lock", "checkpoint.pt.part", "results.json.part", "report.html.part"]
        for name in names:
            (tmp_path / name).write_text("precious")
        finish(tmp_path, report=True)
        assert {(tmp_path / name).read_text() for name in names} == {"precious"}
        for name in ("checkpoint.pt", "results.json"):
            (tmp_path / name).unlink()
        (tmp_path / "report.html").write_text("of something else")
        said = quit_with([*SMALL_WORDS, "--out", tmp_path], capsys)
        assert "it must be a folder without report.html of something else, or go with" in said
        assert (tmp_path / "report.html").read_text() == "of something else"
        finish(tmp_path, overwrite=True)

    @pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp1251"])
    def test_output_of_any_encoding(self, encoding, tmp_path, small_shapes, monkeypatch):
        """None of these has all of β, τ, × and ä."""
        raw = io.BytesIO()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding=encoding))
        for words in (["--help-all"], [*SMALL_WORDS, "--out", f"{tmp_path / 'ä'}"]):
            with contextlib.suppress(SystemExit):
                train.main(words)
            sys.stdout.flush()
        assert b"--temperature" in raw.getvalue() and b"The results are in" in raw.getvalue()

    @pytest.mark.parametrize("name", ["checkpoint.pt", "results.json"])
    def test_a_file_that_is_not_of_a_run_is_said(self, name, tmp_path, capsys):
        options = train.Options(out=tmp_path, **SMALL)
        content = runs.content_of(train.read(options))
        (tmp_path / "compare.json").write_text('{"mine": 1}')
        words = [*SMALL_WORDS, "--out", tmp_path, "--compare", "simclr"]
        assert "compare.json cannot be read (TypeError)" in quit_with(words, capsys)
        train.main([str(word) for word in words] + ["--seeds", "1", "--overwrite"])
        assert json.loads((tmp_path / "compare.json").read_text()).keys() == {"simclr"}
        no_figures = {"options": options.of_the_run(), "content": content, "seed": 0}
        bad = [no_figures, no_figures | {"seed": 7}, no_figures | {"linear": math.nan}]
        for content in ("", "[1]", "PK", *map(json.dumps, bad)):
            (tmp_path / name).write_text(content)
            said = quit_with([*SMALL_WORDS, "--out", tmp_path], capsys)
            assert said.startswith(f"2 train.py: error: {tmp_path / name} cannot be read")
            assert said.count("\n") == 1 and (tmp_path / name).read_text() == content

    def test_it_ends_quietly_where_nobody_reads_on(self, tmp_path):
        program = [sys.executable, HERE / "train.py", *SMALL_WORDS, "--out", tmp_path / "x"]
        with subprocess.Popen(program, -1, stdout=-1, stderr=-1, env=ALONE) as run:  # pipes
            run.stdout.close()
            assert run.stderr.read() == b"" and run.wait() == 141
