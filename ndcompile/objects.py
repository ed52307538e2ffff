"""Objects whose state can be seen: those that are written in Python alone."""

from __future__ import annotations

import functools
import types
from typing import Any

HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made as the program runs
NATIVE = (
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType
)  # fmt: skip
"""Members of classes that are not written in Python."""


def made_in_python(value: Any) -> bool:
    """Whether an object's state is all in its attributes and slots: none of its classes is of another language.

    >>> import random, types
    >>> made_in_python(types.SimpleNamespace(a=1)), made_in_python(random.Random(0))
    (True, False)
    """
    return all(map(_is_python, type(value).__mro__[:-1])) and all(map(_is_python, type(type(value)).__mro__[:-2]))


@functools.cache
def _is_python(cls: type) -> bool:
    own = (member for name, member in vars(cls).items() if name not in ("__dict__", "__weakref__"))
    native = any(isinstance(member, NATIVE) and member.__objclass__ is cls for member in own)
    return cls is types.SimpleNamespace or (bool(cls.__flags__ & HEAP_TYPE) and not native)
