"""How the columns of a row become tokens: recipes, what they are read from, and what they do."""
