"""What crosses between `run_local` and its ranks, as bytes.

Code travels by name where the other side can import it, and by value where it cannot: notebook
cells, lambdas, closures, and test modules that pytest imports without touching `sys.path`.
"""

from __future__ import annotations

import importlib
import io
import operator
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

__all__ = ["dumps_call", "dumps_result"]


def dumps_call(call: object) -> bytes:
    """Bytes of a function and its arguments, to be loaded by a rank."""
    buffer = io.BytesIO()
    pickler = _CallPickler(buffer)
    try:
        pickler.dump(call)
    finally:
        for module in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


def dumps_result(result: object) -> bytes:
    """Bytes of a rank's result, to be loaded by the process that called `run_local`."""
    buffer = io.BytesIO()
    _ResultPickler(buffer).dump(result)
    return buffer.getvalue()


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Sends by value the code of modules that a rank could not import by name.

    cloudpickle takes every module in `sys.modules` for importable elsewhere, and pytest's
    `importlib` mode puts modules there that no path leads to.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.by_value: list[ModuleType] = []
        self._seen: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if _is_unloadable(obj):
            return _tensor_of_bytes, _as_bytes(obj)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            # torch's modules of settings, which cloudpickle finds by a function's words: where one
            # uses torch.distributed and says `x.config`, it takes torch.distributed.config along.
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, FunctionType | type) and obj.__module__ not in self._seen:
            self._seen.add(obj.__module__)
            module = sys.modules.get(obj.__module__)
            registered = cloudpickle.list_registry_pickle_by_value()
            if module and module.__name__ not in registered and _is_out_of_reach(module):
                cloudpickle.register_pickle_by_value(module)
                self.by_value.append(module)
        return super().reducer_override(obj)


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Names the classes that came from the caller by value, so that it gets its own back.

    Sent back by value they would overwrite the attributes of the caller's class with copies.
    """

    def reducer_override(self, obj: Any) -> Any:
        if _is_unloadable(obj):
            return _tensor_of_bytes, _as_bytes(obj)
        if isinstance(obj, type) and _came_by_value(obj):
            return _own_class, (obj.__module__, obj.__qualname__, cloudpickle.dumps(obj))
        return super().reducer_override(obj)


def _is_unloadable(obj: Any) -> bool:
    """Whether it is a tensor of a newer dtype, which torch pickles but cannot unpickle."""
    torch: Any = sys.modules.get("torch")
    if torch is None or type(obj) is not torch.Tensor:
        return False
    is_small_float = obj.dtype.is_floating_point and obj.dtype.itemsize == 1
    return is_small_float or obj.dtype in (torch.uint16, torch.uint32, torch.uint64)


def _as_bytes(tensor: Any) -> tuple[Any, ...]:
    torch: Any = sys.modules["torch"]
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return content, tensor.dtype, tuple(tensor.shape), tensor.requires_grad


def _tensor_of_bytes(content: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    return content.view(dtype).view(shape).requires_grad_(requires_grad)


def _came_by_value(cls: type) -> bool:
    return cls.__module__ == "__main__" or cls.__module__ not in sys.modules


def _own_class(module: str, qualname: str, copy: bytes) -> Any:
    """This process's class of that name; the copy if it has none (made inside the rank)."""
    try:
        found = operator.attrgetter(qualname)(sys.modules[module])
    except (KeyError, AttributeError):
        found = None
    return found if isinstance(found, type) else cloudpickle.loads(copy)


def _is_out_of_reach(module: ModuleType) -> bool:
    """Whether importing this source file by its name, on the same `sys.path`, would fail."""
    spec: ModuleSpec | None = getattr(module, "__spec__", None)
    # Parts of a C extension have no file of their own; they come with their parent.
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        return False
    found = _find_afresh(spec.name)
    return found is None or found.origin != spec.origin


def _find_afresh(name: str) -> ModuleSpec | None:
    """What `import name` would find if nothing were imported yet.

    `importlib.util.find_spec` answers from `sys.modules`, so it cannot say.
    """
    path: Sequence[str] | None = None
    parent_name = name.rpartition(".")[0]
    if parent_name:
        parent = _find_afresh(parent_name)
        if parent is None or parent.submodule_search_locations is None:
            return None
        path = parent.submodule_search_locations
        loaded = sys.modules.get(parent_name)
        if loaded and parent.origin and getattr(loaded, "__file__", None) == parent.origin:
            path = loaded.__path__  # a package may extend its own path while it is imported
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)
