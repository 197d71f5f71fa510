"""Sandbox of chat templates: Jinja's, with the helpers that Hugging Face gives to templates and nothing impure.

A template sees only its variables: it reaches no attribute that begins with an underscore, changes none of the messages,
opens no file and loads no other template. Functions that depend on the clock or on chance are missing: `strftime_now`,
which Hugging Face has, `lipsum` and the filter `random`.

A template can still take long or use much memory, and Jinja cannot stop it. The sandbox bounds the output, the total length
of all ranges, and the results of *, ** and the methods that pad a text. It does not bound nested loops over the messages,
a text that is repeatedly joined to itself, and filters and formats that pad. Serve only templates that you have read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 1 << 24
MAX_RANGE = 100_000
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes")
BEGIN, END = "penstock_generation_begins", "penstock_generation_ends"  # variables written around a generation


class Refused(jinja2.TemplateError):
    """The template refuses a chat by calling raise_exception."""


class Generation(Extension):
    """Tags {% generation %} ... {% endgeneration %}: around text that the model generates."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the body, in a separate scope, between two variables: empty texts, or marks that locate it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (BEGIN, END))
        return [begin.set_lineno(line), nodes.Scope(body).set_lineno(line), end.set_lineno(line)]


class Sandbox(ImmutableSandboxedEnvironment):
    """Environment of all chat templates."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"], finalize=_written
        )
        del self.globals["lipsum"], self.filters["random"]
        self.globals |= {"raise_exception": _raise_exception, "namespace": _Namespace, "dict": _dict}
        self.filters["tojson"] = _to_json

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raise at once. Jinja's own undefined value raises only on use, and renders as an empty text."""
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is out of reach")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power. Raises SecurityError: it is too large."""
        for value, times in ((left, right), (right, left)):
            size = value.bit_length() if isinstance(value, int) else len(value) if isinstance(value, (str, list, tuple)) else 0
            repeats = operator == "**" or not isinstance(value, int)
            if repeats and isinstance(times, int) and size * times > MAX_CHARACTERS:
                raise SecurityError(f"what {operator} makes is too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function. Raises SecurityError: it would pad a text beyond the limit."""
        numbers = [each for each in (*args, *kwargs.values()) if isinstance(each, int)]
        if getattr(__obj, "__name__", "") in _PADDING and max(numbers, default=0) > MAX_CHARACTERS:
            raise SecurityError("a text is padded too far")
        return super().call(__context, __obj, *args, **kwargs)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render a template of a Sandbox. Raises SecurityError: over MAX_CHARACTERS. A template may raise any other error, too."""
    parts: list[str] = []
    left = MAX_CHARACTERS
    for part in template.generate(variables, range=_bounded_range()):
        left -= len(part)
        if left < 0:
            raise SecurityError(f"it writes more than {MAX_CHARACTERS:,} characters")
        parts.append(part)
    return "".join(parts)


def _bounded_range() -> Callable[..., Sequence[int]]:
    left = MAX_RANGE

    def bounded(*args: int) -> Sequence[int]:
        nonlocal left
        numbers = range(*args)
        left -= len(numbers[: left + 1])  # not len(numbers): a length past 2^63 raises OverflowError
        if left < 0:
            raise SecurityError(f"its ranges have more than {MAX_RANGE:,} numbers in all")
        return numbers

    return bounded


def _written(value: Any) -> Any:
    """Check a value before it is written. Raises SecurityError: it is a method, such as `items`: its text has an address."""
    if isinstance(value, (BuiltinMethodType, MethodType, FunctionType)):
        raise SecurityError(
            f"{value.__name__} is a method, and is written without a call: for a key write ['{value.__name__}']"
        )
    return value


def _raise_exception(message: object) -> NoReturn:
    raise Refused(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's tojson escapes < > & and ' for HTML: the model would see \u003c in place of <.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_number
    )


def _number(value: object) -> int | float:
    if isinstance(value, Decimal):  # JSON has only one kind of number
        return int(value) if value.as_tuple().exponent == 0 else float(value)
    raise TypeError(f"a {type(value).__name__} has no place in JSON")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    # The type has dict.update: a template could change a message with it.
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Namespace without names that begin with an underscore, which have a meaning in Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        named = dict(*given, **kwargs)
        for name in named:
            _check_name(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"{name!r} is no name for a namespace")
