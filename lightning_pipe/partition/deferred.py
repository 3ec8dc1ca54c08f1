"""Tensors that are made later, with the values that they would have now.

While a model is built, what is done to its tensors is recorded instead of done; the model's tensors
are on the meta device and take no memory. Later those that are needed are made, by the same
operations. The idea of recording and replaying is that of torchdistX's ``deferred_init``.

Random numbers are drawn at once, into a tensor that is dropped, and the generator's state before
them is kept for the replay. So generators are always where they would be without deferring: draws
that are not deferred, ``torch.manual_seed`` and ``fork_rng`` in between need no care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Generator, Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_pipe.partition.tape import Constant, Operation, Tape, View

_META = torch.device("meta")
# What they fill does not matter to them, nor how many random numbers they draw.
_FILLS = {
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_"),
    *("geometric_", "zero_", "fill_", "copy_"),
}
# Their results are Python's, or as large as the values say.
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operations whose schema does not say that they change these arguments.
_CHANGED_SILENTLY = {
    name: ("running_mean", "running_var")
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# Questions that are answered as if the tensor was there (nn.init skips tensors on the meta device).
_WHERE: dict[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}


class DeferredTensors:
    """Records how tensors are made, and makes those that are asked for.

    Where code asks a deferred tensor for values (``.item()``, ``if tensor.any()``), they are
    computed on the spot, in memory that is freed afterwards. Tensors that are made from data
    (``torch.tensor([...])``, ``torch.load``) are not deferred.

    Args:
        device: Where tensors are to be that do not say so themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tape = Tape()
        self._constants: dict[int, list[Constant]] = {}  # by the address of their storage

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Defer what is done to tensors inside, in this thread."""
        with _DispatchMode(self), _FunctionMode(self):
            yield

    def is_deferred(self, tensor: Tensor) -> bool:
        """Tell whether the tensor was left without values by this object."""
        return self._tape.is_deferred(tensor)

    def device(self, tensor: Tensor) -> torch.device:
        """Tell where a deferred tensor is going to be."""
        return self._tape.device(tensor)

    def values(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Make deferred tensors as they would be by now (see `Tape.values`)."""
        return self._tape.values(tensors)

    def call(self, function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record an operation and return what it returns, deferred; or run it where it must be."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [tensor for tensor in _written(function, args, kwargs)]
        names = {argument.name for argument in function._schema.arguments}
        makes = "device" in names and (not tensors or kwargs.get("device") == _META)
        if self._tape.is_running or not (makes or any(map(self.is_deferred, tensors))):
            self._spare_constants(written)
            return function(*args, **kwargs)
        if _VALUE_TAGS & set(function.tags) or not _returns_tensors(function):
            return self._run(function, args, kwargs)
        if written and not all(map(self.is_deferred, written)):
            return self._write_into_real(function, args, kwargs, written)
        device = self._device_of(tensors, kwargs)
        try:
            returned = self._run_without_memory(function, args, kwargs, makes)
        except NotImplementedError:  # it has no such way to run
            if not written:
                return self._run(function, args, kwargs)
            returned = written[0] if function._schema.returns else None
        outputs = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
        if any(output.layout != torch.strided for output in outputs):
            return self._run(function, args, kwargs)
        if not tensors and not any(output.numel() for output in outputs):
            return function(*args, **{**kwargs, "device": device})  # a place for real memory
        new = {i: o for i, o in enumerate(outputs) if not self.is_deferred(o)}
        random = self._draw(function, args, kwargs, device)
        for output in new.values():
            self._tape.register(output, device)
        if new or written:
            self._record(function, args, kwargs, makes, device, written, new, random)
        return returned

    def _record(
        self,
        function: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        makes: bool,
        device: torch.device,
        written: list[Tensor],
        new: dict[int, Tensor],
        random: tuple[Generator, Tensor] | None,
    ) -> None:
        if makes or kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": device}
        overwritten = set()
        if _base_name(function) in _FILLS and self._fills_storage(written[0]):
            overwritten = {id(written[0])}
        arguments = tree_map_only(Tensor, self._reference, (tuple(args), kwargs))
        read = [
            leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and id(leaf) not in overwritten and self.is_deferred(leaf)
        ]
        outputs = {index: self._tape.view(tensor) for index, tensor in new.items()}
        keys = [tensor.untyped_storage()._cdata for tensor in written]
        self._tape.add(
            Operation(
                function,
                arguments,
                outputs,
                frozenset(tensor.untyped_storage()._cdata for tensor in read),
                frozenset([*keys, *(view.storage for view in outputs.values())]),
                frozenset(keys if overwritten else ()),
                torch.get_default_dtype(),
                random,
            )
        )

    def _run_without_memory(
        self, function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], makes: bool
    ) -> Any:
        """Return what the operation returns, on the meta device."""
        if makes or kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}

        def without_memory(tensor: Tensor) -> Tensor:
            return tensor if tensor.is_meta else _empty_like(tensor, _META)

        args, kwargs = tree_map_only(Tensor, without_memory, (tuple(args), kwargs))
        return function(*args, **kwargs)

    def _draw(
        self,
        function: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> tuple[Generator, Tensor] | None:
        """Take the random numbers that an operation takes; return the state before them."""
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return None
        generator = kwargs.get("generator") or _default_generator(device)
        state = generator.get_state()
        name = _base_name(function)
        blind = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in _FILLS:
            blind = blind[:1]
        elif not name.endswith("_like"):
            blind = []
        ids = {id(tensor) for tensor in blind}

        def stand_in(tensor: Tensor) -> Tensor:
            return _empty_like(tensor, device) if id(tensor) in ids else self._real(tensor)

        if "device" in kwargs:
            kwargs = {**kwargs, "device": device}
        args, kwargs = tree_map_only(Tensor, stand_in, (tuple(args), kwargs))
        drawn = function(*args, **kwargs)
        self._tape.freed.add(sum(t.nbytes for t in tree_leaves(drawn) if isinstance(t, Tensor)))
        return generator, state

    def _write_into_real(
        self,
        function: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        written: list[Tensor],
    ) -> Any:
        if any(map(self.is_deferred, written)):
            raise MisconfigurationException(
                f"configure_model calls {function} to change tensors that it has made together "
                "with such that were there before. Change them in two calls."
            )
        self._spare_constants(written)
        return self._run(function, args, kwargs)

    def _run(self, function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation with values, for which what it reads is made."""
        if kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": self._device}
        args, kwargs = tree_map_only(Tensor, self._real, (tuple(args), kwargs))
        return function(*args, **kwargs)

    def _real(self, tensor: Tensor) -> Tensor:
        return self.values([tensor])[0] if self.is_deferred(tensor) else tensor

    def _device_of(self, tensors: Iterable[Tensor], kwargs: dict[str, Any]) -> torch.device:
        """Where the operation would run."""
        device = kwargs.get("device")
        if device is not None:
            return self._device if torch.device(device) == _META else torch.device(device)
        for tensor in tensors:
            if self.is_deferred(tensor):
                return self._tape.device(tensor)
        return torch.device("cpu")  # torch has filled in any other default

    def _reference(self, tensor: Tensor) -> View | Constant:
        if self.is_deferred(tensor):
            return self._tape.view(tensor)
        constant = Constant(tensor.detach())
        if tensor.layout == torch.strided:
            key = tensor.untyped_storage()._cdata
            self._constants.setdefault(key, []).append(constant)
        return constant

    def _spare_constants(self, written: Iterable[Tensor]) -> None:
        """Keep the values that operations have read, before a tensor is overwritten."""
        for tensor in written:
            if self._constants and tensor.layout == torch.strided:
                for constant in self._constants.pop(tensor.untyped_storage()._cdata, ()):
                    constant.tensor = constant.tensor.clone()

    def _fills_storage(self, tensor: Tensor) -> bool:
        return tensor.nbytes == tensor.untyped_storage().nbytes() and tensor.is_contiguous()


class _DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation, also those inside of torch's own functions."""

    def __init__(self, tensors: DeferredTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._tensors.call(func, args, kwargs or {})


class _FunctionMode(TorchFunctionMode):
    """Sees what Python does to tensors without an operation."""

    def __init__(self, tensors: DeferredTensors) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _WHERE and self._tensors.is_deferred(args[0]):
            return _WHERE[func](self._tensors.device(args[0]))
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            args = [self._real(args[0]), *args[1:]]
        elif func == _SET_DATA:
            tensor, data = args
            if self._tensors.is_deferred(tensor) and not data.is_meta:
                args = [tensor, data.to(_META)]
            elif not tensor.is_meta:
                args = [tensor, self._real(data)]
        return func(*args, **(kwargs or {}))

    def _real(self, tensor: Tensor) -> Tensor:
        if not self._tensors.is_deferred(tensor):
            return tensor
        return self._tensors.values([tensor])[0]


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _written(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation changes."""
    for place, name in _written_arguments(function):
        value = args[place] if place < len(args) else kwargs.get(name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


@cache
def _written_arguments(function: OpOverload) -> list[tuple[int, str]]:
    silently = _CHANGED_SILENTLY.get(_base_name(function), ())
    return [
        (place, argument.name)
        for place, argument in enumerate(function._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in silently
    ]


@cache
def _returns_tensors(function: OpOverload) -> bool:
    return all("Tensor" in str(returned.type) for returned in function._schema.returns)


def _base_name(function: OpOverload) -> str:
    return str(function.overloadpacket.__name__)


def _default_generator(device: torch.device) -> Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: Generator = module.default_generators[index]
    return generator
