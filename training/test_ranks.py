"""Tests of several processes: every number of ranks makes the same run, and torchrun resumes it."""

import multiprocessing
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import distributed, nn

import hardneg
from hardneg import Training
from training import baselines
from training.test_training import ALONE, METHODS, SMALL_WORDS, numbers_of

# What torchrun runs: several commands, one after the other. A command can stop at a certain step.
# The last command then stops by the death of a rank.
DRIVER = """
import os, signal, sys, torch
from hardneg import InvalidArgument, Training
from training import images, ranks
import train

shapes, step, taken = images.shapes, Training._step, []
images.shapes = lambda n, **options: shapes(n // 10, **options)

def deadly(self, *arguments):
    taken.append(0)
    if len(taken) == int(os.environ["LAST"]):
        if command != commands[-1]:
            raise KeyboardInterrupt
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *arguments)

Training._step = deadly
torch.set_num_threads(1)
commands = sys.argv[1:]
with ranks.joined():
    for command in commands:
        taken.clear()
        try:
            train.act(train.parse(command.split()))
        except KeyboardInterrupt:
            print("stopped")
        except InvalidArgument as error:
            print(error)
"""


def started_by_torchrun(ranks, driver, commands, last=0):
    """Run commands on several ranks → the exit code and what was printed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    words += [f"{ranks}", f"{driver}", *commands]
    told = ALONE | {"LAST": f"{last}"}
    done = subprocess.run(words, capture_output=True, text=True, env=told, timeout=120)
    return done.returncode, done.stdout + done.stderr


class Grouped(nn.Module):
    """An encoder that normalises each image by itself."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8)
        self.linear = nn.Linear(8, 12)

    def forward(self, x):
        features = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return features, self.linear(features)


def without_batches(network):
    """Replace BatchNorm by a norm of each image."""
    for name, part in network.named_children():
        if isinstance(part, nn.BatchNorm2d):
            setattr(network, name, nn.GroupNorm(1, part.num_features))
        else:
            without_batches(part)


def method_of(name, encoder, pixels):
    """Make a method without BatchNorm."""
    criterion = hardneg.ContrastiveLoss("hcl", temperature=0.3)
    method = hardneg.SimCLR(criterion)
    if name == "bank":
        method = hardneg.Bank(criterion, encoder, pixels)
    if name == "queue":
        method = baselines.Queue(criterion, encoder, pixels, queue_size=20, momentum=0.9)
    if name == "clae":
        method = baselines.CLAE(criterion, bound=0.01)
    if name == "diffhard":
        game = hardneg.Game(8, width=2, latent=4, pretrain=1, every=2, batch_size=12)
        method = hardneg.DiffHard(hardneg.ContrastiveLoss("ppcl"), game)
    without_batches(method)
    return method


# a method, and options of its training
CASES = [(name, {}) for name in METHODS]
CASES += [("simclr", {"bfloat16": True}), ("simclr", {"micro_batch": 4})]
CASES += [("bank", {"micro_batch": 3})]


def train_a_little(name, group, options):
    """Train for two epochs of batches of 12 → losses, and all that has a state."""
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (48, 3, 8, 8), dtype=torch.uint8)
    encoder = Grouped()
    method = method_of(name, encoder, pixels)
    settings = {"epochs": 2, "batch_size": 12, "lr": 1e-3, "bfloat16": False, "group": group}
    training = Training(encoder, pixels, method, **settings | options)
    losses = [float(figures.get("loss", 0)) for figures in training]
    state = [*encoder.parameters(), *method.parameters(), *method.buffers()]
    flat = [x.detach().flatten().float() for x in state]
    return losses, torch.cat(flat)


def train_as_a_rank(rank, ranks, folder):
    """Train all cases in one of several processes."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder / 'store'}", ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = distributed.group.WORLD
    found = [train_a_little(name, group, options) for name, options in CASES]
    torch.save(found, folder / f"{rank}.pt")
    encoder, pixels = Grouped(), torch.arange(7 * 192).view(7, 3, 8, 8).byte()
    for parameter in encoder.parameters():
        distributed.broadcast(parameter.detach(), 0)
    alone = hardneg.embed(encoder, pixels)
    together = hardneg.embed(encoder, pixels, group=group)
    torch.testing.assert_close(together, alone)
    distributed.destroy_process_group()


class TestRanks:
    """Several processes, started by torchrun."""

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_any_number_of_ranks_makes_the_same_run(self, ranks, tmp_path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["training.test_ranks"])
        several = []
        for rank in range(ranks):
            arguments = rank, ranks, tmp_path
            several.append(context.Process(target=train_as_a_rank, args=arguments))
            several[-1].start()
        for process in several:
            process.join()
            assert process.exitcode == 0
        of_ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
        for (name, options), *found in zip(CASES, *of_ranks, strict=True):
            losses, state = train_a_little(name, None, options)
            error = 0.02 if options.get("bfloat16") else 1e-5
            first_losses, first_state = found[0]
            np.testing.assert_allclose(first_losses, losses, error, error, err_msg=name)
            torch.testing.assert_close(first_state, state, rtol=error, atol=error)
            for _, other in found:
                assert torch.equal(other, first_state), name

    def test_every_method_is_stopped_and_goes_on(self, tmp_path):
        """With two ranks to the bit."""
        driver = tmp_path / "driver.py"
        driver.write_text(DRIVER)

        def commands(folder):
            found = []
            for method, words in METHODS.items():
                every = " ".join(SMALL_WORDS)
                found.append(f"{every} --method {method} {words} --out {folder / method}")
            return found

        whole, cut = tmp_path / "whole", tmp_path / "cut"
        code, said = started_by_torchrun(2, driver, [*commands(whole), "--batch-size 3"])
        assert said.count("batch_size is 3; it must be a whole number from 4") == 1
        assert code == 0, said
        assert said.count("2 processes share each batch") == 1
        assert said.count("\ntrained encoder") == len(METHODS)
        start = time.perf_counter()
        code, said = started_by_torchrun(2, driver, commands(cut), last=4)
        assert code != 0 and "SIGKILL" in said
        assert said.count("stopped\n") == len(METHODS) - 1
        assert time.perf_counter() - start < 60
        code, said = started_by_torchrun(2, driver, commands(cut))
        assert code == 0 and said.count("The run is resumed after epoch") == len(METHODS), said
        for method in METHODS:
            found = numbers_of(cut / method / "results.json")
            assert found == numbers_of(whole / method / "results.json"), method
