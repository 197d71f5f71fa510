"""Answers: what the routes tell as JSON, field by field. The documentation page shows these words."""
