"""Methods of training to compare with: a queue of keys, adversarial views.

Each is a method of `hardneg.Training`, as those of hardneg.py are. References in brackets are those
of hardneg.py, and
   [13] Ho, Vasconcelos. Contrastive Learning with Adversarial Examples (CLAE). 2010.12050
"""

import copy

import torch

import hardneg
from training import require


class Queue(hardneg.SimCLR):
    """Contrast a view with a key, embedded by a slow copy of the encoder; keys are the candidates.
    queue_size: how many keys of earlier batches are candidates; fewer than there are images, as an
    older key of the anchor's image is a false negative. momentum: of the copy, in [0, 1).
    Ref: [8] Algorithm 1, but the copy is in eval mode, and this batch's keys are candidates, too:
    without them, their age would tell negatives from positives."""

    def __init__(self, criterion, encoder, images, queue_size, momentum, view_options=None):
        super().__init__(criterion, view_options)
        require(0 <= momentum < 1, "momentum", momentum, "in [0, 1)")
        n = len(images)
        require(1 <= queue_size < n, "queue_size", queue_size, f"from 1 to below {n}, the images")
        self.momentum = momentum
        self.slow = copy.deepcopy(encoder).requires_grad_(False).eval()
        self.leader = (encoder,)  # in a tuple: it is no part of this module
        first = torch.arange(queue_size, device=images.device) * n // queue_size  # evenly spread
        self.register_buffer("rows", hardneg.embed(encoder, images[first])[1])

    def step(self, encoder, images, index, generator, **options):
        z = hardneg.unit(self.embed_views(encoder, generator, images)[0])
        keys = hardneg.unit(self.embed_views(self.slow, generator, images)[0])  # no gradient
        self.keys = keys
        place = torch.arange(len(keys), device=keys.device)
        candidates = torch.cat([self.keys, self.rows])
        given = {"negatives": candidates, "positive_index": place, "normalize": False}
        return self.contrast(z, keys, **given, **options)

    def after_step(self):
        newest_first = torch.cat([self.keys, self.rows])
        self.rows.copy_(newest_first[: len(self.rows)])
        hardneg.follow(self.slow, self.leader[0], self.momentum)


class CLAE(hardneg.SimCLR):
    """Contrast two views, and the first with a harder second one: the mean of both losses.
    The second view moves against the encoder: x' = x + bound · sign ∂ℓ/∂x, within [0, 1].
    bound: the largest change of a pixel, half of [13]'s ε.
    Ref: after [13], which moves the first view against itself and keeps two BatchNorm statistics"""

    def __init__(self, criterion, bound, view_options=None):
        super().__init__(criterion, view_options)
        require(0 < bound < 1, "bound", bound, "in (0, 1)")
        self.bound = bound

    def step(self, encoder, images, index, generator, return_stats=False, **options):
        first = hardneg.view(images, generator, **self.view_options)
        second = hardneg.view(images, generator, **self.view_options).requires_grad_()
        z, other = encoder(torch.cat([first, second]))[1].chunk(2)
        loss, figures = self.contrast(z, other, return_stats=return_stats, **options)
        with torch.autocast(loss.device.type, enabled=False):
            (slope,) = torch.autograd.grad(loss, second, retain_graph=True)
        harder = (second + self.bound * slope.sign()).clamp(0, 1).detach()
        harder_loss, _ = self.contrast(z, encoder(harder)[1], **options)
        return (loss + harder_loss) / 2, figures
