"""Fields of several schemas, and what all schemas have in common.

The TypedDict is that of typing_extensions: pydantic accepts that of typing only from Python 3.12 on.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

described = with_config(ConfigDict(use_attribute_docstrings=True))  # a docstring below a field is its description

# Fields of several schemas.
Name = Annotated[str, Field(description="The name in URLs.")]
Fingerprint = Annotated[str, Field(description="The fingerprint of the data.")]
Epoch = Annotated[int, Field(description="The epoch.")]
Rank = Annotated[int, Field(description="The rank.")]
Step = Annotated[int, Field(description="The step in the epoch.")]
Line = Annotated[int, Field(description="The line of the batch.")]
NumTokens = Annotated[int, Field(description="Number of tokens.")]
NumShards = Annotated[int, Field(description="Number of Parquet files.")]
Text = Annotated[str, Field(description="The decoded text. Missing without a tokenizer.")]
Columns = Annotated[dict[str, Any], Field(description="Values of the passthrough columns.")]
OnBadRow = Annotated[str, Field(description="The effect on a batch that holds a bad row: `fail` or `replace`.")]
BadRowsMet = Annotated[int, Field(description="Bad rows met so far.")]
Parameters = Annotated[dict[str, bool | int | str | None], Field(description="Every parameter of the spec with its value.")]


@described
class Schema(TypedDict):
    """A JSON object; the docstring below a field describes it."""
