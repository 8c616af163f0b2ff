"""Print the folder of an MTP head twice: fetched, then found."""

import sys

import mlxstack.engine  # noqa: F401  (the seam goes in before any model module)
from mlxstack.core.preset import ModelSpec
from mlxstack.features.drafts.engine.draft_loading import locate_head

for _ in range(2):
    sys.stdout.write(f"{locate_head(ModelSpec(id='demo', mtp=sys.argv[1]))}\n")
