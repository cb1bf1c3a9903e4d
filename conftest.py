"""Settings of all tests: each has one thread, and none sees the cache of the user."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run beside each other


@pytest.fixture(autouse=True)
def no_cache_of_the_user(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path_factory.getbasetemp() / 'cache'}")
