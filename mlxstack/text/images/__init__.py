"""Sizes, tokens and pixels of images, one file per family."""
