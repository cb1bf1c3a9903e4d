"""The losses and the miner beside published code, which ran once: its values are recorded here."""

import numpy as np
import pytest
import torch
from numpy.random import default_rng as rng
from torch.nn import functional as F

import hardneg
from hardneg import contrastive_loss
from test_hardneg import embeddings


class TestPublishedCode:
    """Compare with published code: the loss, and the norm and one projection of its gradient.

    Each published function ran once, on the CPU in float64. There `.cuda()` did nothing.
    The functions of hcl and ot got unit rows.

    hcl     joshr17/HCL 7b4647f, image/main.py, criterion: "easy" at β = τ⁺ = 0, else "hard".
            At β = 0 chingyaoc/DCL 7d6345f, main.py, train, gives the same bits.
    ot      rjiang03/HCL-OT 89c8792, main.py, OT_hard, with POT 0.9.7.
            Its default cost ‖x − y‖² is twice the paper's, so our epsilon is half of its own.
            For "exp" the two are equal, and with its κ ours is e^κ times its own. Its Sinkhorn
            stops at 1e-9, so the tolerance is 1e-8.
    simclr, ppcl
            In this order: lightly 1.6.0 NTXentLoss (2 cases), pytorch-metric-learning 2.9.0
            NTXentLoss (1) and SupConLoss (2), info-nce-pytorch 0.1.4 InfoNCE (2).
    BANK    WangFeng18/UnsupervisedLearningCodes 4f817da, objective.py, without its import of
            sklearn. In this order: PointLoss, HardNegativePointLoss, FlatLoss, HardFlatLoss,
            SingleLoss.
    """

    # In a line: loss, samples, t, options; value, norm, projection.
    # `of` is the source of the negatives, `views` the number of views if it is not 2.
    BATCH = """
        hcl     4 0.5  tau_plus=0,beta=0           2.89919106559 0.482717240596 -0.459201896528
        hcl     9 1    tau_plus=0.1,beta=0         2.83214016943 0.196835401277 0.0624100798361
        hcl     8 0.07 tau_plus=0,beta=1           8.60868580947 2.74668812975  1.46538361581
        hcl    13 0.7  tau_plus=0.2,beta=3         3.86918594832 0.275449260631 -0.0390424078791
        hcl    16 0.3  tau_plus=0.5,beta=0.5       3.74084068897 0.648599769846 0.504520676036
        hcl    32 0.5  tau_plus=0.1,beta=1         4.7988127109  0.206181325035 0.167929728657
        ot      4 0.5  epsilon=0.35                3.2381149586  0.533612910803 -0.531052267578
        ot      9 1    tau_plus=0.1,epsilon=0.5    3.08525305879 0.201930211935 0.0622784908238
        ot     12 0.3  tau_plus=0.5,epsilon=0.5    4.1684876657  0.757028146603 -0.932520592425
        ot     16 0.5  epsilon=0.05                4.27900478931 0.285184975422 0.0571579745989
        ot      5 0.5  epsilon=3*np.e,cost='exp'    2.712199573   0.5597104522   1.204938736
        simclr  9 0.1  -                           6.51997871633 2.06642814593  0.567165190255
        simclr  7 0.2  of='bank'                   5.52672203605 1.27848908268  -0.265588364955
        simclr  8 1    -                           2.67134440416 0.163524814629 0.0585711613931
        ppcl    6 0.5  views=3                     3.23857356663 0.250278518668 -0.16162763027
        ppcl    6 0.1  labels=[0,1,2]*2            5.41255540882 1.77789629419  1.18663830712
        simclr 11 0.1  of='keys'                   4.87189335538 1.84499389679  1.62841498261
        simclr  9 0.5  of='bank'                   3.89158721069 0.350686915759 0.145152705052
    """.strip().splitlines()
    BANK = [  # loss, samples, t, k, weight of the own row in its anchor; value, norm, projection
        ("simclr", 5, 0.07, 41, 1, 6.51332611693, 2.55672336183, -0.0968299165182),
        ("simclr", 8, 0.07, 41, -1, 12.4180668505, 1.53654766771, -2.27943260634),
        ("hard", 4, 0.1, 5, 5, 0.561651425043, 0.231469461099, -0.173917047303),
        ("hard", 5, 0.07, 4, -3, 15.5723170296, 0.75835360279, 0.183512909481),
        ("simple", 6, 1, 41, 2, -0.631405195504, 0.0897771502934, 0.117300449586),
        ("hard-simple", 9, 1, 9, 4, -0.289247403881, 0.0345776711435, 0.0188483780541),
        ("hard-simple", 12, 1, 10, -4, 1.29246551674, 0.0410027387429, -0.00339516371578),
        ("triplet", 7, 1, 2, 2, 0.20097283717, 0.106497426062, -0.0304519850591),
    ]

    def check(self, loss, x, direction, expected, tolerance=1e-10):
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        figures = loss.item(), gradient.norm().item(), (gradient * direction).sum().item()
        np.testing.assert_allclose(figures, expected, rtol=tolerance)

    @pytest.mark.parametrize("line", BATCH)
    def test_batch(self, line):
        loss, samples, t, words, *figures = line.split()
        samples, t, expected = int(samples), float(t), [float(figure) for figure in figures]
        options = {} if words == "-" else eval(f"dict({words})")
        of, views = options.pop("of", None), options.pop("views", 2)
        x, direction = embeddings(samples, 2, samples * views, 8)
        views = x.requires_grad_().split(samples)
        if of == "bank":
            options = {"negatives": embeddings(0, 41, 8)}
        elif of == "keys":  # the second views of the other samples
            options = {"negatives": views[1], "positive_index": torch.arange(samples)}
        value = contrastive_loss(*views, loss=loss, temperature=t, **options)
        self.check(value, x, direction, expected, 1e-8 if loss == "ot" else 1e-10)

    # sentence-transformers 6.2.0, mine_hard_negatives(num_negatives=3): query and what it found.
    # It leaves out queries with fewer than three.
    MINED = [
        ({}, "0765 1763 2805 3467 4360 5436"),
        ({"skip": 2}, "0518 1354 2517 3710 4027 5672"),
        ({"absolute_margin": -0.2}, "1635 2805 3467 4360"),
        ({"relative_margin": 0.05}, "1635 2051 3671 4360"),
        ({"relative_margin": 0.3, "skip": 1}, "1354 2174 3710 4027"),
        ({"relative_margin": 0.05, "absolute_margin": 0.2}, "1354 2517 3671 4360"),
    ]

    @pytest.mark.parametrize("options, expected", MINED)
    def test_mine(self, options, expected):
        random = rng(0)
        rows = (torch.tensor(random.normal(size=(size, 3))) for size in (6, 9))
        found = hardneg.mine(*rows, 3, **options).tolist()
        told = [f"{i}{a}{b}{c}" for i, (a, b, c) in enumerate(found) if c >= 0]
        assert told == expected.split()

    @pytest.mark.parametrize("case", BANK)
    def test_bank(self, case):
        """Their k nearest rows include the anchor's own if it is near; their log adds 1e-7."""
        loss, samples, t, k, weight, *expected = case
        x, direction = embeddings(samples, 2, samples, 8)
        bank = F.normalize(embeddings(0, 41, 8))
        own = 3 * torch.arange(samples)
        # If False, no own row is among the k, so the positive is not in the denominator.
        near = weight > -2
        anchors = x.requires_grad_() + weight * bank[own]
        options = {"negatives": bank, "positive_index": own, "alpha": (k - near) / 40}
        options |= {"loss": loss, "temperature": t, "reduction": "none"}
        losses = contrastive_loss(anchors, bank[own], **options)
        if loss in ("simclr", "hard"):
            losses = -torch.log((torch.exp(-losses) if near else 1 / torch.expm1(losses)) + 1e-7)
        elif loss == "triplet":  # ours compares squared distances, theirs cosines
            losses = losses / 2
        elif near:  # their mean over k includes the positive
            losses = (1 - 1 / k) * losses
        self.check(losses.mean(), x, direction, expected)
