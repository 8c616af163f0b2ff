"""The doors: one HTTP service, several dialects."""
