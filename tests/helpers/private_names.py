"""The private names of torch that the package reads, found in its source."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import meshverse

__all__ = ["COMPAT", "PRIVATE_MODULES", "names_read"]

COMPAT = Path(meshverse.__file__).parent / "_torch_compat"

# Modules of torch that are private themselves, as the source calls them: all that is read of them
# counts.
PRIVATE_MODULES = {
    "c10d_core": "torch._C._distributed_c10d",
    "c_extension": "torch._C",
    "fake_tensor": "torch._subclasses.fake_tensor",
    "functorch": "torch._functorch.pyfunctorch",
    "guards": "torch._guards",
    "ir": "torch._inductor.ir",
    "local_tensors": "torch.distributed._local_tensor",
    "lowering": "torch._inductor.lowering",
    "symbolic_convert": "torch._dynamo.symbolic_convert",
    "symbolic_shapes": "torch.fx.experimental.symbolic_shapes",
    "torch._ops": "torch._ops",
}
_OURS = {"self", "cls", "super", "torch"}
_PRIVATE = re.compile("_[A-Za-z][A-Za-z0-9_]*")


def names_read() -> dict[str, set[str]]:
    """Private name -> the files of `_torch_compat` that read it, without their endings.

    That is: attributes that begin with an underscore, what is read of a private module or imported
    from one, and names in strings, which are asked for with `getattr` or are those of a saved mesh.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(COMPAT.glob("*.py")):
        if file.stem == "private_names":  # which lists them, and imports modules
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in _names_in(node):
                found[name].add(file.stem)
    return dict(found)


def _names_in(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        is_private = _PRIVATE.fullmatch(node.attr) and owner not in _OURS
        return [node.attr] if owner in PRIVATE_MODULES or is_private else []
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        is_module_private = "._" in str(node.module)
        names = [alias.name for alias in node.names]
        return [name for name in names if is_module_private or _PRIVATE.fullmatch(name)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _PRIVATE.findall(node.value) if _PRIVATE.fullmatch(node.value) else []
    return []
