"""A pretend accelerator on torch's PrivateUse1 key: tensors that say they are on `gpu:0` and compute on CPU storage.

What it shows (and docs/gpu.md lists what it cannot): tensors on different devices in one operation raise; every copy to
or from the host and every operation that would make the host wait for the device is counted with the place in the code
that asked for it; a copy to pinned memory that nobody has waited for holds values that are wrong. Numbers, gradients,
optimizers and gloo are real.

`install` changes the process for good: call it in a process of the test's own (`on_accelerator`).
"""

import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from distributed import run_distributed
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

READS_SIZES = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::equal",
        "aten::masked_select",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::bincount",
    }
)
"""Operations whose result, or its size, the host has to know before it can go on."""
HOST_COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::_copy_from"})

synchronisations: Counter[tuple[str, str]] = Counter()
"""How often the host would have waited for the device since `clear`, by (kind, place in the code)."""
_pinned: "dict[int, weakref.ref[torch.UntypedStorage]]" = {}
_pending: deque[tuple[int, Tensor, Tensor]] = deque()
"""Copies to pinned memory that have not happened: (number, where to, what)."""
_lock = threading.Lock()
_num_issued = 0
_hook_errors: list[BaseException] = []
"""What hooks raised in the backward pass that runs."""


class PretendTensor(torch.Tensor):
    """A tensor on the pretend accelerator, around a CPU tensor that only this file knows."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "PretendTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("gpu", 0),
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"PretendTensor({list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, PretendTensor) for kind in types):
            return NotImplemented  # On a real device tensors have no class of their own.
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                _replace(*args)
                return None
            if func is torch.Tensor.data.__get__:  # type: ignore[attr-defined]
                return args[0].detach()
            if func is torch.Tensor.tolist:
                return args[0].cpu().tolist()
            if func in (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr):
                raise TypeError(f"{func.__name__}: a tensor on gpu:0 has no memory on the host; copy it first")
            if func in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
                return func(args[0], _keeping_errors(args[1]))
            if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
                return _raising_kept(func)(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def _keeping_errors(hook: Callable[..., Any]) -> Callable[..., Any]:
    """What a hook raises comes out when the backward pass has ended. While it came through the engine, the engine would
    call this device's module, whose functions are Python, and end the process."""

    def called(*args: Any) -> Any:
        try:
            return hook(*args)
        except BaseException as error:
            _hook_errors.append(error)

    return called


def _raising_kept(backward: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        _hook_errors.clear()
        done = backward(*args, **kwargs)
        if _hook_errors:
            error = _hook_errors[0]
            _hook_errors.clear()
            try:
                raise error
            finally:
                del error  # Its frames hold this one.
        return done

    return called


def _replace(tensor: Tensor, other: Tensor) -> None:
    """`tensor.data = other`."""
    assert isinstance(tensor, PretendTensor)
    if not isinstance(other, PretendTensor):
        raise RuntimeError("tensor.data: the new one is on another device")
    torch.Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]
    tensor.inner = other.inner


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
    on_host = [tensor for tensor in tensors if not isinstance(tensor, PretendTensor)]
    if name == "aten::record_stream":
        return None
    if any(tensor.is_meta for tensor in on_host):
        # The Meta backend comes before all others, on whatever device the other tensors are.
        return func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if name in HOST_COPIES:
        return _copied(func, name, args, kwargs)
    if here and any(tensor.dim() and tensor.numel() for tensor in on_host):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found gpu:0 and cpu")
    _count(name, args, kwargs)
    given = tree_map(_inner, args)
    if name == "aten::histc" and not given[0].is_floating_point():  # CPUs count floats only.
        made = func(given[0].float(), *given[1:], **_on_host(kwargs)).to(given[0].dtype)
    else:
        made = func(*given, **_on_host(kwargs))
    known = {id(tensor.inner): tensor for tensor in here}

    def outer(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else PretendTensor(leaf)

    return tree_map(outer, made)


def _count(name: str, args: Any, kwargs: Any) -> None:
    if name in READS_SIZES:
        _noted(name.removeprefix("aten::").lstrip("_"))
    elif name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            _noted("boolean index")
    elif name == "aten::histc" and len(args) < 4:  # Looks for the ends of the range.
        _noted("histc")
    elif name == "aten::repeat_interleave" and not any(isinstance(v, int) for v in (*args, *kwargs.values())):
        _noted("repeat_interleave")


def _copied(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A copy on the device, or between it and the host."""
    to_host = not isinstance(args[0], PretendTensor)
    if name == "aten::_to_copy":
        target = kwargs.get("device")
        to_host = target is not None and torch.device(target).type == "cpu"
        source, is_async = args[0], bool(kwargs.get("non_blocking"))
    else:
        source, is_async = args[1], bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
    from_host = not isinstance(source, PretendTensor)
    if name == "aten::_to_copy" and to_host:
        # Without a wait the result is pinned, as on CUDA.
        result = torch.empty_like(source.inner, dtype=kwargs.get("dtype") or source.dtype)
        if is_async:
            _mark_pinned(result)
        _leave(result, source.inner.to(result.dtype), is_async=is_async)
        return result
    if name != "aten::_to_copy" and to_host:
        _leave(args[0], source.inner, is_async=is_async)
        return args[0]
    if from_host and is_pinned(source):
        _arrive(_last_into(source))  # Whoever copies back what he copied out does both in one order.
    if from_host and source.numel() and not (is_async and is_pinned(source)):
        _noted("copy from pinned memory, waited for" if is_pinned(source) else "copy from pageable memory")
    made = func(*tree_map(_inner, args), **_on_host(kwargs))
    return PretendTensor(made) if name == "aten::_to_copy" else args[0]


def _leave(target: Tensor, values: Tensor, *, is_async: bool) -> None:
    """Copies to the host. What is not waited for arrives when somebody waits for an event or for the device."""
    global _num_issued
    if not is_async or not is_pinned(target):
        _noted("copy to the host")
        target.copy_(values)
        return
    with _lock:
        _num_issued += 1
        _pending.append((_num_issued, target, values.clone()))
        target.fill_(float("nan") if target.is_floating_point() else -77 if target.dtype.is_signed else 77)


def _last_into(tensor: Tensor) -> int:
    """The last pending copy into the tensor's memory; 0: there is none."""
    storage = tensor.untyped_storage()
    return max((number for number, target, _ in tuple(_pending) if target.untyped_storage() is storage), default=0)


def _arrive(number: int) -> None:
    with _lock:
        while _pending and _pending[0][0] <= number:
            _, target, values = _pending.popleft()
            target.copy_(values)


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, PretendTensor) else leaf


def _on_host(kwargs: Any) -> dict[str, Any]:
    own = {key: tree_map(_inner, value) for key, value in kwargs.items()}
    if own.get("device") is not None:
        own["device"] = torch.device("cpu")
    own.pop("pin_memory", None)
    return own


# Synchronisations -----------------------------------------------------------------------------------------------------


def _noted(kind: str) -> None:
    synchronisations[kind, _place()] += 1


def _place() -> str:
    """The innermost line of code outside of torch; before it, where that is a library's, the innermost of motet's."""
    frame: Any = sys._getframe(2)
    library = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if "/motet/" in path:
            own = f"{path.partition('/src/')[2] or path}:{frame.f_lineno}"
            return f"{own} -> {library}" if library else own
        if not library and "/torch/" not in path and path not in (__file__, "<string>"):
            library = f"{path.rpartition('site-packages/')[2].rpartition('/tests/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return library or "backward pass"


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Counts the synchronisations of the block."""
    synchronisations.clear()
    found: Counter[tuple[str, str]] = Counter()
    yield found
    found.update(synchronisations)


# Pinned memory --------------------------------------------------------------------------------------------------------


def _mark_pinned(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    _pinned[id(storage)] = weakref.ref(storage)
    return tensor


def is_pinned(tensor: Tensor, *_: Any, **__: Any) -> bool:
    if isinstance(tensor, PretendTensor):
        return False
    storage = tensor.untyped_storage()
    known = _pinned.get(id(storage))
    return known is not None and known() is storage


def _pin_memory(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    if isinstance(tensor, PretendTensor):
        raise RuntimeError("cannot pin a tensor of gpu:0; only dense CPU tensors can be pinned")
    return tensor if is_pinned(tensor) else _mark_pinned(tensor.clone())


def _pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A creation function that knows `pin_memory`."""

    def created(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        return _mark_pinned(made) if pin_memory else made

    return created


def _resizing(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A creation function that makes its result empty, and gives it its size afterwards."""

    def created(*args: Any, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        return PretendTensor(made.inner) if isinstance(made, PretendTensor) else made

    return created


def _moving(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` and `torch.as_tensor`, which switch subclasses off while they copy to a device."""

    def created(*args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        made = _pinning(make)(*args, **kwargs)
        made = made if device is None else made.to(device)
        return made.requires_grad_() if requires_grad else made

    return created


def _keeping_ties(move: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.to`: on the way to a real device parameters stay the same objects, with other memory."""

    def moved(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        torch.__future__.set_swap_module_params_on_conversion(device is not None and device.type == "gpu")
        try:
            return move(module, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return moved


# Streams, events, the device's module ---------------------------------------------------------------------------------


class PretendEvent:
    """Has happened when somebody waited for it; copies to the host that were issued before it have then arrived."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **_: Any) -> None:
        self._number, self.enable_timing, self._seconds = 0, enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        self._number, self._seconds = _num_issued, time.perf_counter()

    def synchronize(self) -> None:
        if any(number <= self._number for number, _, _ in tuple(_pending)):
            _noted("wait for an event")
        _arrive(self._number)

    def query(self) -> bool:
        return not any(number <= self._number for number, _, _ in tuple(_pending))

    def wait(self, stream: Any = None) -> None:
        """Another stream waits, not the host."""

    def elapsed_time(self, end: "PretendEvent") -> float:
        assert self.enable_timing
        assert end.enable_timing
        return (end._seconds - self._seconds) * 1e3


def _synchronize(device: Any = None) -> None:
    _noted("synchronize")
    _arrive(_num_issued)


class PretendStream:
    """Computes at once, as every stream here."""


class _DeviceModule:
    """`torch.gpu`."""

    Event = PretendEvent
    Stream = PretendStream

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        assert torch.device(device) == torch.device("gpu", 0) if not isinstance(device, int) else device == 0

    def device(self, index: Any) -> Any:
        return nullcontext()

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        """Random numbers come from the CPU's generator."""

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def max_memory_allocated(self, device: Any = None) -> int:
        return 1

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 2**30, 2**31

    def get_device_name(self, device: Any = None) -> str:
        return "pretend accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_library: torch.library.Library | None = None


def install() -> torch.device:
    """Makes this process have the pretend accelerator, for good. Returns its device."""
    global _library
    if _library is not None:
        return torch.device("gpu", 0)
    module = _DeviceModule()
    _setup_privateuseone_for_python_backend("gpu", backend_module=module)
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), dispatch_key="PrivateUse1")
    # The engine's threads may have been counted before there was this device.
    torch.autograd.set_multithreading_enabled(False)
    changes: Any = torch
    changes.nn.Module.to = _keeping_ties(torch.nn.Module.to)
    changes.Tensor.pin_memory, changes.Tensor.is_pinned = _pin_memory, is_pinned
    for name in ("empty", "zeros", "empty_like"):
        setattr(changes, name, _pinning(getattr(torch, name)))
    for name in ("arange", "linspace"):
        setattr(changes, name, _resizing(getattr(torch, name)))
    for name in ("tensor", "as_tensor"):
        setattr(changes, name, _moving(getattr(torch, name)))
    changes.distributed.Backend.backend_capability["gloo"].append("gpu")
    changes.distributed.Backend.default_device_backend_map["gpu"] = "gloo"
    changes.Event = PretendEvent
    changes.accelerator.synchronize = _synchronize
    changes.accelerator.max_memory_allocated = module.max_memory_allocated
    return torch.device("gpu", 0)


def on_accelerator(fn: Callable[..., Any], world_size: int = 1, *args: Any, **options: Any) -> list[Any]:
    """`fn(rank, device, *args)` in processes of one gloo group, each of which has a pretend accelerator."""

    def work(rank: int, *args: Any) -> Any:
        return fn(rank, install(), *args)

    return run_distributed(work, world_size, *args, before=install, **options)
