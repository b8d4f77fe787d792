#include <cstdint>
#include <vector>

#include <pybind11/stl.h>

#include "bindings.h"
#include "ring_steps.h"

namespace meshverse::bindings {

using namespace py::literals;

using Integers = std::vector<std::int64_t>;

void bind_ring_steps(py::module_& module) {
  module.def(
      "ring_steps",
      [](const Integers& shape, const std::vector<Integers>& part_of_spot,
         const std::vector<Integers>& placements) {
        const Unlocked unlocked;
        std::vector<Integers> steps;
        steps.reserve(placements.size());
        for (const Integers& placement : placements) {
          steps.push_back(ring_steps(shape, part_of_spot, placement));
        }
        return steps;
      },
      "shape"_a, "part_of_spot"_a, "placements"_a,
      R"(Ring steps that leave a part of a cluster, over all groups of each axis of a mesh.

A group with positions on ``n`` parts has ``n`` such steps, or none if ``n`` is 1.

Args:
    shape: Size of each axis.
    part_of_spot: For each level of the cluster, the part of each spot.
    placements: Of each placement, the spot at each position of the mesh, in row-major order.

Returns:
    Of each placement, numbers of steps in row-major order, shape ``(axes, levels)``.

Raises:
    ValueError: A placement has another number of positions than the mesh, or a spot or part that
        does not exist.

>>> ring_steps([2, 2], [[0, 0, 1, 1]], [[0, 1, 2, 3], [0, 2, 1, 3], [0, 2, 2, 0]])
[[4, 0], [0, 4], [4, 4]]
)");
}

}  // namespace meshverse::bindings
