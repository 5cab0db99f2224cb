"""From `module:Class`, as a user or an entry point writes it, to the class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar, cast

from .errors import BackendUnavailableError, ConfigurationError

Base = TypeVar("Base")


def load_class(
    target: str, base: Callable[..., Base], *, what: str, key: str, remedy: str = ""
) -> type[Base]:
    """Import a class.

    Args:
        target: `module:Class`.
        base: The class must be this one or a subclass. (Its type is that of a class that may be abstract.)
        what: What is loaded, in an error message, e.g. `"transport 'shm'"`.
        key: The setting that names it, for the error.
        remedy: What makes it loadable, if a module or class that is missing can only mean that a requirement
            is.

    Raises:
        BackendUnavailableError: the module says so itself; or, with a `remedy`, the module or the class is
            missing.
        ConfigurationError: the module cannot be imported, has no such class, or the class is not a `base`.
    """
    assert isinstance(base, type)
    module_name, _, class_name = target.partition(":")
    try:
        module = import_module(module_name)
    except BackendUnavailableError:
        raise
    except Exception as error:  # a module of others may raise anything, and it is always about this setting
        if remedy and isinstance(error, ImportError):
            raise BackendUnavailableError(f"{what} cannot be loaded: {error}; {remedy}") from error
        raise ConfigurationError(
            f"{what} cannot be loaded: module {module_name!r} cannot be imported: {type(error).__name__}: {error}",
            key=key,
            value=target,
        ) from error
    found = getattr(module, class_name, None)
    if found is None and remedy:
        raise BackendUnavailableError(
            f"{what} cannot be loaded: module {module_name!r} has no class {class_name!r}; {remedy}"
        )
    if not (inspect.isclass(found) and issubclass(found, base)):
        wanted = "class" if found is None else f"{base.__name__} subclass"
        raise ConfigurationError(
            f"{what} cannot be loaded: module {module_name!r} has no {wanted} {class_name!r}",
            key=key,
            value=target,
        )
    return cast(type[Base], found)
