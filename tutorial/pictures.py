"""Draw the pictures of README.md beside it, with its own code: python tutorial/pictures.py

With the folder of a run, as in `python tutorial/pictures.py runs/shapes-simclr-hcl-0` after `python
train.py`, draw that of ../README.md instead.
"""

import contextlib
import io
import math
import re
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg
import train
from training import report, runs

HERE = Path(__file__).resolve().parent

plt.switch_backend("Agg")  # needs no screen
plt.style.use("tableau-colorblind10")
COSINES = torch.linspace(-1, 1, 401, dtype=torch.float64)


def save(figure, name):
    """Write a picture beside the page."""
    figure.savefig(HERE / f"{name}.png", dpi=120)
    plt.close(figure)


def panels(count=1, width=4.5, **options):
    """Make panels side by side → the figure, and the panels."""
    options |= {"figsize": (width * count, 3.2), "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(1, count, **options)
    return figure, axes[0]


def sphere(page):
    """Draw vectors of six topics before and after training, on a sphere."""
    points = page["points"].view(100, 20, 32)[:6].flatten(0, 1)
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=0.003)
    around, down = torch.linspace(0, 2 * math.pi, 25)[:, None], torch.linspace(0, math.pi, 13)
    globe = [around.cos() * down.sin(), around.sin() * down.sin(), down.cos().expand(25, 13)]
    colors = ["C0", "C1", "tab:green", "black", "tab:pink", "tab:purple"]
    figure, axes = panels(2, 2.7, subplot_kw={"projection": "3d"})
    for axis, title in zip(axes, ("before", "after 300 batches"), strict=True):
        z = F.normalize(encoder(points).detach(), dim=1)
        axis.plot_wireframe(*globe, color="0.8", lw=0.4)
        for topic, color, marker in zip(z.split(20), colors, "os^DvP", strict=True):
            axis.scatter(*topic.T, color=color, marker=marker, s=16, depthshade=False)
        axis.set_axis_off()
        axis.set(title=title, xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
        axis.set_box_aspect((1, 1, 1), zoom=1.4)
        for _ in range(300):
            loss = page["infonce"](*page["two_views"](encoder, points, random))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    save(figure, "sphere")


def slopes(loss_of, positive, negatives, t=0.5):
    """Return the slopes of a loss in the cosines of a positive and of its negatives."""
    p = torch.tensor([positive / t], dtype=torch.float64, requires_grad=True)
    s = (negatives / t)[None].clone().requires_grad_()
    loss = loss_of(p, s)
    return [slope[0] / t for slope in torch.autograd.grad(loss, (p, s))]


def nce(p, s):
    """InfoNCE of one anchor, from its logits."""
    return F.softplus(s.logsumexp(1) - p).sum()


def pull(page):
    """Draw the slope in the positive, with and without it in the denominator."""
    random = torch.Generator().manual_seed(0)
    negatives = (0.25 * torch.randn(126, generator=random, dtype=torch.float64)).clamp(-1, 1)
    places = COSINES[200:]
    figure, (axis,) = panels()
    for t in (0.5, 0.1):
        pulls = [-slopes(nce, p, negatives, t)[0] * t for p in places]
        axis.plot(places, torch.stack(pulls), label=f"InfoNCE, t = {t}")
    axis.plot(places, torch.ones(len(places)), "k:", label="decoupled")
    axis.set(xlabel="cosine of the positive", ylabel="pull: minus the slope in p", ylim=(0, 1.1))
    axis.legend()
    save(figure, "pull")


def debiased(p, s, tau_plus=0.1):
    """Step 3's loss of one anchor, from its logits, where the floor does not bind."""
    rest = (s.exp().sum(1) - s.shape[1] * tau_plus * p.exp()) / (1 - tau_plus)
    return F.softplus(rest.log() - p).sum()


def with_labels(p, s):
    """InfoNCE of one anchor without the ten negatives of its class, the first."""
    return F.softplus(s[:, 10:].logsumexp(1) + math.log(100 / 90) - p).sum()


def false_negative(page):
    """Draw the forces on the anchor's class: ten of 100 negatives are of it."""
    random = torch.Generator().manual_seed(0)
    others = (0.2 * torch.randn(90, generator=random, dtype=torch.float64)).clamp(-1, 1)
    own = torch.full((10,), 0.7, dtype=torch.float64)
    everything = torch.cat([own, others])
    losses = {"InfoNCE": nce, "debiased\nτ⁺ = 0.1": debiased, "labels known": with_labels}
    pulls, pushes = [], []
    for loss_of in losses.values():
        positive, negatives = slopes(loss_of, 0.7, everything)
        pulls.append(-positive.item())
        pushes.append(-negatives[:10].sum().item())
    in_sum = torch.tensor(pulls) + torch.tensor(pushes)
    places = torch.arange(3.0)
    figure, (axis,) = panels()
    axis.bar(places - 0.25, pulls, 0.25, label="on the positive")
    axis.bar(places, pushes, 0.25, label="on the false negatives")
    axis.bar(places + 0.25, in_sum, 0.25, color="C3", label="on the class, in sum")
    axis.axhline(0, color="k", lw=0.8)
    axis.axhline(in_sum[2], color="k", ls=":", lw=1)
    axis.set(ylabel="pull (push, if below 0), t = 0.5", ylim=(-1.2, 4.4))
    axis.set_xticks(places, list(losses))
    axis.legend(fontsize="small")
    save(figure, "false_negative")


def push(page):
    """Draw the push of tilted weights, held fixed, on negatives spread evenly over all cosines."""
    figure, (axis,) = panels()
    logits = COSINES / 0.5
    batch = logits.repeat(len(logits), 1)  # the rules of the page take one
    for beta in (0.0, 1.0, 4.0):
        log_w = page["tilted"](batch, beta)[0]
        label = f"tilted, held, β = {beta:g}, t = 0.5" if beta else "InfoNCE, t = 0.5"
        axis.plot(COSINES, 100 * (logits + log_w).softmax(0), label=label)
    # The dotted line is the same as that of β = 4, so the latter is drawn as a band below it.
    axis.lines[-1].set(linewidth=6, color="0.65")
    axis.plot(COSINES, 100 * (COSINES / 0.1).softmax(0), "k:", label="InfoNCE, t = 0.1")
    axis.set(xlabel="cosine of the negative", ylabel="share of the push, %")
    axis.set_xticks([-1, -0.5, 0, 0.5, 1])
    axis.legend(fontsize="small")
    save(figure, "push")


def top(page):
    """Draw which of 126 negatives on a circle are kept, near the anchor."""
    random = torch.Generator().manual_seed(293)
    angles = 2 * math.pi * torch.rand(126, generator=random)
    kept = angles.cos() >= angles.cos().topk(math.ceil(0.03 * 126)).values[-1]
    figure, (axis,) = panels()
    around = torch.linspace(-1, 1, 101)
    axis.plot(around.sin(), around.cos(), color="0.5", lw=1, zorder=0)
    axis.scatter(0, 1, marker="*", s=260, color="C0", label="anchor", zorder=2)  # at angle 0
    for some, label, color in ((kept, "kept, α = 0.03", "C1"), (~kept, "dropped", "0.5")):
        places = (angles[some].sin(), angles[some].cos())
        axis.scatter(*places, color=color, label=label, s=36, edgecolor="k", lw=0.5, zorder=3)
    axis.set(aspect="equal", xlim=(-0.6, 0.6), ylim=(0.52, 1.1), xticks=[], yticks=[])
    axis.legend(loc="lower center", fontsize="small")
    save(figure, "top")


def plan(page):
    """Draw tilted weights and a transport plan, where one image is near to all others."""
    random = torch.Generator().manual_seed(0)
    z = torch.eye(12) + 0.1 * torch.randn(12, 12, generator=random)
    z[:, 0] = 1  # the first is in the middle of all others
    z = F.normalize(z, dim=1)
    logits = (z @ z.T / 0.5).fill_diagonal_(-math.inf)
    figure, axes = panels(2, 2.9)
    rules = {"tilted, β = 5": page["tilted"](logits, 5.0)}
    rules["transport, ε = 0.1"] = page["transported"](logits)
    for axis, (title, log_w) in zip(axes, rules.items(), strict=True):
        weights = log_w.softmax(1)
        picture = axis.imshow(weights, vmin=0, vmax=0.5, cmap="Blues")
        first = 100 * weights[:, 0].sum() / 12
        axis.set(title=f"{title}:\nthe first gets {first:.0f} %", xticks=[], yticks=[])
        axis.set(xlabel="negative", ylabel="anchor")
    figure.colorbar(picture, ax=axes, label="share of the row")
    save(figure, "plan")


@torch.no_grad()
def cosines_of(page, encoder, points):
    """Return the cosines of one view of each point with another view of all others."""
    random = torch.Generator().manual_seed(0)
    x, y = page["two_views"](encoder, points, random)
    return (x @ y.T).fill_diagonal_(-1)


def nearest_in_batches(cosines):
    """Return the cosine of the nearest of 63 others, for each point of random batches."""
    nearest = torch.empty(2000)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(1))
    for rows in order.split(64):
        nearest[rows] = cosines[rows][:, rows].amax(1)
    return nearest


def draw_candidates(name, kinds):
    """Draw the cosine of the nearest candidate of each point, of several kinds of candidates."""
    figure, (axis,) = panels()
    for label, values in kinds.items():
        axis.hist(values.numpy(), 40, range=(0, 1), histtype="step", lw=1.6, label=label)
    axis.set(xlabel="cosine of the nearest negative", ylabel="points, of 2000")
    axis.legend(loc="upper left", fontsize="small")
    save(figure, name)


def found(page):
    """Draw how near the nearest negative is in a batch, in a bank, and with a mined one."""
    encoder = page["train"](lambda x, y, *_: page["infonce"](x, y, t=0.1))
    cosines = cosines_of(page, encoder, page["points"])
    in_batch = nearest_in_batches(cosines)
    in_bank = cosines.amax(1)
    draw_candidates("bank", {"in a batch of 64": in_batch, "in a bank of 2000": in_bank})
    one_of_eight = torch.randint(8, (2000, 1), generator=torch.Generator().manual_seed(2))
    mined = cosines.topk(8).values.gather(1, one_of_eight).flatten()
    with_mined = torch.maximum(in_batch, mined)
    draw_candidates("mined", {"in a batch": in_batch, "with a mined one": with_mined})


def generated(page):
    """Draw how near generated points are to each other, and real ones."""
    page["mixer"].reset_parameters()
    encoder = page["train"](page["generated"])
    random = torch.Generator().manual_seed(0)
    latent = torch.randn(2000, 16, generator=random)
    some = page["points"][torch.randperm(2000, generator=random)[:64]]
    with torch.no_grad():
        shares = (4 * page["mixer"](latent)).softmax(1)  # (2000, 64)
    real = nearest_in_batches(cosines_of(page, encoder, page["points"]))
    made = nearest_in_batches(cosines_of(page, encoder, shares @ some))
    draw_candidates("generated", {"real points, batches of 64": real, "generated": made})


def hardest(folder):
    """Draw two images and their five hardest negatives, before and after a run of train.py."""
    options = train.Options()
    images = report.at_most(train.read(options), 1000)
    first, encoder = [runs.untrained(options.encoder, images, options.seed) for _ in range(2)]
    state = runs.read_checkpoint(Path(folder), options.device)
    encoder.load_state_dict(state["training"]["encoder"])
    z = {"untrained": hardneg.embed(first, images.test)[1]}
    z["trained"] = hardneg.embed(encoder, images.test)[1]
    _, _, figure = report.draw_nearest(options, z, images.test_labels, images.test, count=2)
    figure.set_size_inches(4.8, 3.6)
    figure.set_layout_engine("constrained")
    save(figure, "hardest")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        hardest(sys.argv[1])
    else:
        text = (HERE / "README.md").read_text()
        with contextlib.redirect_stdout(io.StringIO()):  # what the page prints
            page = {}
            for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
                exec(block, page)
            for draw in (sphere, pull, false_negative, push, top, plan, found, generated):
                draw(page)
