"""Schemas of the JSON that the server returns. The page /docs shows their docstrings.

Small modules start sooner: for each schema, pydantic parses the whole module to find the docstrings of the fields.
"""
