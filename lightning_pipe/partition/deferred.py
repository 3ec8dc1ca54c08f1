"""Tensors that are made later, with the values that they would have now.

While a model is built, what is done to its tensors is recorded instead of done; the model's tensors
are on the meta device and take no memory. Later those that are needed are made, by the same
operations. The idea of recording and replaying is that of torchdistX's ``deferred_init``.

Random numbers are drawn at once, into a tensor that is dropped, and the generator's state before
them is kept for the replay. So generators are always where they would be without deferring: draws
that are not deferred, ``torch.manual_seed`` and ``fork_rng`` in between need no care.

Tensors that code wants on the meta device itself are what they always are there: not deferred.

A DTensor is deferred if this rank's part of it is. What ``parallelize_module`` and the like say to
the other ranks that share a layer, to cut its tensors, is recorded as well and said later, by those
that own it: they replay the same operations, so they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Generator, Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_pipe.partition.deferred_parts import (
    draw_whole,
    draws_part,
    dtensor_like,
    local_part,
)
from lightning_pipe.partition.operators import (
    base_name,
    done_work,
    filled_tensors,
    gives_values,
    is_collective,
    tensors_in,
    written_tensors,
)
from lightning_pipe.partition.tape import Constant, Operation, Tape, View

_META = torch.device("meta")
_REAL = torch.empty(0, device="cpu")
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

    Attributes:
        meta_means: Which device an operation is to use that is told to use the meta device: that of
            the deferred tensor from which torch has it, or the meta device if code wants just that.
    """

    def __init__(self) -> None:
        self.meta_means = _META
        self._tape = Tape()
        self._constants: dict[int, list[Constant]] = {}  # by the address of their storage

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Defer what is done to tensors inside, in this thread."""
        with _DispatchMode(self), _FunctionMode(self):
            yield

    def is_deferred(self, tensor: Tensor) -> bool:
        """Tell whether the tensor was left without values by this object."""
        return self._tape.is_deferred(local_part(tensor))

    def device(self, tensor: Tensor) -> torch.device:
        """Tell where a deferred tensor is going to be."""
        return self._tape.device(local_part(tensor))

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Make deferred tensors as they would be by now (see `Tape.values`)."""
        values = self._tape.values(map(local_part, tensors))
        return [dtensor_like(tensor, value) for tensor, value in zip(tensors, values, strict=True)]

    def real(self, tensor: Tensor) -> Tensor:
        """Make a tensor if it is deferred."""
        return self.values([tensor])[0] if self.is_deferred(tensor) else tensor

    def call(self, function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record an operation and return what it returns, deferred; or run it where it must be."""
        tensors = tensors_in((args, kwargs))
        written = written_tensors(function, args, kwargs)
        makes = self._makes(function, tensors, kwargs)
        if _is_meta(kwargs.get("device")):
            kwargs = {**kwargs, "device": self.meta_means}
        concerns = makes or any(map(self.is_deferred, tensors))
        if self._tape.is_running or not concerns or _is_meta(kwargs.get("device")):
            self._spare_constants(written)
            return function(*args, **kwargs)
        if gives_values(function) and not is_collective(function):
            return self._run(function, args, kwargs)
        if written and not all(map(self.is_deferred, written)):
            return self._write_into_real(function, args, kwargs, written)
        if is_collective(function):
            return self._defer_collective(function, args, kwargs, written)
        return self._defer(function, args, kwargs, makes, written)

    def _defer_collective(
        self, function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], written: Any
    ) -> Any:
        if not written:
            raise MisconfigurationException(
                f"configure_model calls {function} on tensors that it has made. They have no "
                "values yet: a rank gives them to those of its own layers, afterwards."
            )
        device = self._tape.device(written[0])
        self._record(function, args, kwargs, False, device, written, {}, None)
        return args[0], done_work()

    def _defer(
        self,
        function: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        makes: bool,
        written: list[Tensor],
    ) -> Any:
        tensors = tensors_in((args, kwargs))
        device = self._device_of(tensors, kwargs)
        try:
            returned = self._run_without_memory(function, args, kwargs, makes)
        except NotImplementedError:  # it has no such way to run
            if not written:
                return self._run(function, args, kwargs)
            returned = written[0] if function._schema.returns else None
        outputs = tensors_in(returned)
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

    def _makes(self, function: OpOverload, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
        """Tell whether an operation makes memory, of which there is none on the meta device."""
        device = kwargs.get("device")
        if _is_meta(device):
            return not _is_meta(self.meta_means)
        if not tensors:
            return any(argument.name == "device" for argument in function._schema.arguments)
        after_meta = device is not None and all(tensor.is_meta for tensor in tensors)
        return after_meta and base_name(function) != "_to_copy"  # which raises

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
        if makes:
            kwargs = {**kwargs, "device": device}
        tensors = tensors_in((args, kwargs))
        overwritten = [t for t in filled_tensors(function, tensors) if self._fills_storage(t)]
        arguments = tree_map_only(Tensor, self._reference, (tuple(args), kwargs))
        read = filter(self.is_deferred, tensors[len(overwritten) :])
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
        tensors = tensors_in((args, kwargs))
        only_shapes = base_name(function).endswith("_like")
        blind = set(map(id, tensors if only_shapes else filled_tensors(function, tensors)))

        def stand_in(tensor: Tensor) -> Tensor:
            return _empty_like(tensor, device) if id(tensor) in blind else self.real(tensor)

        if "device" in kwargs:
            kwargs = {**kwargs, "device": device}
        args, kwargs = tree_map_only(Tensor, stand_in, (tuple(args), kwargs))
        drawn = function(*args, **kwargs)
        self._tape.freed.add(sum(tensor.nbytes for tensor in tensors_in(drawn)))
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
        args, kwargs = tree_map_only(Tensor, self.real, (tuple(args), kwargs))
        return function(*args, **kwargs)

    def _device_of(self, tensors: Iterable[Tensor], kwargs: dict[str, Any]) -> torch.device:
        """Where the operation would run."""
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
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
        if any(map(is_traceable_wrapper_subclass_type, types)):
            if draws_part(func, args) and self._tensors.is_deferred(args[0]):
                with self:
                    return draw_whole(func, args[0], args[1:], kwargs or {})
            return NotImplemented  # then the operations on its parts are seen
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
        tensors, kwargs = self._tensors, kwargs or {}
        if func in _WHERE and tensors.is_deferred(args[0]):
            return _WHERE[func](tensors.device(args[0]))
        deferred = list(filter(tensors.is_deferred, tensors_in((args, kwargs))))
        wants_meta = any(map(_is_meta, tree_leaves((args, kwargs))))
        tensors.meta_means = tensors.device(deferred[0]) if deferred and not wants_meta else _META
        try:
            if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
                args = [tensors.real(args[0]), *args[1:]]
            elif func == Tensor.to and deferred and wants_meta:  # torch thinks that it is there
                args, kwargs = args[:4], {**kwargs, "copy": True}
            elif func == torch._has_compatible_shallow_copy_type:  # if a module's parameter stays
                args = [_REAL if tensors.is_deferred(tensor) else tensor for tensor in args]
            elif func == _SET_DATA:
                tensor, data = args
                if tensors.is_deferred(tensor) and not data.is_meta:
                    args = [tensor, data.to(_META)]
                elif not tensor.is_meta:
                    args = [tensor, tensors.real(data)]
            return func(*args, **kwargs)
        finally:
            tensors.meta_means = _META


def _is_meta(device: Any) -> bool:
    """Tell whether something names the meta device."""
    return isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "meta"


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _default_generator(device: torch.device) -> Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: Generator = module.default_generators[index]
    return generator
