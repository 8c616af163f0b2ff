"""`verify`: what this machine computes, against what it should, and how fast."""
