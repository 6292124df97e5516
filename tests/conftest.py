"""Strict settings for all tests: two CPU devices, no implicit promotion, no reused keys."""

import os

import pytest

pytest.register_assert_rewrite("verify_tools")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Most of the tests' time is compiling programs that run for a moment; commands inherit this.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)


def pytest_configure(config):
    # A warning raised in advdet's or experiments' own lines is an error.
    config.addinivalue_line("filterwarnings", "error:::advdet")
    config.addinivalue_line("filterwarnings", "error:::experiments")


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """A cache folder of the tests' own, the same for all of them; a module may set another."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADVDET_CACHE", str(folder))
        yield folder


@pytest.fixture
def rng():
    """NumPy's legacy generator, whose stream is frozen."""
    return np.random.RandomState(0)
