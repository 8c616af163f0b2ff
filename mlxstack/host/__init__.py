"""This computer: paths, processes, memory, presets."""
