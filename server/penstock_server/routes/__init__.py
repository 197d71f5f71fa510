"""The HTTP surface: each route parses its parameters, calls the data path and serialises. No logic lives here."""
