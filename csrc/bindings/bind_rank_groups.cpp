#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "bindings.h"
#include "rank_groups.h"
#include "value_types.h"

namespace meshverse::bindings {

using namespace py::literals;

void bind_rank_groups(py::module_& module) {
  py::class_<RankGroups> groups(module, "RankGroups", py::is_final(), plain_class(),
                                R"(The groups of one axis: ranks that differ along this axis only.

Group ``g`` holds the positions ``axis.complement(size)(g) + axis(i)``, for every index ``i`` of the
axis.

Args:
    axis: Layout of the axis.
    rank_map: Global rank at every position.

Raises:
    ValueError: Copies of ``axis`` do not tile the positions of ``rank_map``.

>>> groups = RankGroups(AxisLayout(2, 4), RankMap.identity(8))
>>> groups.ranks_of(5), groups.group_index(5), groups.coordinate(5)
([1, 5], 1, 1)
>>> groups.all().tolist()
[[0, 4], [1, 5], [2, 6], [3, 7]]
)");
  groups.def(py::init<AxisLayout, RankMap::Ptr>(), "axis"_a, py::arg("rank_map").none(false))
      .def_property_readonly("n_groups", &RankGroups::n_groups, "Number of groups.")
      .def_property_readonly("group_size", &RankGroups::group_size,
                             "Number of ranks of each group.")
      .def_property_readonly(
          "axis", [](const RankGroups& self) { return self.axis(); }, "Layout of the axis.")
      .def_property_readonly(
          "rank_map", [](const RankGroups& self) { return self.rank_map(); },
          "Global rank at every position.")
      .def_property_readonly(
          "offsets", [](const RankGroups& self) { return self.offsets(); },
          "First position of every group: the complement of the axis.")
      .def("group_index", &RankGroups::group_index, "position"_a,
           R"(Index of the group of ``position``, in the order in which torch creates the groups.

Raises:
    IndexError: ``position`` is outside the rank map.
)")
      .def("coordinate", &RankGroups::coordinate, "position"_a,
           R"(Index of ``position`` within its group, in the order of the axis.

Raises:
    IndexError: ``position`` is outside the rank map.
)")
      .def("ranks_of", &RankGroups::ranks_of, "position"_a,
           R"(Global ranks of the group of ``position``, in the order of the axis.

Raises:
    IndexError: ``position`` is outside the rank map.
)")
      .def(
          "fingerprint_of",
          [](const RankGroups& self, std::int64_t position, const std::string& salt) {
            return self.fingerprint_of(position, salt).hex();
          },
          "position"_a, "salt"_a = "",
          R"(Hash of the ordered ranks of the group of ``position`` and of ``salt``: 32 hex digits.

All members of the group compute the same hash, in every process; other groups have another one.

Raises:
    IndexError: ``position`` is outside the rank map.
)")
      .def("all", &RankGroups::all,
           "Global ranks of every group, as int64 of shape ``(n_groups, group_size)``.")
      .def("__repr__", [](const RankGroups& self) {
        return "RankGroups(" + std::to_string(self.n_groups()) + " groups of " +
               std::to_string(self.group_size()) + " along " + self.axis().to_string() + " over " +
               self.rank_map()->to_string() + ")";
      });
  module.def(
      "rank_group",
      [](const AxisLayout& axis, const RankMap::Ptr& rank_map, std::int64_t position,
         const std::string& salt, bool ascending) {
        const RankGroups all(axis, rank_map);
        std::vector<std::int64_t> ranks = all.ranks_of(position);
        if (ascending) std::sort(ranks.begin(), ranks.end());
        std::string fingerprint = all.fingerprint_of_ranks(ranks, salt).hex();
        return std::make_pair(std::move(ranks), std::move(fingerprint));
      },
      "axis"_a, py::arg("rank_map").none(false), "position"_a, "salt"_a, "ascending"_a = false,
      R"(Global ranks of the group of ``position``, and the hash of them, in order, and of ``salt``.

All members compute the same hash, of 32 hex digits; groups with other ranks, another order of them
or another salt have another one. O(group size).

Args:
    ascending: Sort the ranks, instead of keeping the order of the axis.

Raises:
    IndexError: ``position`` is outside the rank map.
    ValueError: Copies of ``axis`` do not tile the positions of ``rank_map``.
)");
  set_new(
      groups,
      [](const py::object&, const AxisLayout& axis, const RankMap::Ptr& rank_map) {
        return RankGroups(axis, rank_map);
      },
      "axis"_a, py::arg("rank_map").none(false));
}

}  // namespace meshverse::bindings
