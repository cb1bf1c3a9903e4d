"""Learn to retrieve with negatives of each query's own: python benchmarks/explicit.py

A query and a document are noisy views of one fact, by two random maps. A fact has a topic, which is
easy to see, and a detail, which is not. Documents of other topics, as in a batch, teach the topic.
Documents of the same topic with another detail, given with each query, teach the detail.

The program measures how often the right document is first among those of all details of its topic,
and among one of each topic. The results go to results/explicit.json.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from hardneg import ContrastiveLoss, unit
from training import compare, report

HERE = Path(__file__).resolve().parent
TOPICS, DETAILS, DIM, BATCH, STEPS, SEEDS = 1000, 20, 32, 64, 500, range(5)
ROWS = {  # name: options of the loss, explicit negatives of a query
    "simclr": ({}, 0),
    "hcl": ({"loss": "hcl", "beta": 1.0, "tau_plus": 0.0}, 0),
    "hard": ({"loss": "hard", "alpha": 0.1}, 0),
    "ot": ({"loss": "ot", "epsilon": 0.3}, 0),
    "simclr, 1 given": ({}, 1),
    "simclr, 4 given": ({}, 4),
    "hcl, 4 given": ({"loss": "hcl", "beta": 1.0, "tau_plus": 0.0}, 4),
    "hard, 4 given": ({"loss": "hard", "alpha": 0.1}, 4),
    "ot, 4 given": ({"loss": "ot", "epsilon": 0.3}, 4),
}


class World:
    """Draw queries and documents about facts: a topic and a detail of a tenth of its length."""

    def __init__(self, generator):
        self.generator = generator
        self.topics = 3 * self.noise(TOPICS, DIM)
        self.details = 0.3 * self.noise(DETAILS, DIM)
        self.maps = self.noise(2, 2 * DIM, 2 * DIM) / DIM**0.5

    def noise(self, *shape):
        """Draw normal numbers."""
        return torch.randn(*shape, generator=self.generator)

    def view(self, topic, detail, side):
        """Show facts (…,) as queries, side 0, or documents, side 1 → (…, 2 · DIM)."""
        facts = torch.cat(torch.broadcast_tensors(self.topics[topic], self.details[detail]), -1)
        x = facts @ self.maps[side]
        return x + 0.3 * self.noise(*x.shape)

    def draw(self, *shape):
        """Draw topics and details."""
        return (torch.randint(n, shape, generator=self.generator) for n in (TOPICS, DETAILS))


def learn(options, k, seed):
    """Train two encoders → the accuracy within a topic, and among topics, in percent."""
    torch.manual_seed(seed)
    world = World(torch.Generator().manual_seed(seed))
    sides = nn.ModuleList(
        nn.Sequential(nn.Linear(2 * DIM, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)
    )
    criterion = ContrastiveLoss(**{"temperature": 0.1, **options})
    positive_index = torch.arange(BATCH)  # the row of each query's document
    optimizer = torch.optim.Adam(sides.parameters(), 1e-3)
    for _ in range(STEPS):
        topic, detail = world.draw(BATCH)
        x, y = (encoder(world.view(topic, detail, side)) for side, encoder in enumerate(sides))
        shift = (
            1 + torch.rand(BATCH, DETAILS - 1, generator=world.generator).argsort(1)[:, :k]
        )  # (B, k)
        other = (detail[:, None] + shift) % DETAILS
        n = sides[1](world.view(topic[:, None].expand(-1, k), other, 1)).flatten(0, 1)  # (B k, 64)
        negatives = torch.cat([y, n])
        loss = criterion(x, y, negatives=negatives, positive_index=positive_index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        topic, detail = world.draw(2000)
        x = unit(sides[0](world.view(topic, detail, 0)))
        details = world.view(topic[:, None].expand(-1, DETAILS), torch.arange(DETAILS), 1)
        within = (unit(sides[1](details)) @ x[:, :, None])[..., 0].argmax(1) == detail
        topics = world.view(torch.arange(TOPICS), torch.zeros(TOPICS, dtype=torch.long), 1)
        among = x @ unit(sides[1](topics)).T
        return [100 * float(found.float().mean()) for found in (within, among.argmax(1) == topic)]


def table(found):
    """Write the Markdown table: means ± standard deviations over seeds."""
    lines = [["loss", "right detail of 20, %", "right topic of 1000, %"]]
    for name, values in found.items():
        within, among = zip(*values, strict=True)
        lines.append([name, report.spread(within), report.spread(among)])
    return report.markdown(lines)


if __name__ == "__main__":
    found = {
        name: [learn(options, k, seed) for seed in SEEDS]
        for name, (options, k) in tqdm(ROWS.items())
    }
    (HERE / "results" / "explicit.json").write_text(json.dumps(found) + "\n")
    print(table(found))
    within = {name: [pair[0] for pair in values] for name, values in found.items()}
    print(compare.verdict(compare.runs_of(within)))
