"""Answers: what the routes tell as JSON, field by field. The documentation page shows these words.

TypedDict is that of typing_extensions throughout, for pydantic takes that of typing from Python 3.12 on.
"""

from pydantic import ConfigDict, with_config

described = with_config(ConfigDict(use_attribute_docstrings=True))  # makes the words below a field its description
