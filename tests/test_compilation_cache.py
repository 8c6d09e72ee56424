import jax
import pytest

from bert_jax.train import compilation_cache


@pytest.fixture(autouse=True)
def cache_of_the_tests():
    folder = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


def test_programs_are_kept_in_the_user_s_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(compilation_cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilation_cache.enable_compilation_cache() == tmp_path / "bert_jax" / "programs"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "bert_jax" / "programs")


@pytest.mark.parametrize("value", ["", "gs://bucket/programs"])
def test_jax_s_own_variable_decides_where_it_is_set(monkeypatch, value):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv(compilation_cache.VARIABLE, value)
    assert compilation_cache.enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir == before


def test_a_cache_that_cannot_be_made_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv(compilation_cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compilation_cache.enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir == before
