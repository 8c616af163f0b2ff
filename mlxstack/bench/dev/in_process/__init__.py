"""In-process benchmarks of arrays and engines, as child processes."""
