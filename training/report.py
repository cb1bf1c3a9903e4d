"""Show what an encoder has learned, by figures, tables, pictures and a page."""

import base64
import html
import io
import itertools
import math
import string
import warnings
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev

import torch
from matplotlib import pyplot as plt
from scipy import special
from torch import Tensor
from torchvision.utils import make_grid

import hardneg
from training import readouts, runs, shown
from training.cache import Rows
from training.images import Images, at_most, even

COLUMNS = {"linear": "linear %", "knn": "kNN %"}
COLUMNS |= {"uniformity": "uniformity", "tolerance": "tolerance"}
OF_SOME = {"transfer": "on shapes %", "finetuned": "fine-tuned %"}  # figures of a few studies
FIGURES = "loss positive negative spread ess candidates clamped d_loss g_loss".split()
READOUT = 100_000  # a readout takes no more images, as their features must fit into memory
PAIRED = 10_000  # uniformity looks at all pairs of no more embeddings, in half a GiB


# ---- Figures -----------------------------------------------------------------------------------


def evaluate(encoder, images: Images, figures: Iterable[str] = tuple(COLUMNS)) -> dict:
    """Measure an encoder. If it is None, measure the pixels, averaged to 16 × 16.
    Accuracies are in percent. Without classes, figures that need them are None."""
    least = 0 if images.classes else -1
    some = (images.train_labels >= least).nonzero()[:, 0]
    some = some[even(images.train_labels[some], READOUT)]
    labels = images.train_labels[some]
    train, _ = _features(encoder, Rows(images.train, some), labels.device)
    test, z = _features(encoder, images.test, labels.device)
    sets = train, labels, test, images.test_labels
    readouts.check_finite(train=train, test=test, embeddings=z)
    ways = {"uniformity": (hardneg.uniformity, [z[even(images.test_labels, PAIRED)]])}
    if images.classes:
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


def _features(encoder, images, device):
    """Return features and embeddings of images. Without an encoder both are the pixels.
    Pixels averaged to 16 × 16 are told apart better than more of them, and in less time."""
    if encoder is not None:
        return hardneg.embed(encoder, images)
    pool = torch.nn.AdaptiveAvgPool2d(min(16, images.shape[-1]))
    pixels = torch.cat([pool(part.to(device) / 255).flatten(1) for part in images.split(500)])
    return pixels, pixels


def measure(encoder, images: Images, name: str, seed: int, known: dict | None = None) -> dict:
    """Measure the trained encoder, the untrained one of a seed, and raw pixels.
    The dict `known` keeps the figures of the last two for other runs."""
    print("Measuring raw pixels, the untrained and the trained encoder …", flush=True)
    if known is None:
        known = {}
    start = f"{name} {seed}"
    if "raw" not in known:
        known["raw"] = evaluate(None, images)
    if start not in known:
        known[start] = evaluate(runs.untrained(name, images, seed), images)
    trained = evaluate(encoder, images)
    return trained | {"untrained": known[start], "raw": known["raw"]}


def keep_figures(seen: list[dict]) -> None:
    """Turn the figures of some steps into numbers, and keep only those in FIGURES."""
    seen[:] = [{name: float(step[name]) for name in FIGURES if name in step} for step in seen]


def summary(training: hardneg.Training, seen: list[dict], images: Images) -> dict:
    """Summarise an epoch by the means of its figures and, ten times in a run, by the accuracy."""
    means = {"epoch": training.epoch}
    for name in FIGURES:
        values = [step[name] for step in seen if name in step]
        if values:
            means[name] = mean(values)
    every = math.ceil(training.epochs / 10)
    if training.epoch % every == 0 and images.classes:
        trained = every * len(training.images)
        some = at_most(images, max(1000, trained // 20))  # measuring takes little time
        means |= evaluate(training.encoder, some, ("knn",))
    return means


# ---- Tables ------------------------------------------------------------------------------------


def spread(values: list, digits: int = 1) -> str:
    """Write the mean ± the standard deviation of values, or a single value alone."""
    text = f"{mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {stdev(values):.{digits}f}"
    return text


def interval(gaps: list) -> tuple[float, float]:
    """Return the mean of differences, and half the width of Student's 95 % interval.
    For a single difference the width is ∞."""
    n = len(gaps)
    if n == 1:
        return gaps[0], math.inf
    factor = special.stdtrit(n - 1, 0.975)  # 4.3 for three differences, 2.8 for five
    return mean(gaps), factor * stdev(gaps) / math.sqrt(n)


def gain(gaps: list, digits: int = 1) -> str:
    """Write the mean of differences ± half the width of its interval, or a single one alone."""
    middle, half = interval(gaps)
    if len(gaps) == 1:
        return f"{middle:+.{digits}f}"
    return f"{middle:+.{digits}f} ± {half:.{digits}f}"


def cells(rows: dict[str, list]) -> list[list[str]]:
    """Write {name: figures of each of its runs} as lines of a table, without empty columns."""
    some = next(iter(rows.values()))[0]
    titles = COLUMNS | OF_SOME
    shown = [name for name in titles if some.get(name) is not None]
    lines = [[""] + [titles[name] for name in shown]]
    for title, figures in rows.items():
        line = [title]
        for name in shown:
            digits = 1 if "%" in titles[name] else 2
            values = [run[name] for run in figures if name in run]  # some runs lack a figure
            line.append(spread(values, digits) if values else "")
        lines.append(line)
    return lines


def markdown(lines: list[list[str]]) -> str:
    """Write lines of cells as a Markdown table. The first line is its heading."""
    heading, *body = lines
    rule = ["---"] * len(heading)
    return "\n".join(f"| {' | '.join(line)} |" for line in [heading, rule] + body)


def rows_of(results: dict) -> dict[str, list]:
    """Return raw pixels, the untrained and the trained encoder of a run as rows for `cells`."""
    return {
        "raw pixels": [results["raw"]],
        "untrained encoder": [results["untrained"]],
        "trained encoder": [results],
    }


def print_table(results: dict) -> None:
    """Print the table of a run."""
    print()
    for line in cells(rows_of(results)):
        print(f"{line[0]:18}" + "".join(f"{x:>12}" for x in line[1:]))
    if results["linear"] is None:  # there are no classes
        return
    if results["linear"] <= max(results["untrained"]["linear"], results["raw"]["linear"]):
        print("The encoder learned nothing that helps. Try more epochs or images, or a lower --lr.")


# ---- The page, with pictures that have a title and a caption ------------------------------------

plt.switch_backend("Agg")  # it needs no screen
plt.style.use("tableau-colorblind10")
PAGE = string.Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: auto; padding: 1rem }
body { color: #222 } h1, h2 { font-size: 1.2rem; margin: 2rem 0 0 }
div { overflow-x: auto } img { width: 100%; min-width: 40rem } td { padding: .1rem .6rem .1rem 0 }
</style><h1>$title</h1><p>$summary</p><div><table>$table</table></div>
<p>"linear" is the test accuracy of logistic regression on frozen features, and "kNN" that of a vote
of the 200 nearest training images. Uniformity is about −4 if embeddings cover the sphere evenly,
and 0 if all are one point. Tolerance is the mean cosine within a class.</p>
$pictures</html>
""")


def write_page(options, encoder: hardneg.Encoder, images: Images, results: dict) -> None:
    """Draw in report.html what a run of `train.Options` has learned, on about 1000 test images.
    If that fails, warn, as the run is complete without it."""
    path = options.out / runs.PAGE
    try:
        runs.write(path, page_of(options, encoder, images, results).encode())
        print(f"The pictures are in {shown(path)}")
    except Exception as error:  # drawing takes names and numbers of any kind
        message = f"{path} cannot be drawn ({type(error).__name__}: {error})."
        warnings.warn(f"{message} The results are complete.", stacklevel=1)


def page_of(options, encoder: hardneg.Encoder, images: Images, results: dict) -> str:
    """Make the page of a run."""
    some = at_most(images, 1000)
    test, labels = some.test, some.test_labels
    first = runs.untrained(options.encoder, images, options.seed)
    z = {"untrained": hardneg.embed(first, test)[1], "trained": hardneg.embed(encoder, test)[1]}
    pictures = [draw_curves(results["history"]), draw_nearest(options, z, labels, test)]
    pictures.append(draw_map(z, labels, some.classes))
    parts = []
    for title, caption, figure in pictures:
        title, data = html.escape(title), base64.b64encode(png(figure)).decode()
        parts.append(f"<h2>{title}</h2><p>{html.escape(caption)}</p>")
        parts.append(f'<div><img alt="{title}" src="data:image/png;base64,{data}"></div>\n')
    table = []
    for line in cells(rows_of(results)):
        table.append("<tr>" + "".join(f"<td>{cell}" for cell in line))
    return PAGE.substitute(
        title=html.escape(f"{results['loss']} on {shown(Path(results['data']).resolve().name)}"),
        summary=f"{results['epochs']} epochs of {results['method']} "
        f"took {results['seconds']:.0f} seconds.",
        table="".join(table),
        pictures="".join(parts),
    )


def png(figure: plt.Figure) -> bytes:
    """Draw a figure as a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    return content.getvalue()


PANEL_OF = {"loss": "losses", "d_loss": "losses", "g_loss": "losses", "knn": "kNN %"}
PANEL_OF["candidates"] = "candidates"


def draw_curves(history: list[dict]) -> tuple:
    """Draw the figures of each epoch → title, caption, picture.
    Up to epoch 0 the networks of a game train alone."""
    curves = {}  # panel: {figure: ([epochs], [values])}
    for epoch in history:
        for name, value in epoch.items():
            if name != "epoch":
                panel = curves.setdefault(PANEL_OF.get(name, "cosines and shares"), {})
                epochs, values = panel.setdefault(name, ([], []))
                epochs.append(epoch["epoch"])
                values.append(value)
    figure = plt.figure(figsize=(8, 3.6), layout="constrained")
    for k, (title, lines) in enumerate(sorted(curves.items(), reverse=True)):
        axis = figure.add_subplot(1, len(curves), k + 1)
        for name, (epochs, values) in lines.items():
            axis.plot(epochs, values, ".-", label=name, linewidth=1)
        axis.set(title=title, xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    _, losses = curves["losses"]["loss"]
    title = f"The loss went from {losses[0]:.2f} to {losses[-1]:.2f}"
    caption = "While the encoder learns, cosines of two views of an image (positive) rise above "
    caption += "those of different images (negative). For an anchor, spread is the standard "
    caption += "deviation of the negative cosines. candidates is the number of negatives, and ess "
    caption += "the share of them that count. clamped is the share of anchors for which debiasing "
    caption += "leaves no more than its floor."
    return title, caption, figure


def draw_nearest(options, embeddings: dict, labels: Tensor, test: Tensor) -> tuple:
    """Draw images, and the others nearest to them with their weights, before and after training.
    Ref: [2] Fig. 2, 3"""
    chosen = [int((labels == c).nonzero()[0, 0]) for c in labels.unique()[:4]]
    if len(chosen) == 1:  # no classes
        chosen = range(min(4, len(labels)))
    columns = min(7, len(labels) - 1)
    weights = {name: weights_of(z, options) for name, z in embeddings.items()}
    shown, titles = [], []
    for anchor, (name, z) in itertools.product(chosen, embeddings.items()):
        cosines = z @ z[anchor]
        cosines[anchor] = -math.inf
        nearest = cosines.topk(columns).indices.tolist()
        shown += [anchor] + nearest
        titles += [(name, "k")]
        for k in nearest:
            is_false = bool(labels[k] == labels[anchor] >= 0)
            titles.append((f"{weights[name][anchor, k]:.2g}", "C1" if is_false else "k"))
    gap = test.shape[-1] // 4
    pitch = test.shape[-1] + gap
    grid = make_grid(test[shown].cpu(), columns + 1, gap, pad_value=255)
    figure, axis = plt.subplots(figsize=(7, 1.8 * len(chosen)), layout="constrained")
    axis.imshow(grid.permute(1, 2, 0).numpy())
    axis.axis("off")
    for k, (title, color) in enumerate(titles):
        row, column = divmod(k, columns + 1)
        axis.text(gap + column * pitch, (row + 0.17) * pitch, title, fontsize=9, color=color)
    caption = "A row has an image and the others nearest to it. These are its hardest negatives, "
    caption += "and the numbers are their weights."
    if labels.max() >= 0:
        caption += " An orange number marks a false negative, which has the class of the image."
    return "The hardest negatives, before and after training", caption, figure


def weights_of(z: Tensor, options) -> Tensor:
    """Weigh all other rows for each unit row of z (n, D), as `train.Options` say → (n, n)."""
    seen = []

    def keep(pos, neg, log_w):
        seen.append(log_w)
        return pos[:, 0]

    given = {name: getattr(options, name) for name in hardneg.DEFAULTS if name in vars(options)}
    given |= {"objective": keep, "block_size": 0}
    hardneg.contrastive_loss(z, negatives=z, positive_index=torch.arange(len(z)), **given)
    return seen[0].exp()


def draw_map(embeddings: dict[str, Tensor], labels: Tensor, classes: list) -> tuple:
    """Draw embeddings, before and after training, in the plane where the classes differ most."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.5), layout="constrained")
    for axis, (name, z) in zip(axes, embeddings.items(), strict=True):
        means = z  # without classes, the plane shows where images differ most
        if classes:
            means = torch.stack([z[labels == label].mean(0) for label in labels.unique()])
        _, _, directions = torch.linalg.svd(means - means.mean(0), full_matrices=False)
        x = z @ directions[:2].T  # (n, 2)
        axis.scatter(x[:, 0].cpu(), x[:, 1].cpu(), s=6, color="0.9")  # there are ten colours
        for label in range(min(10, len(classes))):
            color = [plt.cm.tab10(label)]
            axis.scatter(*x[labels == label].T.cpu(), s=6, color=color, label=label)
        axis.set(title=name, xticks=[], yticks=[])
    if classes:
        handles, numbers = axis.get_legend_handles_labels()
        legend = figure.legend(handles, numbers, loc="outside lower center", ncols=5, markerscale=2)
        for text, name in zip(legend.get_texts(), classes, strict=False):
            text.set_text(name[:30])  # set here, as a label that begins with _ would be hidden
            text.set_parse_math(False)  # so that $ is a letter
    caption = "Each point is an image, in the plane where the means of the classes are farthest "
    caption += "apart. Images of one class should lie together."
    return f"A map of {len(x)} test images, before and after training", caption, figure
