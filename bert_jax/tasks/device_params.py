"""The parameters of opened checkpoints on the devices, where they stay as long as the checkpoint is in use."""

import weakref
from collections.abc import Iterable
from typing import Any

from jax.sharding import Mesh

from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import paths
from bert_jax.train import partitioning

# By checkpoint, and by mesh and path: a caller that predicts several times with one LoadedModel uploads it once.
_UPLOADED: "weakref.WeakKeyDictionary[LoadedModel, dict[tuple[Mesh, str], Any]]" = weakref.WeakKeyDictionary()


def device_params(loaded: LoadedModel, mesh: Mesh, wanted: Iterable[str]) -> dict[str, Any]:
    """The parameters of these paths, nested by module, on the devices of the mesh.

    They are copied once for each mesh, and freed with the LoadedModel; later changes of its arrays have no effect.
    """
    wanted = tuple(wanted)
    held = _UPLOADED.setdefault(loaded, {})
    if missing := {path: loaded.params[path] for path in wanted if (mesh, path) not in held}:
        placed = paths.flatten(partitioning.put(paths.unflatten(missing), mesh))
        held.update({(mesh, path): leaf for path, leaf in placed.items()})
    return paths.unflatten({path: held[mesh, path] for path in wanted})
