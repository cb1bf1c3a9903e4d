"""Show what an encoder has learned, by figures, tables, pictures and a page."""

import base64
import html
import io
import itertools
import math
import shlex
import string
import warnings
from pathlib import Path
from statistics import mean, stdev

import torch
from matplotlib import pyplot as plt
from scipy import linalg, special

import hardneg
from training import flag_of, readouts, runs, shown, write_whole
from training.cache import Rows
from training.images import at_most, even

COLUMNS = {
    "linear": "linear %",
    "knn": "kNN %",
    "uniformity": "uniformity",
    "tolerance": "tolerance",
}
TITLES = COLUMNS | {"transfer": "on shapes %", "finetuned": "fine-tuned %"}  # of a few studies
FIGURES = "loss positive negative spread ess candidates clamped d_loss g_loss".split()
READOUT = 100_000  # a readout takes no more images, as their features must fit into memory
PAIRED = 10_000  # uniformity looks at all pairs of no more embeddings, in half a GiB


# ---- Figures -----------------------------------------------------------------------------------


class Pixels(torch.nn.AdaptiveAvgPool2d):
    """Stand for an encoder whose features and embeddings are pixels, averaged to 16 × 16.
    They are told apart better than more of them, and in less time."""

    def __init__(self, images):
        super().__init__(min(16, images.train.shape[-1]))
        self.weight = torch.nn.Parameter(torch.zeros(1))  # which says where it works
        self.to(images.train_labels.device)

    def forward(self, images):
        pixels = super().forward(images).flatten(1)
        return pixels, pixels


def evaluate(encoder, images, figures=tuple(COLUMNS)):
    """Measure an encoder. Accuracies are in percent. Without classes, what needs them is None."""
    test, z = hardneg.embed(encoder, images.test)
    readouts.check_finite(test=test, embeddings=z)
    ways = {"uniformity": (readouts.uniformity, [z[even(images.test_labels, PAIRED)]])}
    if images.classes:
        labelled = (images.train_labels >= 0).nonzero()[:, 0]
        some = labelled[even(images.train_labels[labelled], READOUT)]
        train, _ = hardneg.embed(encoder, Rows(images.train, some))
        sets = train, images.train_labels[some], test, images.test_labels
        ways["tolerance"] = readouts.tolerance, [z, images.test_labels]
        ways["linear"] = readouts.linear_readout, sets
        ways["knn"] = readouts.knn_accuracy, sets
    found = dict.fromkeys(figures)
    for name in ways.keys() & found:
        way, given = ways[name]
        value = round(float(way(*given)), 4)
        # tolerance is NaN if no two test images share a class, and JSON has no NaN
        found[name] = None if math.isnan(value) else value
    return found


def measure(encoder, images, name, seed, known=None):
    """Measure the trained encoder, the untrained one of a seed, and raw pixels.
    The dict `known` keeps the figures of the last two for other runs."""
    print("Measuring raw pixels, the untrained and the trained encoder …", flush=True)
    known = {} if known is None else known
    start = f"{name} {seed}"
    if "raw" not in known:
        known["raw"] = evaluate(Pixels(images), images)
    if start not in known:
        known[start] = evaluate(runs.untrained(name, images, seed), images)
    return evaluate(encoder, images) | {"untrained": known[start], "raw": known["raw"]}


def keep_figures(seen):
    """Turn the figures of some steps into numbers, and keep only those in FIGURES."""
    seen[:] = [{name: float(step[name]) for name in FIGURES if name in step} for step in seen]


def summary(training, seen, images):
    """Summarise an epoch by the means of its figures and, ten times in a run, by the accuracy."""
    means = {"epoch": training.epoch}
    for name in FIGURES:
        values = [step[name] for step in seen if name in step]
        if values:
            means[name] = mean(values)
    every = math.ceil(training.epochs / 10)
    if training.epoch % every == 0 and images.classes:
        # about a twentieth of the images since the last time, so that it takes little time
        some = at_most(images, max(1000, every * len(training.images) // 20))
        means |= evaluate(training.encoder, some, ["knn"])
    return means


def line_of(training, history):
    """Write what the last epoch found as a line."""
    pretrain, last = training.method.pretrain, history[-1]
    found = [f"{name} {last[name]:.3f}" for name in ("loss", "d_loss") if name in last]
    epochs = f"epoch {pretrain + training.epoch} of {pretrain + training.epochs}"
    return ", ".join([epochs] + found)


# ---- Tables ------------------------------------------------------------------------------------


def spread(values, digits=1):
    """Write the mean ± the standard deviation of values, or a single value alone."""
    text = f"{mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {stdev(values):.{digits}f}"
    return text


def interval(gaps):
    """Return the mean of differences, and half the width of Student's 95 % interval.
    For a single difference the width is ∞."""
    n = len(gaps)
    if n == 1:
        return gaps[0], math.inf
    factor = special.stdtrit(n - 1, 0.975)  # 4.3 for three differences, 2.8 for five
    return mean(gaps), factor * stdev(gaps) / math.sqrt(n)


def gain(gaps, digits=1):
    """Write the mean of differences ± half the width of its interval, or a single one alone."""
    middle, half = interval(gaps)
    text = f"{middle:+.{digits}f}"
    if len(gaps) > 1:
        text += f" ± {half:.{digits}f}"
    return text


def cells(rows):
    """Write {name: figures of each of its runs} as lines of a table, without empty columns."""
    some = next(iter(rows.values()))[0]
    titles = {name: x for name, x in TITLES.items() if some.get(name) is not None}
    lines = [[""] + list(titles.values())]
    for title, figures in rows.items():
        line = [title]
        for name in titles:
            digits = 1 if "%" in titles[name] else 2
            values = [run[name] for run in figures if name in run]  # some runs lack a figure
            line.append(spread(values, digits) if values else "")
        lines.append(line)
    return lines


def markdown(lines):
    """Write lines of cells as a Markdown table. The first line is its heading."""
    rule = ["---"] * len(lines[0])
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule] + lines[1:])


def table_of(results):
    """Write raw pixels, the untrained and the trained encoder of a run as a table of plain text."""
    rows = {"raw pixels": [results["raw"]], "untrained encoder": [results["untrained"]]}
    text = ""
    for title, *line in cells(rows | {"trained encoder": [results]}):
        text += f"{title:18}" + "".join(f"{cell:>12}" for cell in line) + "\n"
    return text


def doubt_of(results):
    """Say if a run with classes does not show that its encoder learned something."""
    before = [results["untrained"]["linear"], results["raw"]["linear"]]
    if None in before or results["linear"] > max(before):
        return ""
    if max(before) == 100:
        return "These images are told apart without training. They are too easy to show a gain."
    return "The encoder learned nothing that helps. Try more epochs or images, or a lower --lr."


def print_table(results, options):
    """Print the table of a run of `train.Options`, and the line of Python that makes its loss."""
    print(f"\n{table_of(results)}")
    doubt = doubt_of(results)
    if doubt:
        print(doubt)
    print(f"criterion = {options.criterion()}")


# ---- The page, whose pictures have a title and a sentence on what to see in them -----------------

plt.switch_backend("Agg")  # it needs no screen
plt.style.use("tableau-colorblind10")
PAGE = string.Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root { color-scheme: light dark } code { overflow-wrap: anywhere }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: auto; padding: 1rem }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 1rem 0 } h2 { font-size: 1.1rem; margin: 0 }
pre { overflow-x: auto; font-size: min(1rem, 2.3vw) }
main { display: flex; flex-wrap: wrap; gap: 2rem; margin: 2rem 0 }
section { flex: 1 1 20rem } img { width: 100%; max-width: 36rem; background: white }
</style><h1>$verdict</h1><p>$besides</p><p><code>$command</code></p><p>It trains with
<code>criterion = $criterion</code></p><pre>$table</pre>
<p>"linear" is the test accuracy of logistic regression on frozen features, and "kNN" that of a vote
of the 200 nearest training images. Uniformity is about −4 if embeddings cover the sphere evenly,
and 0 if all are one point. Tolerance is the mean cosine within a class.</p>
<main>$pictures</main>
<details><summary>$facts</summary><p>$settings. Classes: $classes</p></details>
<p>Made by hardneg, whose README says which loss to take when.</p></html>
""")
# A picture has the curves of some figures. Curves that stay at one value are left out.
CURVES = {
    "Loss": ("loss d_loss g_loss", "It should fall, and become flat at the end."),
    "kNN accuracy in percent": (
        "knn",
        "It should rise. To save time it is measured on fewer images than in the table. So the 200 "
        "that vote lie farther away, and the accuracy is lower.",
    ),
    "Cosines": (
        "positive negative spread",
        "The cosine of two views (positive) should stay above that of two images (negative). "
        "Before training both are high, so both may fall. spread is the standard deviation of the "
        "negatives of an anchor.",
    ),
    "Shares": (
        "ess clamped",
        "ess is the share of negatives that count. clamped is the share of anchors for which "
        "debiasing leaves no more than its floor. A curve that stays at one value is left out.",
    ),
    "Negatives of an anchor": ("candidates", "So many samples are pushed away."),
}

NEAREST = (
    "Each framed image is followed by the others nearest to it, its hardest negatives. The numbers "
    "are their weights, and the average weight is 1. Where classes are known, an orange number "
    "marks a false negative, which has the class of the image."
)
MAP = (
    "Each point is a test image, and classes have colours. The features are shown in the plane "
    "where classes of training images lie farthest apart, compared with their spread. Images of "
    "one class should lie together."
)


def write_page(options, encoder, images, results):
    """Draw in report.html what a run of `train.Options` has learned, on about 1000 test images.
    If that fails, warn, as the run is complete without it."""
    path = options.out / runs.PAGE
    try:
        write_whole(path, [page_of(options, encoder, images, results).encode()])
        print(f"The pictures are in {shown(path)}")
    except Exception as error:  # drawing takes names and numbers of any kind
        message = f"{path} cannot be drawn ({type(error).__name__}: {error})."
        warnings.warn(f"{message} The results are complete.", stacklevel=1)


def page_of(options, encoder, images, results):
    """Make the page of a run."""
    some = at_most(images, 1000)
    first = runs.untrained(options.encoder, images, options.seed)
    encoders = {"untrained": first, "trained": encoder}
    z = {name: hardneg.embed(encoders[name], some.test)[1] for name in encoders}
    pictures = list(draw_curves(results["history"]))
    pictures.append(draw_nearest(options, z, some.test_labels, some.test))
    if len(images.classes) > 2:
        pictures.append(draw_map(encoders, some))
    parts = []
    for title, caption, figure in pictures:
        title, data = html.escape(title), base64.b64encode(png(figure)).decode()
        parts.append(f"<section><h2>{title}</h2>{html.escape(caption)}")
        parts.append(f'<img alt="{title}" src="data:image/png;base64,{data}"></section>\n')
    settings = results["options"] | results["versions"]
    verdict, besides = verdict_of(results, len(images.classes))
    took = f"Training took {results['seconds']:.0f} seconds on {results['device']}."
    texts = {
        "title": f"{results['loss']} on {Path(results['data']).resolve().name}",
        "verdict": verdict,
        "besides": besides,
        "command": command_of(options),
        "criterion": options.criterion(),
        "facts": f"{took} It ended on {results['date']}.",
        "settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
        "classes": ", ".join(images.classes),
    }
    texts = {name: html.escape(shown(text)) for name, text in texts.items()}
    return PAGE.substitute(texts, table=table_of(results), pictures="".join(parts))


def verdict_of(results, classes):
    """Say what was learned, and what to compare it with."""
    before = results["untrained"]
    if not classes:
        verdict = f"Uniformity is {results['uniformity']:.1f}"
        return verdict, f"Without training it is {before['uniformity']:.1f}."
    guess = f"Guessing among the {classes} classes would be right for {100 / classes:.1f} %."
    verdict = f"{results['linear']:.1f} % of test images are told right by linear readout"
    besides = f"Without training it is {before['linear']:.1f} %. {guess} {doubt_of(results)}"
    return verdict, besides.rstrip()


def command_of(options):
    """Write a command that makes the same run."""
    chosen = {name: getattr(options, name) for name in ("loss", "method", "recipe")}
    usual = vars(type(options)(**chosen))
    words = ["python", "train.py"]
    for name, value in vars(options).items():
        if name in chosen or value != usual[name]:
            words.append(flag_of(name, value))
            if not isinstance(value, bool):
                words.append(str(value))
    return shlex.join(words)


def png(figure):
    """Draw a figure as a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    return content.getvalue()


def draw_curves(history):
    """Draw the figures of each epoch → titles, captions, pictures.
    Up to epoch 0 the networks of a game train alone."""
    for title, (names, caption) in CURVES.items():
        figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
        for name in names.split():
            some = {epoch["epoch"]: epoch[name] for epoch in history if name in epoch}
            if len(set(some.values())) > 1:
                axis.plot(some.keys(), some.values(), ".-", label=name, linewidth=1)
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if axis.lines:
            figure.legend(loc="outside lower center", ncols=3)
            yield title, caption, figure
        plt.close(figure)


def draw_nearest(options, z, labels, test, count=4):
    """Draw about `count` test images, and the others nearest to them with their weights, before and
    after training. Ref: [2] Fig. 2, 3"""
    anchors = range(0, len(labels), -(-len(labels) // count))
    weights = {name: weights_of(z[name], options) for name in z}
    rows, columns = len(anchors) * len(z), min(6, len(labels))
    figure, axes = plt.subplots(rows, columns, squeeze=False, figsize=(0.8 * columns, 0.95 * rows))
    for line, (anchor, name) in zip(axes, itertools.product(anchors, z), strict=True):
        cosines = z[name] @ z[name][anchor]
        cosines[anchor] = math.inf  # so that the image itself comes first
        for axis, k in zip(line, cosines.topk(columns).indices.tolist(), strict=True):
            title, color = f"{weights[name][anchor, k]:.2g}", "k"
            if k == anchor:
                title = name
            elif labels[k] == labels[anchor] >= 0:
                color = "C1"
            axis.imshow(test[[k]][0].permute(1, 2, 0).numpy(force=True))
            axis.set(xticks=[], yticks=[])
            axis.set_title(title, pad=3, fontsize=9, color=color)
            axis.spines[:].set(visible=k == anchor, linewidth=2)  # a frame
    return "The hardest negatives, before and after training", NEAREST, figure


def weights_of(z, options):
    """Weigh all other rows for each unit row of z (n, D), as `train.Options` say → (n, n)."""
    seen = []

    def keep(pos, neg, log_w):
        seen.append(log_w)
        return pos[:, 0]

    own = torch.arange(len(z))
    options.criterion()(z, negatives=z, positive_index=own, objective=keep, block_size=0)
    return seen[0].exp()


def draw_map(encoders, images):
    """Draw features of test images, before and after training, in the plane of `plane_of`."""
    figure, axes = plt.subplots(2, figsize=(5, 8), layout="constrained")
    labels = images.test_labels.cpu()
    # after a space, as a legend leaves out what begins with _
    names = [f" {shown(text)[:30]}" for text in images.classes[:10]]
    for axis, (name, encoder) in zip(axes, encoders.items(), strict=True):
        train, test = (hardneg.embed(encoder, x)[0].cpu() for x in (images.train, images.test))
        x = (test @ plane_of(train, images.train_labels.cpu())).T
        axis.scatter(x[0], x[1], s=6, color="0.9")  # there are ten colours
        for k, text in enumerate(names):
            own = x[:, labels == k]
            axis.scatter(own[0], own[1], s=6, color=plt.cm.tab10(k), label=text)
        axis.set(title=name, xticks=[], yticks=[])
    if len(images.classes) <= 10:
        columns = 2 if max(map(len, names)) <= 13 else 1
        with plt.rc_context({"text.parse_math": False, "legend.markerscale": 2}):  # $ is no formula
            figure.legend(handles=axis.collections[1:], loc="outside lower center", ncols=columns)
    return "The features, before and after training", MAP, figure


def plane_of(x, labels):
    """Find the plane of features (n, D) in which Fisher's discriminant is largest → (D, 2)."""
    x, labels = x[labels >= 0].double(), labels[labels >= 0]
    means = torch.stack([x[labels == label].mean(0) for label in labels.unique()])
    total = x.T.cov()
    ridge = 0.01 * total.diag().mean() * torch.eye(len(total))  # some directions have no spread
    _, directions = linalg.eigh(means.T.cov(), total + ridge)  # the largest comes last
    return torch.tensor(directions[:, -2:], dtype=torch.float32)
