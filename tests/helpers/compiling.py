"""What tests that compile have in common, beside the fixture `nothing_compiled`."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch._inductor.config

__all__ = ["COMPILES", "plain_kernels"]

# The warnings are from torch itself while it compiles; none of them is about meshes.
COMPILES = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("nothing_compiled"),
]


def plain_kernels(*, many: bool = False) -> AbstractContextManager[None]:
    """Have inductor compile plain loops, in this process: seconds instead of half a minute.

    It asks the compiler for no vectors of this processor, so it gives the same code on all, and it
    starts no helper processes.

    Args:
        many: compile torch's headers once for all kernels, which pays from some five kernels on.
    """
    return torch._inductor.config.patch(  # type: ignore[no-any-return]
        {
            "compile_threads": 1,
            "cpp.simdlen": 1,
            "cpp.vec_isa_ok": False,
            "cpp_cache_precompile_headers": many,
        }
    )
