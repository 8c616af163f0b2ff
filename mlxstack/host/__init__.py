"""The local machine: paths, processes, memory, presets."""
