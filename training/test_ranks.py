"""Tests of several processes: without draws any number makes the same run; torchrun resumes it."""

import functools
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import distributed, nn

import hardneg
from hardneg import Training
from test_hardneg import PLAIN
from training import baselines
from training.test_training import ALONE, METHODS, SMALL_WORDS, numbers_of

# What torchrun runs: several commands, one after the other. A command can stop at a certain step.
# The last command then stops by the death of a rank. After a restart nothing stops any more.
DRIVER = """
import os, signal, sys, torch
from hardneg import InvalidArgument, Training
from training import images, ranks
import train

shapes, step, taken = images.shapes, Training._step, []
images.shapes = lambda n, **options: shapes(n // 10, **options)

def deadly(self, *arguments):
    taken.append(0)
    is_last = len(taken) == int(os.environ["LAST"])
    if is_last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
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

FAILING = """
import os, sys, train

def learn(*_):
    raise OSError(5, "Input/output error", "photo-17.png")

if os.environ["RANK"] == "1":
    train.learn = learn
train.main(sys.argv[1:])
"""


def started_by_torchrun(driver, commands, last=0, restarts=0):
    """Run commands on two ranks → the exit code and what was printed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += [f"--max-restarts={restarts}", f"{driver}", *commands]
    told = ALONE | {"LAST": f"{last}"}
    done = subprocess.run(words, capture_output=True, text=True, env=told, timeout=120)
    return done.returncode, done.stdout + done.stderr


class OverRanks(nn.BatchNorm2d):
    """A BatchNorm that sees the whole batch, also on a CPU."""

    process_group = None

    def forward(self, x):
        if not self.training or self.process_group is None:
            return super().forward(x)
        whole = super().forward(hardneg.gather(x, self.process_group))
        ranks = distributed.get_world_size(self.process_group)
        return whole.chunk(ranks)[distributed.get_rank(self.process_group)]


class Small(nn.Module):
    """An encoder with a norm that does not depend on the number of ranks."""

    def __init__(self, norm=None):
        super().__init__()
        # A bias would have no gradient but rounding, which AdamW divides by its size.
        self.conv = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.norm = norm or nn.GroupNorm(2, 8)
        self.linear = nn.Linear(8, 12)

    def forward(self, x):
        features = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return features, self.linear(features)


class OfAnImage(nn.GroupNorm):
    """Normalise each image alone. In channels_last older versions of torch crash."""

    def __init__(self, channels):
        super().__init__(1, channels)

    def forward(self, x):
        return super().forward(x.contiguous())


def without_batches(network):
    """Replace BatchNorm by a norm of each image."""
    for name, part in network.named_children():
        if type(part) is nn.BatchNorm2d:
            setattr(network, name, OfAnImage(part.num_features))
        else:
            without_batches(part)


def method_of(name, encoder, pixels, group=None):
    """Make a method for small images. Nothing that it draws differs between numbers of ranks."""
    criterion = hardneg.ContrastiveLoss("hcl", temperature=0.3)
    method = hardneg.SimCLR(criterion, PLAIN)
    if name == "bank":
        method = hardneg.Bank(criterion, encoder, pixels, view_options=PLAIN)
    if name == "queue":  # of whole batches, as their order differs
        method = baselines.Queue(criterion, encoder, pixels, 24, 0.9, PLAIN)
    if name == "clae":
        method = baselines.CLAE(criterion, 0.01, PLAIN)
    if name == "diffhard":
        game = hardneg.Game(8, width=2, latent=4, pretrain=1, every=2, batch_size=12)
        rank, ranks = (group.rank(), group.size()) if group else (0, 1)
        table = torch.randn(12, 4)
        game.latents = lambda n, _: table[: n * ranks][rank::ranks].to(game.G.first.bias)
        method = hardneg.DiffHard(hardneg.ContrastiveLoss("ppcl"), game, PLAIN)
    return method


# a method, the encoder's norm, the dtype, options of the training, the error that is allowed
CASES = [(name, OverRanks, torch.float64, {}, 1e-10) for name in METHODS]
CASES += [(name, None, torch.float32, {}, 1e-5) for name in METHODS]
CASES += [("simclr", None, torch.float64, {"micro_batch": 4}, 1e-10)]
CASES += [("bank", None, torch.float64, {"micro_batch": 3}, 1e-10)]
CASES += [("simclr", None, torch.float32, {"bfloat16": True}, 0.02)]


def train_a_little(name, norm, dtype, options, group):
    """Train for two epochs of batches of 12 → losses, and all that has a state."""
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (48, 3, 8, 8)).to(dtype) / 255
    encoder = Small(norm and norm(8))
    method = method_of(name, encoder, pixels, group)
    without_batches(method)
    settings = {"epochs": 2, "batch_size": 12, "lr": 1e-3, "bfloat16": False, "group": group}
    training = Training(encoder, pixels, method, **settings | options)
    encoder.to(dtype)
    method.to(dtype)
    encoder.norm.process_group = group
    losses = [float(figures.get("loss", 0)) for figures in training]
    if name == "queue":  # keys of a batch come in another order
        method.rows.copy_(method.rows.sort(0).values)
    state = [*encoder.parameters(), *encoder.buffers(), *method.parameters(), *method.buffers()]
    flat = [x.detach().flatten().to(dtype) for x in state]
    return losses, torch.cat(flat)


def stay_equal(name, group):
    """Train with BatchNorm and draws. After every step all ranks have the same state."""
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (48, 3, 8, 8)).byte()
    encoder = Small(nn.BatchNorm2d(8))
    method = method_of(name, encoder, pixels)
    method.view_options = {"blur": 0.5}
    for _ in Training(encoder, pixels, method, epochs=1, batch_size=12, group=group):
        state = [*encoder.state_dict().values(), *method.parameters(), *method.buffers()]
        flat = torch.cat([x.detach().flatten().double() for x in state])
        for other in hardneg.gather(flat[None], group):
            assert torch.equal(other, flat), name


def train_as_a_rank(rank, ranks, folder):
    """Train all cases in one of several processes."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder / 'store'}", ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = distributed.group.WORLD
    found = [train_a_little(*case, group) for *case, error in CASES]
    torch.save(found, folder / f"{rank}.pt")
    for name in METHODS:
        stay_equal(name, group)
    distributed.destroy_process_group()


@functools.cache
def trained_alone():
    """Train all cases without a group."""
    return [train_a_little(*case, None) for *case, error in CASES]


@pytest.mark.xdist_group("processes")
class TestRanks:
    """Several processes, started by torchrun."""

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_any_number_of_ranks_makes_the_same_run(self, ranks, tmp_path):
        multiprocessing.set_forkserver_preload(["training.test_ranks"])
        start = {"nprocs": ranks, "start_method": "forkserver"}
        torch.multiprocessing.start_processes(train_as_a_rank, (ranks, tmp_path), **start)
        of_ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
        for (*case, error), alone, *found in zip(CASES, trained_alone(), *of_ranks, strict=True):
            losses, state = alone
            first_losses, first_state = found[0]
            np.testing.assert_allclose(first_losses, losses, error, error, err_msg=f"{case}")
            torch.testing.assert_close(first_state, state, rtol=error, atol=error)
            for _, other in found:
                assert torch.equal(other, first_state), case

    def test_an_error_of_one_rank_is_printed_with_its_number(self, tmp_path):
        driver = tmp_path / "driver.py"
        driver.write_text(FAILING)
        code, said = started_by_torchrun(driver, [*SMALL_WORDS, "--out", f"{tmp_path / 'out'}"])
        assert code == 1
        assert "rank 1: train.py: error: [Errno 5] Input/output error: 'photo-17.png'" in said

    def test_every_method_is_stopped_and_goes_on(self, tmp_path):
        """With two ranks to the bit. torchrun ends both when one dies, and starts them again."""
        driver = tmp_path / "driver.py"
        driver.write_text(DRIVER)

        def commands(folder):
            found = []
            for method, words in METHODS.items():
                every = " ".join(SMALL_WORDS)
                found.append(f"{every} --method {method} {words} --out {folder / method}")
            return found

        whole, cut = tmp_path / "whole", tmp_path / "cut"
        wrong = ["--batch-size 3", "--data nowhere"]
        code, said = started_by_torchrun(driver, [*commands(whole), *wrong])
        assert said.count("--data is nowhere; it must be shapes, ") == 1
        assert said.count("batch_size is 3; it must be a whole number from 4") == 1
        assert code == 0, said
        assert said.count("2 processes share each batch") == 1
        assert said.count("\ntrained encoder") == len(METHODS)
        code, said = started_by_torchrun(driver, commands(cut), last=4, restarts=1)
        assert code == 0 and said.count("exitcode: -9") == 1, said
        assert said.count("stopped\n") == len(METHODS) - 1
        assert said.count("The run is resumed after epoch") == len(METHODS)
        for method in METHODS:
            found = numbers_of(cut / method / "results.json")
            assert found == numbers_of(whole / method / "results.json"), method
