#include <string>

#include <pybind11/stl.h>

#include "bindings.h"
#include "rank_groups.h"

namespace meshverse::bindings {
namespace {

using namespace py::literals;

RankType rank_type(const std::string& dtype) {
  if (dtype == "int32") return RankType::kInt32;
  if (dtype == "int64") return RankType::kInt64;
  throw std::invalid_argument("all groups as '" + dtype +
                              "': ranks come as 'int32' or 'int64'; ask for one of these");
}

}  // namespace

void bind_rank_groups(py::module_& module) {
  py::class_<RankGroups>(module, "RankGroups", py::is_final(), plain_class(),
                         R"(The groups of one axis: the ranks that differ along it only.

Group ``g`` holds the positions ``offsets(g) + axis(i)`` for ``i`` in ``0..group_size-1``.

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
)")
      .def(py::init<AxisLayout, RankMap::Ptr>(), "axis"_a, py::arg("rank_map").none(false))
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
           R"(Place of the group of ``position`` in the order in which torch creates the groups.

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
          R"(32 hexadecimal digits for the group of ``position``: its ranks, its axis and ``salt``.

All members of the group get the same, in every process; no other group does.

Raises:
    IndexError: ``position`` is outside the rank map.
)")
      .def(
          "all",
          [](const RankGroups& self, const std::string& dtype) {
            return self.all(rank_type(dtype));
          },
          "dtype"_a = "int64",
          R"(Global ranks of every group, shape ``(n_groups, group_size)``.

Args:
    dtype: ``"int64"`` or ``"int32"``.

Raises:
    ValueError: Another type was asked for, or a rank does not fit.
)")
      .def("__repr__", [](const RankGroups& self) {
        return "RankGroups(" + std::to_string(self.n_groups()) + " groups of " +
               std::to_string(self.group_size()) + " along " + self.axis().to_string() + " over " +
               self.rank_map()->to_string() + ")";
      });
}

}  // namespace meshverse::bindings
