"""Tests of code_search.py."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hardneg
from benchmarks.code_search import group_batches
from test_hardneg import SEEDS, embeddings, seeded


class TestGroupBatches:
    """Groups of neighbours come together, each sample once."""

    @given(**SEEDS, n=st.integers(1, 40), k=st.integers(1, 8), size=st.integers(1, 6))
    def test_is_a_permutation_of_groups(self, seed, n, k, size):
        index = hardneg.mine(*embeddings(seed, 2, n, 3), k)
        order = group_batches(index, size, seeded(seed)).tolist()
        assert sorted(order) == list(range(n))
        assert order == group_batches(index, size, seeded(seed)).tolist()
        if size == 1:
            assert n < 9 or order != list(range(n))
        itself = torch.cat([torch.arange(n)[:, None], index], 1)  # a sample as its own neighbour
        assert order == group_batches(itself, size, seeded(seed)).tolist()

    def test_neighbours_share_a_batch(self):
        """Twenty tight clusters of eight come whole, in random order."""
        centres = embeddings(0, 20, 16).repeat_interleave(8, 0)
        x = centres + 0.01 * embeddings(1, 160, 16)
        order = group_batches(hardneg.mine(x, x, 7), 8, seeded(0))
        clusters = (order // 8).view(20, 8)
        assert (clusters == clusters[:, :1]).all()
        assert clusters[:, 0].tolist() != sorted(clusters[:, 0].tolist())
        order = group_batches(hardneg.mine(x, x, 7), 4, seeded(0))
        halves = (order // 8).view(40, 4)
        assert (halves == halves[:, :1]).all()
        assert (halves[1:, 0] == halves[:-1, 0]).sum() < 10  # a group has four, and not the eight

    def test_groups_have_samples(self):
        with pytest.raises(hardneg.InvalidArgument, match="^size is 0; it must be at least 1"):
            group_batches(torch.arange(6)[:, None], 0)
