// Table of contents of meshverse._core: one line for each file, in order of dependence.
#include "bindings.h"

PYBIND11_MODULE(_core, module, pybind11::mod_gil_not_used()) {
  module.doc() =
      "The arithmetic of meshes, without torch: layouts, rank maps, groups and their keys.";
  module.attr("__version__") = MESHVERSE_VERSION;
  module.attr("__commit__") = MESHVERSE_COMMIT;
  meshverse::bindings::bind_axis_layout(module);
  meshverse::bindings::bind_layout(module);
  meshverse::bindings::bind_rank_map(module);
  meshverse::bindings::bind_rank_groups(module);
  meshverse::bindings::bind_options_key(module);
  meshverse::bindings::bind_group_cache(module);
  meshverse::bindings::bind_held_lock(module);
  meshverse::bindings::bind_reshard(module);
  meshverse::bindings::bind_ring_steps(module);
}
