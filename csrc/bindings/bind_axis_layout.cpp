#include <string>
#include <vector>

#include "axis_layout.h"
#include "bindings.h"
#include "fast_calls.h"
#include "value_types.h"

namespace meshverse::bindings {
namespace {

AxisLayout make_axis_layout(PyObject* positional, PyObject* keywords) {
  const auto [sizes, strides] = to_sizes_and_strides(positional, keywords, "O|O:AxisLayout");
  return strides ? AxisLayout(sizes, *strides) : AxisLayout::row_major(sizes);
}

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

std::string repr_of(const AxisLayout& layout) {
  return "AxisLayout(" + std::string(py::str(sizes_of(layout))) + ":" +
         std::string(py::str(strides_of(layout))) + ")";
}

py::tuple reduced(const AxisLayout& layout) {
  return py::make_tuple(ValueType<AxisLayout>::type(),
                        py::make_tuple(sizes_of(layout), strides_of(layout)));
}

PyObject* call_axis(PyObject* self, PyObject* positional, PyObject* keywords) {
  return or_error([&] {
    PyObject* const index = to_argument(positional, keywords, "O:AxisLayout", "index");
    return to_python(ValueType<AxisLayout>::of(self)(to_integer(index, "indices")));
  });
}

py::object create_axis_layout() {
  static PyMethodDef methods[] = {
      method<&AxisLayout::complement>("complement", R"(complement($self, n, /)
--

The ascending layout that, with this one, covers ``0..n-1`` exactly once.

Raises:
    ValueError: There is none.

>>> AxisLayout(4, 2).complement(16)
AxisLayout((2, 2):(8, 1))
)"),
      method<&AxisLayout::is_orthogonal>("is_orthogonal", R"(is_orthogonal($self, /)
--

Whether every stride is a multiple of the span of the next smaller one.

No two indices then share a position. torch accepts exactly these layouts for a mesh.
)"),
      method<&AxisLayout::is_sorted>("is_sorted", R"(is_sorted($self, /)
--

Whether no stride is greater than the one to its left.)"),
      method<&AxisLayout::sorted>("sorted", R"(sorted($self, /)
--

The same positions in ascending order.

Raises:
    ValueError: Positions repeat or interleave.

>>> AxisLayout((2, 4), (1, 2)).sorted()
AxisLayout((8,):(1,))
)"),
      method<&reduced>("__reduce__", "__reduce__($self, /)\n--\n\nFor pickle."),
      {}};
  static PyGetSetDef properties[] = {
      property<&sizes_of>("sizes", "Size of every mode, slowest first."),
      property<&strides_of>("strides", "Stride of every mode, slowest first."),
      property<&AxisLayout::size>("size", "Number of indices."),
      {}};
  const std::vector<PyType_Slot> slots = {{Py_tp_call, untyped(&call_axis)},
                                          {Py_tp_repr, untyped(&unary<&repr_of>)},
                                          {Py_tp_str, untyped(&unary<&AxisLayout::to_string>)}};
  return ValueType<AxisLayout>::create<&make_axis_layout>("meshverse._core.AxisLayout",
                                                          R"(AxisLayout(sizes, strides=None)
--

An immutable map from indices ``0..size-1`` to positions.

Written as modes, sizes over strides; the rightmost mode varies fastest. Equal maps are equal
objects: modes that continue one another are merged, and modes of size 1 are dropped.

Args:
    sizes: Size of every mode, at least 1.
    strides: Distance in positions of two neighboring indices of every mode, at least 0.
        Row-major where left out.

Raises:
    ValueError: A size or a stride is out of range, or they are not equally many.
    OverflowError: A position does not fit 64 bits.

A call gives the position at an index, or an IndexError where the index is not in ``0..size-1``.

>>> AxisLayout((2, 2, 2), (8, 2, 1))
AxisLayout((2, 4):(8, 1))
>>> AxisLayout((2, 4), (8, 1))(5)
9
)",
                                                          methods, properties, slots);
}

}  // namespace

void bind_axis_layout(py::module_& module) { module.attr("AxisLayout") = create_axis_layout(); }

}  // namespace meshverse::bindings
