"""The page at `/`: static files that poll the JSON of /v1. No build step; the files are served as they are here."""
