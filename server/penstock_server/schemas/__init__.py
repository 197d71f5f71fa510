"""Schemas of the JSON that the server returns. The page /docs shows their docstrings.

In several modules: pydantic parses the module of a schema to find the docstrings of its fields.
"""
