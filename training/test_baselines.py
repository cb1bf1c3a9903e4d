"""Tests of training/baselines.py: what hardneg's own methods do, these do, too."""

import copy
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hardneg
from hardneg import contrastive_loss
from test_hardneg import (
    DEVICE,
    IMAGES,
    PLAIN,
    Operations,
    Plain,
    all_close,
    at_least,
    central_difference,
    close,
    embeddings,
    equal_states,
    finite,
    numpy,
    random_images,
    same,
    seeded,
    stays_on_the_device,
    takes_steps,
    tensors_of,
    with_slope,
)
from training import baselines

METHODS = ["queue", "clae"]


# ---- Helpers
def make(name, criterion, encoder, images, **options):
    """Make a method by its name."""
    if name == "queue":
        options = {"queue_size": min(100, len(images) - 1), "momentum": 0.99} | options
        return baselines.Queue(criterion, encoder, images, **options)
    return baselines.CLAE(criterion, **{"bound": 0.015} | options)


def begin(images, name, loss="simclr", init=0, method_options=None, **options):
    """Make a training that has not begun."""
    torch.manual_seed(init)
    encoder = hardneg.Encoder(dim=16, size=images.shape[-1])
    criterion = hardneg.ContrastiveLoss(loss, temperature=0.5)
    method = make(name, criterion, encoder, images, **method_options or {})
    usual = {"epochs": 2, "batch_size": 80, "lr": 3e-3, "bfloat16": False}
    return hardneg.Training(encoder, images, method, **usual | options)


class TestQueue:
    """`Queue` contrasts with keys of a slow encoder."""

    PLAIN_VIEWS = {"view_options": PLAIN}

    def test_holds_embeddings_of_the_slow_encoder(self):
        """In eval mode; they enter after the step, and then the slow encoder follows."""
        options = self.PLAIN_VIEWS | {"momentum": 0.5}
        training = begin(IMAGES, "queue", method_options=options, epochs=1)
        method, encoder = training.method, training.encoder
        method.step = Mock(wraps=method.step)
        rows, slow = method.rows.clone(), copy.deepcopy(encoder)
        cosines = rows @ hardneg.embed(encoder, IMAGES)[1].T
        assert cosines.amax(1).min() > 0.99999
        assert cosines.argmax(1).tolist() == [k * 240 // 100 for k in range(100)]  # evenly spread
        for figures in training:
            keys = hardneg.embed(slow, method.step.call_args.args[1])[1]
            kept = torch.cat([keys, rows[:20]]) if figures["step"] == 1 else keys
            assert (method.rows @ kept.T).amax(0).min() > 0.99999
            hardneg.follow(slow, encoder, 0.5)
            assert equal_states(slow.state_dict(), method.slow.state_dict())
        assert not any(p.requires_grad for p in method.slow.parameters())

    @at_least(40)
    @given(size=st.integers(1, 5), batches=st.lists(st.integers(1, 6), min_size=2, max_size=6))
    def test_keeps_the_last_keys(self, size, batches):
        """Batches may be larger than the queue."""
        encoder = hardneg.Encoder(dim=2, size=8)
        few = IMAGES[:6, :, :8, :8]
        queue = baselines.Queue(hardneg.ContrastiveLoss(), encoder, few, size, 0.99)
        angles = torch.arange(sum(batches)) / 100
        parts = torch.stack([angles.cos(), angles.sin()], 1).split(batches)
        newest_first = torch.cat([*parts[::-1], queue.rows])
        for keys in parts:
            queue.embed_views = Mock(return_value=[keys])
            queue.step(None, keys, None, None, lambda loss: None)
        close(queue.rows, newest_first[:size], 1e-6)

    def test_has_no_own_row_as_candidate(self):
        """The loss is that of rows for each anchor, from which its own one is left out."""
        options = self.PLAIN_VIEWS | {"queue_size": 7}
        training = begin(IMAGES[:30], "queue", method_options=options)
        method, encoder, own = training.method, training.encoder.eval(), torch.arange(8)
        losses, z = [], hardneg.embed(encoder, IMAGES[own])[1]
        rows = torch.cat([z, method.rows])
        method.step(encoder, IMAGES[own], own, torch.Generator(), losses.append)
        (loss,) = losses
        others = torch.stack([rows[torch.arange(len(rows)) != i] for i in own])
        wanted = contrastive_loss(z, rows[own], negatives=others, temperature=0.5)
        close(loss, wanted, 1e-5)


class TestCLAE:
    """`CLAE` contrasts with a second view that is made harder."""

    @pytest.mark.parametrize("bound", [1e-3, 0.1])
    def test_moves_the_second_view_along_the_sign_of_the_slope(self, bound):
        """Within [0, 1]: min(1, max(0, x_k + bound · sign ∂ℓ/∂x_k)). Ref: after [13]"""
        torch.manual_seed(0)
        layer, seen = nn.Linear(48, 3).double(), []
        layer.weight.data[:, :16] = 0  # blind to one colour: no slope, no change

        def encoder(x):
            seen.append(x)
            return x, torch.tanh(layer(x.flatten(1)))

        def said(y):
            z = encoder(torch.cat([first, torch.as_tensor(y)]))[1].chunk(2)
            return contrastive_loss(*z, **options)

        images, options = random_images(3, 4), {"return_stats": True, "temperature": 0.7}
        method = baselines.CLAE(hardneg.ContrastiveLoss(), bound, {"jitter": 0.5})
        losses = []
        stats = method.step(encoder, images, None, seeded(4), losses.append, **options)
        (loss,) = losses
        (views, harder), generator = seen[:2], seeded(4)
        first, second = (hardneg.view(images, generator, jitter=0.5) for _ in range(2))
        assert torch.equal(views, torch.cat([first, second])) and not harder.requires_grad
        with torch.no_grad():
            slope = central_difference(lambda y: float(said(y)[0]), numpy(second))
        assert np.abs(slope[:, 1:]).min() > 1e-8
        assert ((harder - second)[:, 1:].abs() < bound - 1e-9).any()
        close(harder, np.clip(numpy(second) + bound * np.sign(slope), 0, 1), 1e-12)
        (clean, wanted), (hard, _) = said(second), said(harder)
        close(stats["positive"], wanted["positive"], 1e-12)
        mean = with_slope((clean + hard) / 2, layer.weight)
        same(with_slope(loss, layer.weight), mean, 1e-10)
        assert hard > clean

    def test_the_slope_is_not_under_autocast(self):
        torch.manual_seed(0)
        layers, losses = nn.Sequential(nn.Linear(192, 32), nn.Linear(32, 8)), []

        def encoder(x):
            with torch.autocast("cpu", enabled=False):
                return x, layers(x.flatten(1))

        method, images = baselines.CLAE(hardneg.ContrastiveLoss(), 0.1), random_images(6, 8).float()
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                method.step(encoder, images, None, seeded(4), losses.append)
        assert torch.equal(*losses)


@pytest.mark.parametrize("name", METHODS)
class TestBoth:
    """Both are methods of `hardneg.Training`."""

    def test_every_loss_takes_a_step(self, name):
        takes_steps(begin, name)

    def test_everything_is_on_the_device_of_the_images(self, name):
        stays_on_the_device(begin(IMAGES[:40].to(DEVICE), name))

    def test_resumes_to_the_same_bits(self, name, tmp_path):
        """In bfloat16, which leaves parameters and figures in float32."""
        whole, seen = begin(IMAGES, name, bfloat16=True), []
        for figures in whole:
            seen.append(figures)
            if len(seen) in (1, whole.steps_per_epoch, whole.steps_per_epoch + 2):
                torch.save(whole.state_dict(), tmp_path / f"{len(seen)}.pt")
        for path in tmp_path.iterdir():
            second = begin(IMAGES, name, init=1, bfloat16=True)
            second.load_state_dict(torch.load(path, weights_only=True))
            assert list(second) == seen[int(path.stem) :]
            assert equal_states(whole.state_dict(), second.state_dict())
        found = [*tensors_of(seen), *whole.encoder.parameters()]
        assert {x.dtype for x in found} == {torch.float32} and finite(*found)

    def test_micro_batches_have_the_gradients_of_one_pass(self, name):
        found, images, network = [], embeddings(0, 7, 3, 8, 8).sigmoid(), Plain()
        for encoder in (network, hardneg.in_micro_batches(network, 3)):
            criterion = hardneg.ContrastiveLoss("ppcl", temperature=0.2)
            method = make(name, criterion, network, images)
            network.seen.clear()
            losses = []
            method.step(encoder, images, torch.arange(7), seeded(3), losses.append)
            found.append([*losses, *torch.autograd.grad(losses[0], [*network.parameters()])])
        all_close(*reversed(found), 1e-10, floor=1e-6)
        assert max(network.seen) <= 3

    def test_a_step_reads_nothing(self, monkeypatch, name):
        """On a GPU, that would wait. Steps with statistics, and the optimizer, may read."""
        monkeypatch.setattr(hardneg, "_may_read", lambda x: False)
        training, reads = begin(IMAGES, name, batch_size=8, epochs=1, lr=1e-3), []
        monkeypatch.setattr(training.optimizer, "step", lambda: None)
        run = iter(training)
        for _ in range(16):
            with Operations() as operations:
                figures = next(run)
            if "ess" not in figures:
                reads += [operations.reads()]
        assert len(reads) > 9 and not any(reads)


INVALID = [("queue", "momentum", -0.1), ("queue", "momentum", 1.0), ("queue", "queue_size", 0)]
INVALID += [("queue", "queue_size", 240)]  # as many as there are images
INVALID += [("clae", "bound", 0.0), ("clae", "bound", 1.0)]


@pytest.mark.parametrize("of, name, value", INVALID)
def test_invalid_arguments_are_named(of, name, value):
    with pytest.raises(hardneg.InvalidArgument, match=f"^{name} is .*; it must be "):
        begin(IMAGES, of, method_options={name: value})
