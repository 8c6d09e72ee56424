"""Eight CPU devices, a cache of compiled programs, and the fixtures that many tests share.

The text is cut from data_prep/sample; nothing here needs the network, an accelerator or torch.
"""

import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import os
import random
import sys
import typing
from pathlib import Path
from typing import Any

# The tests run each program a few times, so most of their time would go into compiling. Without LLVM's optimization
# passes compiling takes half as long; with XLA's older code generator, which jaxlib has until 0.10, and one LLVM module
# a program it takes a third of that. Tests that train for long, or that test the code users run, start processes of
# their own without these flags. On a GPU, sums have one order, so that a resumed run can equal the whole one.
XLA_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_gpu_deterministic_ops=true",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
CACHE = Path(__file__).parent.parent / ".cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import hypothesis
import jax
import jaxtyping
import pytest
from beartype import beartype

jax.config.update("jax_numpy_rank_promotion", "raise")


def names_arrays(annotation: object) -> bool:
    """Whether jaxtyping has to see this annotation: it holds an array type, or is not evaluated yet."""
    if isinstance(annotation, str) or getattr(type(annotation), "__module__", "").startswith("jaxtyping"):
        return True
    return any(names_arrays(argument) for argument in typing.get_args(annotation))


def check_types(checked: Any = None, *, typechecker: Any = None, by_shape: Any = jaxtyping.jaxtyped) -> Any:
    """What --jaxtyping-packages decorates with: jaxtyping for functions with array types, beartype alone for others.

    jaxtyping binds the arguments of a call to the signature, for the shapes in it. Where the annotations have none,
    that checks nothing more and took a tenth of the suite's CPU time.
    """
    if checked is None:
        return functools.partial(check_types, typechecker=typechecker)
    if inspect.isfunction(checked) and not any(map(names_arrays, checked.__annotations__.values())):
        by_type = None  # made at the first call: most of the 4,000 functions have none in one process

        @functools.wraps(checked)
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal by_type
            if by_type is None:
                by_type = beartype(checked)
            return (checked if jaxtyping.config.jaxtyping_disable else by_type)(*arguments, **named)

        return call
    return by_shape(checked, typechecker=typechecker)


jaxtyping.jaxtyped = check_types  # before the first import of the packages

from tiny_runs import environment

from bert_jax.config import ModelConfig

# An example may take as long as it takes on a loaded machine: no test here is about time.
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=50)
hypothesis.settings.load_profile("untimed")

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "data_prep" / "sample"
SAMPLE_DOCUMENTS = 12
SAMPLE_CHARACTERS = 6000  # of each document


# Files whose tests take longest, so that no worker begins one while the others have nothing left to do.
LONGEST = ("test_loop", "test_finetune", "test_step", "test_pretrain", "test_build_examples", "test_checkpoint")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first; workers take files in this order (--no-loadscope-reorder)."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Leaves the modules that are now imported out of garbage collection: it took a second each time it ran."""
    gc.freeze()


@pytest.fixture(scope="session")
def sample_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of twelve documents, each the beginning of a chapter of the sample."""
    from data_prep.readers import corpus as readers

    documents: list[str] = []
    for path in readers.expand(str(SAMPLE / "books" / "*.txt.xz")):
        for document in readers.documents(path):
            if len(document) > SAMPLE_CHARACTERS:
                documents.append(document[:SAMPLE_CHARACTERS].rsplit("\n", 1)[0])
            if len(documents) == SAMPLE_DOCUMENTS:
                break
        if len(documents) == SAMPLE_DOCUMENTS:
            break
    path = tmp_path_factory.mktemp("sample") / "text.txt"
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(sample_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's paragraphs shuffled into 120 documents of several, about 0.3 MB: enough for many units."""
    from data_prep.readers import corpus as readers

    paragraphs = [line for document in readers.documents(sample_text) for line in document.split("\n")]
    generator = random.Random(0)
    documents = ["\n".join(generator.sample(paragraphs, min(9, len(paragraphs)))) for _ in range(120)]
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def vocab_dir(sample_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder of 1000 ids, trained on sample_text."""
    from data_prep import vocabulary
    from data_prep.vocabulary import TokenizerOptions

    directory = tmp_path_factory.mktemp("tokenizer") / "vocab"
    vocabulary.train(TokenizerOptions(sample_text, directory, vocab_size=1000, lowercase=True, strip_accents=True))
    return directory


@pytest.fixture(scope="session")
def shards_dir(sample_text: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of build_examples on sample_text: nsp, T=64, dynamic masking of whole words, about a fifth held out."""
    from bert_jax.commands import build_examples

    directory = tmp_path_factory.mktemp("shards") / "shards"
    build_examples.main(
        [
            f"--input={sample_text}",
            f"--tokenizer={vocab_dir}",
            f"--output={directory}",
            "--seq_len=64",
            "--objective=nsp",
            "--masking=dynamic",
            "--mask_unit=word",
            "--eval_fraction=0.25",
            "--workers=1",
        ]
    )
    return directory


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """An architecture for tests: two layers, odd enough to catch a confusion of axes."""
    return ModelConfig(vocab_size=1000, layers=2, width=32, heads=4, feed_forward=48, max_positions=64)


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this test use one device instead of eight, which is cheaper for tests that are not about meshes."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)


@pytest.fixture
def nvidia_gpu() -> None:
    """Skips the test on a machine without an NVIDIA GPU, or where jax does not use it."""
    from bert_jax.model.runtime import detailed_platform

    if detailed_platform(jax.devices()[0].client) != "cuda":
        pytest.skip("jax has no NVIDIA GPU here; with one, run: make accelerator")


@pytest.fixture
def one_device_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this test starts have one device, as on a user's machine, instead of eight."""
    jax.devices()  # those of this process are counted when they are first used
    monkeypatch.setenv("XLA_FLAGS", environment(1)["XLA_FLAGS"])


@pytest.fixture
def bert_jax_data() -> Path:
    """The folder of real data; skips the test if BERT_JAX_DATA is not set."""
    if "BERT_JAX_DATA" not in os.environ:
        pytest.skip("BERT_JAX_DATA is not set: it names the folder of real corpora and benchmarks")
    return Path(os.environ["BERT_JAX_DATA"])


@pytest.fixture(scope="session")
def peer_python() -> str:
    """A Python with torch and transformers: this one, or that of BERT_JAX_PEER_PYTHON; else a skip."""
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        return sys.executable
    if not os.environ.get("BERT_JAX_PEER_PYTHON"):
        pytest.skip("torch and transformers are not installed, and BERT_JAX_PEER_PYTHON names no Python that has them")
    return os.environ["BERT_JAX_PEER_PYTHON"]
