"""Keep tests away from the cache of the user who runs them."""

import pytest


@pytest.fixture(autouse=True)
def no_cache_of_the_user(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path_factory.getbasetemp() / 'cache'}")
