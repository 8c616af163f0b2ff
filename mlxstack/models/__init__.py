"""Models as files: hub, downloads, folders, references."""
