"""Tests of hardneg.py by subject, in the order of its sections.

`python -m pytest test_hardneg.py -k TestSinkhorn` runs the tests of one subject.
`HYPOTHESIS_PROFILE=explore python -m pytest test_hardneg.py` draws 300 new examples for each
property, and prints how to repeat one that fails; without it each property has its usual ten.

Embeddings are random: similarities tie, and losses have kinks, only where a test wants it.
"""

import contextlib
import copy
import itertools
import math
import os
import re
import subprocess
import sys
import warnings
from collections import UserDict
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.random import default_rng as rng
from scipy.optimize import linprog
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.transforms import functional as transforms

import hardneg
import reference_numpy as oracle
from hardneg import contrastive_loss
from training import readouts
from training.images import shapes

unhurried = [HealthCheck.too_slow, HealthCheck.filter_too_much]
common = settings(deadline=None, database=None, suppress_health_check=unhurried)
settings.register_profile("ci", common, max_examples=10, derandomize=True)
settings.register_profile("explore", common, max_examples=300, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
pytestmark = pytest.mark.filterwarnings("ignore:Sinkhorn|Debiasing|None of|The first row")

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
UNABLE = "older versions cannot trace how options are joined, and ask the driver of a fake GPU"
RECENT = pytest.mark.skipif(TORCH < (2, 10), reason=UNABLE)
INF = math.inf
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = Path(__file__).resolve().parent
PRESETS = sorted(hardneg.PRESETS)
METHODS = ["simclr", "bank", "diffhard"]
RULES = [name for name in hardneg.WEIGHTS if name in oracle.RULES]
OBJECTIVES = [name for name in hardneg.OBJECTIVES if name in oracle.OBJECTIVES]
FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16
BOOLEANS = st.booleans()
SEEDS = {"seed": st.integers(0, 2**32 - 1)}
BATCHES = {**SEEDS, "v": st.integers(2, 4), "b": st.integers(2, 4), "d": st.integers(2, 4)}
TWO_VIEWS = {**SEEDS, "b": st.integers(2, 5)}
MATRICES = {**SEEDS, "a": st.integers(1, 4), "n": st.integers(1, 6)}
PLANS = {**MATRICES, "epsilon": st.floats(0.2, 5), "share": st.sampled_from([0, 0.2])}
SAMPLES = {  # values for each option of a loss, from which properties draw
    "loss": st.sampled_from(PRESETS),
    "weights": st.sampled_from([*hardneg.WEIGHTS]),
    "objective": st.sampled_from([*hardneg.OBJECTIVES]),
    "temperature": st.floats(0.2, 2),
    "tau_plus": st.sampled_from([None, None, 0.0, 0.1, 0.3, 0.9]),
    "beta": st.integers(0, 9).map(lambda k: k / 2) | st.floats(0, 5) | st.sampled_from([1e-320]),
    "alpha": st.floats(0.01, 1).map(lambda alpha: round(alpha, 2)),
    # Sinkhorn stops at an error of 1e-12; in the plan that is 1e-12 / √(1 − σ₂²), which grows
    "epsilon": st.floats(0.5, 3),
    "cost": st.sampled_from([*hardneg.COSTS]),
    "margin": st.floats(0, 1),
    "absolute_margin": st.sampled_from([None, None, 3, 0.4, -0.2]),
    "relative_margin": st.sampled_from([None, None, 0.05, 0.5]),
    "normalize": BOOLEANS,
    "detach_weights": st.sampled_from([None, True, False]),
    "reduction": st.sampled_from(["mean", "sum", "none"]),
    "block_size": st.sampled_from([None, 0, 1, 3]),
}
IMAGES, LABELS = shapes(240, seed=1, size=16)
PLAIN = {"area": (1, 1), "ratio": (1, 1), "flip": 0, "jitter": 0, "gray": 0}  # changes nothing
# a process of its own has one thread: more would wait for each other
ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}


# ---- Helpers
def taken_by(*functions):
    """Name the options that functions take."""
    return {name for function in functions for name in hardneg.takes(function)} & SAMPLES.keys()


OF_ROWS = taken_by(*[row[0] for row in (*hardneg.WEIGHTS.values(), *hardneg.OBJECTIVES.values())])
OF_CALLS = SAMPLES.keys() - OF_ROWS - {"loss", "weights", "objective"}


def samples_of(*functions, others=()):
    """Draw the options that rules and objectives take, and others."""
    names = sorted({*others} | taken_by(*functions))

    def settle(drawn):  # costs of "exp" are up to e⁴
        if drawn.get("cost") == "exp":
            drawn["epsilon"] *= 20
        return drawn

    return st.fixed_dictionaries({name: SAMPLES[name] for name in names}).map(settle)


def functions_of(weights, objective):
    """List the rule and the objective that hardneg has by these names."""
    tables = (hardneg.WEIGHTS, weights), (hardneg.OBJECTIVES, objective)
    return [table[name][0] for table, name in tables if name in table]


def couples(weights):
    """Tell whether a rule, by its name, or a function couples anchors."""
    return weights in hardneg.WEIGHTS and "potential" in hardneg.takes(hardneg.WEIGHTS[weights][0])


def at_least(n):
    """Give a property n examples, or those of the profile if they are more."""
    return settings(max_examples=max(n, settings.default.max_examples))


def ends_of(low, high):
    """Draw numbers of a range, and its ends often."""
    return st.sampled_from([low, high]) | st.floats(low, high)


def numpy(x):
    """Convert to a numpy array in float64."""
    return x.detach().double().numpy() if torch.is_tensor(x) else np.asarray(x, dtype=np.float64)


def close(got, want, tolerance, floor=1.0):
    """Assert equal shapes and infinities, and errors of at most tolerance · max(floor, largest)."""
    got, want = numpy(got), numpy(want)
    assert got.shape == want.shape
    scale = max(floor, np.abs(want[np.isfinite(want)]).max(initial=0))
    assert scale < 1e20, "beside a masked value no error would show"
    with np.errstate(invalid="ignore"):
        off = np.where(got == want, 0, np.abs(got - want))
    assert (off <= tolerance * scale).all(), (
        f"off by {off.max() / scale:.1e}: {got} instead of {want}"
    )


def refused(said):
    """Expect an InvalidArgument that says so."""
    return pytest.raises(hardneg.InvalidArgument, match=said)


def same(got, want, tolerance):
    """Assert that two pairs of value and gradient are close; a gradient's scale is 1e-3 or more."""
    close(got[0], want[0], tolerance)
    close(got[1], want[1], tolerance, floor=1e-3)


def all_close(got, want, tolerance, floor=1.0):
    """Assert that two lists of tensors are close, one by one."""
    for one, other in zip(got, want, strict=True):
        close(one, other, tolerance, floor)


def finite(*values):
    """Tell whether tensors have neither NaN nor infinities."""
    return all(bool(x.isfinite().all()) for x in values)


def thrice(logits):
    """Weigh as `tilted` at β = 3 does, without its mean of 1, in arrays and tensors."""
    return logits + logits + logits  # 3 * (−∞ + 0j) would be NaN


def far(logits):
    """Count candidates at an obtuse angle alone, in arrays and tensors. An anchor may keep none."""
    where = torch.where if torch.is_tensor(logits) else np.where
    return where(logits.real > 0, -INF, 0.0)


def seeded(seed):
    """Make a generator of torch."""
    return torch.Generator().manual_seed(seed)


def normal(seed, *shape):
    """Draw normal numbers as an array."""
    return rng(seed).standard_normal(shape)


def embeddings(seed, *shape):
    """Draw normal numbers as a tensor in float64."""
    return torch.tensor(normal(seed, *shape))


def masked_logits(seed, a, n, share=0.3, empty=False):
    """Draw logits (a, n), a share of them −∞, but no whole row except, if `empty`, the first."""
    generator = rng(seed)
    logits = generator.uniform(-2, 2, (a, n))
    hidden = generator.random((a, n)) < share
    hidden[np.arange(a), generator.integers(n, size=a)] = False
    logits[hidden] = -INF
    if empty:
        logits[0] = -INF
    return logits


def masked(x):
    """Convert to a tensor in float64 that has MASKED in place of −∞."""
    return torch.as_tensor(x).double().clamp_min(hardneg.MASKED)


def infinite(log_w):
    """Write −∞ where a log weight counts as masked."""
    return log_w.masked_fill(log_w < hardneg.FAR / 1e5, -INF)


def n_of(logits):
    """Compute N_i of masked logits."""
    return (logits > hardneg.FAR).sum(-1).to(logits.dtype)


def couple(log_kernel, *options, **more):
    """Couple by Sinkhorn: f, g and its error."""
    return hardneg.sinkhorn(lambda: [masked(log_kernel).to(log_kernel.dtype)], *options, **more)


def weigh(name, pos, neg, temperature=1.0, **options):
    """Answer question 2 by the name of a rule → log w (A, N), log w⁺ (A, M)."""
    options = hardneg.resolve({"weights": name} | options)
    pos, neg, zero = masked(pos), masked(neg), torch.zeros((), dtype=torch.float64)
    potential = zero
    if couples(name):
        potential = couple(hardneg.by_rule(neg, neg, zero, temperature, options))[1]
    batch = SimpleNamespace(log_weights=None, potential=potential, t=temperature)
    log_w_pos = hardneg.by_rule(pos, neg, zero, temperature, options) + hardneg.uniform(pos)
    return hardneg.weigh(batch, neg, n_of(neg), options), log_w_pos


def log_weights(name, logits, **options):
    """Compute a rule's log weights as a loss uses them: with mean 1, or 0 and −∞."""
    return infinite(weigh(name, logits, logits, **options)[0])


def log_negatives(pos, neg, log_w, tau_plus=0.0, t=1.0, **options):
    """Compute the log of the debiased sum over negatives, as `answer` does."""
    pos, neg, log_w = masked(pos), masked(neg), masked(log_w)
    options = hardneg.resolve({"weights": thrice} | options) | {"tau_plus": tau_plus}
    batch = SimpleNamespace(log_weights=None, t=t)
    return hardneg.add_up(batch, pos, neg, log_w, n_of(neg), options)[0]


def judge(objective, pos, neg, log_w, t=1.0, tau_plus=0.0, **options):
    """Compute an objective by its name from logits."""
    function, _ = hardneg.OBJECTIVES[objective]
    known = hardneg.resolve(options) | {"pos": masked(pos), "neg": masked(neg), "t": t}
    known |= {"log_w": masked(log_w)}
    known["log_negatives"] = log_negatives(pos, neg, log_w, tau_plus, t)
    return hardneg.fill_in(function, known)


def with_slope(value, x):
    """Return a value and its gradient."""
    return value.detach(), torch.autograd.grad(value.sum(), x, retain_graph=True)[0]


def negatives_of(x, k, each=0):
    """Take the last K rows as the option `negatives`, for `each` > 0 as (B, each, D)."""
    rows = x[len(x) - k :]
    return {"negatives": rows.reshape(-1, each, x.shape[1]) if each else rows} if k else {}


def tensors(x, v, k=0, dtype=torch.float64, each=0):
    """Make leaves of rows (V·B + K, D): a list of V views and, if K > 0, the option `negatives`."""
    x = torch.as_tensor(x).to(dtype)
    views = [view.clone().requires_grad_() for view in x[: len(x) - k].chunk(v)]
    bank = negatives_of(x, k, each)
    return views, {name: rows.clone().requires_grad_() for name, rows in bank.items()}


def ours(x, v, k=0, dtype=torch.float64, **options):
    """Compute value and gradient of hardneg."""
    views, bank = tensors(x, v, k, dtype)
    value = contrastive_loss(*views, **bank, **options)
    gradients = torch.autograd.grad(value, [*views, *bank.values()])
    return value.detach(), torch.cat(gradients)


def marginals_of(allowed):
    """Make the equations of couplings on allowed entries: Σ_j P_ij = 1/A, Σ_i P_ij = 1/N."""
    entries, matrix, masses = np.argwhere(allowed), [], []
    for axis in (0, 1):
        lines = np.unique(entries[:, axis])
        matrix += [entries[:, axis] == line for line in lines]
        masses += [1 / len(lines)] * len(lines)
    return np.array(matrix, dtype=np.float64), np.array(masses)


def feasible(allowed):
    """Tell whether a coupling can use every allowed entry; if not, Sinkhorn is slow. If half of a
    batch shares a label, its anchors take all candidates of the other half: entries within the
    other half carry no mass. The largest possible least mass is above 0 if none is so."""
    used, count = allowed.any(1).sum() * allowed.any(0).sum(), allowed.sum()
    if count == used:
        return True
    matrix, masses = marginals_of(allowed)
    above = np.hstack([matrix, matrix.sum(1, keepdims=True)])  # P_ij = a rest + the least mass
    objective = np.append(np.zeros(count), -1)
    result = linprog(objective, A_eq=above, b_eq=used * masses)  # masses are whole numbers
    return result.status == 0 and -result.fun > 1 / (2 * count)


def exact_coupling(cost):
    """Find the coupling of least cost by linear programming; +∞ masks an entry."""
    allowed = cost < INF
    matrix, masses = marginals_of(allowed)
    result = linprog(cost[allowed], A_eq=matrix, b_eq=masses)
    assert result.status == 0, result.message
    plan = np.zeros(cost.shape)
    plan[allowed] = result.x  # row by row, as the entries are
    return plan


def central_difference(function, x):
    """Compute ∂f/∂x ≈ (f(x + h) − f(x − h)) / 2h by entry; its error is O(h²) + rounding / h."""
    h, out = 1e-6, np.zeros(np.shape(x))
    for place in np.ndindex(out.shape):
        step = np.zeros(out.shape)
        step[place] = h
        out[place] = (function(x + step) - function(x - step)) / (2 * h)
    return out


def can_couple(x, v, k, objective, masks, options):
    """Tell whether the anchors of a call have a coupling that Sinkhorn finds soon."""
    z = oracle.unit(x)
    views, bank = np.split(z[: len(z) - k], v), z[len(z) - k :] if k else None
    given = [masks.get(name) for name in ("positive_index", "negative_mask", "labels")]
    margins = options["absolute_margin"], options["relative_margin"]
    neg = oracle.who(views, bank, *given, margins, hardneg.OBJECTIVES[objective][1])[1]
    return feasible(np.array(neg) > -INF)


def degenerate_batches(seed=5):
    """Make degenerate batches by name, two views stacked in one array."""
    x, others = normal(seed, 8, 3), np.arange(8)[:, None] != 2
    found = {"usual": x, "near": x[:1] + 1e-4 * x, "two samples": x[:4]}
    found |= {"opposite": np.concatenate([x[:4], -x[:4]])}
    found |= {"tiny": x * 1e-30, "huge": x * 1e30, "one dimension": x[:, :1]}
    found |= {"one zero row": x * others, "all zero": np.zeros((8, 3))}
    return found | {"all equal": x[[0] * 8], "two points": np.stack([x[0], -x[0]] * 4)}


def similarities(x, y, labels=None):
    """Compute a batch's cosines: pos (2B, 1) and neg (2B, 2B), −∞ where j is no negative of i."""
    z, b = oracle.unit(np.concatenate([x, y])), len(x)
    cosines, places = z @ z.T, np.arange(2 * b)
    owners = np.tile(np.arange(b) if labels is None else labels, 2)
    pos = cosines[places, (places + b) % (2 * b)][:, None]
    return pos, np.where(owners[:, None] != owners, cosines, -INF)


class Operations(TorchDispatchMode):
    """Record the names of the operations of a call, and the bytes of the largest new tensor."""

    READS = ["_local_scalar_dense", "nonzero", "item", "masked_select"]

    def __init__(self):
        super().__init__()
        self.names, self.bytes = [], 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        known = {x.untyped_storage().data_ptr() for x in tensors_of((arguments, options))}
        storages = [x.untyped_storage() for x in tensors_of(made)]
        new = [x.nbytes() for x in storages if x.data_ptr() not in known]
        self.names.append(function.overloadpacket.__name__)
        self.bytes = max([self.bytes, *new])
        return made

    def reads(self):
        return [name for name in self.names if name in self.READS]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let no value be read."""
    monkeypatch.setattr(hardneg, "_may_read", lambda x: False)


def edited(name, function):
    """Make a function with another result, as a reader may edit it."""

    @wraps(function)
    def edit(*arguments, **options):
        result = function(*arguments, **options)
        if name in hardneg.WEIGHTS:
            return 0.3 * arguments[0]  # the logits
        if name == "sinkhorn":
            return result[0], result[1] + torch.linspace(0, 1, len(result[1])), result[2]
        if isinstance(result, tuple):
            return 0.7 * result[0], *result[1:]
        return 0.7 * result

    return edit


def replace(monkeypatch, name, function):
    """Replace a function of hardneg, also in its row of rules or objectives."""
    monkeypatch.setattr(hardneg, name, function)
    for table in (hardneg.WEIGHTS, hardneg.OBJECTIVES):
        if name in table:
            monkeypatch.setitem(table, name, (function, *table[name][1:]))


def random_images(n=4, size=16, dtype=torch.float64):
    """Draw images of even noise."""
    return torch.rand(n, 3, size, size, generator=seeded(0), dtype=dtype)


def weights_of(module):
    """Copy the parameters of a module."""
    return [parameter.detach().clone() for parameter in module.parameters()]


def moved(module, before):
    """Tell whether any parameter is another than before."""
    return not all(torch.equal(x, y) for x, y in zip(module.parameters(), before, strict=True))


def tensors_of(state):
    """List the tensors of a nested structure."""
    return [x for x in tree_leaves(state) if torch.is_tensor(x)]


def equal_states(one, other):
    """Tell whether the tensors of two structures are equal to the bit."""
    return all(torch.equal(x, y) for x, y in zip(tensors_of(one), tensors_of(other), strict=True))


class Pixels(nn.Module):
    """Embed an image as its pixels, times a factor."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x, self.scale * x.flatten(1)


class Plain(nn.Module):
    """Embed images of 8 × 8 pixels in float64 without BatchNorm; `seen` are its batches' sizes."""

    def __init__(self, *before):
        super().__init__()
        torch.manual_seed(0)
        layers = *before, nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 6)
        self.layers, self.seen = nn.Sequential(*layers).double(), []

    def forward(self, x):
        self.seen.append(len(x))
        return x.mean((2, 3)), self.layers(x.double())


def tiny_game(size=8, **options):
    """Make a game of very small networks."""
    torch.manual_seed(0)
    usual = {"width": 2, "latent": 4, "pretrain": 1, "every": 2, "batch_size": 8}
    return hardneg.Game(size, **usual | options)


def settled(game):
    """Make a game a fixed function: float64, eval mode, spectral norms that have converged."""
    with torch.no_grad():
        for _ in range(30):
            game.D(game.G(game.latents(32)))
    game.G_ema.load_state_dict(game.G.state_dict())
    draw = game.latents
    game.double().eval()
    game.latents = lambda *arguments: draw(*arguments).double()
    game.train = lambda: game
    return game


def play(game, encoder, real, lr=0.0, turn=True, **options):
    """Take one step of DiffHard, with plain gradient descent for the encoder → loss, figures."""
    criterion = hardneg.ContrastiveLoss("ppcl" if game.pairs else "simclr")
    method = hardneg.DiffHard(criterion, game, {"blur": 0.5})
    game.taken = 0 if turn else 1
    optimizer, losses = torch.optim.SGD(encoder.parameters(), lr), []

    def descend(loss):
        losses.append(loss.detach())
        hardneg._descend(loss, optimizer, "encoder")

    figures = method.step(encoder, real, None, seeded(3), descend, **options)
    return losses[0], figures


def by_hand(game, encoder, real, lr, turn, rates):
    """Take the step of `play` as [3]'s Algorithm 1 says. rates: of Adam, (ascent, G and D)."""
    generator, each = seeded(3), 2 if game.pairs else 1
    z = game.latents(len(real) // each, generator)
    fakes = [network(z) for network in (game.G, game.G_ema)[:each]]
    batch = torch.cat([*fakes, real])
    views = [hardneg.view(batch, generator, blur=0.5) for _ in range(2)]
    rows = encoder(torch.cat(views))[1]
    labels = [*range(len(z))] * each + [*range(100, 100 + len(real))]
    name = "ppcl" if game.pairs else "simclr"
    loss = contrastive_loss(*rows.chunk(2), loss=name, labels=labels)

    def move(network, value, rate, **options):
        adam = torch.optim.Adam(network.parameters(), rate, betas=(0.0, 0.999), **options)
        hardneg._descend(value, adam, "network")

    slopes = torch.autograd.grad(loss, [*encoder.parameters()], retain_graph=True)
    if turn and game.ascent:
        move(game.G, loss, rates[0], maximize=True)
    with torch.no_grad():
        for parameter, slope in zip(encoder.parameters(), slopes, strict=True):
            parameter -= lr * slope
    if not turn:
        return loss.detach(), {}
    with torch.no_grad():
        for slow, fast in zip(game.G_ema.parameters(), game.G.parameters(), strict=True):
            slow.lerp_(fast, 1 - game.momentum)
    real = real[: game.batch_size]
    z = game.latents(len(real), generator)
    d_loss = F.relu(1 - game.D(real)).mean() + F.relu(1 + game.D(game.G(z))).mean()  # [3] Eq. 5
    move(game.D, d_loss, rates[1])
    g_loss = -game.D(game.G(z)).mean()
    move(game.G, g_loss, rates[1])
    return loss.detach(), {"d_loss": d_loss, "g_loss": g_loss}


def make(name, criterion, encoder, images, **options):
    """Make a method of training by its name."""
    if name == "diffhard":
        return hardneg.DiffHard(criterion, options.pop("game", None) or tiny_game(images.shape[-1]))
    if name == "bank":
        return hardneg.Bank(criterion, encoder, images, **options)
    return hardneg.SimCLR(criterion, **options)


def begin(images, name="simclr", loss="simclr", init=0, method_options=None, wrap=None, **options):
    """Make a training that has not begun."""
    torch.manual_seed(init)
    encoder = (wrap or nn.Module.float)(hardneg.Encoder(dim=16, size=images.shape[-1]))
    criterion = hardneg.ContrastiveLoss(loss, objective="ppcl" if name == "diffhard" else None)
    method = make(name, criterion, encoder, images, **method_options or {})
    usual = {"epochs": 2, "batch_size": 80, "lr": 3e-3, "bfloat16": False}
    return hardneg.Training(encoder, images, method, **usual | options)


def takes_steps(begin, name):
    """Assert that a method moves an encoder by every way to weigh and to judge. begin(images, name,
    loss, ...) makes a training."""
    for loss in PRESETS:
        training = begin(IMAGES[:80], name, loss, batch_size=40)
        before = weights_of(training.encoder)
        losses = [figures.get("loss") for figures in itertools.islice(training, 4)]
        assert finite(losses[-1], *training.encoder.parameters())
        assert moved(training.encoder, before)


def stays_on_the_device(training):
    """Assert that a step and the readouts make no tensor but on the device of the images."""
    images, method = training.images, training.method.to(DEVICE)
    encoder = training.encoder.to(DEVICE)
    arguments = encoder, images, torch.arange(len(images), device=DEVICE), torch.Generator(DEVICE)
    for device in (DEVICE, "meta"):  # Adam makes its state; then a tensor on meta would raise
        with torch.device(device):
            figures = method.step(*arguments, torch.Tensor.backward, return_stats=True)
            x, z = hardneg.embed(encoder, images)
            figures |= {"uniformity": readouts.uniformity(z)}
    assert {value.device.type for value in (x, *figures.values())} == {DEVICE}


RANKS = """
import os
import sys
import torch
import test_hardneg

torch.distributed.init_process_group("gloo")
group = torch.distributed.group.WORLD
found = test_hardneg.losses_of(group)
if group.rank() == 0:
    torch.save(found, sys.argv[1])
test_hardneg.refuse(group, group.rank())
torch.distributed.barrier()
os._exit(0)  # at a usual end gloo's threads may abort a process whose work is done
"""
VARIANTS = [{}, {"reduction": "sum"}, {"labels": [0, 1, 0, 2, 3, 2]}]
VARIANTS += [{"detach_weights": False, "block_size": 5}, {"absolute_margin": -0.3}]
VARIANTS += [{"tau_plus": 0.05, "temperature": 0.7}, {"negatives": embeddings(1, 7, 4)}]
VARIANTS += [{"negatives": embeddings(3, 6, 2, 4)}, {"negative_mask": embeddings(2, 6, 6) > -0.5}]
VARIANTS += [{"detach_weights": False}]


def refuse(group, rank):
    """Let both ranks refuse what only one of them has, and then go on."""
    x = embeddings(rank, 2, 4, 3)
    for views in (x[: 1 + rank], x[:, : 3 + rank], x[..., : 2 + rank]):
        with refused("^views differ between ranks"):
            contrastive_loss(*views, labels=torch.arange(views.shape[1]), group=group)
    with refused("^negatives differs between ranks"):
        contrastive_loss(*x, negatives=x[0], group=group)
    broken = x.clone()
    broken[0, 1, 2] = math.nan if rank == 1 else 0.0
    with pytest.raises(hardneg.NotFinite, match="^views of rank 1 have NaN"):
        contrastive_loss(*broken, group=group)
    assert contrastive_loss(*x, group=group).isfinite()


class Wrapped(nn.Module):
    """Embed two samples at a time: what DistributedDataParallel wraps."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x):
        return hardneg.in_micro_batches(lambda rows: self.encoder(rows), 2)(x)


def of_one_view(images, texts, share, group):
    """Yield losses of one view with named positives; ranks have different numbers of them."""
    labels, own = torch.tensor([0, 1, 0, 2, 3, 0]), embeddings(4, 6, 6)
    for loss in ("supcon", "ot"):
        options = {"labels": labels[share], "log_weights": own[share], "group": group}
        yield contrastive_loss(images, loss=loss, **options)
    rows, some = hardneg.gather(texts, group), torch.stack([share, labels[share] - 1], 1)
    options = {"negatives": rows, "positive_index": some, "log_weights": own[0], "group": group}
    yield contrastive_loss(images, objective="each", **options)


def of_rank(value, name, v, share, shares):
    """Take a rank's share of an option of VARIANTS; columns come rank by rank."""
    if name == "labels":
        return torch.tensor(value)[share]
    if name == "negative_mask":
        columns = torch.cat([others.repeat(v) for others in shares])
        return value[share.repeat(v)][:, columns]
    return value[share] if name == "negatives" and value.ndim == 3 else value


def losses_of(group):
    """Compute losses of a rank's samples and their mean gradients, in one list."""
    rank = 0 if group is None else torch.distributed.get_rank(group)
    shares = torch.arange(6).view(1 if group is None else 2, -1)
    inputs, share, found = embeddings(0, 3, 6, 5), shares[rank], []

    def add(value):
        value, gradient = with_slope(value, encoder.weight)
        if group is not None:
            torch.distributed.all_reduce(gradient)
        found.extend([value, gradient / len(shares)])

    for loss, (k, variant) in itertools.product(PRESETS, enumerate(VARIANTS)):
        torch.manual_seed(0)
        encoder, v = nn.Linear(5, 4).double(), 2 + k % 2
        options = {name: of_rank(x, name, v, share, shares) for name, x in variant.items()}
        rows = variant.get("negatives")
        if loss == "ot" and rows is not None and rows.ndim == 3:  # these rows are not shared
            options["weights"] = "tilted"
        views = [encoder(view[share]) for view in inputs[:v]]
        add(contrastive_loss(*views, loss=loss, group=group, **options))
    images, texts, given = (encoder(view[share]) for view in inputs)
    for value in of_one_view(images, texts, share, group):
        add(value)
    few = Wrapped(encoder)
    if group is not None:
        few = nn.parallel.DistributedDataParallel(few)
    encoder.zero_grad()
    value = contrastive_loss(*few(inputs[:2, share].flatten(0, 1)).chunk(2), group=group)
    value.backward()
    found += [value.detach(), encoder.weight.grad]
    options = {"reduction": "none", "block_size": 4, "group": group}
    each = contrastive_loss(images, texts, **options)  # of the own anchors
    found.append(each.detach().view(2, -1)[:, :3])  # those of the first rank
    add(each.mean() - each.mean().detach())  # the gradient alone, as the means of ranks differ
    # rank 1 does not use the candidates, but the backward pass of `gather` waits for it
    marks = (share > 2).double().repeat(2)[:, None].expand(-1, 12)
    options = {"objective": without_candidates, "log_weights": marks, "group": group}
    for size in (0, 4):
        add(contrastive_loss(images, texts, block_size=size, **options))
    warm = 0.2 + encoder.weight.square().mean()  # a temperature with a gradient
    add(contrastive_loss(images, texts, temperature=warm, block_size=4, group=group))
    # on rank 0 the function learns something, so this rank does without blocks, and rank 1 does not
    learned = torch.zeros((), dtype=torch.float64, requires_grad=rank == 0)
    options = {"loss": "ot", "detach_weights": False, "block_size": 4, "group": group}
    options["objective"] = lambda pos, neg, log_w: (neg + log_w).logsumexp(1) - pos[:, 0] + learned
    add(contrastive_loss(images, texts, **options))
    compiled = torch.compile(contrastive_loss, backend="aot_eager")
    add(compiled(images, texts, loss="ot", block_size=4, group=group))
    rows = torch.cat([texts, given])  # as `gather` says
    options = {"negatives": hardneg.gather(rows, group), "loss": "ot", "group": group}
    options["positive_index"] = rank * len(rows) + torch.arange(len(share))
    add(contrastive_loss(images, texts, **options))
    return found


def without_candidates(pos, neg, log_w):
    """Judge anchors whose log weights are 1 by their positives alone."""
    marked = log_w.amax(1) > 0.5
    if marked.all():
        return -pos.sum(1)
    return torch.where(marked, 0, neg.logsumexp(1)) - pos.sum(1)


def start(words, folder):
    """Start Python with these words in a folder, and record what it prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=ALONE, **pipes)


# ---- Sections 2 and 5: weights, transport
class TestWeights:
    """Every rule is the oracle's, and weighs a positive as a candidate at its logit."""

    KEPT = [(0.07, 100, 7), (0.1, 9, 1), (1e-6, 9, 1), (2 / 3, 3, 2), (1 / 6, 60, 10)]

    @pytest.mark.parametrize("alpha, n, kept", KEPT)
    def test_top_keeps_the_ceiling(self, alpha, n, kept):
        assert (hardneg.top(embeddings(n, 1, n), alpha) == 0).sum() == kept

    def test_top_needs_no_order(self, monkeypatch):
        """Where it asks for none, a GPU gives any."""
        topk = torch.Tensor.topk

        def backwards(x, k, sorted=True):
            found = topk(x, k)
            return found if sorted else SimpleNamespace(values=found.values.flip(-1))

        logits = embeddings(1, 3, 9)
        wanted = hardneg.top(logits, 0.5)
        monkeypatch.setattr(torch.Tensor, "topk", backwards)
        assert torch.equal(hardneg.top(logits, 0.5), wanted)

    @pytest.mark.parametrize("name", RULES)
    @at_least(60)
    @given(**MATRICES, m=st.integers(1, 3), tied=BOOLEANS, may_read=BOOLEANS, data=st.data())
    def test_log_weights(self, name, seed, a, n, m, tied, may_read, data):
        """Also where the host may not see that all rows keep as many."""
        options = data.draw(samples_of(hardneg.WEIGHTS[name][0], others=["temperature"]))
        pos, neg = masked_logits(seed + 1, a, m), masked_logits(seed, a, n, empty=a > 1)
        assume(not couples(name) or feasible(neg > -INF))
        cosines = (np.round(x / 2) if tied else x / 2 for x in (pos, neg))
        pos, neg = (x / options["temperature"] for x in cosines)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hardneg, "_may_read", lambda x: may_read)
            found, found_pos = weigh(name, pos, neg, **options)
        wanted, wanted_pos = oracle.weigh(name, pos.tolist(), neg.tolist(), **options)
        close(infinite(found), wanted, 1e-10)
        some = (neg > -INF).any(1)  # without candidates there is nothing to weigh
        shares = (masked(x)[some].log_softmax(1) for x in (found_pos, np.array(wanted_pos)))
        close(*map(infinite, shares), 1e-10)


class TestSinkhorn:
    """The coupling has uniform marginals, respects its masks, and reports its own error."""

    @pytest.mark.parametrize("cost", hardneg.COSTS)
    @given(**PLANS, empty=BOOLEANS, size=st.integers(1, 6))
    def test_plan(self, cost, seed, a, n, epsilon, share, empty, size):
        """Fully masked rows and columns carry no mass, and blocks of rows change nothing."""
        cosines = masked_logits(seed, a, n, share, empty and a > 1) / 2
        allowed = cosines > -INF
        assume(feasible(allowed))
        costs = hardneg.COSTS[cost](torch.tensor(cosines))
        close(costs[torch.tensor(allowed)], oracle.ground_cost(cosines[allowed], cost), 1e-12)
        # Sinkhorn settles in 1000 steps; costs of "exp" are up to e⁴
        epsilon = 7.4 * max(epsilon, 2.0) if cost == "exp" else max(epsilon, 0.5)
        kernel = -costs / epsilon
        before = kernel.clone()
        finite_kernel = masked(kernel)
        for function in (lambda: [finite_kernel], lambda: iter(finite_kernel.split(size))):
            f, g, error = hardneg.sinkhorn(function)
            assert error <= 1e-12 and finite(f, g) and torch.equal(kernel, before)
            plan = torch.exp(f[:, None] + kernel + g)
            close(plan, oracle.sinkhorn(numpy(kernel))[0], 1e-10)
            for dim in (0, 1):
                close(plan.sum(dim), allowed.any(dim) / allowed.any(dim).sum(), 1e-11)

    @pytest.mark.parametrize("tolerance, steps", [(None, 1000), (0.01, 1000), (0.0, 2)])
    @pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
    @given(**MATRICES)
    def test_error_is_that_of_the_plan(self, dtype, rounding, tolerance, steps, seed, a, n):
        kernel = torch.tensor(rng(seed).uniform(-5, 0, (a, n)), dtype=dtype)
        used = a - (a > 1 and seed % 2)  # rows; the others are fully masked
        kernel[used:] = -INF
        f, g, error = couple(kernel, tolerance, steps)
        assert f.dtype == g.dtype == error.dtype == dtype
        plan = torch.exp(f[:, None] + kernel + g).double()
        if a != n or steps == 1000:
            columns = rounding if a != n else rounding + 2 * float(error)
            close(plan.sum(0), np.full(n, 1 / n), columns)
        close((plan.sum(1)[:used] - 1 / used).abs().sum(), error, rounding)
        usual = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        assert steps < 1000 or error <= (tolerance or usual)

    def test_has_converged_if_nothing_is_allowed_or_the_last_step_suffices(self):
        nothing = torch.full((3, 4), -INF, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            f, g, error = couple(nothing)
            couple(torch.tensor(rng(0).uniform(-6, 0, (5, 5))), 2.0, max_steps=1)
        assert error == 0 and finite(f, g)

    def test_its_last_step_is_looked_at_on_a_gpu(self, as_on_a_gpu):
        """Also if it is no eighth one: the error is that of the plan."""
        kernel = torch.tensor(rng(0).uniform(-6, 0, (5, 7)))
        with pytest.warns(UserWarning, match="^Sinkhorn stopped at step 19, .*epsilon") as said:
            with Operations() as operations:
                f, g, error = couple(kernel, 0.0, max_steps=19)
        assert len(operations.reads()) == 3 and len(said) == 1  # at steps 8, 16 and 19
        rows = torch.exp(f[:, None] + kernel + g).sum(1)
        close((rows - 1 / 5).abs().sum(), error, 1e-12)

    def test_nan_stops_it(self):
        kernel = Mock(return_value=[torch.full((3, 3), math.nan)])
        with pytest.raises(hardneg.NotFinite, match="^log_kernel has NaN"):
            hardneg.sinkhorn(kernel)
        assert kernel.call_count <= 9

    def test_a_batch_settles_soon_where_classes_cluster(self, as_on_a_gpu):
        """Rows and columns in turn take hundreds of steps, their mean a few."""
        x = np.tile(normal(0, 8, 16), (16, 1)) + 0.1 * normal(1, 128, 16)
        views = torch.tensor(x), torch.tensor(x + 0.02 * normal(2, 128, 16))
        for masks in ({}, {"absolute_margin": -9}, {"negative_mask": torch.ones(256).bool()}):
            with Operations() as operations:
                contrastive_loss(*(x.float() for x in views), loss="ot", epsilon=0.1, **masks)
            assert len(operations.reads()) == 1  # one in eight steps


# ---- Section 3: objectives
class TestDebiased:
    """False negatives are subtracted, down to a floor."""

    def test_where_exactly_nothing_is_left_the_floor_has_no_slope(self):
        tau_plus, log_mean_pos = torch.tensor([0.5]), torch.zeros(1, requires_grad=True)
        log_mean = tau_plus.log().requires_grad_()
        value, clamped = hardneg.published(log_mean, log_mean_pos, tau_plus, 0.5)
        assert (value.item(), clamped.item()) == (-2, True)
        assert torch.autograd.grad(value, [log_mean, log_mean_pos]) == (0, 0)

    @pytest.mark.parametrize("own", [1e15, 1e16, 4e19])
    def test_large_log_weights_of_an_anchor_without_anything(self, own):
        """It has neither a positive nor a candidate, so that its log weights alone are seen."""
        x, mask = embeddings(1, 6, 4).requires_grad_(), torch.ones(6, 6, dtype=torch.bool)
        mask[0] = False
        log_weights = torch.zeros(6, 6, dtype=torch.float64)
        log_weights[0] = own
        given = {"negative_mask": mask, "log_weights": log_weights, "labels": [0, 1, 1, 2, 2, 1]}
        for weights in hardneg.WEIGHTS:
            loss = contrastive_loss(x, loss="hcl", weights=weights, **given)
            (gradient,) = torch.autograd.grad(loss, x)
            assert loss.isfinite() and gradient.isfinite().all(), weights

    @pytest.mark.parametrize("easy, warns", [(1, False), (2, False), (3, True)])
    def test_warns_if_the_floor_binds_for_more_than_half(self, easy, warns):
        """A view far from its other one, beside equal ones. A warning names the caller's line."""
        x = torch.eye(5)[:4]
        y = torch.cat([x[:easy], -x[easy:]])
        options = {"loss": "debiased", "temperature": 0.3, "reduction": "none"}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            contrastive_loss(x, y, tau_plus=0.2, **options)
            contrastive_loss(x, y, **options)  # by default the floor says that all is well
            module = hardneg.ContrastiveLoss(tau_plus=0.2, **options)
            _, stats = module(x, y, return_stats=True)
        assert stats["clamped"] == easy / 4
        assert [warning.filename for warning in said] == [__file__] * 2 * warns


# ---- Sections 1 and 4: the loss, candidates
class TestContrastiveLoss:
    """`contrastive_loss` is the papers' formulas, and differentiable by whatever asks for it."""

    ANSWERS = [(loss, None, None) for loss in oracle.PRESETS]
    ANSWERS += [("hcl", *pair) for pair in itertools.product([*RULES, thrice, far], OBJECTIVES)]
    SHAPES = {**BATCHES, "v": st.integers(1, 3), "b": st.integers(1, 4), "k": st.integers(1, 5)}
    SHAPES |= {"where": st.sampled_from(["batch", "bank", "each"])}
    MASKS = {"hidden": st.just(0) | st.floats(0, 0.8)}
    MASKS |= {"masks": st.sampled_from(["", "labels", "positive_index", "labels, positive_index"])}
    MASKS |= {"log_weights": st.sampled_from(["", "", "all", "each"])}
    # dtype: the error of the loss, and of a gradient that is rounded to the dtype
    ERRORS = {torch.float64: (1e-10, 0), torch.float32: (1e-4, 0)}
    ERRORS |= {torch.float16: (1e-4, 2e-3), torch.bfloat16: (1e-4, 1e-2)}
    DTYPES = {"dtype": st.just(torch.float64) | st.sampled_from([*ERRORS]), "data": st.data()}

    def masks(self, random, shape, b, rows, each, hidden, masks, log_weights):
        """Draw who counts; a mask, or weights, of one row are for all anchors."""
        (a, n), drawn = shape, {}
        if hidden:
            mask = random.random((random.choice([1, a]), n)) >= hidden
            drawn["negative_mask"] = mask[0] if len(mask) == 1 else mask
        if "labels" in masks and not each:
            drawn["labels"] = random.integers(3, size=b + rows)
        if "positive_index" in masks and rows:
            places = random.integers(-1, n, size=(b, random.integers(1, 5)))
            drawn["positive_index"] = places[:, 0] if places.shape[1] == 1 else places
        if log_weights:
            drawn["log_weights"] = random.standard_normal(shape if log_weights == "each" else n)
        return drawn

    @pytest.mark.parametrize("loss, weights, objective", ANSWERS)
    @at_least(20)
    @given(**SHAPES, **MASKS, **DTYPES)
    def test_is_the_oracles(
        self, loss, weights, objective, seed, where, v, b, d, k, dtype, data, **rules
    ):
        """Value, gradient, slope in t and statistics, for all that a call may be given at once. Any
        anchor may lose its candidates, by an absolute margin of 3 every one, and `far` may keep
        none of them."""
        answers = weights or hardneg.PRESETS[loss][0], objective or hardneg.PRESETS[loss][1]
        coupled, random = couples(answers[0]), rng(seed)
        drawn = data.draw(samples_of(*functions_of(*answers), others=OF_CALLS))
        if coupled:
            dtype = torch.float64  # in float32 Sinkhorn stops at 1e-5: see TestExtremes
        rows, each = {"batch": (0, 0), "bank": (k, 0), "each": (b * k, k)}[where]
        a, n = (b, k) if rows else (v * b, v * b)
        x = normal(seed, v * b + rows, d)
        if coupled and not drawn["normalize"]:  # costs are of unit rows
            x = oracle.unit(x)
        x = torch.tensor(x).to(dtype).double().numpy()
        weight = random.standard_normal(a) if drawn["reduction"] == "none" else np.ones(())

        masks = self.masks(random, (a, n), b, rows, each, **rules)
        given = {name: torch.tensor(value) for name, value in masks.items()}
        if "negative_mask" in masks:
            masks["negative_mask"] = np.broadcast_to(masks["negative_mask"], (a, n))
        assume(v > 1 or "labels" in masks or "positive_index" in masks)  # positives have a name
        assume(not coupled or where != "each")  # no candidate is shared
        assume(not coupled or can_couple(x, v, rows, answers[1], masks, drawn))
        t, block_size = drawn.pop("temperature"), drawn.pop("block_size")
        options = {"loss": loss, "weights": weights, "objective": objective, **masks, **drawn}

        def by_oracle(inputs, t=t, **more):
            bank = negatives_of(inputs, rows, each)
            views = np.split(inputs[: len(inputs) - rows], v)
            return oracle.contrastive_loss(*views, **bank, **options, temperature=t, **more)

        def total(inputs, t=t):
            return (by_oracle(inputs, t) * weight).sum()

        views, bank = tensors(x, v, rows, dtype, each)
        learned = torch.tensor(t, dtype=torch.float64, requires_grad=True)
        asked = {"temperature": learned, "block_size": block_size, "return_stats": True}
        value, stats = contrastive_loss(*views, **bank, **options | given | asked)
        inputs, by_value = [*views, *bank.values(), learned], torch.tensor(weight).to(value)
        *slopes, by_t = torch.autograd.grad(value, inputs, by_value, materialize_grads=True)
        gradient = torch.cat([slope.flatten(0, -2) for slope in slopes])

        assert value.dtype == torch.promote_types(dtype, torch.float32) and gradient.dtype == dtype
        error, rounding = self.ERRORS[dtype]
        if coupled:
            error = max(error, 1e-7)  # Sinkhorn's 1e-12 is more where one differentiates it
        wanted, figures = by_oracle(x, return_stats=True)
        close(value, wanted, error)
        close(gradient, oracle.gradient(total, x), max(error, rounding), floor=1e-3)
        # a coupling is of cosines, which do not depend on t
        if coupled:
            close(by_t, central_difference(lambda t: total(x, float(t)), np.array(t)), error)
        else:
            close(by_t, np.imag(total(x, t + 1e-30j)) / 1e-30, error)
        assert stats.keys() == figures.keys()
        assert not any(figure.requires_grad for figure in stats.values())
        found = [float(stats[name]) for name in figures]
        np.testing.assert_allclose(found, [*figures.values()], error, error)

    EQUATIONS = {  # what [1], [2] and [4] print for two views, and with which settings
        "simclr": (oracle.simclr_eq, {"temperature": 0.5}),
        "hcl": (oracle.hcl_eq2, {"temperature": 0.5, "beta": 1.0, "tau_plus": 0.1}),
        "debiased": (oracle.hcl_eq2, {"temperature": 0.5, "beta": 0.0, "tau_plus": 0.1}),
        "ot": (oracle.ot_eq5, {"temperature": 0.5, "epsilon": 0.5}),
        "hard": (oracle.hard_eq9, {"temperature": 1.0, "alpha": 4095 / 49999}),
    }

    @pytest.mark.parametrize("loss", EQUATIONS)
    @given(**TWO_VIEWS, data=st.data())
    def test_two_views_have_the_printed_equations(self, loss, seed, b, data):
        equation, settings = self.EQUATIONS[loss]
        x = normal(3, 40, 5)
        printed = equation(*np.split(oracle.unit(x), 2), **settings)
        close(ours(x, 2, loss=loss, **hardneg.PAPERS[loss])[0], printed, 1e-9)

        given = data.draw(samples_of(others=hardneg.PAPERS[loss]))
        if "tau_plus" in given:
            given["tau_plus"] = given["tau_plus"] or 0.0
        settings = settings | given

        def of_rows(rows):
            return equation(*np.split(oracle.unit(rows), 2), **settings)

        x = normal(seed, 2 * b, 3)
        found = ours(x, 2, loss=loss, **given)
        same(found, (of_rows(x), oracle.gradient(of_rows, x)), 1e-9 if loss == "ot" else 1e-10)

    @at_least(30)
    @given(**TWO_VIEWS, pairs=st.integers(0, 3), t=SAMPLES["temperature"])
    def test_ppcl_has_the_printed_equation(self, seed, b, pairs, t):
        """[3] Eq. 8 by its sets: a generated anchor has three positives, a real one has one."""
        real = b - 1
        assume(pairs + real > 1)
        labels = [*range(pairs), *range(pairs), *range(pairs, pairs + real)]
        raw, latents = [*range(len(labels))] * 2, [k if k < pairs else None for k in labels] * 2
        printed = partial(oracle.ppcl_eq8, raw=raw, latents=latents, temperature=t)
        x = normal(seed, len(raw), 3)
        found = ours(x, 2, loss="ppcl", labels=labels, temperature=t)
        same(found, (printed(x), oracle.gradient(printed, x)), 1e-10)

    @pytest.mark.parametrize("loss", PRESETS)
    def test_gradient_of_some_inputs(self, loss):
        """Of one of them, of all, or of none."""
        x, y, bank = embeddings(14, 3, 4, 3)
        inputs = [x, y, bank, torch.tensor(0.4, dtype=torch.float64)]
        whole = None
        for size, wanted in itertools.product((0, 3), [range(4), (0,), (1,), (2,), (3,), ()]):
            leaves = [x.clone().requires_grad_(k in wanted) for k, x in enumerate(inputs)]
            options = {"negatives": leaves[2], "temperature": leaves[3], "block_size": size}
            value = contrastive_loss(*leaves[:2], loss=loss, **options)
            asked = [leaves[k] for k in wanted]
            found = torch.autograd.grad(value, asked, materialize_grads=True) if asked else ()
            whole = whole or (value.detach(), found)
            close(value, whole[0], 1e-12)
            all_close(found, [whole[1][k] for k in wanted], 1e-12)
            with torch.inference_mode():
                close(contrastive_loss(*leaves[:2], loss=loss, **options), value, 1e-12)

    def test_statistics_are_of_the_first_pairs(self):
        x, y = embeddings(0, 2, 1000, 4)
        rows = embeddings(1, 1000, 1100, 4)  # of each anchor's own
        _, stats = contrastive_loss(x, y, negatives=rows, return_stats=True)
        first = 2**20 // 1100
        few = {"negatives": rows[:first], "return_stats": True}
        all_close(stats.values(), contrastive_loss(x[:first], y[:first], **few)[1].values(), 1e-12)

    @pytest.mark.parametrize("block_size", [0, 3])
    def test_changes_in_place_are_detected(self, block_size):
        x, y, bank = embeddings(16, 3, 4, 3)
        options = {"normalize": False, "reduction": "none", "block_size": block_size}
        loss = contrastive_loss(x.requires_grad_(), y, negatives=bank, **options)
        bank.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()


class TestNamedPositives:
    """One view has positives by `labels` or by `positive_index`; what cannot be meant is told."""

    def test_log_weights_of_any_size_do_not_mask(self):
        """Nor do they let the anchor's own sample count."""
        x, y = embeddings(1, 2, 4, 3)
        huge = torch.zeros(8, 8).double().index_fill_(0, torch.tensor([0]), 1e31)
        value = contrastive_loss(x, y, log_weights=huge, reduction="none")
        close(value[0], huge.new_tensor(5e19), 1e-12)
        close(value[1:], contrastive_loss(x, y, reduction="none")[1:], 1e-12)
        learned = huge.clone().requires_grad_()  # which get no gradient
        assert not contrastive_loss(x, y, log_weights=learned).requires_grad
        _, stats = contrastive_loss(x, y, log_weights=huge - 1e25, return_stats=True)
        assert stats["candidates"] == 6

    @pytest.mark.parametrize("block_size", [0, 1])
    def test_what_no_anchor_has_is_said_once(self, block_size):
        x, y = embeddings(1, 2, 3, 4)
        mask = torch.zeros(3, 3, dtype=torch.bool)
        one, more = mask.clone(), {"return_stats": True, "block_size": block_size}
        one[2, 0] = True  # one candidate in all
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            contrastive_loss(x, y, negatives=y, negative_mask=one, block_size=block_size)
        for options in ({"labels": [1, 1, 1]}, {"negatives": y, "negative_mask": mask}):
            with pytest.warns(UserWarning, match="^None of . anchors has a candidate") as said:
                _, stats = contrastive_loss(x, y, **options, **more)
            assert len(said) == 1 and stats["candidates"] == 0
        with pytest.warns(UserWarning, match="^None of 3 anchors has a positive"):
            assert contrastive_loss(x, labels=[1, 2, 3], block_size=block_size) == 0

    def test_rows_of_the_second_view_need_an_index(self):
        x, y = embeddings(1, 2, 3, 4)
        with pytest.warns(UserWarning, match="Name it in positive_index="):
            contrastive_loss(x, y, negatives=torch.cat([x, y]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            contrastive_loss(x, y, negatives=x)
            contrastive_loss(x, y, negatives=torch.where(x > 0, x, y[0]))  # shares some entries
            others = torch.tensor([[1, 2], [0, 2], [0, 1]])  # for each sample rows of its own
            contrastive_loss(x, y, negatives=y[others])
            contrastive_loss(x, y, negatives=y, positive_index=torch.arange(3))
            contrastive_loss(x, y, negatives=y, negative_mask=~torch.eye(3, dtype=torch.bool))
            contrastive_loss(x, y, negatives=y, labels=[0, 1, 2, 0, 1, 2])

    def test_a_matrix_of_the_whole_batch_in_blocks(self):
        x, y = embeddings(1, 2, 8, 4)
        for function in (lambda s: torch.ones(16, 16), lambda s: s + torch.ones(16, 16)):
            contrastive_loss(x, y, weights=function)
            with pytest.raises(Exception) as caught:
                contrastive_loss(x, y, weights=function, block_size=6)
            notes = getattr(caught.value, "__notes__", [])
            assert "log_weights= takes a matrix" in str([caught.value, *notes])


class TestFunctions:
    """Own functions may be the `weights`, the `objective` or both: `weigh` takes them."""

    @pytest.mark.parametrize("weights", hardneg.WEIGHTS)
    @at_least(20)
    @given(**SEEDS, v=st.integers(2, 3), k=st.sampled_from([0, 4]), data=st.data())
    def test_an_own_objective_is_as_a_named_one(self, weights, seed, v, k, data):
        x, objective = normal(seed, 4 * v + k, 3), data.draw(SAMPLES["objective"])
        of_call = "temperature", "block_size", "detach_weights"
        rule, judgement = functions_of(weights, objective)
        of_objective = data.draw(samples_of(judgement))
        named = data.draw(samples_of(rule, others=of_call)) | {"weights": weights, "tau_plus": 0.0}

        def own(pos, neg, log_w):
            return judge(objective, pos, neg, log_w, named["temperature"], **of_objective)

        wanted = ours(x, v, k, **named | of_objective | {"objective": objective, "block_size": 0})
        same(ours(x, v, k, **named | {"objective": own}), wanted, 1e-10)

    LEARNED = {"part": st.sampled_from(["weights", "objective", "tilted"])}
    LEARNED |= {"kind": st.sampled_from(["leaf", "computed", "module"]), "size": st.integers(1, 13)}
    LEARNED |= {"reduction": SAMPLES["reduction"], "least": st.floats(-10, 10)}

    @at_least(40)
    @given(**SEEDS, **LEARNED)
    def test_parameters_may_enter_any_anchors(self, seed, part, size, kind, reduction, least):
        """Those with a logit above `least`; a block of others knows nothing of the parameters. So
        may those of a row of rules that was edited. Two anchors have no positive."""
        x, labels = embeddings(seed, 12, 3).requires_grad_(), [0, 1, 2, 2, 3, 3, *[4, 5] * 3]
        torch.manual_seed(seed)
        module = nn.Linear(1, 1).double()
        scale = module.weight.exp()  # a graph before it, which may be needed more than once

        def learned(logits):
            if kind == "module":
                return module(logits[..., None])[..., 0]
            return logits * (scale if kind == "computed" else module.weight)

        def function(logits, *others):
            chosen = logits.amax(1) > least
            if chosen.any():
                logits = torch.where(chosen[:, None], learned(logits), logits)
            if part == "objective":
                return logits.logsumexp(1) + others[0].logsumexp(1)
            return logits

        found, inputs = [], [x, module.weight, module.bias]
        given = {"weights": "tilted"} if part == "tilted" else {part: function}
        for block_size in (0, size):
            with pytest.MonkeyPatch.context() as patch:
                replace(patch, "tilted", lambda logits: function(logits))
                options = given | {"reduction": reduction, "block_size": block_size}
                value = contrastive_loss(x, labels=labels, **options)
                value = (value * embeddings(1, *value.shape)).sum()
                gradients = torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True)
            found.append([0 * x if y is None else y for y in (value.detach(), *gradients)])
        all_close(*found, 1e-12)

    def test_may_be_random(self):
        x = embeddings(1, 2, 6, 3).requires_grad_()  # whose candidates the loss does not read
        t = x.detach()[0, 0, 0].exp().requires_grad_()

        def judge(pos, neg, log_w):
            return pos[:, 0] * torch.randn(len(pos), dtype=torch.float64)

        loss = contrastive_loss(*x, objective=judge, temperature=t, block_size=4)
        value, slope = with_slope(loss, t)
        close(slope * t, -value, 1e-12)  # of the same draw

    FUNCTIONS = [torch.neg, lambda s: s.clamp_min(-1e15).square()]
    FUNCTIONS += [lambda s: -torch.log(1 + (-s).exp())]

    @pytest.mark.parametrize("objective", ["nce", "decoupled"])
    @pytest.mark.parametrize("tau_plus", [0.0, 0.1])
    @pytest.mark.parametrize("function", FUNCTIONS)
    def test_do_not_count_for_anchors_without_candidates(self, objective, tau_plus, function):
        x, y = embeddings(2, 2, 4, 3).requires_grad_()
        options = {"weights": function, "objective": objective, "tau_plus": tau_plus}
        loss = contrastive_loss(x, y, labels=[0] * 4, **options)
        assert loss == 0
        assert torch.autograd.grad(loss, x)[0].abs().max() == 0

    @pytest.mark.parametrize("weights", hardneg.WEIGHTS)
    def test_what_does_not_count_is_one_number(self, weights):
        """In logits and log weights, whether a mask or the rule dropped it."""

        def judge(pos, neg, log_w):
            dropped = neg == -1e30
            assert torch.equal(log_w == -1e30, dropped) and dropped.any()
            assert neg[~dropped].abs().max() < 99 and log_w[~dropped].abs().max() < 99
            return pos[:, 0]

        x, y = embeddings(2, 2, 6, 3)
        contrastive_loss(x, y, weights=weights, objective=judge, labels=[0, 0, 1, 1, 2, 3])


class TestContrastiveLossModule:
    """`ContrastiveLoss` holds options, which a call may override, and a learned temperature."""

    def test_options(self):
        x, y = embeddings(3, 2, 4, 3)
        for call in (partial(contrastive_loss, x, y), hardneg.ContrastiveLoss):
            with pytest.raises(TypeError, match="^there is no option 'temprat.*mean 'temperature'"):
                call(temprature=0.1)
        module = hardneg.ContrastiveLoss("hcl", beta=2.0, temperature=0.3)
        for options in ({}, {"beta": 0.5}, {"temperature": 0.1}):
            settled = {"loss": "hcl", "beta": 2.0, "temperature": 0.3} | options
            close(module(x, y, **options), contrastive_loss(x, y, **settled), 1e-12)
        of_a_class = type("Loss", (hardneg.ContrastiveLoss,), {"beta": 3.0})  # that is no option
        close(of_a_class("hcl", temperature=0.3, beta=2.0)(x, y), module(x, y), 1e-12)
        settled = module.options["weights"], module.options["objective"]
        assert settled == hardneg.PRESETS["hcl"][:2] and not module.state_dict()
        hinges = hardneg.ContrastiveLoss("hcl", objective="triplet", tau_plus=0.1)
        assert hinges.options["tau_plus"] == 0  # they are not debiased

    def test_a_temperature_and_modules_are_learned(self):
        x, y = embeddings(3, 2, 4, 3)
        learned, weights = nn.Parameter(torch.tensor(0.4).double()), nn.PReLU().double()
        module = hardneg.ContrastiveLoss(temperature=learned, weights=weights)
        assert [*module.state_dict()] == ["temperature", "weights.weight"]
        module(x, y).backward()
        assert learned.grad != 0 and weights.weight.grad != 0
        plain = partial(contrastive_loss, x, y, weights=weights)
        close(module(x, y, temperature=0.1), plain(temperature=0.1), 1e-12)
        module.load_state_dict({"temperature": torch.tensor(0.75)}, strict=False)
        close(module(x, y), plain(temperature=0.75), 1e-12)
        nn.utils.parametrize.register_parametrization(module, "temperature", nn.Softplus())
        close(module(x, y), plain(temperature=module.temperature.item()), 1e-12)

    def test_its_repr_is_the_call_that_makes_it(self):
        """A function of the user's shows its name. A module of the user's is shown by torch."""
        given = {"temperature": 0.3, "cost": "exp", "detach_weights": False}
        module = hardneg.ContrastiveLoss("ot", **given)
        words = 'ContrastiveLoss("ot", temperature=0.3, cost="exp", detach_weights=False)'
        assert repr(module) == words
        assert eval(words, {"ContrastiveLoss": hardneg.ContrastiveLoss}).given == module.given
        learned = nn.Parameter(torch.tensor(0.0725))
        module = hardneg.ContrastiveLoss(weights=F.relu, temperature=learned)
        assert repr(module) == 'ContrastiveLoss("simclr", weights=relu, temperature=0.0725)'
        module = hardneg.ContrastiveLoss("hcl", objective=nn.Identity(), beta=2.0)
        words = 'ContrastiveLoss(\n  "hcl", beta=2.0\n  (objective): Identity()\n)'
        assert repr(module) == words

    TYPED = """
import torch
from hardneg import ContrastiveLoss, contrastive_loss

x, t = torch.zeros(2, 3), torch.tensor(0.1)
ContrastiveLoss("hcl", beta="x")  # wrong
ContrastiveLoss(3)  # wrong
contrastive_loss(x, x, loss="hcl", betta=1.0)  # wrong
contrastive_loss(x, x, loss=3)  # wrong
contrastive_loss(x, x, temperature="warm")  # wrong
ContrastiveLoss("hcl", temperature=torch.nn.Parameter(t), weights=torch.nn.Identity())
ContrastiveLoss(weights=torch.square, objective=lambda pos, neg, log_w: neg.sum(1) - pos.sum(1))
contrastive_loss(x, x, weights="top", objective="nce", temperature=t, tau_plus=0.1, beta=1,
                 absolute_margin=0.1, detach_weights=False, block_size=4, negatives=x)
"""
    defaults = ", ".join([f"{name}={value!r}" for name, value in hardneg.DEFAULTS.items()])
    TYPED += f"contrastive_loss(x, x, {defaults})\n"

    def test_a_type_checker_finds_wrong_options(self, tmp_path, monkeypatch):
        pytest.importorskip("mypy", reason="mypy is not installed")
        (tmp_path / "calls.py").write_text(self.TYPED)
        words = "-m mypy --strict --allow-untyped-calls calls.py".split()
        monkeypatch.setitem(ALONE, "MYPYPATH", f"{HERE}")
        printed, error = start(words, tmp_path).communicate(timeout=300)
        lines = enumerate(self.TYPED.splitlines(), 1)
        wrong = [line for line, text in lines if text.endswith("# wrong")]
        found = re.findall(r"calls.py:(\d+): error", printed)
        assert list(map(int, found)) == wrong, printed + error


class TestExtremes:
    """Degenerate batches, extreme options, half precision and autocast: finite and accurate."""

    WIDE = {name: SAMPLES[name] for name in sorted({*OF_ROWS, "block_size"})}
    WIDE |= {"temperature": ends_of(0.005, 10), "alpha": ends_of(1e-6, 1)}
    WIDE |= {"beta": ends_of(0, 100) | st.just(1e8), "epsilon": ends_of(0.005, 100)}
    WIDE |= {"tau_plus": ends_of(1e-6, 0.99), "dtype": st.sampled_from(FLOATS[:2])}

    @pytest.mark.parametrize("kind", degenerate_batches())
    @at_least(25)
    @given(**WIDE, seed=st.integers(0, 99), loss=st.sampled_from([*PRESETS, "tilted ppcl"]))
    def test_is_finite(self, kind, seed, loss, **options):
        x = degenerate_batches(seed)[kind]
        *weights, loss = loss.split()
        options |= {"loss": loss, "weights": weights[0] if weights else None}
        if kind in ("tiny", "huge") and options["dtype"] == torch.float32:
            with pytest.raises(hardneg.NotFinite, match="overflow or underflow"):
                ours(x, 2, **options)
        else:
            assert finite(*ours(x, 2, **options))
        ties = kind in ("all equal", "two points", "one dimension")  # rounding breaks them
        rule = hardneg.WEIGHTS[hardneg.PRESETS[loss][0]][0]
        if not ties or "candidates" not in hardneg.takes(rule):
            want = oracle.contrastive_loss(*np.split(x, 2), loss=loss)
            close(ours(x, 2, loss=loss)[0], want, 1e-10)

    @pytest.mark.parametrize("loss", PRESETS)
    @given(**SEEDS, dtype=st.sampled_from([torch.float32, torch.float16]))
    def test_is_accurate_at_low_temperature(self, loss, seed, dtype):
        x = normal(seed, 10, 8)
        x[1:4], x[6:9] = x[:1] + 0.02 * x[1:4], x[5:6] + 0.02 * x[6:9]  # near-duplicate negatives
        x = torch.tensor(x).to(dtype)
        z = oracle.unit(numpy(x))
        gaps = np.diff(np.sort(z @ z.T, 1), axis=1)
        assume(gaps.min() > 1e-6)  # which of two candidates is nearer is beyond float32
        options = {"loss": loss, "temperature": 0.02, "beta": 8.0, "epsilon": 1}
        tolerance = 1e-3 if dtype == torch.float32 else 1e-2
        all_close(ours(x, 2, dtype=dtype, **options), ours(x, 2, **options), tolerance)

    @given(**SEEDS, loss=st.sampled_from(PRESETS), dtypes=st.tuples(*[st.sampled_from(FLOATS)] * 3))
    def test_dtypes_may_be_mixed_and_autocast_changes_nothing(self, seed, loss, dtypes):
        """A loss has the dtype of the views, float32 at least, and a gradient that of its input."""
        rows = embeddings(seed, 3, 4, 3)
        parts = [x.to(dtype).requires_grad_() for x, dtype in zip(rows, dtypes, strict=True)]
        found = []
        for enabled, size in itertools.product((False, True), (0, 3)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                options = {"negatives": parts[2], "block_size": size, "reduction": "none"}
                value = contrastive_loss(*parts[:2], loss=loss, **options).mean()
            # in blocks a backward pass computes the loss again
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled and size > 0):
                slopes = torch.autograd.grad(value, parts)
            assert value.dtype == torch.promote_types(torch.promote_types(*dtypes[:2]), FLOATS[0])
            assert tuple(slope.dtype for slope in slopes) == dtypes
            found.append([value.detach(), *slopes])
        all_close(found[2], found[0], 1e-6)
        all_close(found[3], found[1], 1e-6)

    def test_negatives_are_normalized_in_the_dtype_of_the_views(self):
        (x, y), rows = embeddings(1, 2, 4, 3), embeddings(2, 5, 3).float()
        found = contrastive_loss(x, y, negatives=rows)
        close(found, contrastive_loss(x, y, negatives=rows.double()), 1e-12)

    @pytest.mark.parametrize("objective", ["nce", "each", "ppcl"])
    def test_a_hard_positive_is_accurate(self, objective):
        """log(1 + 2 e²⁰) is 1e-9 above log 2 + 20."""
        x = torch.eye(2, dtype=torch.float64)
        found = contrastive_loss(x, -x, objective=objective, temperature=0.05)
        close(found, np.log1p(2 * np.exp(20)), 1e-13)

    @pytest.mark.parametrize("block_size", [0, 4])
    def test_a_learned_temperature_may_have_16_bits_and_one_entry(self, block_size):
        views, slopes = embeddings(1, 2, 200, 3).float(), []
        for t in (torch.tensor([0.0625], dtype=torch.float16), torch.tensor(0.0625)):
            loss = contrastive_loss(*views, temperature=t.requires_grad_(), block_size=block_size)
            close(loss, contrastive_loss(*views, temperature=0.0625), 1e-6)
            slopes += torch.autograd.grad(loss, t)
            assert (slopes[-1].dtype, slopes[-1].shape) == (t.dtype, t.shape)
        assert abs(slopes[0].float() / slopes[1] - 1) < 1e-3

    def test_epsilon_beyond_the_dtype(self):
        """t/ε underflows while the potentials still count."""
        x, labels = normal(9, 16, 4), [0, 1, 0, 2, 3, 0, 1, 4]
        options = {"loss": "ot", "labels": labels, "epsilon": 1e9}
        wanted = oracle.contrastive_loss(*np.split(x, 2), **options)
        close(ours(x, 2, dtype=torch.float32, **options)[0], wanted, 1e-5)


class TestLimits:
    """At the ends of t `simclr` becomes a closed form, at small ε transport is optimal."""

    @given(**SEEDS, a=st.integers(2, 4), n=st.integers(4, 6))
    def test_small_epsilon_is_optimal_transport(self, a, n, seed):
        """The entropic coupling costs at most ε log N more. Its relative entropy is at most log
        N."""
        cost = rng(seed).uniform(0, 2, (a, n))
        kernel = torch.tensor(-cost / 0.05)
        f, g, error = couple(kernel, tolerance=1e-5)
        slack = 2 * float(error) + 1e-9  # mass that is off its row may save its whole cost
        spent = float((torch.exp(f[:, None] + kernel + g) * torch.tensor(cost)).sum())
        least = float((exact_coupling(cost) * cost).sum())
        assert least - slack <= spent <= least + 0.05 * math.log(n) + slack

    TEMPERATURES = {"hot": st.floats(0.2, 300), "cold": st.floats(1e-3, 10)}

    @given(**TWO_VIEWS, **TEMPERATURES, classes=st.sampled_from([2, 100]))
    def test_ends_of_temperature(self, seed, b, hot, cold, classes):
        """τ² (L − first order) is within R³ / (36 √3 τ) of Var/2. A third cumulant is at most R³ /
        (6 √3). And 0 ≤ τ L − max(0, max_j s_j − s⁺) ≤ τ log(1 + N), attained by equal cosines."""
        (x, y), labels = normal(seed, 2, b, 3), rng(seed).integers(classes, size=b)
        pos, neg = similarities(x, y, labels)
        x, y = map(torch.tensor, (x, y))
        losses = partial(contrastive_loss, labels=labels, reduction="none")
        n, push = (neg > -INF).sum(1), np.where(neg > -INF, neg, 0).sum(1)
        # log(1 + N) − (N/(N + 1)) s⁺/τ + (1/(N + 1)) Σ_j s_j/τ: [4] Eq. 7, whose N counts s⁺, too
        first_order = np.log(1 + n) - (n * pos[:, 0] - push) / (n + 1) / hot
        scaled = hot**2 * (numpy(losses(x, y, temperature=hot)) - first_order)
        for i in range(2 * b):
            s = np.append(neg[i, neg[i] > -INF], pos[i])
            most = np.ptp(s) ** 3 / (36 * math.sqrt(3) * hot)
            assert abs(scaled[i] - s.var() / 2) <= most + 1e-14 * hot**2

        limit, most = np.maximum(0, neg.max(1) - pos[:, 0]), cold * np.log(1 + n)  # [4] Eq. 6
        off = cold * numpy(losses(x, y, temperature=cold)) - limit
        assert (off >= -1e-12).all() and (off <= most + 1e-12).all()
        close(losses(x, y, loss="triplet"), 2 * limit, 1e-12)
        one = x[:1].expand(b, 3)
        close(cold * losses(one, one, temperature=cold), most, 1e-12)


# ---- Section 6: finding
class TestMine:
    """`mine` lists the nearest documents that may be negatives, as brute force does."""

    MARGINS = {"absolute_margin": st.sampled_from([None, -0.1, 0.0, 0.2])}
    MARGINS |= {"relative_margin": st.sampled_from([None, 0.0, 0.3])}
    DRAWN = {"n": st.integers(1, 6), "more": st.integers(0, 9), "skip": st.integers(0, 3)}
    DRAWN |= {"k": st.integers(1, 16), "own": BOOLEANS, "labelled": BOOLEANS, "tied": BOOLEANS}
    DRAWN |= MARGINS | {"normalize": BOOLEANS, "enabled": BOOLEANS}

    def wanted(self, cosines, k, skip, positives=None, labels=None, **margins):
        """List the k nearest negatives by brute force, of equals the first; −1 if none is left."""
        positives = np.arange(len(cosines)) if positives is None else positives
        found = []
        for i, row in enumerate(cosines):
            own = [j for j in np.ravel(positives[i]) if j >= 0]
            allowed = row <= (oracle._limit([row[j] for j in own], **margins) if own else INF)
            allowed[own] = False
            if labels is not None:
                allowed &= ~np.isin(labels, labels[own])
            order = [j for j in np.argsort(-row, kind="stable") if allowed[j]]
            nearest = order[skip : skip + k]
            found.append(nearest + [-1] * (k - len(nearest)))
        return np.array(found)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    @at_least(30)
    @given(**SEEDS, **DRAWN)
    def test_is_brute_force(self, dtype, seed, n, more, own, labelled, tied, enabled, **options):
        """By cosines or inner products, and with autocast, too. Coordinates are few where they are
        to tie. Then the order of equals is free."""
        random, size, normalize = rng(seed), n + more, options.pop("normalize")
        rows = [random.standard_normal((length, 3)) for length in (n, size)]
        if tied:
            rows = [random.integers(-2, 3, (length, 2)) * 1.0 for length in (n, size)]
            options |= {"absolute_margin": None, "relative_margin": None}
        queries, documents = (torch.tensor(x).to(dtype).requires_grad_() for x in rows)
        given = {}
        if own:
            places = random.integers(-1, size, size=(n, random.integers(1, 4)))
            given["positives"] = places[:, 0] if places.shape[1] == 1 else places
        if labelled:
            given["labels"] = random.integers(3, size=size)
        asked = options | given | {"normalize": normalize, "scores": True}
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found, scores = hardneg.mine(queries, documents, **asked)
        queries, documents = numpy(queries), numpy(documents)
        if normalize:
            queries, documents = oracle.unit(queries), oracle.unit(documents)
        cosines = queries @ documents.T
        want = self.wanted(cosines, **options, **given)
        assert found.dtype == torch.long and found.shape == want.shape
        assert not scores.requires_grad
        cosines = np.append(cosines, np.full((n, 1), -9.0), 1)  # of −1
        got = np.take_along_axis(cosines, found.numpy(), 1)
        close(scores.masked_fill(found < 0, -9), got, 1e-6)
        assert torch.equal(scores == -INF, found < 0)
        close(got, np.take_along_axis(cosines, want, 1), 1e-6)

    def test_a_document_may_be_as_near_as_the_margin_allows(self):
        x = torch.eye(4)
        found = hardneg.mine(x, x.repeat(2, 1), 1, absolute_margin=0.0)
        assert found[:, 0].tolist() == [4, 5, 6, 7]

    WRONG = [("k", 0), ("k", 2.0), ("skip", -1), ("queries", torch.eye(4) * INF)]
    WRONG += [("documents", torch.eye(4)[:size]) for size in (0, 3)]
    WRONG += [("documents", torch.eye(4)[:, :3]), ("documents", torch.eye(4) * INF)]
    WRONG += [("labels", torch.ones(8)), ("positives", torch.zeros(3, 2).long())]
    WRONG += [("positives", [0, 1, 2, place]) for place in (-2, 4)]
    WRONG += [("absolute_margin", math.nan), ("relative_margin", math.nan)]

    @pytest.mark.parametrize("name, value", WRONG)
    def test_wrong_arguments(self, name, value):
        usual = {"queries": torch.eye(4), "documents": torch.eye(4), "k": 1}
        with refused(f"^{name} (is|has) "):
            hardneg.mine(**usual | {name: value})

    @pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int32, None])
    def test_rows_are_any_whole_numbers(self, kind):
        """Or a list, as labels are; queries and documents may have two dtypes."""
        x, y = embeddings(1, 2, 4, 3)
        rows, labels = torch.tensor([2, 0, 3, 1]), [0, 1, 2, 0]
        wanted = hardneg.mine(x, y, 2, positives=rows, labels=torch.tensor(labels))
        positives = rows.to(kind) if kind else rows.tolist()
        found = hardneg.mine(x.float(), y, 2, positives=positives, labels=labels)
        assert torch.equal(found, wanted)


class TestDraw:
    """Indices have the frequencies of their weights, and a generator's state replays them."""

    @pytest.mark.parametrize("constant", [0, 1000])
    @given(**SEEDS, a=st.integers(1, 3), n=st.integers(3, 5))
    def test_frequencies(self, constant, seed, a, n):
        """P(i, then j) = w_i w_j / (1 − w_i) for shares w: the second is one of the rest."""
        log_w, draws = normal(seed, a, n), 20000
        log_w[:, 0] = -INF
        for row in torch.tensor(log_w):
            index = hardneg.draw((row + constant).expand(draws, -1), 2, seeded(seed)).numpy()
            w = row.softmax(0).numpy()
            expected = draws * np.outer(w / (1 - w), w)
            np.fill_diagonal(expected, 0)
            found = np.zeros((n, n))
            np.add.at(found, tuple(index.T), 1)
            used = expected > 0
            assert (found[~used] == 0).all()
            chi = (found - expected)[used] ** 2 / expected[used]
            assert chi.sum() < 75  # of 11 degrees at most: 1e-11

    @given(**MATRICES)
    def test_replay_and_no_repeats(self, seed, a, n):
        log_w = hardneg.uniform(masked(masked_logits(seed, a, n))).repeat(50, 1)
        counts, generator = (log_w > hardneg.FAR).sum(1), seeded(3)
        k = int(counts.min())
        index, following = (hardneg.draw(log_w, k, generator) for _ in range(2))
        assert index.shape == (50 * a, k) and index.dtype == torch.long
        assert (log_w.gather(1, index) > hardneg.FAR).all()
        assert (index != following).any() or counts.max() == 1
        assert all(len(set(row)) == k for row in index.tolist())
        assert torch.equal(hardneg.draw(log_w, k, seeded(3)), index)

    def test_no_noise_and_16_bits(self, monkeypatch):
        """Noise may round to 0, whose log is −∞; it is drawn in float32."""
        flat = torch.zeros(1, 999).half()
        index, wanted = (hardneg.draw(x, 99, seeded(1)) for x in (flat, flat.float()))
        assert torch.equal(index, wanted)
        log_w = torch.tensor([[0.0, -INF, 0.0, -3.0]]).half()
        monkeypatch.setattr(torch.Tensor, "exponential_", lambda x, generator: x.zero_())
        assert hardneg.draw(log_w, 3).sort().values.tolist() == [[0, 2, 3]]

    TOO_FEW = [([0, -INF, 0], 3), ([-INF] * 3, 1), ([0, 0, 0], 4), ([0, 0, 0], 0)]

    @pytest.mark.parametrize("row, k", [*TOO_FEW, ([0, math.nan, 0], 1)])
    def test_wrong_arguments(self, row, k):
        with refused("^log_w has NaN" if math.nan in row else "^k is "):
            hardneg.draw(torch.tensor([[0.0] * 3, row]), k)


# ---- Section 8: checks
class TestInvalidArguments:
    """An `InvalidArgument` names the argument, of `Options` or a tensor; NaN never passes."""

    @pytest.mark.parametrize("name", hardneg.ALLOWED)
    def test_options(self, name):
        allowed, x = hardneg.ALLOWED[name], embeddings(1, 4, 3)
        wrong = ["heavy", ["hcl"], 1, torch.ones(2)]  # instead of one of some names
        if isinstance(allowed, list):
            low, high = allowed
            wrong = [low - 1, math.nextafter(low, -INF), math.nextafter(high, INF), high + 1]
            wrong += [INF, -INF, math.nan, "0.5", torch.ones(2), torch.tensor(low - 1)]
            wrong += [True, 1.5] if isinstance(high, int) else [True]
        module, message = hardneg.ContrastiveLoss("ot"), rf"^{name} is .*it must be"
        ready = [partial(call, x, x) for call in (contrastive_loss, module)]
        for value, call in itertools.product(wrong, (*ready, hardneg.ContrastiveLoss)):
            with refused(message) as caught:
                call(**{name: value})
            assert torch.is_tensor(value) or str(value) in str(caught.value)

    SHAPES = [[], [(4, 3)], [(4, 3), (5, 3)], [(4, 3), (4, 2)]]
    SHAPES += [[shape] * 2 for shape in ((0, 3), (4,), (4, 3, 1), (3, 0))]
    VIEWS = [list(map(torch.ones, some)) for some in SHAPES]
    NO_VIEWS = [1.0], np.ones((3, 2)), (torch.ones(3, 2),) * 2
    VIEWS += [[some, torch.ones(3, 2)] for some in NO_VIEWS]
    VIEWS += [[torch.ones(3, 2).to(dtype)] * 2 for dtype in (torch.long, torch.bool, torch.cfloat)]
    VIEWS += [[torch.ones(4, 3), labels] for labels in (torch.arange(4), torch.arange(4.0))]

    @pytest.mark.parametrize("views", VIEWS)
    def test_views(self, views):
        with refused(r"(?s)^views(\[1\]|\[0\])? (is|has) .*labels="):
            contrastive_loss(*views)

    WRONG = [("labels", torch.zeros(shape), ()) for shape in (3, 8, (4, 2), ())]
    WRONG += [("labels", torch.zeros(count), (2,)) for count in (4, 5)]
    WRONG += [("labels", torch.zeros(count), (4, 2)) for count in (4, 6, 12)]
    WRONG += [("weights", "transported", (4, 2)), ("weights", lambda s: s.sum(1), ())]
    WRONG += [("weights", lambda s: 0.0, ()), ("objective", lambda p, n, w: n.sum(), ())]
    WRONG += [("objective", lambda p, n, w: n - p, ())]
    SIZES = [(2, 4), (3,), (0, 3), (3, 2, 3), (4, 2, 2), (4, 0, 3), (1, 4, 2, 3)]
    WRONG += [("negatives", torch.ones(size), ()) for size in SIZES]
    WRONG += [("negatives", x, ()) for x in ([[1.0] * 3], torch.ones(2, 3).long())]
    INDICES = [[0, 1, 2], [0, 1, 2, 5], [0, -2, 0, 0], [[0, 1], [2, 5], [0, 1], [2, 3]]]
    INDICES += [[0.0, 1.0, 2.0, 3.0], [True, False] * 2]
    WRONG += [("positive_index", index, (5,)) for index in INDICES]
    WRONG += [("positive_index", [0, 1, 2, 0], (4, 2)), ("positive_index", [0, 1, 2, 3], ())]
    WRONG += [("log_weights", torch.ones(4, 7), ()), ("log_weights", torch.ones(8).long(), ())]
    WRONG += [("log_weights", torch.ones(8) * INF, ()), ("negative_mask", torch.ones(8, 8), ())]
    WRONG += [("negative_mask", torch.ones(4, 8).bool(), k) for k in ((), (7,), (4, 2))]

    SAID = [  # argument, its value, rows given; what the error says
        ("labels", torch.zeros(4), (2,), "a tensor (6) for 4 samples and 2 rows of negatives"),
        ("labels", torch.zeros(4), (4, 2), "no labels and no weights"),
        ("positive_index", [0, 1, 2, 5], (5,), "has rows from 0 to 5. It can have −1 to 4"),
        ("positive_index", [0, 1, 2, 3], (), "names rows of negatives, but there are none"),
        ("temperature", torch.ones(2), (), "it must be a number from 1e-06 to 1000000"),
        ("tau_plus", 1.0, (), "is 1.0; it must be a number from 0 to 0.999"),
        ("alpha", 1.1, (), "is 1.1; it must be a number from 1e-09 to 1"),
        ("beta", -1, (), "is -1; it must be a number from 0 to 100000000"),
        ("epsilon", 0, (), "is 0; it must be a number from 1e-09 to 1e+09"),
        ("margin", INF, (), "is inf; it must be a number from 0 to 1e+09"),
        ("absolute_margin", INF, (), "is inf; it must be a number from -9 to 9"),
        ("relative_margin", INF, (), "is inf; it must be a number from -9 to 9"),
        ("block_size", 1.5, (), "is 1.5; it must be a whole number from 0 to "),
        ("cost", "cosine", (), "is 'cosine'; it must be one of sqeuclidean, exp"),
        ("loss", "infonce", (), "; it must be one of simclr, "),
        *[(name, value, k, f"{name} ") for name, value, k in WRONG],
    ]

    NOTHING = "x", b"x", object(), [], {}, {1}, [0.5] * 1000, list("abcd"), [[1], [1, 2]], 1j
    NOTHING += (math.nan, -INF, np.ones(3), torch.ones(0), torch.ones(2, 2, 2), torch.ones(7))
    NOTHING += (torch.tensor([1j] * 4), lambda: 0, slice(3), Mock)
    TENSORS = contrastive_loss.__kwdefaults__.keys() - {"return_stats"}

    @pytest.mark.parametrize("name", sorted({*hardneg.DEFAULTS, *TENSORS}))
    def test_wrong_things_are_named(self, name):
        """Each error says which argument is wrong, of an option in few words, and none comes from
        inside torch."""
        x = embeddings(1, 2, 4, 3)
        for thing in self.NOTHING:
            rows = {"negatives": embeddings(2, 5, 3)} if name == "positive_index" else {}
            if callable(thing) and name in ("weights", "objective"):
                continue  # which may do as it likes
            if torch.is_tensor(thing) and thing.shape == (4,) and name == "labels":
                continue  # complex numbers are equal or not, as others
            with refused(rf"\b{name}\b") as caught:
                contrastive_loss(*x, **rows | {name: thing})
            assert name not in hardneg.DEFAULTS or len(str(caught.value)) < 300

    def test_functions_may_answer_in_16_bits(self):
        x = embeddings(1, 2, 4, 3)
        wanted = contrastive_loss(*x, objective=lambda p, n, w: p[:, 0] + w.amax(1))
        own = {"weights": lambda s: 0 * s.half(), "objective": lambda p, n, w: p[:, 0].half()}
        found = contrastive_loss(*x, **own)
        assert found.dtype == torch.float64
        close(found, wanted, 0.01)

    @pytest.mark.parametrize("name, value, k, said", SAID)
    def test_errors_say_what_is_allowed(self, name, value, k, said):
        bank = {"negatives": torch.ones(*k, 3)} if k else {}
        with refused(re.escape(said)):
            contrastive_loss(*torch.ones(2, 4, 3), **bank | {name: value})

    def test_embeddings_are_finite(self):
        """A masked row does not reach the value, but its gradient would be 0 · NaN."""
        masks = {"negative_mask": torch.tensor([True, False])}, {"positive_index": [1, 1, 1, 1]}
        places = (0, "views[0]"), (5, "views[1]"), (9, "negatives")
        for value, mask, (place, name) in itertools.product((math.nan, -INF), masks, places):
            x = embeddings(2, 10, 3)
            x[place, 1] = value
            with refused(f"^{re.escape(name)} has NaN or inf"):
                contrastive_loss(x[:4], x[4:8], negatives=x[8:], **mask)
        large = torch.full((3, 4), 6e4, dtype=torch.float16)  # their sum is not finite
        assert contrastive_loss(large, large, normalize=False, temperature=1e6).isfinite()

    VIEW = torch.ones(4, 3)
    BANK, LONG = hardneg.MemoryBank(VIEW), 1e22 * VIEW
    MISTAKES = [  # a call, and what the error says
        (partial(contrastive_loss, torch.ones(4, 2, 3)), r" \(4, 2, 3\).* as in \*x.unbind\(1\)"),
        (partial(contrastive_loss, VIEW, VIEW[:0]), r"^views.* \(0, 3\), which is empty; it must"),
        (partial(contrastive_loss, VIEW, VIEW.to("meta")), r"is on meta, views\[0\] on cpu"),
        (partial(contrastive_loss, VIEW, VIEW, loss="HCL"), "did you mean 'hcl'"),
        (partial(couple, VIEW, max_steps=0), "^max_steps is 0; it must be "),
        (partial(hardneg.draw, VIEW.long(), 1), "^log_w is torch.int64"),  # as indices are
        (partial(hardneg.mine, LONG, LONG, 2, normalize=False), "^a product of queries and"),
        (partial(hardneg.MemoryBank, VIEW * math.nan), "^rows has NaN"),
        (partial(hardneg.follow, nn.ReLU(), nn.ReLU(), 99), "^momentum is 99; it must be"),
        (partial(BANK.update, [1], VIEW[:1] * math.nan), "^z has NaN"),
        (partial(BANK.update, [0, 1, 2], VIEW[:1]), r"^z is .* tensor \(3, 3\)"),
        (lambda: tiny_game().imitate(IMAGES), r"16\), but the generator makes \(8, 3, 8, 8\)\. "),
        (partial(begin, IMAGES[:1]), r"^len\(images\) is 1; it must be a whole number from 2 "),
        (partial(begin, IMAGES, rate=1.0), "^a setting is 'rate'; it must be one of epochs, batch"),
        (partial(hardneg.DiffHard, hardneg.ContrastiveLoss(), tiny_game()), "For pairs it must be"),
        (partial(hardneg._descend, VIEW, None, "encoder"), "^The loss must be one number. Use "),
    ]

    @pytest.mark.parametrize("call, said", MISTAKES)
    def test_a_mistake_says_what_to_do(self, call, said):
        with refused(said):
            call()

    @at_least(40)
    @given(**SEEDS, exponent=st.integers(-44, 38))
    def test_rows_of_any_length_are_right_or_refused(self, seed, exponent):
        """In float32, where squares overflow and underflow."""
        x = embeddings(seed, 2, 6, 4)
        scaled = (x * 10.0**exponent).float()
        bank = hardneg.MemoryBank(x[0].float())
        calls = [partial(contrastive_loss, *scaled), partial(hardneg.mine, *scaled, 2)]
        calls += [partial(hardneg.MemoryBank, scaled[0]), partial(bank.update, range(6), scaled[0])]
        if -21 <= exponent <= 17:
            close(contrastive_loss(*scaled), contrastive_loss(*x), 1e-3)
        elif not -25 <= exponent <= 19:
            for call in calls:
                with refused("overflow or underflow"):
                    call()


# ---- Section 7: large batches and ranks
class TestLargeBatches:
    """A loss in blocks stores no matrix of all pairs, and has the gradients of what is read."""

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("block_size, reduction", [(None, "mean"), (0, "none")])
    def test_an_ordinary_batch_is_differentiated_twice(self, loss, block_size, reduction):
        """Differences see the weights, too; a loss in blocks refuses."""
        x = embeddings(12, 4, 3).requires_grad_()

        def function(z, **options):
            return contrastive_loss(*z.chunk(2), loss=loss, **options).sum()

        options = {"block_size": block_size, "reduction": reduction, "detach_weights": False}
        assert torch.autograd.gradgradcheck(partial(function, **options), x)
        with pytest.raises(RuntimeError, match="block_size=0"):
            torch.autograd.grad(function(x, block_size=3), x, create_graph=True)

    @pytest.mark.parametrize("samples", [256, 257])
    def test_a_quarter_of_a_block_is_not_cut(self, samples):
        """These are 2^18 pairs, and a few more, which have no second derivatives."""
        x = embeddings(1, 2, samples, 3).requires_grad_()
        is_cut = pytest.raises(RuntimeError, match="block_size=0")
        with is_cut if samples > 256 else contextlib.nullcontext():
            torch.autograd.grad(contrastive_loss(*x), x, create_graph=True)

    def test_losses_of_anchors_may_be_changed_in_place(self):
        x, found = embeddings(0, 8, 3).requires_grad_(), []
        for size in (0, 3):
            losses = contrastive_loss(*x.chunk(2), reduction="none", block_size=size)
            losses[2:4] *= 2
            found.append(torch.autograd.grad(losses.sum(), x)[0])
        close(*found, 1e-12)

    RESIDENT = """
import re
import torch
import hardneg

def peak():  # resource.getrusage would count what the parent process had, too
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024

def take(loss, n, **options):
    x, y = torch.randn(2, n, 32).requires_grad_()
    value = hardneg.contrastive_loss(x, y, loss=loss, temperature=0.5, **options)
    (value * torch.randn(value.shape)).sum().backward()

take("hcl", 8, weights=lambda s: s, block_size=4)
take("ot", 8, epsilon=1.0)
before = peak()
take("hcl", 4096)
take("simclr", 4096, weights=lambda logits: 0.5 * logits, reduction="none")
print(peak() - before)
take("ot", 4096, epsilon=1.0)  # its blocks and those of the loss have different sizes
print(peak() - before)
documents, before = torch.randn(50_000, 4), peak()
hardneg.mine(documents[:1200], documents, 100)
print(peak() - before)
"""

    @pytest.mark.xdist_group("processes")
    @pytest.mark.skipif(sys.platform != "linux", reason="how much is resident is Linux's to say")
    def test_resident_memory_is_linear(self, tmp_path, monkeypatch):
        """A matrix of all pairs would have 256 MiB, and 229 for mining. That of a block has 4, and
        16 for mining."""
        # C's malloc keeps freed blocks for later unless they are this large
        monkeypatch.setitem(ALONE, "MALLOC_MMAP_THRESHOLD_", f"{2**21}")
        run = start(["-c", self.RESIDENT], tmp_path)
        printed, error = run.communicate(timeout=300)
        assert run.returncode == 0, error
        usual, coupled, mined = map(float, printed.split())
        assert usual < 150 and coupled < 150 and mined < 100

    # forward mode has to stop at detached weights, too
    DETACHED = {"loss": "hcl", "detach_weights": True}, {"loss": "ot"}

    @pytest.mark.parametrize("samples", [6, 300])
    @pytest.mark.parametrize("options", [{}, {"loss": "hcl"}, {"loss": "hard-simple"}, *DETACHED])
    def test_torch_func_has_the_same_derivatives(self, samples, options):
        """The second ones without blocks."""
        x, y = embeddings(1, 2, samples, 4)

        def loss(a):
            return contrastive_loss(a, y, **options)

        wanted = torch.autograd.functional.jacobian(loss, x)
        close(torch.func.grad(loss)(x), wanted, 1e-12)
        _, along = torch.func.jvp(loss, (x,), (y,))
        close(along, (wanted * y).sum(), 1e-12)
        if samples < 300:
            wanted = torch.autograd.functional.hessian(loss, x)
            close(torch.func.hessian(loss)(x), wanted, 1e-12)

    @RECENT
    @pytest.mark.parametrize("loss", ["hcl", "hard", "triplet"])
    def test_compiles_for_sizes_and_options_that_vary(self, loss):
        """An annealed β is a symbol of the graph, as the size of a batch is."""
        torch._dynamo.reset()
        call = partial(contrastive_loss, loss=loss)
        compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
        for n, beta in ((6, 1.0), (8, 0.8), (11, 0.5)):
            x, y = embeddings(n, 2, n, 3)
            close(compiled(x, y, beta=beta), call(x, y, beta=beta), 1e-10)

    CASES = [("hcl", 0, 6), ("hcl", 0, 600), ("ot", 0, 6), ("ot", 0, 600)]
    CASES += [("ppcl", 5, 6), ("hard-simple", 5, 6), ("triplet", 5, 600)]

    @RECENT
    @pytest.mark.parametrize("loss, k, samples", CASES)
    def test_compiles_with_the_encoder(self, loss, k, samples):
        """Value and gradient are those of eager code; an ordinary batch is one graph."""
        x, y, bank = (embeddings(n, n, 3) for n in (samples, samples, k + 1))
        encoder, t = nn.Linear(3, 4).double(), nn.Parameter(torch.tensor(0.4))
        criterion = hardneg.ContrastiveLoss(loss, temperature=t, epsilon=0.5)

        def step(x, y, bank):
            given = {"negatives": encoder(bank)} if k else {}
            return criterion(encoder(x), encoder(y), **given)

        torch._dynamo.reset()
        in_one = loss != "ot" and (k > 0 or samples < 600)
        compiled = torch.compile(step, backend="aot_eager", fullgraph=in_one)(x, y, bank)
        wanted = with_slope(step(x, y, bank), encoder.weight)
        same(with_slope(compiled, encoder.weight), wanted, 1e-12)

    def test_a_compiled_large_batch_stores_no_matrix(self):
        x, y = embeddings(1, 2, 1500, 3).float().requires_grad_()
        torch._dynamo.reset()
        compiled = torch.compile(partial(contrastive_loss, loss="hcl"), backend="aot_eager")
        compiled(x, y)
        with Operations() as operations:
            compiled(x, y).backward()
        assert operations.bytes < 3000 * 3000


class TestRows:
    """A rule, an objective and an option stand in one row, which has all facts."""

    def test_all_rows_are_tried(self):
        """The oracle and these tests know each of them, with the same defaults."""
        judges = [row[0] for row in oracle.OBJECTIVES.values()]
        defaults = oracle.options_of(*oracle.RULES.values(), *judges, oracle.contrastive_loss)
        known = [("SAMPLES of test_hardneg.py", SAMPLES, hardneg.DEFAULTS)]
        known += [("RULES of reference_numpy.py", oracle.RULES, hardneg.WEIGHTS)]
        known += [("OBJECTIVES of reference_numpy.py", oracle.OBJECTIVES, hardneg.OBJECTIVES)]
        known += [("PRESETS of reference_numpy.py", oracle.PRESETS, hardneg.PRESETS)]
        parameters = "what a rule, an objective or contrastive_loss of reference_numpy.py takes"
        known += [(parameters, {*defaults, "block_size"}, hardneg.DEFAULTS)]
        lacks = [
            f"{name!r} of hardneg.py is not tried. Add it to {place}."
            for place, found, rows in known
            for name in rows
            if name not in found
        ]
        assert not lacks, " ".join(lacks)
        for name in hardneg.DEFAULTS.keys() & defaults:
            assert hardneg.DEFAULTS[name] == defaults[name], name

    def test_an_option_is_one_entry(self):
        """Its sentences are in the help, and its default is allowed."""
        for help_text in (contrastive_loss.__doc__, hardneg.ContrastiveLoss.__doc__):
            words = " ".join(help_text.split())
            for name, text in hardneg.TEXTS.items():
                assert f"{name} = {hardneg.DEFAULTS[name]!r}, " in words
                assert " ".join(text.split()) in words and text.strip().endswith("."), name
        for name, default in hardneg.DEFAULTS.items():
            hardneg.resolve({name: default})


class TestWhatIsReadRuns:
    """Whoever edits a rule, an objective or a question changes what is trained, at every size."""

    # the part that is edited, and options of a call that uses it
    EDITS = [(name, {"weights": name}) for name in hardneg.WEIGHTS]
    EDITS += [(name, {"objective": name}) for name in hardneg.OBJECTIVES]
    EDITS += [("transported", {"loss": "ot", "detach_weights": False})]
    EDITS += [("sinkhorn", {"loss": "ot"})]
    EDITS += [("published", {"loss": "debiased", "tau_plus": 0.01})]
    EDITS += [("by_rule", {"loss": "hcl"}), ("answer", {"loss": "hcl"})]
    CASES = [(*edit, size, "mean") for edit in EDITS for size in (128, 600)]
    CASES += [(*edit, 128, "none") for edit in EDITS] + [("tilted", {"loss": "hcl"}, 600, "none")]
    PATHS = itertools.product((128, 600), ("evaluation", "statistics"))
    CASES += [("tilted", {"loss": "hcl"}, *path) for path in PATHS]

    @pytest.mark.parametrize("name, options, samples, asked", CASES)
    def test_an_edit_changes_what_is_asked_for(self, monkeypatch, name, options, samples, asked):
        """Most often a gradient, of a mean or of the losses."""
        torch.manual_seed(0)
        x, y = torch.randn(2, samples, 4).requires_grad_()
        loss = partial(contrastive_loss, x, y, **options)

        def outcome():
            if asked == "evaluation":
                with torch.no_grad():
                    return loss()
            if asked == "statistics":
                return loss(return_stats=True)[1]["ess"]
            return with_slope(loss(reduction=asked), x)[1]

        before = outcome()
        replace(monkeypatch, name, edited(name, getattr(hardneg, name)))
        assert (outcome() - before).norm() > 1e-3 * before.norm()


class TestReadyForAGPU:
    """Nothing that a GPU would wait for, few operations, and nothing on another device."""

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("samples", [128, 512])
    def test_the_host_reads_nothing(self, as_on_a_gpu, loss, samples):
        """Of Sinkhorn it reads one number for every eight steps: these converge in as many."""
        x, y = (torch.randn(samples, 16, requires_grad=samples == 128) for _ in range(2))
        with Operations() as operations:  # blocks compute their gradient with the loss
            value, _ = contrastive_loss(x, y, loss=loss, epsilon=0.5, return_stats=True)
            if samples == 128:
                value.backward()
        assert len(operations.reads()) == (loss == "ot")

    @pytest.mark.parametrize("loss", PRESETS)
    @pytest.mark.parametrize("device", [DEVICE, pytest.param("fake", marks=RECENT)])
    def test_tensors_are_made_on_the_device(self, monkeypatch, loss, device):
        """On a GPU, if only a fake one, and beside the default device meta: a mix raises."""
        fake = device == "fake"
        if fake:  # it has no values to read
            monkeypatch.setattr(hardneg, "_stops", lambda error, step, *_: step == 3)
        device, default = ("cuda", "cpu") if fake else (device, "meta")
        with FakeTensorMode() if fake else contextlib.nullcontext():
            x = torch.randn(4, 3, device=device, requires_grad=True)
            rows, index = torch.randn(5, 3, device=device), torch.arange(4, device=device)
            given = {"negatives": rows, "positive_index": index}, {"labels": [0, 1, 1, 2]}
            for options, (size, reduction) in itertools.product(given, ((0, "mean"), (3, "none"))):
                options = options | {"loss": loss, "block_size": size, "reduction": reduction}
                # blocks are differentiated at once, which asks the driver of a device
                with torch.device(default), torch.set_grad_enabled(not fake or size == 0):
                    value, stats = contrastive_loss(x, x, return_stats=True, **options)
                    if not fake:
                        value.sum().backward()
                assert {y.device.type for y in (value, *stats.values())} == {device}

    @RECENT
    @pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
    def test_a_gpu_couples_in_few_launches(self, as_on_a_gpu, monkeypatch):
        """Eight steps of Sinkhorn, after which the error is looked at, on 8192 × 8192 pairs."""
        monkeypatch.setattr(hardneg, "_stops", lambda error, step, *_: step == 8)
        with FakeTensorMode(), torch.no_grad(), Operations() as operations:
            x = torch.empty(4096, 8, device="cuda")
            contrastive_loss(x, x, loss="ot")
        launches = [name for name in operations.names if name not in ("device", "detach")]
        assert 250 < len(launches) < 1000

    @RECENT
    def test_finding_stays_on_the_device(self):
        """There are no values to read on a fake one."""
        margins = {"relative_margin": 0.05, "absolute_margin": 0.01}
        with FakeTensorMode():
            x, y = torch.randn(2, 700, 4, device="cuda")
            labels = torch.zeros(700, device="cuda")
            mined = hardneg.mine(x, y, 5, skip=1, labels=labels, **margins)
            drawn = hardneg.draw(x @ y.T, 3)
        assert mined.device.type == drawn.device.type == "cuda"

    @pytest.mark.parametrize("name", METHODS)
    def test_a_step_of_training_reads_nothing(self, as_on_a_gpu, monkeypatch, name):
        """Steps with statistics, and the optimizers themselves, may read."""
        game = {"game": tiny_game(16, pretrain=0)} if name == "diffhard" else {}
        training = begin(IMAGES, name, batch_size=8, epochs=1, method_options=game)
        optimizers, reads = [training.optimizer], []
        if name == "diffhard":
            optimizers += training.method.game.optimizers.values()
        for optimizer in optimizers:
            monkeypatch.setattr(optimizer, "step", lambda: None)
        run = iter(training)
        for _ in range(16):
            with Operations() as operations:
                figures = next(run)
            if "ess" not in figures:
                reads += [operations.reads()]
        assert len(reads) > 9 and not any(reads)


@pytest.mark.xdist_group("processes")
class TestGather:
    """With a `group` two processes do what one does that has all samples; `gather` joins rows."""

    def test_two_processes_are_one(self, tmp_path):
        """Losses and their gradients."""
        (tmp_path / "ranks.py").write_text(RANKS)
        words = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
        run = start([*words, "ranks.py", "found.pt"], tmp_path)
        _, error = run.communicate(timeout=300)
        assert run.returncode == 0, error
        for one, two in zip(torch.load(tmp_path / "found.pt"), losses_of(None), strict=True):
            close(one, two, 1e-8)

    def test_a_group_of_one_refuses_what_it_cannot_do(self, tmp_path, monkeypatch):
        meeting = f"file://{tmp_path / 'meeting'}"
        torch.distributed.init_process_group("gloo", meeting, rank=0, world_size=1)
        try:
            group, x, found = torch.distributed.group.WORLD, embeddings(0, 3, 4), []
            x.requires_grad_()
            loss = contrastive_loss(x, x, block_size=0, group=group)
            with pytest.raises(RuntimeError, match="ranks have no second derivatives"):
                torch.autograd.grad(loss, x, create_graph=True)
            given = {"negatives": embeddings(1, 5, 4), "block_size": 0}  # nothing is gathered
            for options in ({}, {"group": group}):
                loss = contrastive_loss(x, x + 1, **given, **options)
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
            close(*found, 1e-12)
            with pytest.raises(hardneg.NotFinite, match="^negatives has NaN"):
                contrastive_loss(x, x + 1, negatives=x * math.nan, group=group)
            # a sum over ranks is not seen by others
            monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.mul_(2))
            both = hardneg.gather(x.T, group) + x.T
            close(torch.autograd.grad(both, x, torch.ones(4, 3).double())[0], 0 * x + 3, 0)
        finally:
            torch.distributed.destroy_process_group()


# ---- Section 9: views
@pytest.mark.filterwarnings("error")
class TestViews:
    """Each transformation of `view` is torchvision's or does what its name says."""

    def test_one_transformation(self):
        x = random_images(size=64)
        close(hardneg.view(x, **PLAIN), x, 1e-6)
        close(hardneg.view(x, **PLAIN, blur=1, sigma=(0, 0)), x, 1e-6)
        close(hardneg.view(x, **PLAIN | {"flip": 1}), x.flip(3), 1e-6)
        close(hardneg.view(x, **PLAIN | {"gray": 1}), transforms.rgb_to_grayscale(x, 3), 1e-3)
        blurred = hardneg.view(x, **PLAIN, blur=1, sigma=(1.5, 1.5))
        close(blurred, transforms.gaussian_blur(x, 7, 1.5), 1e-6)
        flat = hardneg.view(x[:, :, :40], **PLAIN, blur=1, sigma=(1.5, 1.5))
        close(flat, transforms.gaussian_blur(x[:, :, :40], 5, 1.5), 1e-6)

    def test_contrast_keeps_the_mean_of_brighter_images(self):
        x, options = 0.45 + 0.1 * random_images(), PLAIN | {"jitter": 1, "brightness": 0.4}
        lumas = []
        for contrast in (0.0, 0.4):
            y = hardneg.view(x, seeded(1), **options | {"contrast": contrast})
            lumas.append(transforms.rgb_to_grayscale(y).mean((1, 2, 3)))
        close(*lumas, 1e-4)

    @pytest.mark.parametrize("option", ["brightness", "contrast", "saturation"])
    def test_factors_of_colour(self, option):
        """A view does not tell its factor, but one factor has to explain all pixels of an image."""
        adjust = getattr(transforms, f"adjust_{option}")
        x = random_images(20) * 0.3 + 0.2
        strength = {"brightness": 0, "contrast": 0, "saturation": 0, "hue": 0, option: 0.4}
        views = hardneg.view(x, seeded(1), **PLAIN | {"jitter": 1}, **strength)
        changes = []
        for one, out in zip(x, views, strict=True):
            away = adjust(one, 1.3) - one  # linear in the factor
            changes.append(float(((out - one) * away).sum() / away.square().sum()) * 0.3)
            close(out, adjust(one, 1 + changes[-1]), 1e-3)
        assert -0.401 < min(changes) < -0.25 and 0.25 < max(changes) < 0.401

    def test_hue_turns_chroma_and_keeps_luma(self):
        x, still = random_images(20) * 0.3 + 0.35, {"brightness": 0, "contrast": 0, "saturation": 0}
        seen = hardneg.view(x, seeded(2), **PLAIN | {"jitter": 1}, **still, hue=0.1)
        yiq = [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]
        to_yiq = partial(torch.einsum, "kc,bchw->kbhw", torch.tensor(yiq).double())
        (luma, *before), (new, *after) = to_yiq(x), to_yiq(seen)
        close(new, luma, 1e-6)
        before, after = torch.complex(*before), torch.complex(*after)
        turns = (after * before.conj()).sum((1, 2)) / before.abs().square().sum((1, 2))
        close((after - turns[:, None, None] * before).abs(), np.zeros((20, 16, 16)), 1e-6)
        close(turns.abs(), np.ones(20), 1e-5)
        angles = turns.angle() / (2 * math.pi)
        assert -0.101 < angles.min() < -0.06 and 0.06 < angles.max() < 0.101

    def test_crop(self):
        """An image of its own coordinates shows where a crop was cut."""
        axis = ((torch.arange(64) + 0.5) / 64).double().expand(64, 64)
        x = torch.stack([axis, axis.T, 0 * axis]).expand(400, 3, 64, 64)

        def cut(**options):
            seen = hardneg.view(x, seeded(3), **PLAIN | options)[:, :2]
            sides = (seen.amax((2, 3)) - seen.amin((2, 3))) * 64 / 63
            return seen, sides, sides[:, 0] / sides[:, 1]

        seen, sides, ratio = cut(area=(0.2, 0.5), ratio=(3 / 4, 4 / 3))
        # −1 and 1 where the crop touches a border
        place = (seen.mean((2, 3)) - 0.5) / (0.5 - sides / 2)
        ranges = (sides.prod(1), 0.2, 0.5), (ratio, 3 / 4, 4 / 3)
        for found, low, high in (*ranges, (place[:, 0], -1, 1), (place[:, 1], -1, 1)):
            assert low - 0.02 < found.min() < low + 0.1 and high - 0.1 < found.max() < high + 0.02
        assert abs(np.corrcoef(place.T)[0, 1]) < 0.2
        _, _, ratio = cut(area=(0.05, 0.05), ratio=(1 / 4, 4))
        assert abs(ratio.log().mean()) < 0.2  # even on a logarithmic scale
        for long in (1 / 4, 4):  # a crop never leaves the image, where coordinates are mirrored
            seen, _, _ = cut(area=(0.5, 1.0), ratio=(long, long))
            assert seen[:, 0].diff(dim=2).min() > 0 and seen[:, 1].diff(dim=1).min() > 0

    @pytest.mark.parametrize("option", ["flip", "gray", "jitter", "blur"])
    def test_probabilities(self, option):
        x = random_images(1).expand(1000, -1, -1, -1)
        seen = hardneg.view(x, seeded(1), **PLAIN | {option: 0.3}, sigma=(1, 2))
        assert 0.25 < ((seen - x).abs().amax((1, 2, 3)) > 1e-3).double().mean() < 0.35

    def test_each_image_has_its_own_view_and_a_generator_replays_them(self):
        """Bytes, other whole numbers and autocast do not change it."""
        x = (random_images(1).expand(8, -1, -1, -1) * 255).to(torch.uint8)
        draw = partial(hardneg.view, blur=0.5)
        seen, other = draw(x, seeded(4)), draw(x, seeded(5))
        assert not torch.equal(seen, other)
        assert len(seen.flatten(1).unique(dim=0)) == 8 and 0 <= seen.min() and seen.max() <= 1
        for same_image in (x, x.long()):
            assert torch.equal(draw(same_image, seeded(4)), seen)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(draw(x, seeded(4)), seen)
        close(seen, draw(x / 255, seeded(4)), 1e-6)
        for dtype in (torch.float16, torch.bfloat16):
            coarse = (x / 255).to(dtype)
            plain = hardneg.view(coarse, **PLAIN)  # computed in float32, on any processor
            assert plain.dtype == torch.float32
            close(plain, coarse, 1e-6)

    BYTES = torch.randint(0, 256, (4, 3, 16, 16), generator=seeded(0))
    # images, and the range that the error says
    RANGES = [(BYTES.int() * 256, "0 to 65280"), (BYTES / 128 - 1, "-1 to 0.99")]
    RANGES += [(BYTES / 0.0, "nan to nan"), (BYTES / 200, "0 to 1.")]

    @pytest.mark.parametrize("pixels, found", RANGES)
    def test_pixels_out_of_range_are_refused(self, pixels, found):
        calls = [hardneg.view, partial(hardneg.embed, hardneg.Encoder(size=16))]
        calls += [tiny_game(16).imitate]
        for call in calls:
            with refused(f"^images is from {found}.*must be bytes, or floats from 0 to 1"):
                call(pixels)


# ---- Section 10: encoders and memory
class TestEncoder:
    """`Encoder` gives features and embeddings; its first layer depends on the image size."""

    SIZES = [("small", 32, 256), ("resnet18", 64, 512), ("resnet50", 96, 2048)]

    @pytest.mark.parametrize("name, size, features", SIZES)
    def test_shapes(self, name, size, features):
        encoder = hardneg.Encoder(name, dim=300, size=size).eval()
        found, z = encoder(torch.rand(2, 3, size, size))
        assert found.shape == (2, features) == (2, encoder.features) and z.shape == (2, 300)
        assert encoder.head[0].out_features == max(features, 600)
        close(z, encoder.head(found), 1e-5)
        if name != "small":
            side = encoder.backbone.conv1.kernel_size[0]
            pools = isinstance(encoder.backbone.maxpool, nn.MaxPool2d)
            assert (side, pools) == ((3, False) if size <= 64 else (7, True))


class TestMemoryBank:
    """A `MemoryBank` remembers a row of every image, or as a queue the last embeddings."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
    @given(**SEEDS, n=st.integers(1, 8), b=st.integers(1, 6), momentum=st.floats(0, 0.99))
    def test_update(self, dtype, seed, n, b, momentum):
        index = rng(seed).permutation(n)[:b]
        z = embeddings(seed, len(index), 3).to(dtype).requires_grad_()
        rows = normal(seed + 1, n, 3)
        bank = hardneg.MemoryBank(torch.tensor(rows, requires_grad=True), momentum)
        bank.update(torch.tensor(index), z)
        wanted = oracle.unit(rows)  # row ← (m row + (1 − m) z) / ‖·‖
        wanted[index] = momentum * wanted[index] + (1 - momentum) * oracle.unit(numpy(z))
        close(bank.rows, oracle.unit(wanted), 1e-6)
        assert not bank.rows.requires_grad and bank.rows.dtype == torch.float64

    def test_follow_moves_a_network_towards_another(self):
        layers = (nn.Linear(3, 3), nn.Linear(3, 3))  # each is there twice, and moves once
        leader, follower = (nn.Sequential(x, x, nn.BatchNorm1d(3)) for x in layers)
        leader(embeddings(1, 5, 3).float())
        before = copy.deepcopy(follower.state_dict())
        hardneg.follow(follower, leader, 0.9)
        states = before, follower.state_dict(), leader.state_dict()
        for old, x, new in zip(*(state.values() for state in states), strict=True):
            mean = 0.9 * numpy(old) + 0.1 * numpy(new)
            close(x, mean if x.is_floating_point() else new, 1e-6)
        for other in (nn.Linear(3, 3), nn.Sequential(nn.Linear(1, 3))):
            with refused(r"^leader's 0\.weight .* \(3, 3\)"):
                hardneg.follow(follower, other, 0.9)


class TestWrappers:
    """A wrapped encoder, or one of another dtype, gives what the plain one gives."""

    WRAPS = {"DP": nn.DataParallel, "DDP": nn.parallel.DistributedDataParallel}
    WRAPS |= {"compile": partial(torch.compile, backend="eager"), "float64": nn.Module.double}
    WRAPS |= {"float16": nn.Module.half, "bfloat16": nn.Module.bfloat16}
    WRAPS["both"] = lambda net: nn.DataParallel(torch.compile(net, backend="eager"))

    @pytest.fixture(params=WRAPS)
    def wrap(self, request):
        meeting = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=meeting, rank=0, world_size=1)
        yield self.WRAPS[request.param]
        torch.distributed.destroy_process_group()

    def test_values(self, wrap):
        plain, other = (hardneg.Encoder(dim=8, size=16) for _ in range(2))
        wrapped = wrap(copy.deepcopy(plain)).eval()
        x = (IMAGES[:9] / 255).to(next(wrapped.parameters()).dtype)
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(x.dtype, 1e-5)
        found = hardneg.embed(wrapped, IMAGES[:9])
        all_close(found, hardneg.embed(plain, IMAGES[:9]), tolerance)
        assert {value.dtype for value in found} == {torch.float32}
        all_close(hardneg.in_micro_batches(wrapped, 4)(x), wrapped(x), tolerance)
        for follower, leader in ((copy.deepcopy(other), wrapped), (wrapped, other)):
            old, new = weights_of(follower), weights_of(leader)
            hardneg.follow(follower, leader, 0.9)
            wanted = [0.9 * x.double() + 0.1 * y for x, y in zip(old, new, strict=True)]
            all_close(weights_of(follower), wanted, tolerance)

    def test_to_embed_nothing_is_compiled(self):
        backend = Mock()
        hardneg.embed(torch.compile(hardneg.Encoder(size=16), backend=backend), IMAGES[:3])
        backend.assert_not_called()

    @pytest.mark.parametrize("name", ["simclr", "bank"])
    def test_training(self, wrap, name):
        runs = (begin(IMAGES[:40], name, wrap=of, micro_batch=30) for of in (None, wrap))
        if wrap is nn.parallel.DistributedDataParallel:
            with refused("^encoder must be the module that Distributed"):
                list(runs)
        else:
            all_close(*([figures["loss"] for figures in run] for run in runs), 0.03)


# ---- Section 11: generators
class TestGame:
    """A `Game` of `Generator` and `Discriminator` against the encoder, by `DiffHard`."""

    STEPS = [(12, {}), (5, {}), (3, {"pairs": False}), (6, {"ascent": False}), (6, {"lr": 0.0})]

    @pytest.mark.parametrize("n, options", STEPS)
    @pytest.mark.parametrize("turn", [True, False])
    def test_a_step_is_algorithm_1(self, n, options, turn):
        """An odd number of images has one generated image fewer, as they come in pairs."""
        options = {"momentum": 0.7, "ascent_lr": 0.01, "lr": 0.02} | options
        game, encoder, real = settled(tiny_game(**options)), Plain(), random_images(n, 8)
        with torch.no_grad():
            game.G_ema.first.bias.add_(torch.linspace(-1, 1, 64))  # the two generators differ
        for parameter in game.G.parameters():
            parameter.grad = torch.ones_like(parameter)  # of the step before
        other, twin = copy.deepcopy(game), copy.deepcopy(encoder)
        found, figures = play(game, encoder, real, lr=0.1, turn=turn)
        rates = options["ascent_lr"], options["lr"]
        wanted, told = by_hand(other, twin, real, 0.1, turn, rates)
        assert figures.keys() == told.keys()
        assert not any(figure.requires_grad for figure in figures.values())
        all_close([found, *figures.values()], [wanted, *(told[name] for name in figures)], 1e-6)
        all_close(encoder.parameters(), twin.parameters(), 1e-10)
        all_close(game.parameters(), other.parameters(), 1e-8)
        assert all(p.grad is None and not p.requires_grad for p in game.G_ema.parameters())
        assert all(p.requires_grad for p in game.D.parameters())

    @pytest.mark.parametrize("size, width, latent", [(8, 2, 3), (32, 2, 1), (64, 3, 5)])
    def test_networks(self, size, width, latent):
        """Images in [0, 1] and one score each, in float32; widths double up to four times."""
        game = hardneg.Game(size, width, latent)
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                images = game.G(4 * game.latents(3))
                scores = game.D(images)
            assert images.shape == (3, 3, size, size) and scores.shape == (3,)
            assert images.dtype == scores.dtype == torch.float32 and len(images.unique()) > 260
            assert 0 <= images.min() and images.max() <= 1 and images.std() > 0.01
        channels = [m.out_channels for m in game.D.modules() if isinstance(m, nn.Conv2d)]
        assert channels[0] == width == game.G.blocks[-1].in_channels
        assert max(channels) == width * min(4, size // 4)
        first, *others = [isinstance(block.residual[0], nn.ReLU) for block in game.D.blocks[:-1]]
        assert not first and all(others)  # a ReLU would cut off half of the image
        close(game.latents(20000, seeded(1)).T.cov().view(latent, latent), np.eye(latent), 0.05)

    def test_weights_have_spectral_norm_one(self):
        game = tiny_game(16, width=4, lr=1e-3)
        for k in range(100):
            game.imitate(IMAGES[:8] / 255, seeded(k))
            game.G_ema.eval()  # as for a picture
            game.follow()
        buffers = game.G_ema.named_buffers()  # of the follower: averages have a norm below 1
        estimates = [x for name, x in buffers if name.endswith(("._u", "._v"))]
        close([x.norm() for x in estimates], np.ones(16), 1e-5)
        with torch.no_grad():
            for _ in range(100):
                for network in (game.G, game.G_ema):
                    fakes = network(game.latents(2))
                game.D(fakes)
        layers = [m for m in game.eval().modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
        weights = [layer.weight.detach().flatten(1) for layer in layers]
        close([torch.linalg.svdvals(weight)[0] for weight in weights], np.ones(26), 0.01)

    @pytest.mark.parametrize("broken", ["encoder", "discriminator", "generator"])
    def test_a_loss_that_is_not_finite_moves_nothing(self, monkeypatch, broken):
        game, encoder, real = tiny_game(), Pixels(), random_images(8, 8, torch.float32)
        parts = [encoder, game.G] + [game.D] * (broken != "generator")
        before = [weights_of(part) for part in parts]
        step = partial(game.imitate, real, seeded(1), read=True)
        if broken == "encoder":
            replace(monkeypatch, "ppcl", lambda pos, log_negatives: pos.sum(1) * INF)
            monkeypatch.setattr(hardneg, "_check_finite", lambda *_, **__: None)
            step = partial(play, game, encoder, real, lr=0.1)
        else:
            monkeypatch.setattr(hardneg, "_may_read", lambda x: False)  # as on a GPU
            score, calls = game.D.forward, itertools.count()
            place = {"discriminator": 1, "generator": 2}[broken]
            game.D.forward = lambda x: score(x) * (math.nan if next(calls) == place else 1)
        with pytest.raises(FloatingPointError, match=f"^The loss of the {broken} is -?(inf|nan)"):
            step()
        assert all(x.requires_grad for x in game.D.parameters())  # it learns when the game goes on
        assert not any(moved(part, old) for part, old in zip(parts, before, strict=True))

    @pytest.mark.parametrize("pretrain", [0, 1, 3])
    def test_pre_training_and_turns(self, pretrain):
        """Epochs of the game alone have no loss; later it moves in every second step."""
        game, steps = tiny_game(16, pretrain=pretrain, ascent_lr=0.002, lr=0.003), 3 * pretrain
        training = begin(IMAGES, "diffhard", method_options={"game": game})
        training.schedules = {"temperature": lambda progress: 0.1 + math.sqrt(progress)}
        assert {x.defaults["betas"] for x in game.optimizers.values()} == {(0.0, 0.999)}
        before, first, ascent, rates = weights_of(game), weights_of(training.encoder), [], []
        groups = {name: x.param_groups[0] for name, x in game.optimizers.items()}
        assert (training.epoch, training.steps) == (-pretrain, steps + 6)
        for k, figures in enumerate(training):
            assert (figures["step"], figures["steps"], figures["images"]) == (k + 1, steps + 6, 80)
            epochs = figures["epoch"] + pretrain, training.epoch + pretrain
            assert epochs == (k // 3, (k + 1) // 3)
            turn = k < steps or (k - steps) % 2 == 0
            assert moved(game, before) == turn == ("d_loss" in figures)
            assert ("loss" in figures) == moved(training.encoder, first) == (k >= steps)
            assert ("ess" in figures) == (k >= steps)  # here every step has statistics
            before = weights_of(game)
            ascent.append(groups["ascent"]["lr"] / 0.002)  # it goes like the encoder's
            rates.append(training.optimizer.param_groups[0]["lr"] / 3e-3)
        assert k + 1 == training.steps and rates[-3] != rates[-1]
        close(ascent, rates, 1e-12)
        assert groups["G"]["lr"] == groups["D"]["lr"] == 0.003
        assert game.optimizers["ascent"].state_dict()["state"][0]["step"] == 3


# ---- Section 12: training
class TestBank:
    """`Bank` contrasts what it says."""

    def test_bank_holds_the_embeddings_of_each_image(self, monkeypatch):
        """The loss is that of rows for each anchor, from which its own one is left out."""
        monkeypatch.setattr(hardneg, "view", lambda images, *_, **__: images / 255)
        training = begin(IMAGES, "bank", method_options={"momentum": 0.0})
        bank, said, losses = training.method.bank, torch.zeros(240, 16), []
        z, update = hardneg.embed(training.encoder, IMAGES)[1], bank.update
        close(bank.rows, hardneg.unit(z - z.mean(0)), 1e-5)  # near one point: rounding counts

        def noted(index, z):
            rows = bank.rows.clone()  # before their update
            others = torch.stack([rows[torch.arange(240) != i] for i in index])
            losses.append(contrastive_loss(z, rows[index], negatives=others))
            said[index] = z
            update(index, z)

        bank.update = noted
        seen = list(training)
        close(bank.rows, said, 1e-6)
        close([figures["loss"] for figures in seen], losses, 1e-5)

    @pytest.mark.parametrize("loss", ["hard", "hcl"])
    def test_bank_is_not_copied_in_a_step(self, loss):
        """Its largest tensor has the size of the logits, A × K, not of the bank, K × D."""
        images, encoder = torch.zeros(4000, 3, 8, 8, dtype=torch.uint8), Pixels()
        bank = hardneg.Bank(hardneg.ContrastiveLoss(loss, tau_plus=0.0), encoder, images)
        with Operations() as operations:
            index, descend = torch.arange(8), torch.Tensor.backward
            bank.step(encoder, images[:8], index, None, descend, return_stats=True)
        assert operations.bytes <= 8 * 4000 * 8 < bank.bank.rows.nbytes / 10


class TestMicroBatches:
    """`in_micro_batches` passes a few images at a time, with the gradients of one pass."""

    SIZES = [("simclr", 14, 1), ("simclr", 14, 100), ("simclr", 14, 3)]
    SIZES += [("bank", 7, 3), ("diffhard", 26, 3)]

    @pytest.mark.parametrize("name, rows, size", SIZES)
    def test_gradients(self, name, rows, size):
        found, images, network = [], random_images(7, 8), Plain()
        for parts, encoder in enumerate((network, hardneg.in_micro_batches(network, size))):
            game = settled(tiny_game())  # it seeds, too
            options = {"game": game} if name == "diffhard" else {}
            criterion = hardneg.ContrastiveLoss("ppcl", temperature=0.2)
            method = make(name, criterion, network, images, **options)
            network.seen.clear()
            parameters = [*network.parameters()]
            if name == "diffhard":
                parameters += game.G.parameters()

            def descend(loss, parameters=parameters):
                found.append([loss, *torch.autograd.grad(loss, parameters, retain_graph=True)])
                loss.backward()

            method.step(encoder, images, torch.arange(7), seeded(3), descend)
            # BatchNorm sees all views in one pass, and cannot tell the two of an image apart
            assert max(network.seen) <= size if parts else network.seen == [rows]
        all_close(*reversed(found), 1e-10, floor=1e-6)

    def test_parts_are_of_nearly_one_size(self):
        """BatchNorm cannot take one sample, so a part has one only where it must."""
        for n, size in itertools.product(range(1, 16), range(1, 8)):
            x, take = torch.arange(n)[:, None], Mock(side_effect=lambda part: part)
            assert torch.equal(hardneg.in_micro_batches(take, size)(x), x)
            sizes = sorted(len(call.args[0]) for call in take.call_args_list)
            assert sizes[-1] - sizes[0] <= 1 and (sizes[0] > 1 or 1 in (size, n)), (n, size)
            assert sizes[-1] <= size + (size == 2) * n % 2, (n, size)

    def test_randomness_is_replayed(self):
        """The backward pass embeds the views again."""
        network, x, found = Plain(nn.Dropout(0.5)), random_images(6, 8), []

        def in_parts(x):
            return None, torch.cat([network(some)[1] for some in x.split(2)])

        for encoder in (hardneg.in_micro_batches(network, 2), in_parts):
            torch.manual_seed(1)
            loss = contrastive_loss(*encoder(x)[1].chunk(2))
            torch.rand(100)
            found.append((loss, torch.autograd.grad(loss, network.layers[1].weight)[0]))
        same(*found, 1e-12)
        assert network.seen == [2] * 9  # 3 parts forward and backward, 3 by hand

    def test_takes_and_returns_what_the_encoder_does(self):
        x, y = embeddings(1, 2, 5, 3)

        def encoder(features, more=None, scale=1.0):
            z = scale * (features["x"] + 2 * features["y"] * more)
            return {"z": z, "both": (z.sum(1), z.square())}

        few = hardneg.in_micro_batches(encoder, 2)
        found = few({"x": x, "y": y}, more=y, scale=3.0)
        all_close(tree_leaves(found), tree_leaves(encoder({"x": x, "y": y}, y, 3.0)), 1e-12)
        assert found.keys() == {"z", "both"}
        tokens = UserDict(x=x, y=y)
        for of_tokenizer in (few(tokens, y, scale=3.0), few(features=tokens, more=y, scale=3.0)):
            assert torch.equal(of_tokenizer["z"], found["z"])
        for wrong, found in (("x", r"\[\]"), ({"x": x, "y": y[:3]}, r"\[3, 5\]")):
            with refused(f"equally many rows, not {found}"):
                few(wrong)

    def test_other_kinds_of_outputs_lose_no_row(self):
        x = embeddings(1, 6, 3)
        kinds = [lambda z: UserDict(z=z), lambda z: SimpleNamespace(z=z), lambda z: "text"]
        kinds += [lambda z: 1.0, lambda z: z.mean(0, keepdim=True), lambda z: [z, z[:1]]]
        for kind in kinds:
            with refused("^An encoder must return a row for each sample, in tensors"):
                hardneg.in_micro_batches(kind, 4)(x)
        z, nothing = hardneg.in_micro_batches(lambda z: (z, None), 4)(x)
        assert nothing is None and torch.equal(z, x)


class TestDefaultDtype:
    """What a process has set as its default dtype changes no result."""

    @pytest.mark.parametrize("name", METHODS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_of_training(self, name, dtype):
        trainings = [begin(IMAGES[:40], name, epochs=1, batch_size=20) for _ in range(2)]
        runs = []
        for training, default in zip(trainings, (torch.float32, dtype), strict=True):
            torch.set_default_dtype(default)
            runs.append([figures["loss"] for figures in training if "loss" in figures])
        assert len(runs[0]) >= 2 and runs[0] == runs[1]

    def test_of_a_default_device(self):
        training = begin(IMAGES[:40], epochs=1, batch_size=20)
        with torch.device("meta"):
            assert len(list(training)) == 2

    def test_of_a_training_that_was_made_under_it(self):
        torch.set_default_dtype(torch.float64)
        figures = list(begin(IMAGES[:40], "diffhard", epochs=1, batch_size=20))
        assert finite(*tensors_of(figures))
        assert hardneg.view(IMAGES[:2]).dtype == torch.float32


class TestSchedules:
    """`annealed_beta` falls in the paper's stairs, and the α of `lead_in` geometrically."""

    @given(share=ends_of(0.001, 0.999), beta=st.floats(0, 100), changes=st.integers(1, 20))
    def test_stairs_of_beta_are_even(self, share, beta, changes):
        """They are equally long and equally high, from β to zero; [1] App. C has five changes."""
        places = (np.arange(changes) + share) / changes
        found = [hardneg.annealed_beta(place, beta, changes) for place in (0.0, *places, 1.0)]
        heights = np.linspace(beta, 0, changes + 1)
        close(found, [beta, *heights], 1e-12)
        assert hardneg.annealed_beta(share, beta) == hardneg.annealed_beta(share, beta, 5)

    @given(progress=ends_of(0, 1), alpha=st.floats(0.01, 1), until=st.floats(0.05, 1))
    def test_lead_in(self, progress, alpha, until):
        share = hardneg.lead_in(progress, alpha, until)
        close(share, math.exp(math.log(alpha) * min(1, progress / until)), 1e-12)
        assert hardneg.lead_in(progress, alpha) == hardneg.lead_in(progress, alpha, 0.5)


class TestTraining:
    """Runs of `Training` learn, repeat by seed, resume to the same bits, and stop if they fail."""

    @pytest.mark.parametrize("name, gap", [("simclr", 0.4), ("bank", 0.3)])
    def test_learns(self, name, gap):
        seen = list(begin(IMAGES, name, epochs=12))
        gaps = [p["positive"] - p["negative"] for p in seen[-3:]]  # of the last epoch
        assert sum(gaps) / 3 > gap  # one batch alone depends on rounding and on the draws
        assert name != "simclr" or seen[-1]["loss"] < seen[0]["loss"] - 0.5

    @pytest.mark.parametrize("name", METHODS)
    def test_every_loss_takes_a_step(self, name):
        takes_steps(begin, name)

    @pytest.mark.parametrize("name", METHODS)
    def test_everything_is_on_the_device_of_the_images(self, name):
        game = {"game": tiny_game(16, every=1)} if name == "diffhard" else {}
        stays_on_the_device(begin(IMAGES[:40].to(DEVICE), name, method_options=game))

    ORDER = [("simclr", "sgd"), ("bank", "adam"), ("diffhard", "adamw")]

    @pytest.mark.parametrize("name, recipe", ORDER)
    def test_resumes_to_the_same_bits(self, name, recipe, tmp_path):
        whole, seen = begin(IMAGES, name, recipe=recipe), []
        for figures in whole:
            seen.append(figures)
            # the last two lie at a turn of the game and between two turns
            if len(seen) - whole.steps_per_epoch in (0, 1, 2) or len(seen) == 1:
                torch.save(whole.state_dict(), tmp_path / f"{len(seen)}.pt")
        for path in tmp_path.iterdir():
            second = begin(IMAGES, name, recipe=recipe, init=1)
            second.load_state_dict(torch.load(path, weights_only=True))
            assert list(second) == seen[int(path.stem) :]
            assert equal_states(whole.state_dict(), second.state_dict())
        parts = "epoch step_in_epoch steps_per_epoch encoder method optimizer"
        assert set(whole.state_dict()) == set(parts.split())

    STATES = [("epoch", "1"), ("epoch", 10**6), ("epoch", 1.0), ("epoch", True), ("epoch", -1)]
    STATES += [("step_in_epoch", 3), ("step_in_epoch", -1), ("steps_per_epoch", 30)]

    @pytest.mark.parametrize("name, value", STATES)
    def test_a_state_that_does_not_fit_is_refused(self, name, value):
        training = begin(IMAGES)
        state = training.state_dict()
        training.load_state_dict(state | {"epoch": 2})  # it has ended
        assert list(training) == []
        training.load_state_dict(state)
        with refused(f"^{name} is .*must be a whole number from"):
            training.load_state_dict(state | {name: value})
        assert (training.epoch, training.step_in_epoch) == (0, 0)

    @pytest.mark.parametrize("pretrain", [0, 1])
    def test_what_was_in_eval_mode_is_trained_in_training_mode(self, pretrain):
        """Of a game the spectral norms would not follow the weights, of an encoder BatchNorm."""
        game = tiny_game(16, pretrain=pretrain)
        game.taken = 1  # so that it is not its turn
        training = begin(IMAGES, "diffhard", epochs=1, method_options={"game": game.eval()})
        training.encoder.eval()
        next(iter(training))
        modules = [*game.modules(), *training.encoder.modules()]
        assert all(module.training for module in modules)

    def test_steps_and_seeds_differ_in_what_they_draw(self, monkeypatch):
        draws = []

        def view(images, generator, **options):
            draws.append(torch.rand(2, generator=generator))
            return images / 255

        monkeypatch.setattr(hardneg, "view", view)
        for seed, rank in ((0, 0), (0, 0), (1, 0), (10**9, 0), (0, 1), (1, 1)):
            training = begin(IMAGES, seed=seed)
            training.rank = rank
            list(itertools.islice(training, 4))  # the last is of another epoch
        first, again, *others = torch.stack(draws).chunk(6)
        assert torch.equal(first, again)
        assert len(torch.cat([first, *others]).unique()) == 5 * first.numel()

    @pytest.mark.parametrize("n, size, sizes", [(240, 70, [60] * 4), (5, 2, [3, 2]), (7, 99, [7])])
    def test_an_epoch_has_each_image_once(self, n, size, sizes):
        """In batches of nearly one size, never of one image; epochs and seeds differ in order."""
        orders = []
        for seed in (5, 5, 6):
            training = begin(IMAGES[:n], batch_size=size, seed=seed)
            training.method.step = Mock(wraps=training.method.step)
            assert [figures["images"] for figures in training] == 2 * sizes
            asked = [call.args for call in training.method.step.call_args_list]
            assert all(torch.equal(some, IMAGES[index]) for _, some, index, *_ in asked)
            one, two = torch.cat([given[2] for given in asked]).split(n)
            assert set(one.tolist()) == set(two.tolist()) == set(range(n))
            assert not torch.equal(one, two)
            orders.append([one.tolist(), two.tolist()])
        first, again, other = orders
        assert first == again and not any(order in first for order in other)

    def test_schedules_and_statistics(self):
        """A schedule's option reaches the loss; statistics come every tenth of an epoch."""
        schedules = {"alpha": partial(hardneg.lead_in, alpha=0.1)}
        seen = list(begin(IMAGES, loss="hard", schedules=schedules, batch_size=8))
        assert not any(x.requires_grad for x in tensors_of(seen))
        assert [p["alpha"] for p in seen] == [hardneg.lead_in(k / 60, 0.1) for k in range(60)]
        told = {k: float(p["ess"]) for k, p in enumerate(seen) if "ess" in p}
        wanted = {k: math.ceil(14 * seen[k]["alpha"]) / 14 for k in range(0, 60, 3)}
        assert told == pytest.approx(wanted)

    PLACE = np.arange(100) / 100  # in a run
    COSINE = np.minimum(10 * PLACE + 0.1, 1) * (1 + np.cos(np.pi * PLACE)) / 2  # after a warm-up
    RECIPES = [  # optimizer; epochs, batch size, rate, weight decay; factors of the rate
        ("AdamW", (16, 256, 8e-3, 1e-4), COSINE),
        ("SGD", (200, 128, 0.03, 5e-4), [1] * 80 + [0.1] * 15 + [0.01] * 5),
        ("Adam", (400, 256, 1e-3, 1e-6), [1] * 100),
    ]

    @pytest.mark.parametrize("optimizer, settings, wanted", RECIPES)
    def test_recipes(self, optimizer, settings, wanted):
        recipe, (epochs, *_, decay) = optimizer.lower(), settings
        training = begin(IMAGES[:2], recipe=recipe, epochs=100, lr=1e-6)
        rates = [1e6 * training.optimizer.param_groups[0]["lr"] for _ in training]
        close(rates, wanted, 1e-12)
        assert type(training.optimizer).__name__ == optimizer
        assert tuple(hardneg.RECIPES[recipe].values()) == settings
        learned = nn.Parameter(torch.tensor(0.4))
        method = hardneg.SimCLR(hardneg.ContrastiveLoss("hcl", temperature=learned))
        encoder = hardneg.Encoder(size=16)
        training = hardneg.Training(encoder, IMAGES, method, recipe=recipe, lr=0.5)
        groups = training.optimizer.param_groups
        assert [group["weight_decay"] for group in groups] == [decay, 0]
        assert (training.epochs, training.steps_per_epoch) == (epochs, 2 if recipe == "sgd" else 1)
        assert groups[0]["lr"] == 0.5 and groups[0].get("momentum", 0.9) == 0.9
        assert list(itertools.islice(training, 1)) and learned != 0.4

    # method, part with NaN, epochs of the game alone, step that finds it, whether on a GPU
    BROKEN = [("simclr", "encoder", 0, 1, False), ("diffhard", "encoder", 1, 4, False)]
    BROKEN += [("diffhard", "encoder", 0, 1, True)]
    BROKEN += [("diffhard", "discriminator", pretrain, 1, True) for pretrain in (0, 1)]

    @pytest.mark.parametrize("name, part, pretrain, step, on_a_gpu", BROKEN)
    def test_stops_at_what_is_not_finite(self, request, name, part, pretrain, step, on_a_gpu):
        """On a GPU a step with statistics looks at losses."""
        if on_a_gpu:
            request.getfixturevalue("as_on_a_gpu")
        game = tiny_game(16, pretrain=pretrain)
        options = {"game": game} if name == "diffhard" else {}
        training = begin(IMAGES, name, method_options=options)
        for parameter in (training.encoder if part == "encoder" else game.D).parameters():
            parameter.data.fill_(math.nan)
        found = f"The loss of the {part} is nan" if on_a_gpu else "NaN"
        message = rf"^Training stopped at step {step} of {training.steps}\. .*{found}.* A lower lr"
        with pytest.raises(FloatingPointError, match=message):
            list(training)

    def test_a_step_under_autocast(self):
        """Its backward pass is without, and cached weights do not outlive it."""
        x, slopes = embeddings(1, 8, 8).float(), []
        for enabled in (False, True):
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            loss = layers(x).square().sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                before = layers(x)
                hardneg._descend(loss, torch.optim.SGD(layers.parameters(), 0.1), "layers")
                assert (layers(x) - before).abs().max() > 0.1
            slopes.append(layers[0].weight.grad)
        assert torch.equal(*slopes)

    BFLOAT16 = [*((name, True) for name in METHODS), ("bank", False)]

    @pytest.mark.parametrize("name, enabled", BFLOAT16)
    def test_bfloat16_in_micro_batches(self, name, enabled):
        training, found = begin(IMAGES, name, epochs=1, bfloat16=enabled, micro_batch=50), []
        training.encoder.head.register_forward_hook(lambda _, x, z: found.append(z))
        figures = tensors_of(list(training))
        assert max(len(z) for z in found) <= 50
        assert {z.dtype for z in found} == {torch.bfloat16 if enabled else torch.float32}
        assert {x.dtype for x in (*figures, *training.encoder.parameters())} == {torch.float32}
        assert len(figures) >= 7 and finite(*figures, *training.encoder.parameters())

    def test_bfloat16_is_for_hardware_that_computes_in_it(self, monkeypatch):
        known = {"avx512_bf16": True}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
        found = [hardneg._has_bfloat16(torch.device(name)) for name in ("cpu", "cuda")]
        assert found == [True, False]

    INVALID = [("training", "lr", x) for x in (0, math.nan)]
    INVALID += [("training", "epochs", 0), ("training", "batch_size", 1)]
    INVALID += [("training", "epochs", 1.5), ("training", "batch_size", 2.5)]
    INVALID += [("training", "recipe", "lars"), ("training", "micro_batch", 0)]
    INVALID += [(of, "momentum", x) for of in ("bank", "game") for x in (-0.1, 1.0)]
    INVALID += [("game", name, 0) for name in ("width", "latent", "every")]
    INVALID += [("game", "size", x) for x in (4, 24, 8.0)] + [("game", "pretrain", -1)]
    INVALID += [("game", "batch_size", 1), ("encoder", "size", 33), ("encoder", "name", "large")]
    INVALID += [("view", "images", x) for x in (None, [[[[0.5]]] * 3])]
    INVALID += [("view", "images", torch.ones(size)) for size in ((3, 8, 8), (2, 1, 8, 8))]

    @pytest.mark.parametrize("of, name, value", INVALID)
    def test_invalid_arguments_are_named(self, of, name, value):
        calls = {
            "training": lambda **option: list(begin(IMAGES, **option)),
            "game": tiny_game,
            "encoder": hardneg.Encoder,
            "view": hardneg.view,
        }
        call = calls.get(of, lambda **option: begin(IMAGES, of, method_options=option))
        with refused(f"^{name} is .*; it must be "):
            call(**{name: value})
