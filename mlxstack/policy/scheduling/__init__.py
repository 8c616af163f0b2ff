"""Order and size of the work of a step."""
