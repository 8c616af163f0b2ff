"""Presets as files: schema, validation, overrides, modes."""
