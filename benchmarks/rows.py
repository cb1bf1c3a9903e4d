"""The options of the rows of all studies, of images and of text.

A study of images has a name, the images it is on, its seeds, and options of all of its rows. Seed
100 chooses options, seeds 0 to 4 compare the choices. A row has a name and options of its own,
which win; `as` takes over the rows of another study. Options are words of a command line of
train.py. A name in braces stands for each of its values, which follow the rows. [1] to [4] are the
papers in the header of ../hardneg.py.
"""

import itertools
import re
from typing import NamedTuple

TEXT = """
defaults on shapes, seeds 100:
    simclr-0: --loss simclr --temperature 0.05
    simclr-1: --loss simclr --temperature 0.07
    simclr-2: --loss simclr --temperature 0.1
    simclr-3: --loss simclr --temperature 0.2
    debiased-0: --loss debiased --temperature 0.1 --tau-plus 0.001
    debiased-1: --loss debiased --temperature 0.1 --tau-plus 0.01
    debiased-2: --loss debiased --temperature 0.2 --tau-plus 0.01
    debiased-3: --loss debiased --temperature 0.3 --tau-plus 0.1
    hcl-0: --loss hcl --temperature 0.2 --beta 0.5 --tau-plus 0.01
    hcl-1: --loss hcl --temperature 0.2 --beta 1 --tau-plus 0.01
    hcl-2: --loss hcl --temperature 0.3 --beta 1 --tau-plus 0.01
    hcl-3: --loss hcl --temperature 0.3 --beta 1 --tau-plus 0.1
    ot-0: --loss ot --temperature 0.1 --epsilon 0.1
    ot-1: --loss ot --temperature 0.1 --epsilon 0.3
    ot-2: --loss ot --temperature 0.2 --epsilon 0.1
    ot-3: --loss ot --temperature 0.2 --epsilon 0.3
    hard-0: --loss hard --temperature 0.07 --alpha 0.3
    hard-1: --loss hard --temperature 0.1 --alpha 0.1
    hard-2: --loss hard --temperature 0.1 --alpha 0.3
    hard-3: --loss hard --temperature 0.2 --alpha 0.1
    hard-simple-0: --loss hard-simple --alpha 0.01 --lead-in --epochs 16 --batch-size 256 --lr 0.008
    hard-simple-1: --loss hard-simple --alpha 0.03 --lead-in --epochs 16 --batch-size 256 --lr 0.008
    hard-simple-2: --loss hard-simple --alpha 0.1 --lead-in --epochs 16 --batch-size 256 --lr 0.008
    hard-simple-3: --loss hard-simple --alpha 0.3 --lead-in --epochs 16 --batch-size 256 --lr 0.008
    triplet-0: --loss triplet --margin 0 --weights hardest --batch-size 256 --lr 0.008
    triplet-1: --loss triplet --margin 0.2 --weights hardest --batch-size 256 --lr 0.008
    triplet-2: --loss triplet --margin 0.5 --weights hardest --batch-size 256 --lr 0.008
    triplet-3: --loss triplet --margin 1 --weights hardest --batch-size 256 --lr 0.008
shapes on shapes, seeds 0 1 2 3 4:  # the best of `defaults`
    simclr: --loss simclr --temperature 0.05
    debiased: --loss debiased --temperature 0.1 --tau-plus 0.01
    hcl: --loss hcl --temperature 0.3 --beta 1 --tau-plus 0.1
    ot: --loss ot --temperature 0.1 --epsilon 0.1
    hard: --loss hard --temperature 0.07 --alpha 0.3
shapes-64-search on shapes, seeds 100: --batch-size 64 --lr 0.002
    simclr-0: --loss simclr --temperature 0.05
    simclr-1: --loss simclr --temperature 0.1
    simclr-2: --loss simclr --temperature 0.2
    hcl-0: --loss hcl --temperature 0.1 --beta 0.5 --tau-plus 0.01
    hcl-1: --loss hcl --temperature 0.2 --beta 0.5 --tau-plus 0.01
    hcl-2: --loss hcl --temperature 0.3 --beta 1 --tau-plus 0.1
shapes-64 on shapes, seeds 0 1 2 3 4: --batch-size 64 --lr 0.002
    simclr: --loss simclr --temperature 0.1
    hcl: --loss hcl --temperature 0.1 --beta 0.5 --tau-plus 0.01
cifar10 on cifar10, seeds 0 1 2 3 4: {LONG}
    simclr: --loss simclr --temperature 0.1
    hard: --loss hard --temperature 0.07 --alpha 0.3
    hcl: --loss hcl --temperature 0.07 --beta 0.5 --tau-plus 0.01
    ot: --loss ot --temperature 0.07 --epsilon 0.3
cifar10-beta on cifar10, seeds 0 1 2 3 4: {LONG}
    simclr: --loss simclr --temperature 0.1
    hcl-2: --loss hcl --temperature 0.2 --beta 2 --tau-plus 0.01
cifar10-t on cifar10, seeds 100: {LONG}
    simclr-{t}: --loss simclr --temperature {t}
    hard-{t}: --loss hard --temperature {t} --alpha 0.3
    hcl-{t}: --loss hcl --temperature {t} --beta 0.5 --tau-plus 0.01
    ot-{t}: --loss ot --temperature {t} --epsilon 0.3
tiny-t on tiny, seeds 100: {LONG} --size 32
    simclr-{t}: --loss simclr --temperature {t}
    hard-{t}: --loss hard --temperature {t} --alpha 0.3
    hcl-{t}: --loss hcl --temperature {t} --beta 0.5 --tau-plus 0.0005
    ot-{t}: --loss ot --temperature {t} --epsilon 0.3
tiny on tiny, seeds 0 1 2 3 4: {LONG} --size 32
    simclr: --loss simclr --temperature 0.1
    hard: --loss hard --temperature 0.1 --alpha 0.3
    hcl: --loss hcl --temperature 0.07 --beta 0.5 --tau-plus 0.0005
    ot: --loss ot --temperature 0.07 --epsilon 0.3
batch on cifar10, seeds 0 1 2: --fraction 0.2 --epochs 12 --lr 0.002
    simclr-{size}: --loss simclr --temperature 0.1 --batch-size {size}
    hcl-{size}: --loss hcl --temperature 0.2 --beta 0.5 --tau-plus 0.01 --batch-size {size}
    {size} = 32 128 512
beta on cifar10, seeds 0 1 2: {SHORT} --temperature 0.2  # [1], App. C: β annealed
    simclr: --loss simclr
    hcl-{b}: --loss hcl --beta {b} --tau-plus 0.01
    hcl-{b}-annealed: --loss hcl --beta {b} --tau-plus 0.01 --anneal
    {b} = 0.5 1 2
epsilon-tau on cifar10, seeds 100: {SHORT} --temperature 0.2  # [2], VII-A
    {e}-{tau}: --loss ot --epsilon {e} --tau-plus {tau}
    {e} = 0.1 0.3 1
    {tau} = 0 0.01 0.05
cost on cifar10, seeds 0 1 2: {SHORT} --temperature 0.2 --loss ot --epsilon 0.3
    # [2], VII-C, Fig. 1
    sqeuclidean: --cost sqeuclidean
    exp-0: --cost exp
    exp-2: --cost exp --epsilon 2.2167168  # recorded as ε = 0.3 with the κ of [2] at 2
alpha on cifar10, seeds 100: {SHORT} --temperature 0.2
    hard-{a}: --loss hard --alpha {a}
    {a} = 0.01 0.03 0.1 0.3 1
temperature on cifar10, seeds 0 1 2: {SHORT}  # [4], Table 1
    simclr-{t}: --loss simclr --temperature {t}
    hard-{t}: --loss hard --temperature {t} --alpha 0.1
    simple: --loss simple
    hard-simple: --loss hard-simple --alpha 0.03 --lead-in
hard-debiased on cifar10, seeds 0 1 2: {SHORT} --temperature 0.5
    # [1], Fig. 2 right, at the settings of [1]
    neither: --loss simclr
    debiased: --loss debiased --tau-plus 0.1
    hard: --loss hcl --beta 1 --tau-plus 0
    both: --loss hcl --beta 1 --tau-plus 0.1
objectives on cifar10, seeds 0 1 2: {SHORT} --temperature 0.2 --margin 0.5
    # [2], Tables I to IV: objectives under three kinds of weights, and debiased
    nce, no weights: --loss simclr --weights uniform
    nce, tilted: --loss simclr --weights tilted --beta 1
    nce, coupling: --loss simclr --weights transported --epsilon 0.3
    {o}, no weights: --loss {o} --weights uniform
    {o}, tilted: --loss {o} --weights tilted --beta 1
    {o}, coupling: --loss {o} --weights transported --epsilon 0.3
    nce debiased, no weights: --loss simclr --weights uniform --tau-plus 0.01
    nce debiased, tilted: --loss simclr --weights tilted --beta 1 --tau-plus 0.01
    nce debiased, coupling: --loss simclr --weights transported --tau-plus 0.01 --epsilon 0.3
    {o} = simple triplet
neighbours on cifar10, seeds 0: {SHORT}  # [4], Fig. 8
    simclr-{t}: --loss simclr --temperature {t}
# the rows of the next four are made below
cause-search on cifar10, seeds 100: {SHORT} --fraction 0.25 --validation
cause on cifar10, seeds 0 1 2 3 4: {SHORT}
cause-t on cifar10, seeds 0 1 2: {SHORT}
cause-tiny on tiny, seeds 0 1 2 3 4: --fraction 0.4 --size 32 --epochs 6 --batch-size 128 --lr 0.002
games-10 on cifar10, seeds 0 1 2: --fraction 0.1 --epochs 16 --pretrain 8 {GAMES}
    # [3], Tables 1 and 3, Fig. 2; a run sees 80 000 real images, but for twice the epochs
    SimCLR: --loss simclr
    SimCLR-2x: --loss simclr --batch-size 256
    CLAE: --method clae --loss simclr --bound 0.015
    CL-GAN: {DIFFHARD} --no-pairs --no-ascent
    G+Hard: {DIFFHARD} --no-pairs
    G+Pos: {DIFFHARD} --no-ascent
    DiffHard: {DIFFHARD}
    twice: --loss simclr --epochs 32
games-20 on cifar10, seeds 0 1 2: --fraction 0.2 --epochs 8 --pretrain 4 {GAMES}
    as games-10
    twice: --loss simclr --epochs 16
long on cifar10, seeds 0 1 2: {SIXTY}
    # all images, for 15 times as many steps as in cifar10
    simclr: --loss simclr --temperature 0.1
    # the best of `cause`
    tilted: --loss simclr --temperature 0.1 --weights tilted --beta 0.5
    hcl: --loss hcl --temperature 0.07 --beta 0.5 --tau-plus 0.01
    ot: --loss ot --temperature 0.07 --epsilon 0.3
    # the controls of `tilted`: its weights held, and a plain loss at its effective t
    tilted-held: --loss simclr --temperature 0.1 --weights tilted --beta 0.5 --detach-weights
    simclr 0.067: --loss simclr --temperature 0.067
    # of the table of losses in ../README.md, τ⁺ = 1/510; and of cifar10-beta
    hcl 0.1: --loss hcl --temperature 0.1 --beta 0.5 --tau-plus 0.00196078431372549
    hcl 0.2: --loss hcl --temperature 0.2 --beta 2 --tau-plus 0.01
pays-cifar10 on cifar10, seeds 0 1 2 3 4: {SIXTY} --loss simclr
    # studies/pays.md
    simclr 0.2: --temperature 0.2
    tilted 0.2: --temperature 0.2 --weights tilted --beta 0.5
    simclr 0.1: --temperature 0.1
    simclr 0.4: --temperature 0.4
    tilted 0.4: --temperature 0.4 --weights tilted --beta 0.5
    decoupled 0.067: --temperature 0.067 --objective decoupled
pays-decoupled on cifar10, seeds 0 1 2 3 4: {SIXTY} --loss simclr
    decoupled 0.1: --temperature 0.1 --objective decoupled
pays-rates on cifar10, seeds 1 2 3: {SIXTY} --loss simclr  # seed 1 chooses the rows that go on
    simclr 0.1 at {r}: --temperature 0.1 --lr {r}
    tilted 0.2 at {r}: --temperature 0.2 --weights tilted --beta 0.5 --lr {r}
    {r} = 0.0015 0.006
pays-tiny on tiny, seeds 0 1 2 3 4: --size 32 {SIXTY} --loss simclr
    simclr 0.1: --temperature 0.1
    tilted 0.1: --temperature 0.1 --weights tilted --beta 0.5
    simclr 0.2: --temperature 0.2
    tilted 0.2: --temperature 0.2 --weights tilted --beta 0.5
finetune-tenth on cifar10, seeds 0 1 2: {GAMES} --fraction 0.1 --epochs 20 --pretrain 8
    # [3], 1: a run sees 100 000 images, as in the next
    SimCLR: --loss simclr
    DiffHard: {DIFFHARD}
finetune-all on cifar10, seeds 0 1 2: {GAMES} --epochs 2
    SimCLR: --loss simclr
beta-6 on cifar10, seeds 0: {BRIEF} --temperature 0.5 --tau-plus 0.1  # [1], Fig. 4
    0: --loss debiased
    {b}: --loss hcl --beta {b}
    {b} = 0.5 2 6
cost-course on cifar10, seeds 0: {BRIEF} --temperature 0.2 --loss ot --epsilon 0.3  # [2], Fig. 1, 6
    sqeuclidean: --cost sqeuclidean
    exp-0: --cost exp
games-longer on cifar10, seeds 0: {GAMES} --fraction 0.05 --pretrain 4  # [3], Fig. 3
    SimCLR-{e}: --loss simclr --epochs {e}
    DiffHard-{e}: {DIFFHARD} --epochs {e}
    {e} = 6 12
classes-10 on tiny-10, seeds 0 1 2: {CLASSES} --fraction 1
    # 2 500 images of Tiny ImageNet
    simclr: --loss simclr --temperature 0.1
    hcl: --loss hcl --temperature 0.1 --beta 0.5 --tau-plus 0
classes-50 on tiny-50, seeds 0 1 2: {CLASSES} --fraction 0.2
    as classes-10
classes-200 on tiny-200, seeds 0 1 2: {CLASSES} --fraction 0.05
    as classes-10
"""
SHARED = {  # by several studies; SHORT: 10 000 images of CIFAR-10, LONG: 20 000 of it or of `tiny`
    "SHORT": ["--fraction 0.2 --epochs 12 --batch-size 128 --lr 0.002"],
    "LONG": ["--fraction 0.4 --epochs 10 --lr 0.003"],
    "SIXTY": ["--epochs 60 --batch-size 256 --lr 0.003"],
    "GAMES": ["--batch-size 128 --lr 0.002 --temperature 0.2"],
    "BRIEF": ["--fraction 0.1 --epochs 10 --batch-size 128 --lr 0.002"],
    "CLASSES": ["--size 32 --epochs 40 --lr 0.003"],
    "DIFFHARD": ["--method diffhard --width 16 --every 4"],
    "t": "0.07 0.1 0.2 0.3 0.5 1.0".split(),
}
HEADING = re.compile(r"(\S+) on (\S+), seeds ([\d ]+):(.*)")


class Study(NamedTuple):
    """Hold what a study compares; options are words of a command line."""

    data: str
    seeds: list[int]
    common: str
    rows: dict[str, str]


def read(text: str) -> dict[str, Study]:
    """Read studies: lines that are not indented begin one."""
    studies = {}
    for block in re.split(r"\n(?=\w)", text.strip()):
        lines = [line.split("#")[0].strip() for line in block.split("\n")]
        name, data, seeds, common = HEADING.fullmatch(lines.pop(0)).groups()
        values, rows = dict(SHARED), {}
        for line in lines:
            key, is_there, some = line.partition(" = ")
            if is_there:
                values[key.strip("{}")] = some.split()
        for line in lines:
            row, _, words = line.partition(": ")
            if line.startswith("as "):
                rows |= studies[line[3:]].rows
            elif words:
                rows |= filled(row, words, values)
        [common] = filled("", common, values).values()
        studies[name] = Study(data, [int(seed) for seed in seeds.split()], common, rows)
    return studies


def filled(row: str, words: str, values: dict) -> dict[str, str]:
    """Put values in the place of names in braces: a row for each combination."""
    names = list(dict.fromkeys(re.findall(r"{(\w+)}", row + words)))
    rows = {}
    for some in itertools.product(*[values[name] for name in names]):
        of_name = dict(zip(names, some, strict=True))
        rows[row.format(**of_name)] = words.format(**of_name)
    return rows


# ---- Rows of studies/cause.md: one factor at a time ---------------------------------------------

WEIGHTS = ["uniform", "tilted", "tilted-held", "transported", "transported-held", "top"]
OF_TOP = {0.067: 0.067, 0.133: 0.14, 0.267: 0.35}  # found by trial
OBJECTIVES = {  # N = 252; at 1 / (N + 1) debiasing is decoupling where no floor binds
    "nce": "",
    "1/N": f"--tau-plus {1 / 253:.6f}",
    "5/N": f"--tau-plus {5 / 253:.6f}",
    "decoupled": "--objective decoupled",
}
EFFECTIVE = [0.067, 0.133, 0.267]
COLD = EFFECTIVE[0]
COLDER = [0.05, 0.04]  # 0.05 is t / (1 + 2β): tilted weights with their gradient push so, about


def add(study: str, temperatures: list, weights: list, objectives: list) -> None:
    """Add a row for each way of weighting, objective and effective temperature.

    At the same t_eff all weights spread the push over the negatives alike, up to their gradient."""
    for t, weight, objective in itertools.product(temperatures, weights, objectives):
        words = f"--loss simclr {words_of(weight, t)} {OBJECTIVES[objective]}"
        STUDIES[study].rows[f"{weight} {objective} {t}"] = words


def words_of(weights: str, t: float) -> str:
    """Return the options of a row of WEIGHTS at the effective temperature t.

    It is temperature / (1 + β) for tilted, temperature · ε / (temperature + ε) for transported."""
    if weights == "uniform":
        return f"--temperature {t}"
    if weights == "top":
        return f"--weights top --alpha 0.3 --no-lead-in --temperature {OF_TOP[t]}"
    name, _, held = weights.partition("-")
    words = f"--weights {name} --temperature {round(1.5 * t, 4)}"
    words += " --detach-weights" if held else " --no-detach-weights"
    if name == "tilted":
        return f"{words} --beta 0.5"
    return f"{words} --epsilon {round(3 * t, 4)}"


STUDIES = read(TEXT)
add("cause-search", EFFECTIVE, WEIGHTS, ["nce"])
add("cause-search", [COLD], WEIGHTS, list(OBJECTIVES))
add("cause", [COLD], WEIGHTS, ["nce"])
add("cause", [COLD], ["uniform"], ["1/N", "decoupled"])
add("cause", [COLD], ["tilted"], ["decoupled"])
add("cause", [0.045], ["uniform"], ["nce"])
add("cause", COLDER, ["uniform"], ["decoupled"])
add("cause-t", EFFECTIVE[1:], ["uniform", "tilted-held", "tilted"], ["nce"])
add("cause-tiny", [COLD], WEIGHTS, ["nce"])
add("cause-tiny", [COLD, COLDER[0]], ["uniform"], ["decoupled"])


# ---- Rows of code_search.py ---------------------------------------------------------------------

# options of contrastive_loss; N is the number of candidates of a query
LOSSES = {"simclr": dict(loss="simclr"), "hcl": dict(loss="hcl", beta=0.5, tau_plus="1/N")}
LOSSES |= {"ot": dict(loss="ot", epsilon=0.2), "hard": dict(loss="hard", alpha=0.3)}
LOSSES["debiased"] = dict(loss="debiased", tau_plus="1/N")
LOSSES["decoupled"] = dict(objective="decoupled")
# of a row, where it does not say otherwise; `passes` are times five epochs
SETTINGS = {"loss": "simclr", "batch_size": 128, "passes": 1}
SETTINGS |= {"random": 0}  # random documents for each query, candidates of the whole batch
SETTINGS |= {"mined": 0}  # the same, drawn from the nearest, from the second epoch on
SETTINGS |= {"grouped": 0}  # near ones beside a sample in a batch, from the second epoch on
SETTINGS |= {"refresh": 1}  # epochs between two searches for the nearest
SETTINGS |= {"bank": False}  # search among embeddings that training steps made, not among new ones
SETTINGS |= {"mine_margin": None, "loss_margin": None}  # relative_margin of `mine`, of the loss
SETTINGS |= {"temperature": None, "rate": None}  # these two are chosen
SEARCHES = {"untrained": dict(passes=0)}
SEARCHES |= {loss: dict(loss=loss) for loss in LOSSES}  # weighting the negatives of a batch
# more candidates, as many as with four more for each query, and the time that `mined` takes
SEARCHES |= {"random": dict(random=4), "batch 640": dict(batch_size=640)}
SEARCHES["batch 640, equal time"] = dict(batch_size=640, passes=7)
SEARCHES["batch 128, equal time"] = dict(passes=3)
SEARCHES |= {"grouped": dict(grouped=8), "mined": dict(mined=4)}  # finding near ones
SEARCHES |= {f"mined, {loss}": dict(mined=4, loss=loss) for loss in list(LOSSES)[1:]}
SEARCHES["mined, margin"] = dict(mined=4, mine_margin=0.05)  # against false negatives
SEARCHES["mined, margin in loss"] = dict(mined=4, loss_margin=0.05)
SEARCHES["mined, every 2"] = dict(mined=4, refresh=2)  # how old the nearest may be
SEARCHES["mined, every 4"] = dict(mined=4, refresh=4)
SEARCHES["mined, bank"] = dict(mined=4, bank=True)


# ---- Rows of minimal_pairs.py -------------------------------------------------------------------

# order: whether the encoder sees it; extra: queries that join the candidates of the whole batch
DOUBLED = {"in-batch": dict(), "+ swapped": dict(extra="swapped"), "+ random": dict(extra="random")}
DOUBLED["+ swapped, hcl"] = dict(extra="swapped", loss="hcl")
DOUBLED |= {"bag, in-batch": dict(order=False)}
DOUBLED["bag, + swapped"] = dict(order=False, extra="swapped")
