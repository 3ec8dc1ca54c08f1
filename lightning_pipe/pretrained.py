"""Load pretrained weights, each rank only those of its own stages.

Layers that `configure_model` builds are deferred: what is done to their tensors is recorded, and
done later on the rank that owns them (``partition/deferred.py``). So reading a tensor of a file is
made an operation like any other. It is recorded where a rank does not know yet what it will own,
and what is never needed is never read; of every file a rank reads the header, which has all names
and shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SHOWN = 8  # names in an error

Paths = str | Path | Sequence[str | Path]
Rename = Callable[[str], str | None]


class LoadedNames(NamedTuple):
    """What did not fit, with ``strict=False``.

    Attributes:
        missing: Names of the module for which the files have no tensor.
        unexpected: Names in the files (renamed) that the module does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class _Entry(NamedTuple):
    """Where a tensor is."""

    file: Path
    name: str
    shape: tuple[int, ...]


def load_safetensors(
    module: nn.Module, paths: Paths, rename: Rename | None = None, strict: bool = True
) -> LoadedNames:
    """Load parameters and buffers from safetensors files.

    Call it in ``configure_model``, after the layers are built, or on a part of them::

        def configure_model(self):
            self.model = GPT2LMHeadModel(config)
            load_safetensors(self.model, "gpt2/")

    In a pipeline each rank then reads the tensors of its own stages, and no others. Without one,
    or anywhere else than in ``configure_model``, all are read at once. Values are converted to the
    dtype of the module's tensors.

    Args:
        module: Gets the values.
        paths: A file, or several; the index of a checkpoint in several files
            (``model.safetensors.index.json``); or a directory that has either.
        rename: Gives for a name in the files that in ``module``; ``None`` leaves the tensor out.
        strict: Whether every tensor of the module and of the files must have its counterpart. Of
            tied parameters, one name is enough.

    Returns:
        The names without counterpart.

    Raises:
        MisconfigurationException: There are such names and ``strict`` is set; a shape differs; two
            tensors of the files have one name; a file is not there, or is none of safetensors.
    """
    found = _renamed(_entries(_files(paths)), rename)
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    missing = [n for names in names_of.values() if found.keys().isdisjoint(names) for n in names]
    unexpected = [name for name in found if name not in tensors]
    wanted = {name: found[name] for name in tensors if name in found}
    _refuse_shapes(wanted, tensors)
    _refuse_parts(wanted, tensors)
    if strict and (missing or unexpected):
        raise MisconfigurationException(_misfit(module, paths, missing, unexpected))
    with torch.no_grad():
        for name, entry in wanted.items():
            _load(tensors[name], entry)
    return LoadedNames(tuple(missing), tuple(unexpected))


def _refuse_parts(wanted: Mapping[str, _Entry], tensors: Mapping[str, Tensor]) -> None:
    for name in wanted:
        if isinstance(tensors[name], DTensor):
            raise MisconfigurationException(
                f"load_safetensors: {name!r} is cut already, into parts for several ranks. Load "
                "before `parallelize_module`, which then cuts what was read."
            )


def _load(tensor: Tensor, entry: _Entry) -> None:
    if tensor.is_meta:  # of another rank's layer; one that is deferred says where it will be
        return
    read = torch.ops.lightning_pipe.read_safetensor
    tensor.copy_(read(str(entry.file), entry.name, list(entry.shape), tensor.dtype, device="cpu"))


# ------------------------------------------------------------------------------------ the operation

# As long as this is alive, so is the operation.
_LIBRARY = torch.library.Library("lightning_pipe", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "read_safetensor(str file, str name, int[] shape, ScalarType dtype, *, Device device) -> Tensor"
)


def _read_safetensor(
    file: str, name: str, shape: list[int], dtype: torch.dtype, *, device: torch.device
) -> Tensor:
    if device.type == "meta":  # what it would look like
        return torch.empty(shape, dtype=dtype, device=device)
    return read_tensor(file, name).to(device, dtype, copy=True)  # not a view of the mapped file


_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "read_safetensor", _read_safetensor, "CompositeExplicitAutograd"
)


def read_tensor(file: str, name: str) -> Tensor:
    """Read one tensor of a file: no other part of it but the header."""
    with _safe_open()(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _safe_open() -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise MisconfigurationException(
            "load_safetensors needs the package safetensors: pip install "
            "'lightning-pipe[pretrained]'."
        ) from None
    return safe_open


# ---------------------------------------------------------------------------------------- the files


def _files(paths: Paths) -> list[Path]:
    """The safetensors files that are meant, each once."""
    if not isinstance(paths, (str, Path)):
        return list(dict.fromkeys(file for path in paths for file in _files(path)))
    path = Path(paths)
    if path.is_dir():
        inside = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        if not inside:
            raise MisconfigurationException(
                f"The directory {str(path)!r} has neither {_INDEX} nor {_SINGLE}: give the files."
            )
        path = inside[0]
    if not path.is_file():
        raise MisconfigurationException(f"There is no file {str(path)!r} to load weights from.")
    if path.suffix != ".json":
        return [path]
    weight_map = json.loads(path.read_text()).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise MisconfigurationException(
            f"{str(path)!r} is no index of safetensors files: it has no 'weight_map'."
        )
    return [_files(path.parent / name)[0] for name in dict.fromkeys(weight_map.values())]


def _entries(files: Iterable[Path]) -> Iterable[_Entry]:
    for file in files:
        try:
            with _safe_open()(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    yield _Entry(file, name, tuple(opened.get_slice(name).get_shape()))
        except MisconfigurationException:
            raise
        except Exception as error:  # safetensors has an exception of its own
            raise MisconfigurationException(
                f"{str(file)!r} cannot be read as a safetensors file: {error}."
            ) from error


def _renamed(entries: Iterable[_Entry], rename: Rename | None) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for entry in entries:
        name = entry.name if rename is None else rename(entry.name)
        if name is None:
            continue
        if name in found:
            first = found[name]
            raise MisconfigurationException(
                f"Two tensors are to be loaded as {name!r}: {first.name!r} of {str(first.file)!r} "
                f"and {entry.name!r} of {str(entry.file)!r}. Let `rename` return None for one."
            )
        found[name] = entry
    return found


# --------------------------------------------------------------------------------------- the errors


def _refuse_shapes(wanted: Mapping[str, _Entry], tensors: Mapping[str, Tensor]) -> None:
    wrong = [
        f"{name!r} is {list(entry.shape)} in the file and {list(tensors[name].shape)} in the module"
        for name, entry in wanted.items()
        if entry.shape != tuple(tensors[name].shape)
    ]
    if wrong:
        raise MisconfigurationException(
            f"Tensors have another shape than the module's: {_some(wrong)}. Build the module with "
            "the sizes of the checkpoint, or leave them out: `rename` returns None, strict=False."
        )


def _misfit(
    module: nn.Module, paths: Paths, missing: Sequence[str], unexpected: Sequence[str]
) -> str:
    problems = []
    if missing:
        problems.append(f"have no tensor for {_some([repr(name) for name in missing])}")
    if unexpected:
        names = _some([repr(name) for name in unexpected])
        problems.append(f"have {names}, which the module has not")
    return (
        f"The weights in {paths!s} do not fit {type(module).__name__}: they "
        f"{', and '.join(problems)}. Map the names with `rename`, or load what fits with "
        "strict=False."
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
