"""Further methods of training to compare with, by a queue of keys, adversarial views, and labels.

Each class is a method for `hardneg.Training`. References in brackets are those of hardneg.py and
   [13] Ho, Vasconcelos. Contrastive Learning with Adversarial Examples (CLAE). 2010.12050
"""

import copy

import torch

import hardneg
from training import require


class Queue(hardneg.SimCLR):
    """Contrast a view of each image with a key, which a slow copy of the encoder embeds.
    Keys of this batch and of earlier batches are the candidates.

    queue_size    How many keys of earlier batches are candidates. It must be below the number of
                  images. An older key of the anchor's own image is a false negative.
    momentum      m of the slow copy, in [0, 1).

    Here the copy is in eval mode, and keys of this batch are candidates, too. Without them only
    positives would be new, and an encoder could tell them from negatives by their age. Ref: [8]
    Algorithm 1, which does neither"""

    def __init__(self, criterion, encoder, images, queue_size, momentum, view_options=None):
        super().__init__(criterion, view_options)
        require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        n = len(images)
        hardneg._check("queue_size", queue_size, [1, n - 1])
        self.momentum = momentum
        self.slow = copy.deepcopy(encoder).requires_grad_(False).eval()
        self.leader = (encoder,)  # in a tuple, so that its state is not saved with this module
        first = torch.arange(queue_size, device=images.device) * n // queue_size  # evenly spread
        self.register_buffer("rows", hardneg.embed(encoder, images[first])[1])

    def step(self, encoder, images, index, generator, descend, **options):
        z = hardneg.unit(self.embed_views(encoder, generator, images)[0])
        keys = hardneg.unit(self.embed_views(self.slow, generator, images)[0])  # no gradient
        place = len(keys) * self.rank + torch.arange(len(keys), device=keys.device)
        candidates = torch.cat([hardneg.gather(keys, self.group), self.rows])  # newest first
        options |= {"negatives": candidates, "positive_index": place, "normalize": False}
        loss, figures = self.contrast(z, keys, **options)
        descend(loss)
        self.rows.copy_(candidates[: len(self.rows)])
        hardneg.follow(self.slow, self.leader[0], self.momentum)
        return figures


class CLAE(hardneg.SimCLR):
    """Contrast two views x_1, x_2, and then x_1 with a harder second view x'.
        x' = x_2 + bound · sign ∂ℓ/∂x_2    clamped to [0, 1]

    The loss is the mean of both losses. bound, in (0, 1), is the largest change of a pixel, and
    half of ε in [13]. Ref: after [13], where the first view is moved instead and is contrasted with
    itself, and where BatchNorm has two sets of statistics"""

    def __init__(self, criterion, bound, view_options=None):
        super().__init__(criterion, view_options)
        require(0 < bound < 1, "bound", bound, "in (0, 1)")
        self.bound = bound

    def step(self, encoder, images, index, generator, descend, return_stats=False, **options):
        first = hardneg.view(images, generator, **self.view_options)
        second = hardneg.view(images, generator, **self.view_options).requires_grad_()
        z, other = encoder(torch.cat([first, second]))[1].chunk(2)
        loss, figures = self.contrast(z, other, return_stats=return_stats, **options)
        with torch.autocast(loss.device.type, enabled=False):
            (gradient,) = torch.autograd.grad(loss, second, retain_graph=True)
        harder = (second + self.bound * gradient.sign()).clamp(0, 1).detach()
        harder_loss, _ = self.contrast(z, encoder(harder)[1], **options)
        descend((loss + harder_loss) / 2)
        return figures


def labelled(kind, labels):
    """Make a method of some kind tell its loss the labels (n,) of the training images → its class.
    Images without a label have −1. Each of them gets a number of its own."""
    require(labels.max() >= 0, "--labels", "given", "left out, as these images have no classes")
    own = labels.max() + 1 + torch.arange(len(labels), device=labels.device)
    labels = torch.where(labels < 0, own, labels)

    class Labelled(kind):
        def step(self, encoder, images, index, generator, descend, **options):
            options["labels"] = labels[index]
            if isinstance(self, hardneg.Bank):  # its rows are candidates, too
                options["labels"] = torch.cat([labels[index], labels])
            return super().step(encoder, images, index, generator, descend, **options)

    return Labelled


def say_no_effect(options):
    """Say if a micro-batch holds whole batches, or if a loss needs labels to differ from nce."""
    if options.micro_batch is not None and options.micro_batch >= 2 * options.batch_size:
        print("--micro-batch has no effect, as a batch has no more views than that.")
    has_labels = options.method == "diffhard" or (options.labels and options.has_effect("labels"))
    if options.objective in ("ppcl", "each") and not has_labels:
        print(f"Without --labels, {options.objective} of --loss {options.loss} is the same as nce.")
