"""Recipes: how the columns of a row become tokens."""
