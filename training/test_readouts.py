"""Tests of training/readouts.py."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng as rng
from scipy.optimize import minimize
from scipy.special import logsumexp

import hardneg
import reference_numpy as oracle
from test_hardneg import DEVICE, IMAGES, SEEDS, Operations, close, embeddings, equal_states, normal
from training import readouts


class TestReadouts:
    """knn_accuracy, linear_readout and tolerance."""

    # a tensor made on meta has no values, and one of inference mode cannot be trained on
    SETTINGS = [torch.no_grad, torch.inference_mode, partial(torch.device, "meta")]
    SETTINGS += [partial(torch.autocast, "cpu", torch.bfloat16)]

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_what_the_caller_has_set_changes_nothing(self, setting, dtype):
        """Labels are any integers. e^{1/t} overflows float32 below t = 0.0113."""
        z = 1 + 0.1 * embeddings(5, 300, 4).float().to(DEVICE)

        def figures(dtype):
            x, labels = z.clone(), (z[:, 0] > 1).to(dtype)
            split = x[:200], labels[:200], x[200:], labels[200:]
            found = [readouts.linear_readout(*split), readouts.knn_accuracy(*split, k=3)]
            found += [readouts.tolerance(x, labels), readouts.uniformity(x)]
            x = x - 1
            return [*found, readouts.knn_accuracy(x, labels, x, labels, k=5, temperature=0.001)]

        wanted = figures(torch.long)
        with setting():
            assert figures(dtype) == wanted
        assert wanted[0] > 90 and wanted[-1] == 100

    @given(**SEEDS, k=st.sampled_from([1, 7, 100]))
    def test_knn_accuracy_is_that_of_a_plain_loop(self, seed, k):
        x = normal(seed, 30, 4)
        y = normal(seed + 1, 1030, 4)
        labels, right = rng(seed).integers(3, size=1060), 0
        cosines = oracle.unit(y) @ oracle.unit(x).T
        for row, label in zip(cosines, labels[30:], strict=True):
            votes = np.zeros(3)
            for j in np.argsort(-row, kind="stable")[:k]:
                votes[labels[j]] += np.exp(row[j] / 0.5)
            right += votes.argmax() == label
        sets = x, labels[:30], y, labels[30:]
        found = readouts.knn_accuracy(*map(torch.as_tensor, sets), k=k)
        assert found == pytest.approx(100 * right / 1030, abs=0.11)  # float32 may turn one vote

    def test_linear_readout_is_scipys(self):
        """The class is in a small difference of features: it takes weights against the penalty.
        Rows to test are of one class, as each is judged alone."""
        labels, x = rng(1).integers(3, size=1200), normal(1, 1200, 40)
        labels[200:] = 1
        of_class = 0.2 * (labels - 1)
        x[:, 1] = x[:, 0] + 0.1 * x[:, 1] + of_class
        mean, std = x[:200].mean(0), x[:200].std(0, ddof=1)
        scaled = (x - mean) / std

        def scores(flat, rows):
            weight, bias = flat[:120].reshape(3, 40), flat[120:]
            return scaled[rows] @ weight.T + bias

        def objective(flat):
            some = scores(flat, slice(200))
            own = some[np.arange(200), labels[:200]]
            fit = np.mean(logsumexp(some, axis=1) - own)
            return fit + 1e-3 / 2 * (flat[:120] ** 2).sum()

        best = minimize(objective, np.zeros(123), tol=1e-9).x
        guessed = scores(best, slice(200, None)).argmax(1)
        wanted = 100 * np.mean(guessed == labels[200:])
        dull = normal(4, 1200, 1)
        dull[:200] = 0.1  # constant in training: no part
        for rows in (x, 1e3 * x + 5, np.concatenate([x, dull], 1)):
            rows, classes = torch.tensor(rows), torch.tensor(labels)
            split = rows[:200], classes[:200], rows[200:], classes[200:]
            found = readouts.linear_readout(*split)
            assert found == pytest.approx(wanted, abs=0.31)  # a few are on the border

    @given(**SEEDS, n=st.integers(3, 8), d=st.integers(2, 4))
    def test_tolerance_is_the_mean_cosine_of_a_class(self, seed, n, d):
        """Over ordered pairs of different rows that share a label.

        Eq. 11 of [4] prints a mean over all pairs with an indicator inside: at most 0.1 for ten
        equal classes. Table 1 has values up to 0.61, so its mean is over the pairs of one label.
        """
        x, labels = embeddings(seed, n, d), np.arange(n) % 2
        z = oracle.unit(x.numpy())
        cosines = z @ z.T
        same_label = labels[:, None] == labels
        wanted = cosines[same_label & ~np.eye(n, dtype=bool)].mean()
        close(readouts.tolerance(x, torch.tensor(labels)), wanted, 1e-10)

    def test_tolerance_in_half_precision(self):
        z, labels = embeddings(5, 2100, 4), torch.arange(2100) % 3
        for x in (z, z + 1):
            wanted = readouts.tolerance(x, labels)
            close(readouts.tolerance(x.half(), labels.int()), wanted, 1e-3)

    def test_memory_does_not_grow_as_images_times_classes(self):
        """Labels as rows of 0 and 1 would take 80 GB."""
        z, labels = embeddings(1, 10**4, 8).float(), torch.arange(10**4) * 100
        readouts.tolerance(z, labels)
        assert readouts.knn_accuracy(z, labels, z[:9], labels[:9], k=1) == 100

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_features_that_are_not_finite_are_named(self, value):
        good, labels = embeddings(1, 9, 3), torch.arange(9) % 2
        bad = torch.cat([good[1:], good[:1] * value])
        wrong = [("z", readouts.tolerance, [bad, labels])]
        for readout in (readouts.knn_accuracy, readouts.linear_readout):
            wrong.append(("train", readout, [bad, labels, good, labels]))
            wrong.append(("test", readout, [good, labels, bad, labels]))
        for name, readout, sets in wrong:
            with pytest.raises(hardneg.NotFinite, match=f"^{name} has NaN or inf in 1 of 9 rows"):
                readout(*sets)


class TestEmbed:
    """hardneg.embed."""

    def test_embed_leaves_the_encoder_as_it_was(self):
        encoder = hardneg.Encoder()
        encoder.head.eval()
        before = copy.deepcopy(encoder.state_dict())
        found = hardneg.embed(encoder, IMAGES[:50], batch_size=20)
        assert equal_states(encoder.state_dict(), before)
        assert not any(x.requires_grad for x in found)
        assert encoder.training and encoder.backbone.training and not encoder.head.training
        features, z = encoder.eval()(IMAGES[:50] / 255)
        close(found[0], features, 1e-5)
        close(found[1], z / z.norm(dim=1, keepdim=True), 1e-5)
        found = hardneg.embed(encoder, (IMAGES[:50] / 255).double())
        close(found[0], features, 1e-5)
        encoder.train()
        with pytest.raises(RuntimeError):
            hardneg.embed(encoder, torch.rand(2, 5, 8, 8))  # with five colours
        assert all(module.training for module in encoder.modules())

    @given(**SEEDS, n=st.sampled_from([2, 3, 2000]), t=st.floats(0.5, 4))
    def test_uniformity_is_that_of_all_pairs_but_takes_a_block_of_them(self, seed, n, t):
        x = embeddings(seed, n, 3).requires_grad_()
        with Operations() as operations:
            found = readouts.uniformity(x, t)
        assert not found.requires_grad
        squares = torch.nn.functional.pdist(hardneg.unit(x)).square()
        close(found, (-t * squares).exp().mean().log(), 1e-12)
        assert operations.bytes <= 2**23

    def test_uniformity_names_what_it_cannot_measure(self):
        with pytest.raises(ValueError, match="^z is 1 row; it must be at least two"):
            readouts.uniformity(torch.ones(1, 3))
        with pytest.raises(ValueError, match="has NaN or inf"):
            readouts.uniformity(torch.tensor([[1.0, 2.0], [math.nan, 1.0]]))
