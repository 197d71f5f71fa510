"""Mask columns of pre-tokenized rows: those that penstock.toml names, by default those with a usual name.

labels          the id if it has loss, otherwise -100; not shifted, as Hugging Face's models take them
loss_mask       1 if an id has loss, otherwise 0
attention_mask  0 at padding, which is left out of the row
seq_lengths     of rows that hold several documents: the ids of each document, as TRL packs them
position_ids    or the position of each id in its document, from 0 on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock_server.recipes.column_types import is_booleans, is_tokens
from penstock_server.recipes.fields import Field, FieldError

NAMES: Mapping[str, tuple[str, ...]] = {
    "labels": ("labels",),
    "loss_mask": ("loss_mask", "completion_mask", "assistant_masks"),
    "attention_mask": ("attention_mask",),
    "seq_lengths": ("seq_lengths",),
    "position_ids": ("position_ids",),
}
OF_LOSS = ("labels", "loss_mask")  # a row has one of them
OF_DOCUMENTS = ("seq_lengths", "position_ids")  # likewise
_BOOLEAN = ("loss_mask", "attention_mask")  # roles whose columns may be lists of booleans
_EITHER = {OF_LOSS: "which ids have loss", OF_DOCUMENTS: "where documents begin"}

Masks = tuple[tuple[str, Field], ...]  # by role, in the order of `NAMES`


def find_masks(given: Mapping[str, Any], schema: pa.Schema) -> Masks:
    """Return the declared masks, and for undeclared roles the masks present under a usual name.

    Raises FieldError: a column is missing, occurs twice, or has an unsuitable type.
    """
    for roles, what in _EITHER.items():
        if all(given.get(role) for role in roles):
            raise FieldError(f"{' and '.join(roles)} both tell {what}, and only one of them may")
    found = {role: Field.parse(given[role], schema) for role in NAMES if given.get(role)}
    for role, source in found.items():
        check_mask(role, source, schema)
    for role in NAMES:
        if role not in given and _is_wanted(role, found):
            sources = (Field.parse(name, schema) for name in NAMES[role] if name in schema.names)
            if guess := next((source for source in sources if _fits(role, source.type(schema))), None):
                found[role] = guess
    return tuple((role, found[role]) for role in NAMES if role in found)  # in a fixed order: the fingerprint depends on it


def unused_masks(given: Mapping[str, Any], schema: pa.Schema, used: Masks) -> tuple[str, ...]:
    """Return the columns that are masks by name, but neither declared nor used."""
    settled = {role for role in NAMES if role in given}
    for roles in _EITHER:
        if roles[0] in dict(used) or any(given.get(role) for role in roles):
            settled |= {*roles}
    looked_at = [source.text for _, source in used]
    names = [name for role in NAMES if role not in settled for name in NAMES[role]]
    return tuple(name for name in names if name in schema.names and name not in looked_at)


def mask_of(name: str) -> str | None:
    """Return the mask role of a column's name; None for any other name."""
    return next((role for role in NAMES if name in NAMES[role] or name.endswith(f"_{role}")), None)


def masks_of_turns(given: Mapping[str, Any], schema: pa.Schema, used: Sequence[str]) -> tuple[str, ...]:
    """Return the undeclared columns that would be masks of the prompts and answers in `used`."""
    unsaid = [role for role in NAMES if role not in given]
    names = {name for role in unsaid for name in NAMES[role]}
    endings = tuple(f"_{role}" for role in unsaid)
    return tuple(name for name in schema.names if (name in names or name.endswith(endings)) and name not in used)


def way_without(reason: str, masks: Masks, ids: str) -> str:
    """Return advice to disable the mask that makes a row with these `ids` bad; "" if no mask is the cause."""
    for role, source in masks:
        if reason.startswith((f"{source.text} is ", f"{source.text} has ")):
            told = f" If no mask is meant, {role} = false does without, before a run begins: it makes another snapshot."
            if role == "labels" and " values for " in reason:
                told += f' If they are answers of their own, set prompt = "{ids}" and response = "{source.text}".'
            return told
    return ""


def _is_wanted(role: str, found: Mapping[str, Field]) -> bool:
    return role not in found and not any(role in roles and any(other in found for other in roles) for roles in _EITHER)


def check_mask(role: str, source: Field, schema: pa.Schema) -> None:
    """Check that a field can be a mask. Raises FieldError: it is missing, or has an unsuitable type."""
    if not _fits(role, type_ := source.type(schema)):
        wanted = "lists of integers or booleans" if role in _BOOLEAN else "lists of integers"
        raise FieldError(f"column {source.text!r} is {type_}, but {role} must be {wanted}")


def _fits(role: str, type_: pa.DataType) -> bool:
    return is_tokens(type_) or (role in _BOOLEAN and is_booleans(type_))
