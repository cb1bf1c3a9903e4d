"""Draw how hard each loss pushes a negative, by its cosine: python benchmarks/forces.py

500 negatives lie evenly on a circle, a positive at cosine 0.7. The force on a negative is the
derivative of the loss in its cosine, over that in the positive's. The picture goes to
results/forces.png.
[4] Wang, Liu: Understanding the Behaviour of Contrastive Loss. CVPR 2021, Fig. 3
"""

import math
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg
from training import report

HERE = Path(__file__).resolve().parent
LOSSES = {
    "simclr": {},
    "hcl": {"beta": 0.5, "tau_plus": 0.01},
    "ot": {"epsilon": 0.3},
    "hard": {"alpha": 0.3},
    "simple": {},
}
TEMPERATURES = 0.1, 0.3, 1.0


def circle(n, shift):
    """Return n points evenly on the unit circle, turned by an angle, (n, 2)."""
    angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n + shift
    return torch.stack([angles.cos(), angles.sin()], 1)


def forces(loss, t, n=500, positive=0.7, **options):
    """Return the cosines of n negatives, ascending, and the forces on them.

    A force is below 0 where the loss pulls the negative."""
    anchors = circle(n, 0.0)  # a batch, as ot needs one, in which all anchors have the same cosines
    positives = circle(n, math.acos(positive)).requires_grad_()
    negatives = circle(n, 0.5 * math.pi / n).requires_grad_()
    losses = hardneg.contrastive_loss(
        anchors,
        positives,
        loss=loss,
        temperature=t,
        negatives=negatives,
        normalize=False,
        reduction="none",
        **options,
    )
    pull, push = torch.autograd.grad(losses[0], (positives, negatives))
    cosines, order = (negatives @ anchors[0]).detach().sort()
    return cosines, (push @ anchors[0] / (pull[0] @ anchors[0]).abs())[order]


def main():
    """Print the share of the push that the nearest tenth gets.

    Draw a panel for each temperature."""
    figure, axes = plt.subplots(
        1, len(TEMPERATURES), figsize=(10, 3.4), layout="constrained", sharey=True
    )
    lines = [["loss", *(f"t = {t}" for t in TEMPERATURES)]]
    for loss, options in LOSSES.items():
        shares = []
        for axis, t in zip(axes, TEMPERATURES, strict=True):
            cosines, force = forces(loss, t, **options)
            push = force.clamp_min(0)
            nearest = push[-len(push) // 10 :]  # cosines ascend
            shares.append(f"{100 * float(nearest.sum() / push.sum()):.0f}")
            axis.plot(cosines, force, label=loss)
            axis.set(
                title=f"t = {t}", yscale="log", ylim=(1e-6, 1), xlabel="cosine of the negative"
            )
        lines.append([loss, *shares])
    print(report.markdown(lines))
    axes[0].set_ylabel("force, over that on the positive")
    axes[0].legend()
    figure.savefig(HERE / "results" / "forces.png", dpi=110)


if __name__ == "__main__":
    main()
