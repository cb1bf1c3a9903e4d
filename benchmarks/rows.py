"""The options of the rows of all studies, of images and of text.

A study of images has a name, the images it is on, its seeds, and options of all of its rows. Seed
100 chooses options, and seeds 0 to 4 compare the choices. A row has a name and options of its own,
which win. A line with `as` takes over the rows of another study. Options are words of a command
line of train.py. A name in braces stands for each of its values, which follow the rows.
[1] to [4] are the papers in the header of ../hardneg.py.
"""

import re
from typing import NamedTuple

TEXT = """
shapes on shapes, seeds 0 1 2 3 4:
    simclr: --loss simclr --temperature 0.05
    debiased: --loss debiased --temperature 0.1 --tau-plus 0.01
    hcl: --loss hcl --temperature 0.3 --beta 1 --tau-plus 0.1
    ot: --loss ot --temperature 0.1 --epsilon 0.1
    hard: --loss hard --temperature 0.07 --alpha 0.3
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
temperature on cifar10, seeds 0 1 2: {SHORT}  # [4], Table 1
    simclr-{t}: --loss simclr --temperature {t}
    hard-{t}: --loss hard --temperature {t} --alpha 0.1
    simple: --loss simple
    hard-simple: --loss hard-simple --alpha 0.03 --lead-in
hard-debiased on cifar10, seeds 0 1 2: {SHORT} --temperature 0.5  # [1], Fig. 2, at its settings
    neither: --loss simclr
    debiased: --loss debiased --tau-plus 0.1
    hard: --loss hcl --beta 1 --tau-plus 0
    both: --loss hcl --beta 1 --tau-plus 0.1
objectives on cifar10, seeds 0 1 2: {SHORT} --temperature 0.2 --margin 0.5  # [2], Tables I to IV
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
# A row has kind of weights, objective and effective temperature, which is t/(1 + β) for tilted
# weights and tε/(t + ε) for transported ones. 0.05 is t/(1 + 2β) of `tilted nce`.
cause-tiny on tiny, seeds 0 1 2 3 4: {CAUSE} --fraction 0.4 --size 32 --epochs 6
    uniform nce 0.067: --temperature 0.067
    tilted nce 0.067: --temperature 0.1005 {TILTED} --no-detach-weights
    tilted-held nce 0.067: --temperature 0.1005 {TILTED} --detach-weights
    transported nce 0.067: --temperature 0.1005 {TRANSPORTED} --no-detach-weights
    transported-held nce 0.067: --temperature 0.1005 {TRANSPORTED} --detach-weights
    top nce 0.067: --temperature 0.067 --weights top --alpha 0.3 --no-lead-in
    uniform decoupled 0.067: --temperature 0.067 --objective decoupled
    uniform decoupled 0.05: --temperature 0.05 --objective decoupled
cause on cifar10, seeds 0 1 2 3 4: {CAUSE} --fraction 0.2 --epochs 12
    as cause-tiny
    uniform 1/N 0.067: --temperature 0.067 --tau-plus 0.003953  # 1/(N + 1) for N = 252
    tilted decoupled 0.067: --temperature 0.1005 {TILTED} --no-detach-weights --objective decoupled
    uniform nce 0.045: --temperature 0.045
    uniform decoupled 0.04: --temperature 0.04 --objective decoupled
cause-t on cifar10, seeds 0 1 2: {CAUSE} --fraction 0.2 --epochs 12
    uniform nce 0.133: --temperature 0.133
    tilted-held nce 0.133: --temperature 0.1995 {TILTED} --detach-weights
    tilted nce 0.133: --temperature 0.1995 {TILTED} --no-detach-weights
    uniform nce 0.267: --temperature 0.267
    tilted-held nce 0.267: --temperature 0.4005 {TILTED} --detach-weights
    tilted nce 0.267: --temperature 0.4005 {TILTED} --no-detach-weights
games-10 on cifar10, seeds 0 1 2: --fraction 0.1 --epochs 16 --pretrain 8 {GAMES}  # [3], Table 1
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
    simclr: --loss simclr --temperature 0.1
    tilted: --loss simclr --temperature 0.1 {TILTED}
    hcl: --loss hcl --temperature 0.07 --beta 0.5 --tau-plus 0.01
    ot: --loss ot --temperature 0.07 --epsilon 0.3
    tilted-held: --loss simclr --temperature 0.1 {TILTED} --detach-weights
    simclr 0.067: --loss simclr --temperature 0.067
    hcl 0.1: --loss hcl --temperature 0.1 --beta 0.5 --tau-plus 0.00196078431372549
    hcl 0.2: --loss hcl --temperature 0.2 --beta 2 --tau-plus 0.01
pays-cifar10 on cifar10, seeds 0 1 2 3 4: {SIXTY} --loss simclr
    simclr 0.2: --temperature 0.2
    tilted 0.2: --temperature 0.2 {TILTED}
    simclr 0.1: --temperature 0.1
    simclr 0.4: --temperature 0.4
    tilted 0.4: --temperature 0.4 {TILTED}
    decoupled 0.067: --temperature 0.067 --objective decoupled
pays-decoupled on cifar10, seeds 0 1 2 3 4: {SIXTY} --loss simclr
    decoupled 0.1: --temperature 0.1 --objective decoupled
pays-rates on cifar10, seeds 1 2 3: {SIXTY} --loss simclr  # seed 1 chooses the rows that go on
    simclr 0.1 at {r}: --temperature 0.1 --lr {r}
    tilted 0.2 at {r}: --temperature 0.2 {TILTED} --lr {r}
    {r} = 0.0015 0.006
pays-tiny on tiny, seeds 0 1 2 3 4: --size 32 {SIXTY} --loss simclr
    simclr 0.1: --temperature 0.1
    tilted 0.1: --temperature 0.1 {TILTED}
    simclr 0.2: --temperature 0.2
    tilted 0.2: --temperature 0.2 {TILTED}
"""
SHARED = {  # by several studies; SHORT: 10 000 images of CIFAR-10, LONG: 20 000 of it or of `tiny`
    "SHORT": ["--fraction 0.2 --epochs 12 --batch-size 128 --lr 0.002"],
    "LONG": ["--fraction 0.4 --epochs 10 --lr 0.003"],
    "SIXTY": ["--epochs 60 --batch-size 256 --lr 0.003"],
    "GAMES": ["--batch-size 128 --lr 0.002 --temperature 0.2"],
    "CAUSE": ["--loss simclr --batch-size 128 --lr 0.002"],
    "TILTED": ["--weights tilted --beta 0.5"],
    "TRANSPORTED": ["--weights transported --epsilon 0.201"],
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
    found = re.search(r"{(\w+)}", row + words)
    if not found:
        return {row: words}
    rows = {}
    for value in values[found[1]]:
        rows |= filled(row.replace(found[0], value), words.replace(found[0], value), values)
    return rows


STUDIES = read(TEXT)
