"""What some of the supported versions of torch cannot do."""

from __future__ import annotations

import pytest
from torch.distributed import device_mesh as stock_module

# 2.13 made equal layouts equal objects. Before, two layouts of the same ranks could differ in how
# they were written, so stock meshes differ where ours do not.
needs_shared_layout = pytest.mark.skipif(
    not hasattr(stock_module, "_FlatLayout"), reason="layouts are canonical from torch 2.13 on"
)
