"""Which columns of pre-tokenized rows are masks: those that penstock.toml names, or else those with a usual name.

labels          the id where it is learned, -100 where not; not shifted, as Hugging Face's models take them
loss_mask       1 where an id is learned, 0 where not
attention_mask  0 at padding, which is left out of the row
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from penstock_server.recipes.column_types import is_switches, is_tokens
from penstock_server.recipes.fields import Field, FieldError

NAMES: Mapping[str, tuple[str, ...]] = {
    "labels": ("labels",),
    "loss_mask": ("loss_mask", "completion_mask", "assistant_masks"),
    "attention_mask": ("attention_mask",),
}
OF_LOSS = ("labels", "loss_mask")  # of which a row has one

Masks = tuple[tuple[str, Field], ...]  # by what they are, as `NAMES` has it


def find_masks(given: Mapping[str, Any], schema: pa.Schema) -> Masks:
    """The masks that are declared, and where nothing is said of such masks, those that are there.

    Raises FieldError: a column is not there, or of a type that will not do.
    """
    if all(given.get(role) for role in OF_LOSS):
        raise FieldError(f"{' and '.join(OF_LOSS)} both tell which ids are learned, and only one of them may")
    found = {role: Field.parse(given[role], schema) for role in NAMES if given.get(role)}
    for role, source in found.items():
        check_mask(role, source, schema)
    for role in NAMES:
        if not any(alike in given or alike in found for alike in (OF_LOSS if role in OF_LOSS else (role,))):
            fitting = (name for name in _there(role, schema) if _fits(role, schema.field(name).type))
            if name := next(fitting, None):
                found[role] = Field.parse(name, schema)
    return tuple((role, found[role]) for role in NAMES if role in found)  # in one order: snapshots have their names of it


def unused_masks(given: Mapping[str, Any], schema: pa.Schema, used: Masks) -> tuple[str, ...]:
    """The columns that are masks by their names, and of which nothing is said or made."""
    settled = {role for role in NAMES if role in given}
    if settled & {*OF_LOSS} or "labels" in dict(used):
        settled |= {*OF_LOSS}
    looked_at = [source.text for _, source in used]
    return tuple(name for role in NAMES if role not in settled for name in _there(role, schema) if name not in looked_at)


def mask_called_by(reason: str, masks: Masks) -> str | None:
    """What the mask is by which a row is bad; None if it is bad by itself."""
    return next((role for role, source in masks if f"{source.text} is " in reason or f"{source.text} has " in reason), None)


def check_mask(role: str, source: Field, schema: pa.Schema) -> None:
    """Whether a field can be a mask. Raises FieldError: it is not there, or of a type that will not do."""
    if not _fits(role, type_ := source.type(schema)):
        wanted = "lists of integers" if role == "labels" else "lists of integers or booleans"
        raise FieldError(f"column {source.text!r} is {type_}, but {role} must be {wanted}")


def _there(role: str, schema: pa.Schema) -> list[str]:
    return [name for name in NAMES[role] if name in schema.names]


def _fits(role: str, type_: pa.DataType) -> bool:
    return is_tokens(type_) or (role != "labels" and is_switches(type_))
