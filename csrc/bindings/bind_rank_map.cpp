#include <string>
#include <utility>

#include <pybind11/stl.h>

#include "bindings.h"
#include "rank_array.h"
#include "rank_map.h"

namespace meshverse::bindings {
namespace {

using namespace py::literals;

py::buffer_info buffer_of(RankArray& array) {
  return std::visit(
      [&](auto& values) {
        const auto itemsize = static_cast<py::ssize_t>(sizeof(values[0]));
        std::vector<py::ssize_t> shape(array.shape.begin(), array.shape.end());
        std::vector<py::ssize_t> strides(shape.size(), itemsize);
        if (shape.size() == 2) strides[0] *= shape[1];
        return py::buffer_info(values.data(), std::move(shape), std::move(strides));
      },
      array.values);
}

py::list to_list(const RankArray& array) {
  return std::visit(
      [&](const auto& values) {
        const auto row = [&](std::size_t start, std::size_t length) {
          py::list list(length);
          for (std::size_t i = 0; i < length; ++i) list[i] = py::int_(values[start + i]);
          return list;
        };
        if (array.shape.size() == 1) return row(0, values.size());
        const auto length = static_cast<std::size_t>(array.shape[1]);
        py::list rows(static_cast<std::size_t>(array.shape[0]));
        for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = row(i * length, length);
        return rows;
      },
      array.values);
}

void bind_rank_array(py::module_& module) {
  py::class_<RankArray> array(
      module, "RankArray", py::buffer_protocol(), py::is_final(), plain_class(),
      R"(A contiguous block of int32 or int64 values, of one or two dimensions.

Supports the buffer protocol: ``numpy.asarray`` and ``torch.frombuffer`` view it without a copy.

>>> memoryview(RankMap.identity(4).ranks()).tolist()
[0, 1, 2, 3]
)");
  refuse_constructor(array, "a RankArray is what ranks() and all() return");
  array.def("tolist", &to_list, "The values as a list, of lists where there are two dimensions.")
      .def("__repr__",
           [](const RankArray& self) {
             const char* type = self.values.index() == 0 ? "int32" : "int64";
             return "RankArray(shape=" + std::string(py::str(to_tuple(self.shape))) +
                    ", dtype=" + type + ")";
           })
      .def_buffer(&buffer_of);
}

template <class Integer>
std::vector<std::int64_t> copy_values(const py::buffer_info& info) {
  const auto* values = static_cast<const Integer*>(info.ptr);
  return std::vector<std::int64_t>(values, values + info.size);
}

// The values of a one-dimensional contiguous buffer of int32 or int64.
std::vector<std::int64_t> read_buffer(const py::buffer& buffer) {
  const py::buffer_info info = buffer.request();
  const bool contiguous = info.ndim == 1 && (info.size < 2 || info.strides[0] == info.itemsize);
  if (contiguous && info.item_type_is_equivalent_to<std::int64_t>()) {
    return copy_values<std::int64_t>(info);
  }
  if (contiguous && info.item_type_is_equivalent_to<std::int32_t>()) {
    return copy_values<std::int32_t>(info);
  }
  throw std::invalid_argument("rank map from a buffer of " + std::to_string(info.ndim) +
                              " dimensions and format '" + info.format +
                              "': it must be one-dimensional, contiguous and of int32 or int64; "
                              "flatten or convert it first");
}

RankMap::Ptr from_ranks(const py::object& ranks) {
  if (PyObject_CheckBuffer(ranks.ptr()) != 0) return RankMap::from_ranks(read_buffer(ranks));
  return RankMap::from_ranks(to_integers(ranks, "ranks"));
}

constexpr char kHowToMakeRankMap[] =
    "a RankMap is made by RankMap.identity(n) or RankMap.from_ranks(ranks)";

// Constructor for pickle, from the size of an identity map or from the ranks.
RankMap::Ptr new_rank_map(const py::object&, const py::object& size_or_ranks) {
  if (size_or_ranks.is_none()) throw py::type_error(kHowToMakeRankMap);
  if (py::isinstance<py::int_>(size_or_ranks)) {
    return RankMap::identity(to_one_or_more_integers(size_or_ranks, "size").front());
  }
  return from_ranks(size_or_ranks);
}

py::tuple reduce(const RankMap::Ptr& self) {
  py::object state = py::int_(self->size());
  if (!self->is_identity()) {
    py::tuple ranks(static_cast<std::size_t>(self->size()));
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      ranks[i] = py::int_(self->rank_at(static_cast<std::int64_t>(i)));
    }
    state = std::move(ranks);
  }
  return py::make_tuple(py::type::of<RankMap>(), py::make_tuple(state));
}

}  // namespace

void bind_rank_map(py::module_& module) {
  RankMap::identity(1);  // creates the table of maps: no fork can come in the middle of that
  bind_rank_array(module);
  py::class_<RankMap, RankMap::Ptr> rank_map(module, "RankMap", py::is_final(), plain_class(),
                                             R"(An immutable map from position to global rank.

Created by ``identity`` or ``from_ranks``. Interned: maps with equal content are one object.

>>> RankMap.from_ranks([0, 1, 2]) is RankMap.identity(3)
True
>>> RankMap.from_ranks([0, 2, 4, 6])
RankMap(4 ranks: 0, 2, 4, 6)
)");
  refuse_constructor(rank_map, kHowToMakeRankMap);
  rank_map
      .def_static("identity", &RankMap::identity, "n"_a,
                  "Position ``p`` holds rank ``p``, for ``0..n-1``. Takes O(1) memory.")
      .def_static("from_ranks", &from_ranks, "ranks"_a,
                  R"(Position ``p`` holds ``ranks[p]``.

Args:
    ranks: Unique global ranks, at least 0; integers or a one-dimensional buffer of int32 or int64.

Raises:
    ValueError: A rank is negative or repeats, or there is none.
)")
      .def_property_readonly("size", &RankMap::size, "Number of ranks.")
      .def_property_readonly("is_identity", &RankMap::is_identity,
                             "Whether every position holds the rank of the same number.")
      .def("rank_at", &RankMap::rank_at, "position"_a,
           R"(Global rank at ``position``.

Raises:
    IndexError: ``position`` is not in ``0..size-1``.
)")
      .def("position_of", &RankMap::position_of, "rank"_a,
           "Position that holds the global ``rank``, or None if no position does.")
      .def("is_sorted", &RankMap::is_sorted, "Whether the ranks ascend.")
      .def("sorted", &RankMap::sorted,
           R"(The map of the same ranks in ascending order: equal for maps over one set of ranks.

>>> RankMap.from_ranks([6, 0, 4, 2]).sorted()
RankMap(4 ranks: 0, 2, 4, 6)
)")
      .def("ranks", &RankMap::ranks,
           R"(Global rank at every position, as int32 of shape ``(size,)``.

Raises:
    ValueError: A rank does not fit into int32.
)")
      .def("tuple_hash", &RankMap::tuple_hash,
           R"(The hash of the tuple of ranks, without creating the tuple. O(size).

Raises:
    ValueError: There are more than ``2**31`` ranks.

>>> RankMap.identity(3).tuple_hash() == hash((0, 1, 2))
True
)")
      .def_property_readonly(
          "fingerprint", [](const RankMap& self) { return self.fingerprint().hex(); },
          "Hash of the content: 32 hexadecimal digits, the same on every machine.")
      // As maps are interned, Python's hash by identity would do. This one is the same in every
      // process, so that what is derived from it is reproducible.
      .def("__hash__",
           [](const RankMap& self) { return static_cast<py::ssize_t>(self.fingerprint().low); })
      .def("__repr__", [](const RankMap& self) { return "RankMap(" + self.to_string() + ")"; })
      .def("__str__", &RankMap::in_words)
      .def("__reduce__", &reduce);
  // torch.load(weights_only=True) restores objects only by calling their class, which then returns
  // the interned map; pybind11 does not initialize an object again.
  rank_map.attr("__new__") =
      py::staticmethod(py::cpp_function(&new_rank_map, "cls"_a, "size_or_ranks"_a = py::none()));
}

}  // namespace meshverse::bindings
