"""What makes the words below a field its description."""

from __future__ import annotations

from pydantic import ConfigDict, with_config

described = with_config(ConfigDict(use_attribute_docstrings=True))
