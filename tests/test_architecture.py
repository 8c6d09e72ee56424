"""The modules of bert_jax and data_prep import each other in one direction, imports inside functions included."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

# As in docs/architecture.md: a package imports packages of its own layer and of those above it. Modules that no layer
# names are the last layer: the commands, and the functions of `import bert_jax`.
LAYERS = (
    (
        *("bert_jax.errors", "bert_jax.command_line", "bert_jax.extensions", "bert_jax.host"),
        *("bert_jax.shapes", "bert_jax.array_types"),
    ),
    ("bert_jax.progress",),
    ("bert_jax.config", "bert_jax.storage"),
    ("bert_jax.tokenization",),
    ("bert_jax.data",),
    ("bert_jax.model",),
    ("bert_jax.train",),
    ("bert_jax.lineage",),
    ("bert_jax.interop",),
    ("bert_jax.tasks",),
    ("bert_jax.reporting",),
    ("bert_jax.planning", "data_prep"),
)
# Data preparation runs where there is no jax, and so do the layers above the model.
WITHOUT_JAX = (*(package for layer in LAYERS[:5] for package in layer), "data_prep", "bert_jax.reporting.page")

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("bert_jax", "data_prep")
    for path in sorted((ROOT / package).rglob("*.py"))
}
IMPORT_WITHOUT_JAX = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # an extra that is not installed
        assert not (error.name or "").startswith(("bert_jax", "data_prep")), error
    unwanted = {"jax", "jaxlib", "jaxtyping", "flax", "tensorflow", "torch"}
    found = {module.split(".")[0] for module in sys.modules} & unwanted
    assert not found, f"{name} imports {found}"
"""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below one, without those that only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from statements(child)


def imported(path: Path) -> set[str]:
    """The modules of both packages that a file imports."""
    modules = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules.update(name if name in MODULES else node.module or "" for name in names)
    return modules & MODULES.keys()


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def layer(module: str) -> int:
    if module == "bert_jax":  # it has the version, and imports what a user names
        return 0
    return next((number for number, packages in enumerate(LAYERS) if is_in(module, packages)), len(LAYERS))


IMPORTED = {module: imported(path) for module, path in MODULES.items()}


def test_modules_form_no_circle():
    graphlib.TopologicalSorter(IMPORTED).prepare()  # raises CycleError, which names the modules


def test_packages_import_only_layers_above_them():
    wrong = [
        f"{module} imports {other}"
        for module, others in IMPORTED.items()
        for other in others
        if layer(other) > layer(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_of_the_table_exists():
    assert MODULES.keys() >= {package for packages in LAYERS for package in packages}


def test_packages_before_the_model_and_data_preparation_import_no_jax():
    """Nor what only annotates."""
    modules = [module for module in MODULES if is_in(module, WITHOUT_JAX)]
    subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_JAX, *modules], cwd=ROOT, check=True, timeout=120)
