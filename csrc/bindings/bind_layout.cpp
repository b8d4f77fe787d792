#include <utility>

#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "layout.h"

namespace meshverse::bindings {
namespace {

using namespace py::literals;

py::tuple sizes_of(const AxisLayout& layout) {
  py::tuple sizes(layout.modes().size());
  for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = py::int_(layout.modes()[i].size);
  return sizes;
}

py::tuple strides_of(const AxisLayout& layout) {
  py::tuple strides(layout.modes().size());
  for (std::size_t i = 0; i < strides.size(); ++i) strides[i] = py::int_(layout.modes()[i].stride);
  return strides;
}

// AxisLayout from (sizes, strides), Layout from the same: row-major where strides is None.
template <class Result, class RowMajor, class Strided>
Result from_sizes(py::handle sizes, py::handle strides, RowMajor row_major, Strided strided) {
  if (strides.is_none()) return row_major(to_one_or_more_integers(sizes, "sizes"));
  return strided(to_one_or_more_integers(sizes, "sizes"),
                 to_one_or_more_integers(strides, "strides"));
}

AxisLayout make_axis_layout(py::handle sizes, py::handle strides) {
  const auto strided = [](const auto& n, const auto& d) { return AxisLayout(n, d); };
  return from_sizes<AxisLayout>(sizes, strides, AxisLayout::row_major, strided);
}

Layout make_layout_from_shape(py::handle sizes, py::handle strides) {
  return from_sizes<Layout>(sizes, strides, Layout::row_major, Layout::from_shape);
}

Layout make_layout(const py::sequence& axes) {
  std::vector<AxisLayout> list;
  list.reserve(axes.size());
  for (const py::handle axis : axes) {
    if (!py::isinstance<AxisLayout>(axis)) {
      throw py::type_error("layout with axis " + std::string(py::repr(axis)) +
                           ": every axis must be an AxisLayout; Layout.from_shape takes sizes");
    }
    list.push_back(axis.cast<const AxisLayout&>());
  }
  return Layout(std::move(list));
}

py::tuple axes_of(const Layout& layout) {
  py::tuple axes(layout.axes().size());
  for (std::size_t i = 0; i < axes.size(); ++i) axes[i] = py::cast(layout.axes()[i]);
  return axes;
}

py::tuple ascending_axes_of(const Layout& layout) {
  py::tuple axes(layout.axes().size());
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const AxisLayout& axis = layout.axes()[i];
    axes[i] = py::cast(axis.is_sorted() ? axis : axis.sorted());
  }
  return axes;
}

std::string repr_of(const AxisLayout& layout) {
  return "AxisLayout(" + std::string(py::str(sizes_of(layout))) + ":" +
         std::string(py::str(strides_of(layout))) + ")";
}

// Python's hashes are signed words.
template <class Value>
py::ssize_t hash_of(const Value& value) {
  return static_cast<py::ssize_t>(value.hash());
}

void bind_axis_layout(py::class_<AxisLayout>& axis_layout) {
  axis_layout.def(py::init(&make_axis_layout), "sizes"_a, "strides"_a = py::none())
      .def_property_readonly("sizes", &sizes_of, "Size of every mode, slowest first.")
      .def_property_readonly("strides", &strides_of, "Stride of every mode, slowest first.")
      .def_property_readonly("size", &AxisLayout::size, "Number of indices.")
      .def("__call__", &AxisLayout::operator(), "index"_a,
           R"(Position at ``index``.

Raises:
    IndexError: ``index`` is not in ``0..size-1``.

>>> AxisLayout((2, 4), (8, 1))(5)
9
)")
      .def("complement", &AxisLayout::complement, "n"_a,
           R"(The ascending layout that, with this one, covers ``0..n-1`` exactly once.

Raises:
    ValueError: There is none.

>>> AxisLayout(4, 2).complement(16)
AxisLayout((2, 2):(8, 1))
)")
      .def("is_orthogonal", &AxisLayout::is_orthogonal,
           R"(Whether every stride is a multiple of the span of the next smaller one.

No two indices then share a position. torch accepts exactly these layouts for a mesh.
)")
      .def("is_sorted", &AxisLayout::is_sorted,
           "Whether no stride is greater than the one to its left.")
      .def("sorted", &AxisLayout::sorted,
           R"(The same positions in ascending order.

Raises:
    ValueError: Positions repeat or interleave.

>>> AxisLayout((2, 4), (1, 2)).sorted()
AxisLayout((8,):(1,))
)")
      .def(py::self == py::self)
      .def("__hash__", &hash_of<AxisLayout>)
      .def("__repr__", &repr_of)
      .def("__str__", &AxisLayout::to_string)
      .def("__reduce__", [](const AxisLayout& self) {
        return py::make_tuple(py::type::of<AxisLayout>(),
                              py::make_tuple(sizes_of(self), strides_of(self)));
      });
  set_new(
      axis_layout,
      [](const py::object&, const py::object& sizes, const py::object& strides) {
        return make_axis_layout(sizes, strides);
      },
      "sizes"_a, "strides"_a = py::none());
}

void bind_layout_of_axes(py::class_<Layout>& layout) {
  layout.def(py::init(&make_layout), "axes"_a)
      .def_static("from_shape", &make_layout_from_shape, "sizes"_a, "strides"_a = py::none(),
                  R"(One axis for each size, row-major where no strides are given.

>>> Layout.from_shape((2, 4))
Layout(2:4, 4:1)
)")
      .def_property_readonly("axes", &axes_of, "The axis layouts, in order.")
      .def_property_readonly("ascending", &ascending_axes_of,
                             "Each axis with its positions in ascending order.")
      .def_property_readonly(
          "shape", [](const Layout& self) { return to_tuple(self.shape()); }, "Size of every axis.")
      .def_property_readonly("size", &Layout::size,
                             "Number of positions, the product of the shape.")
      .def_property_readonly("cosize", &Layout::cosize, "The largest position + 1.")
      .def("__len__", [](const Layout& self) { return self.axes().size(); })
      .def("__getitem__", &Layout::axis, "index"_a, py::return_value_policy::copy)
      .def("__iter__", [](const Layout& self) { return py::iter(axes_of(self)); })
      .def("collapse", &Layout::collapse,
           R"(All axes as one: from the row-major index over ``shape`` to the position.

>>> Layout.from_shape((2, 4)).collapse()
AxisLayout((8,):(1,))
)")
      .def(
          "unflatten",
          [](const Layout& self, std::int64_t index, py::handle sizes) {
            return self.unflatten(index, to_integers(sizes, "sizes"));
          },
          "index"_a, "sizes"_a,
          R"(This layout with the axis at ``index`` split into axes of these sizes, row-major.

Raises:
    IndexError: There is no such axis.
    ValueError: A size below 1, or sizes that do not multiply out to the axis.

>>> Layout.from_shape((2, 4)).unflatten(1, (2, 2))
Layout(2:4, 2:2, 2:1)
)")
      .def(
          "select",
          [](const Layout& self, py::handle indices) {
            return self.select(to_integers(indices, "indices"));
          },
          "indices"_a,
          R"(The axes at these indices, in this order; negative ones count from the end.

>>> Layout.from_shape((2, 3, 4)).select((2, 0))
Layout(4:1, 2:12)
)")
      .def("concatenate", &Layout::concatenate, "other"_a, "These axes, then those of ``other``.")
      .def("is_orthogonal", &Layout::is_orthogonal, "Whether the collapsed layout is orthogonal.")
      .def("is_sorted", &Layout::is_sorted, "Whether the collapsed layout is sorted.")
      .def(
          "coordinate",
          [](const Layout& self, std::int64_t position) {
            return to_tuple(self.coordinate(position));
          },
          "position"_a,
          R"(Index on every axis of ``position``, in the copy of this layout that holds it.

Raises:
    ValueError: The layout is not orthogonal.
    IndexError: ``position`` is negative.

>>> Layout.from_shape((2, 4)).coordinate(6)
(1, 2)
)")
      .def(
          "base", &Layout::base, "position"_a,
          R"(Position of coordinate ``(0, ..., 0)`` in the copy of this layout that holds ``position``.

Raises:
    ValueError: The layout is not orthogonal.
    IndexError: ``position`` is negative.

>>> Layout.from_shape((2, 4)).base(13)
8
)")
      .def(py::self == py::self)
      .def("__hash__", &hash_of<Layout>)
      .def("__repr__", [](const Layout& self) { return "Layout" + self.to_string(); })
      .def("__str__", &Layout::to_string)
      .def("__reduce__", [](const Layout& self) {
        return py::make_tuple(py::type::of<Layout>(), py::make_tuple(axes_of(self)));
      });
  set_new(
      layout, [](const py::object&, const py::sequence& axes) { return make_layout(axes); },
      "axes"_a);
}

}  // namespace

void bind_layout(py::module_& module) {
  // Both classes are known before any signature mentions them.
  py::class_<AxisLayout> axis_layout(module, "AxisLayout", py::is_final(), plain_class(),
                                     R"(An immutable map from indices ``0..size-1`` to positions.

Written as modes, sizes over strides; the rightmost mode varies fastest. Equal maps are equal
objects: modes that continue one another are merged, and modes of size 1 are dropped.

Args:
    sizes: Size of every mode, at least 1.
    strides: Distance in positions of two neighbouring indices of every mode, at least 0.
        Row-major where left out.

Raises:
    ValueError: A size or a stride is out of range, or they are not equally many.
    OverflowError: A position does not fit 64 bits.

>>> AxisLayout((2, 2, 2), (8, 2, 1))
AxisLayout((2, 4):(8, 1))
)");
  py::class_<Layout> layout(module, "Layout", py::is_final(), plain_class(),
                            R"(The ordered axis layouts of a mesh. Immutable.

Args:
    axes: The layout of every axis.

>>> Layout([AxisLayout(2, 4), AxisLayout((2, 2), (8, 1))])
Layout(2:4, (2,2):(8,1))
)");
  bind_axis_layout(axis_layout);
  bind_layout_of_axes(layout);
}

}  // namespace meshverse::bindings
