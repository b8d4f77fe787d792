"""Every torch-private name Meshverse relies on, with the versions it is for.

No other file of the package touches a private name of torch. What is public is imported from torch
where it is used. Importing this checks that this torch has all that is listed in `private_names`.
"""

from __future__ import annotations

from .backends import (
    backend_in_words,
    can_split,
    creation_blocks,
    members_only_hazard,
    needs_own_world_group,
    split_options,
)
from .creation import create_by_all, create_by_members, create_by_split
from .dtensors import is_strided_shard, root_of, waited
from .groups import (
    abort_all,
    can_be_reconfigured,
    can_meet_in_store,
    canonical_backend,
    check_backend,
    current_default_group,
    default_backend,
    default_timeout,
    end_group,
    find_group,
    is_shrunk_default,
    resolve_group,
    set_up_device,
    shrunk_from,
    store_of,
    thread_id,
    when_destroyed,
    world_lifetime,
)
from .layouts import (
    FLATTENED_ARE_APART,
    FLATTENING_GIVES_MESH,
    equals_stock,
    from_torch_layout,
    to_torch_layout,
)
from .one_graph import (
    compiles_one_graph,
    coordinate_symbol,
    is_one_graph_compiled,
    is_one_graph_traced,
    let_inductor_call,
    on_simulated_ranks,
)
from .options import (
    IGNORED_OPTION_FIELDS,
    is_backend_options,
    new_like,
    said_timeout,
)
from .private_names import (
    BackendOptions,
    ProcessGroup,
    StockDeviceMesh,
    TorchLayout,
)
from .saved_stock import StockState, hook_setstate, is_made_by_stock, read_stock_state
from .sleep import memory_stats, resume, suspend
from .tagged_layouts import tag_layout, tags_of, with_flattened_tag
from .tracing import (
    has_no_values,
    hook_concatenate,
    hook_from_group,
    is_stocks_own,
    lacks_memory,
    let_compile_know,
    lies_in_memory,
    real_mesh,
    stock_concatenate,
    untraced,
    warn_as_stock,
)

__all__ = [
    "FLATTENED_ARE_APART",
    "FLATTENING_GIVES_MESH",
    "IGNORED_OPTION_FIELDS",
    "BackendOptions",
    "ProcessGroup",
    "StockDeviceMesh",
    "StockState",
    "TorchLayout",
    "abort_all",
    "backend_in_words",
    "can_be_reconfigured",
    "can_meet_in_store",
    "can_split",
    "canonical_backend",
    "check_backend",
    "compiles_one_graph",
    "coordinate_symbol",
    "create_by_all",
    "create_by_members",
    "create_by_split",
    "creation_blocks",
    "current_default_group",
    "default_backend",
    "default_timeout",
    "end_group",
    "equals_stock",
    "find_group",
    "from_torch_layout",
    "has_no_values",
    "hook_concatenate",
    "hook_from_group",
    "hook_setstate",
    "is_backend_options",
    "is_made_by_stock",
    "is_one_graph_compiled",
    "is_one_graph_traced",
    "is_shrunk_default",
    "is_stocks_own",
    "is_strided_shard",
    "lacks_memory",
    "let_compile_know",
    "let_inductor_call",
    "lies_in_memory",
    "members_only_hazard",
    "memory_stats",
    "needs_own_world_group",
    "new_like",
    "on_simulated_ranks",
    "read_stock_state",
    "real_mesh",
    "resolve_group",
    "resume",
    "root_of",
    "said_timeout",
    "set_up_device",
    "shrunk_from",
    "split_options",
    "stock_concatenate",
    "store_of",
    "suspend",
    "tag_layout",
    "tags_of",
    "thread_id",
    "to_torch_layout",
    "untraced",
    "waited",
    "warn_as_stock",
    "when_destroyed",
    "with_flattened_tag",
    "world_lifetime",
]
