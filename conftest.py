"""Settings of all tests: each has one thread, no cache of the user, and the usual default dtype."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run beside each other
import torch


@pytest.fixture(autouse=True)
def as_usual(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path_factory.getbasetemp() / 'cache'}")
    yield
    torch.set_default_dtype(torch.float32)
